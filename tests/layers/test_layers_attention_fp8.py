"""The functional layer of FP8 attention: results and state against float64, the choice of gradients, transforms."""

from functools import partial

import attention_fp8_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from te_jax import checkpoint_policies
from te_jax.layers import attention_fp8
from te_jax.ops.attention import explain_attention
from te_jax.ops.attention.fp8 import backward_scales, forward_scales
from te_jax.recipe import DelayedScaling, Format
from te_jax.state import fp8
from te_jax.state.fp8 import AttentionMetas

L = 4
RECIPE = DelayedScaling(amax_history_len=L, fp8_dpa=True)
TENSORS = AttentionMetas._fields
bf16 = jnp.bfloat16
SMALL = (2, 24, 4, 2, 16)  # b, s, h, g, d
SERVED_BACKWARD = (1, 128, 2, 1, 128)  # by cuDNN in FP8


def data(rng, sizes):
    """q, k, v, dout."""
    b, s, h, g, d = sizes
    return [on_device(rng.standard_normal((b, s, n, d)), bf16) for n in (h, g, g, h)]


def fresh(scales=None):
    scales = scales or dict.fromkeys(TENSORS, 1.0)
    return {name: (jnp.full(1, scales[name], jnp.float32), jnp.zeros(L)) for name in TENSORS}


def attend(q, k, v, state, recipe=RECIPE, **kwargs):
    metas = AttentionMetas(*(fp8.observe(*state[t], recipe, fp8.direction_of(t)) for t in TENSORS))
    return attention_fp8(q, k, v, recipe=recipe, metas=metas, **kwargs)


@partial(jax.jit, static_argnames=("recipe", "backward", "attn_mask_type", "attend"))
def step(q, k, v, dout, state, recipe=RECIPE, attend=attend, **kwargs):
    """out, (dq, dk, dv), new state."""
    out, vjp = jax.vjp(lambda *x: attend(*x, recipe=recipe, **kwargs), q, k, v, state)
    *grads, state = vjp(dout)
    return out, grads, state


def stored(x, scale, dtype):
    top = float(jnp.finfo(dtype).max)
    return jnp.asarray(np.clip(np.asarray(x, np.float32) * np.float32(scale), -top, top).astype(dtype))


def dequantized(operands, by):
    return [np.asarray(x, np.float64) / by[name] for name, x in zip("qkv", operands)]


def close(got, value, off, scale=None, dtype=oracle.E4M3):
    """got: bf16 of value (which may be off by `off`), which with a scale was stored in FP8 on the way."""
    off = off * 1.001 + 1e-6
    if scale is not None:
        off = off + oracle.half_step((np.abs(value) + off) * scale, dtype) / scale
    off = off + 2.0**-8 * (np.abs(value) + off)
    excess = np.abs(np.asarray(got, np.float64) - value) - off
    assert got.dtype == bf16 and excess.max() <= 0, excess.max()


def law(state, amax, top):
    """The delayed scaling of numpy arrays: state (scale, history)."""
    scale, history = (np.array(x, np.float64) for x in state)
    history[0] = amax
    scale = np.array([top / history.max()])
    history = np.roll(history, -1)
    history[0] = 0
    return scale, history


