"""NaN, inf and the ends of the number range: what amaxes, scales and activations make of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.layers import attention_fp8
from te_jax.ops.activation import activation, activation_bwd, activation_fwd, attributes
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.attention.fp8 import attention_fp8_bwd, attention_fp8_fwd, backward_scales, forward_scales
from te_jax.ops.grouped import quantize_stacked
from te_jax.ops.norm import norm_fwd
from te_jax.ops.quantize import quantize, quantize_block
from te_jax.ops.scale_update import results_of, scale_update
from te_jax.recipe import DelayedScaling
from te_jax.state import fp8
from te_jax.stats import TensorStats, fp8_stats_table

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
# -- amaxes -----------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 16, 512  # rows of 256 and more: there a maximum of XLA:CPU drops a NaN


def amax_of_layer(q):
    """That of the output of FP8 attention, as the layer tells it."""
    state = fp8.AttentionMetas(*[fp8.TensorMeta(jnp.float32(1), jnp.float32(0))] * 9)
    call = partial(attention_fp8, *[q.astype(jnp.bfloat16)] * 3, recipe=DelayedScaling(fp8_dpa=True))
    total = lambda metas: jnp.sum(call(metas=metas, attn_mask_type="no_mask").astype(jnp.float32))
    return jax.grad(total)(state).o.amax


def amaxes(x):
    """All amaxes that come of x f32[ROWS, COLUMNS]."""
    one, gelu = jnp.float32(1), attributes(("gelu",))
    ones, amax = jnp.ones(x.shape[-1:]), ("amax",)
    norm = lambda *args, rms: norm_fwd(*args, None, None, None, rms=rms, **of_norm)[1]
    of_norm = dict(outputs=("rstd", "amax"), dtype=E4M3, eps=1e-6, zero_centered=False)
    q = x.reshape(1, ROWS * COLUMNS // 1024, 8, 128).astype(E4M3)
    of_q = dict(causal=False, scale=0.1)
    out, lse, of_out = attention_fp8_fwd(q, q, q, forward_scales(*[one] * 4), **of_q)
    of_grads = attention_fp8_bwd(q.astype(E5M2), q, q, q, out, lse, backward_scales(*[one] * 9), **of_q)[3:]
    blocks = quantize_block(
        x, outputs=("data", "scale_inv"), lead=0, square=False, dtype=E4M3, power_2=False, epsilon=0.0
    )
    per_state = jax.vmap(lambda a, token: fp8._per_state(a, token), in_axes=(1, None), out_axes=None)
    return {
        "quantize": quantize(x, None, outputs=amax, split=1, dtype=E4M3)[0],
        "quantize of bf16": quantize(x.astype(jnp.bfloat16), one, split=1, dtype=E4M3)[2],
        "layernorm": norm(x, ones, ones, rms=False),
        "rmsnorm": norm(x, ones, None, rms=True),
        "activation": activation_fwd(x[:, None], None, outputs=amax, dtype=E4M3, **gelu)[0],
        "its gradient": activation_bwd(x, x[:, None], None, outputs=amax, dtype=E5M2, **gelu)[0],
        **({} if jax.default_backend() == "gpu" else {"attention": of_out}),  # cuDNN's drops a NaN
        "attention's layer": amax_of_layer(q),
        **dict(zip(("dq", "dk", "dv", "dp"), of_grads)),
        "blocks": jnp.sum(blocks[0].astype(jnp.float32)),
        "over vmap": jnp.sum(per_state(jnp.abs(x.T), jnp.ones(()))),
        "experts": quantize_stacked(x[None], None, None, outputs=amax, stack=1, slots=0, split=1, dtype=E4M3)[0][0],
        "max logit": dot_product_attention(*[x.reshape(1, 512, 1, 16)] * 3, return_max_logit=True)[1][0],
    }


def test_a_nan_reaches_every_amax():
    """Wherever it is. Without one they are finite."""
    run, ones = jax.jit(amaxes), jnp.ones((ROWS, COLUMNS))
    for at in (None, (0, 0), (7, 3), (15, 511)):
        x = ones if at is None else ones.at[at].set(jnp.nan)
        got = {name: bool(jnp.isnan(amax)) for name, amax in run(x).items()}
        assert got == dict.fromkeys(got, at is not None), at


def test_a_nan_in_a_history_keeps_the_scale():
    """As in csrc/quantize/scaling.cu."""
    histories = jnp.ones((ROWS, 1024)).at[:, 0].set(0).at[3, 700].set(jnp.nan)
    update = partial(scale_update, outputs=results_of(1), interval=1, margin=0.0, newest=False)
    state = jnp.full((1, ROWS), 3.0), histories[None], jnp.full((1, ROWS), 2.0), jnp.full(1, 448.0)
    scales, _ = jax.jit(update)(*state)
    np.testing.assert_array_equal(scales, np.where(np.arange(ROWS) == 3, 3, 224))


# -- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_force", [True, False])
@pytest.mark.parametrize("margin", [8, -8, 32])
def test_a_mended_scale_is_a_normal_number(margin, in_force):
    """As are those of the law: (448 / 3.3e38) / 2**8 is none, nor is 448 / 1e-44 * 2**8."""
    recipe, tiny, largest = DelayedScaling(margin=margin, amax_history_len=2), 2.0**-126, float(np.finfo("f4").max)
    amaxes = np.float32([3.3e38, 1e-37, 1.0, 0.0])
    old = np.float32([1e-44, np.inf, 0.0, np.nan, 1.0, -1.0])
    scales, top = (a.reshape(-1) for a in np.meshgrid(old, amaxes))
    histories = jnp.stack([jnp.zeros(len(top)), top], 1)
    mend = jax.jit(lambda *state: recipe.mend_states(*state, jnp.zeros(len(top), bool), in_force))
    got = mend(jnp.asarray(scales), histories)
    assert (got[0] >= tiny).all() and (got[0] <= largest).all()
    for again, first in zip(mend(*got), got):
        np.testing.assert_array_equal(again, first)
    by_law = jax.vmap(lambda h: recipe.new_state(jnp.ones(1), jnp.zeros(2), h[1], 448.0)[0][0])(histories)
    recorded = top > 0
    if in_force:
        assert (got[0] <= by_law)[recorded].all()
    np.testing.assert_array_equal(got[0][recorded & ~(scales > 0)], by_law[recorded & ~(scales > 0)])


# -- activations ------------------------------------------------------------------------------------------------------

GELU = 2 * np.sqrt(2 / np.pi)
C = {"gelu": (GELU, GELU * 0.044715), "silu": (1, 0), "swish": (1, 0), "quick_gelu": (1.702, 0)}


def sigmoid(u):
    return np.where(u > 0, 1, np.exp(-np.abs(u))) / (1 + np.exp(-np.abs(u)))


def slot0(name, x):
    """The function of slot 0 and its derivative, of float64."""
    if "relu" in name:
        y = np.maximum(x, 0)
        return (y**2, np.where(x > 0, 2 * y, 0)) if name == "squared_relu" else (y, np.where(x > 0, 1.0, 0))
    inside, (c0, c1) = np.minimum(x, 7.0) if name == "clamped_silu" else x, C.get(name, (1.702, 0))
    cubic = c1 * inside**2 if c1 else 0
    u = inside * (c0 + cubic)
    slope = sigmoid(u) + inside * (sigmoid(u) * sigmoid(-u)) * (c0 + 3 * cubic)
    return inside * sigmoid(u), slope * (np.where(x < 7, 1, np.where(x == 7, 0.5, 0)) if name == "clamped_silu" else 1)


def slot1(name, x):
    if name != "clamped_silu":
        return x, np.ones_like(x)
    return np.clip(x, -7, 7) + 1, np.where(np.abs(x) < 7, 1.0, np.where(np.abs(x) == 7, 0.5, np.where(x == x, 0, x)))


NAMES = ["relu", "squared_relu", *C, "clamped_silu"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_activations_at_the_ends(dtype):
    """y and its gradients by both slots against float64, up to the largest number of the type, and beyond."""
    top = float(jnp.finfo(dtype).max)
    numbers = [0.0, 1e-3, 0.5, 3.0, 7.0, 12.0, 1e4, 1e10, 1e19, 1e25, top / 2, top, np.inf]
    numbers = [n for n in numbers if n <= top or n == np.inf]
    x0 = jnp.asarray([*numbers, *(-n for n in numbers), np.nan], dtype)
    x1, dy = jnp.asarray([1.0, -3.0, 7.5, 100.0], dtype), jnp.asarray([1.0, -2.0, 0.25], dtype)
    dy, x0, x1 = (a.reshape(-1) for a in jnp.meshgrid(dy, x0, x1))
    x = jnp.stack([x0, x1], 0)

    def of(name):
        gated = (name, "clamped_linear" if name == "clamped_silu" else "linear")
        y, vjp = jax.vjp(lambda x: activation(x, gated), x)
        (dx,) = vjp(dy)
        if name == "swish":  # only of `activation`
            return y, dx, dx
        return y, dx, activation_bwd(dy, x, None, outputs=("dx",), dtype=E5M2, **attributes(gated))[0]

    with np.errstate(all="ignore"):
        wide = lambda a: np.asarray(a, np.float64)
        for name, (y, dx, fused) in jax.jit(lambda: {n: of(n) for n in NAMES})().items():
            (f, slope), (gate, gate_slope) = slot0(name, wide(x0)), slot1(name, wide(x1))
            # u is off by 2**-22 of itself, and x u s (1 - s) less than 1. In the derivative 1 - s is off by 2**-24,
            # times x u'(x), which is 36 at most where that counts.
            dy_gate, dy_slope = wide(dy) * gate, wide(dy) * gate_slope
            for got, want, error in (
                (y, f * gate, 2.0**-22 * gate),
                *((d[0], slope * dy_gate, 2.0**-18 * dy_gate) for d in (dx, fused)),
                *((d[1], f * dy_slope, 2.0**-22 * dy_slope) for d in (dx, fused)),
            ):
                same(np.asarray(got), want, np.abs(error), f"{name} {jnp.dtype(dtype)}")


def same(got, want, atol, which):
    """`got` is `want`, f64, rounded to got's type, but for some roundings to f32 before; NaN where that is."""
    info = jnp.finfo(got.dtype)
    want, atol = np.asarray(want.astype(np.float32).astype(got.dtype), np.float64), atol + float(info.tiny)
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), which)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], which)
    error = np.abs(got - want)[finite] - (np.broadcast_to(atol, want.shape)[finite])
    assert (error <= (float(info.eps) + 2.0**-20) * np.abs(want[finite])).all(), (which, error.max())


# -- what is told -----------------------------------------------------------------------------------------------------


def test_the_table_tells_a_nan():
    """Of a probed tensor; without a probe an amax of NaN says that none is recorded."""
    tensor = lambda amax, saturation: TensorStats(amax, 1.0, np.nan, saturation, saturation, np.nan, 0.0)
    of_layers = tensor(np.array([2.0, np.nan]), np.array([0.0, 0.0]))
    lines = fp8_stats_table(dict(probed=of_layers, unknown=tensor(np.nan, np.nan), good=tensor(3.0, 0.0)))
    assert [line.split()[2] for line in lines.splitlines()[1:]] == ["nan", "-", "3"]