def check_amax(new, old, want, dtype):
    """The new state holds an amax that is `want` = (value, off), and is what the law makes of it."""
    amax = float(new[1][-1])
    oracle.amax_close(amax, *want)
    for got, expected in zip(new, law(old, amax, float(jnp.finfo(dtype).max))):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def wide_gradients(q, k, v, out, lse, dout, causal, scale):
    """{name: (value, what it may be off)} of gradients without FP8, lse being (value, what it may be off).

    q, k, v, probabilities and their gradients are rounded to bf16; the latter two are as wrong as exp(logits - lse),
    and gradients as dout v, from which the same sum over the output is taken.
    """
    lse, lse_off = lse
    r = q.shape[2] // k.shape[2]
    q, k, v, out, dout = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in (q, k, v, out, dout))
    k, v = (np.repeat(x, r, axis=1) for x in (k, v))
    t = lambda x: np.swapaxes(x, -1, -2)
    logits = scale * q @ t(k)
    probs = np.exp(np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf) if causal else logits)
    probs = probs * np.exp(-lse[..., None])
    off = np.max(lse_off) + 2.0**-8 * scale * (np.abs(q) @ t(np.abs(k))).max()
    dlogits = scale * probs * (dout @ t(v) - (dout * out).sum(-1, keepdims=True))
    noise = scale * probs * 2.0**-9 * (np.abs(dout) @ t(np.abs(v)))
    part = 1.5 * 2.0**-8 + np.expm1(off)
    product = lambda x, y, noise=0.0: (x @ y, (part * np.abs(x) + noise) @ np.abs(y))
    group = lambda x: np.swapaxes(x.reshape(len(x), -1, r, *x.shape[2:]).sum(2), 1, 2)
    return dict(
        dq=tuple(np.swapaxes(x, 1, 2) for x in product(dlogits, k, noise)),
        dk=tuple(map(group, product(t(dlogits), q, t(noise)))),
        dv=tuple(map(group, product(t(probs), dout))),
    )


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("backward", ["fp8", "bf16"])
def test_results_and_state(backward, mask, fp8_format, rng):
    recipe = DelayedScaling(amax_history_len=L, fp8_dpa=True, fp8_format=fp8_format)
    q, k, v, dout = data(rng, SERVED_BACKWARD)
    wide = 64.0 if fp8_format is Format.HYBRID else 1.0
    by = dict(q=100.0, k=90.0, v=80.0, o=70.0, do=80 * wide, dq=50 * wide, dk=40 * wide, dv=10 * wide, dp=100 * wide)
    old, (fwd, bwd) = fresh(by), (fp8_format.dtype(x) for x in ("fwd", "bwd"))
    out, grads, new = step(q, k, v, dout, old, recipe=recipe, backward=backward, attn_mask_type=mask)

    attrs = dict(causal=mask == "causal", scale=q.shape[-1] ** -0.5)
    operands = [stored(x, by[name], fwd) for name, x in zip("qkv", (q, k, v))]
    want = oracle.forward(*operands, forward_scales(*(by[name] for name in "qkvo")), **attrs)
    close(out, *want["o"], by["o"])
    amaxes = {name: (np.asarray(x, np.float64), 0.0) for name, x in zip(("q", "k", "v", "do"), (q, k, v, dout))}
    amaxes["o"], lse = want["o"], want["lse"]
    if backward == "fp8":
        scales = backward_scales(*(by[name] for name in ("q", "k", "v", "o", "do", "dp", "dq", "dk", "dv")))
        saved = (*operands, stored(out, by["o"], fwd), lse[0])
        want = oracle.backward(stored(dout, by["do"], bwd), *saved, scales, **attrs)
        amaxes |= want
    else:
        want = wide_gradients(*dequantized(operands, by), out, lse, dout, **attrs)
        del amaxes["do"]
    for name, grad in zip(("dq", "dk", "dv"), grads):
        close(grad, *want[name], by[name] if backward == "fp8" else None, bwd)
    for name, meta in new.items():
        if name in amaxes:
            check_amax(meta, old[name], amaxes[name], fwd if name in "qkvo" else bwd)
        else:
            jax.tree.map(np.testing.assert_array_equal, meta, old[name])


def test_wide_gradients_of_clipped_operands(rng):
    """The scales are those of operands that were smaller: the gradients are of what the forward pass saw, of the same
    size as ever. Of q and k as they came they would be some 10^4 times as large."""
    q, k, v, dout = data(rng, (1, 64, 2, 1, 128))
    q = q.at[..., 0].multiply(12).at[..., 0].add(20)
    k = k.at[..., 0].multiply(6)
    by = {name: 1.3 * 448 / float(jnp.abs(x).max()) for name, x in zip("qkv", (q, k, v))}
    by |= dict.fromkeys(TENSORS[3:], 100.0)
    out, grads, _ = step(q, k, v, dout, fresh(by), backward="bf16", attn_mask_type="causal")
    operands = [stored(x, by[name], oracle.E4M3) for name, x in zip("qkv", (q, k, v))]
    attrs = dict(causal=True, scale=128**-0.5)
    lse = oracle.forward(*operands, forward_scales(*(by[name] for name in "qkvo")), **attrs)["lse"]
    want = wide_gradients(*dequantized(operands, by), out, lse, dout, **attrs)
    for name, grad in zip(("dq", "dk", "dv"), grads):
        close(grad, *want[name])
        size = np.linalg.norm(want[name][0])
        assert np.linalg.norm(np.asarray(grad, np.float64) - want[name][0]) < size / 8, name


def test_steps(rng):
    """Histories fill from the right, and the second step reads the scales of the first."""
    q, k, v, dout = data(rng, SMALL)
    state = fresh()
    _, _, state = step(q, k, v, dout, state)
    first, _, state = step(2 * q, k, v, dout, state)
    amax = float(jnp.abs(q).max())
    np.testing.assert_allclose(state["q"][1], [0, 0, amax, 2 * amax])
    np.testing.assert_allclose(state["q"][0], 448 / (2 * amax), rtol=1e-6)
    again, _, _ = step(2 * q, k, v, dout, state)
    assert (first != again).any()  # 2q saturated with the scale of q


@pytest.mark.parametrize("scale", [float(jnp.finfo(jnp.float32).max), 1e-37])
def test_an_extreme_scale_does_not_stay(scale, rng):
    """As of an output that was almost 0: cuDNN (plain JAX would bear it) is not given it, see LARGEST_SCALE."""
    q, k, v, dout = data(rng, SMALL)
    state = fresh() | dict(o=(jnp.full(1, scale, jnp.float32), jnp.zeros(L)))
    _, _, new = step(q, k, v, dout, state)
    amax = float(new["o"][1][-1])
    assert 0.1 < amax < float(jnp.abs(v).max()) * 1.01
    np.testing.assert_allclose(new["o"][0], 448 / amax, rtol=1e-6)


@pytest.mark.parametrize(
    "b,s,t,h,d,mask,expected",
    [
        (1, 1024, 1024, 2, 128, "no_mask", "fp8"),
        (1, 1024, 2048, 2, 128, "no_mask", "fp8"),
        (1, 1024, 896, 2, 128, "no_mask", "bf16"),
        (1, 1100, 1024, 2, 128, "no_mask", "bf16"),
        (1, 1024, 1100, 2, 128, "no_mask", "bf16"),
        (1, 1024, 1024, 2, 64, "no_mask", "bf16"),
        (1, 1024, 2048, 2, 128, "causal", "bf16"),
        (4, 2048, 2048, 32, 128, "causal", "fp8"),
        (1, 2048, 2048, 128, 128, "causal", "bf16"),  # 64 heads read a key head: too many for a part
    ],
)
def test_choice_of_gradients(b, s, t, h, d, mask, expected):
    q, k = (jax.ShapeDtypeStruct((b, n, heads, d), bf16) for n, heads in ((s, h), (t, 2)))
    program = str(jax.make_jaxpr(partial(step, attn_mask_type=mask))(q, k, k, q, fresh()))
    assert ("te_attention_fp8_bwd" in program) == (expected == "fp8")
    assert ("te_attention_bwd" in program) == (expected == "bf16")


@pytest.mark.parametrize(
    "text,kwargs",
    [
        ("a bias is given", dict(bias=jnp.zeros((24, 24)))),
        ("a mask is given", dict(mask=jnp.zeros((24, 24), bool))),
        ("dropout_rate is 0.5", dict(dropout_rate=0.5, dropout_rng=jax.random.key(0))),
        ("softmax_type is 'off_by_one'", dict(softmax_type="off_by_one")),
        ("window_size \\(3, 0\\)", dict(window_size=(3, 0))),
        ("return_max_logit", dict(return_max_logit=True)),
        ("deterministic", dict(deterministic=True)),
        ("backward is 'e4m3'", dict(backward="e4m3")),
        ("head dim is 16; cuDNN's FP8 gradients", dict(backward="fp8")),
    ],
)
def test_refused(text, kwargs, rng):
    q, k, v, _ = data(rng, SMALL)
    with pytest.raises(ValueError, match=f"te_jax.layers.attention_fp8: .*{text}"):
        attend(q, k, v, fresh(), **kwargs)


def test_refused_operands():
    of = lambda *shape, dtype=bf16: jax.ShapeDtypeStruct(shape, dtype)
    q = of(2, 24, 4, 16)

    def attention_fp8_refuses(*arrays, **kwargs):
        choice = explain_attention(*arrays, recipe=RECIPE, **kwargs)
        assert (choice.implementation == "fp8") == ("fp8" not in choice.refused)
        return choice.refused.get("fp8", "")

    assert attention_fp8_refuses(q, q, q) == "" == attention_fp8_refuses(q, q, q, attn_mask_type="causal")
    assert "float32" in attention_fp8_refuses(*(of(2, 24, 4, 16, dtype=jnp.float32),) * 3)
    assert "head dim of v is 32" in attention_fp8_refuses(q, q, of(2, 24, 4, 32))
    assert "head dim is 24" in attention_fp8_refuses(*(of(2, 24, 4, 24),) * 3)
    assert "q has 1 and" in attention_fp8_refuses(of(2, 1, 4, 16), q, q)
    k = of(2, 30, 4, 16)
    assert "neither" in attention_fp8_refuses(q, k, k, attn_mask_type="causal_bottom_right")


def count(jaxpr, op) -> int:
    """Calls of `op`."""
    return sum(eqn.primitive.name == op for eqn in equations(jaxpr))


def test_remat_runs_each_kernel_once(rng):
    """Attention's, or those that quantize its operands, as the policy keeps what they make."""
    arrays = data(rng, SMALL)
    named = partial(attend, context_checkpoint_name="context")

    def kernels(policy):
        layer = jax.checkpoint(named, policy=policy)
        program = jax.make_jaxpr(partial(step, attend=lambda *x, recipe: layer(*x)))(*arrays, fresh())
        return count(program.jaxpr, "te_attention_fp8_fwd"), count(program.jaxpr, "te_quantize")

    assert kernels(jax.checkpoint_policies.save_only_these_names("context")) == (1, 6)
    assert kernels(checkpoint_policies.save(checkpoint_policies.ATTENTION)) == (1, 6)
    assert kernels(checkpoint_policies.save(checkpoint_policies.QUANTIZED)) == (2, 3)
    assert kernels(None) == (2, 6)


@pytest.mark.parametrize("backward,sizes", [("fp8", SERVED_BACKWARD), ("bf16", SMALL)])
def test_numbers_that_a_policy_keeps(backward, sizes, rng):
    """Up to 448, the largest of E4M3, where jax's rounding of what a policy keeps ends at 240."""
    arrays, state = data(rng, sizes), fresh(dict.fromkeys(TENSORS, 100.0))
    policy = checkpoint_policies.save(checkpoint_policies.QUANTIZED, checkpoint_policies.ATTENTION)
    kept = lambda *x, recipe, backward: jax.checkpoint(partial(attend, backward=backward), policy=policy)(*x)
    got, want = (step(*arrays, state, attend=each, backward=backward) for each in (kept, attend))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.float32(a)).all()
        np.testing.assert_array_equal(a, b)


def assert_same(got, want):
    """Of sums in another order: the bits of f32 differ, and with them now and then those of bf16 or FP8 (2**-3)."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=2.0**-3, atol=2.0**-8 * np.abs(y).max())
        assert np.mean(np.abs(x - y) > 1e-5 * np.abs(y)) < 0.01


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", ["fp8", "bf16"])
def test_sharded_equals_one_device(backward, kind, on_host, rng):
    """Rows and heads on 8 devices; on the Explicit mesh the 2 groups of heads are not divided among 4."""
    arrays = data(rng, (4, 128, 4, 2, 128))
    run = partial(step, backward=backward)
    want = run(*arrays, fresh())
    shape = (4, 2) if kind == "auto" else (2, 4)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(KINDS[kind],) * 2)
    specs = [P("data", None, "model" if x.shape[2] % shape[1] == 0 else None) for x in arrays]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(np.asarray(x), NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        state = jax.device_put(fresh(), NamedSharding(mesh, P()))
        assert_same(run(*placed, state), want)


def test_shard_map(on_host, rng):
    """One state for all devices gets the amax of all."""
    *arrays, dout = data(rng, (8, 24, 4, 2, 16))
    want = step(*arrays, dout, fresh())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(step, mesh=mesh, in_specs=(*(P("data"),) * 4, P()), out_specs=(P("data"), P("data"), P()))
    assert_same(jax.jit(run)(*arrays, dout, fresh()), want)


def test_shard_map_of_heads_that_share_keys(on_host, rng):
    """Keys and values that are not sharded get the sum of the devices' gradients."""
    q, k, v, dout = data(rng, (2, 24, 8, 1, 16))
    out, (dq, *want), state = step(q, k, v, dout, fresh())
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    heads = P(None, None, "model")
    specs = dict(in_specs=(heads, P(), P(), heads, P()), out_specs=(heads, [heads, P(), P()], P()))
    got = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(q, k, v, dout, fresh())
    assert_same((got[0], got[1][0], got[2]), (out, dq, state))
    for x, y in zip(got[1][1:], want):  # 8 summands and 7 sums, rounded to bf16 by up to 2**-9 of at most the largest
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=15 * 2.0**-9 * np.abs(y).max())


def test_vmap(rng):
    """Of one state over mapped examples: the same as a batch."""
    arrays = data(rng, (3, 24, 4, 2, 16))
    mapped = lambda q, k, v, state, recipe: jax.vmap(partial(attend, recipe=recipe), (0, 0, 0, None))(q, k, v, state)
    assert_same(step(*arrays, fresh(), attend=mapped), step(*arrays, fresh()))
