"""Dropout of the ops: rate, one mask forward and backward, another one on every shard."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from attention_oracle import OPEN, attend, check, one_hot_values, operands, run, traced_run, visible
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from op_calls import forget_traces

from te_jax.ops import attention
from te_jax.ops.attention import dot_product_attention, dot_product_attention_packed, op, reference

B, S, H, D, RATE = 4, 16, 4, 16, 0.3
ATTRS = dict(OPEN, scale=0.25, dropout_rate=RATE)


def arrays(b=B, h=H, g=H, dtype=jnp.bfloat16):
    """q, k, v, dout; v is the identity, so that out is the dropped probabilities."""
    q, k, _, dout = operands((b, S, S, h, g, D, S), dtype)
    return q, k, one_hot_values(k, S)[0], dout


def masks(out):
    """bool[b, h, s, t] of the out of one-hot values."""
    return np.swapaxes(np.asarray(out, np.float32) != 0, -2, -3)


# ---- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey, partial(jax.random.key, impl="rbg")])
@pytest.mark.parametrize("g", [H, 1])
@pytest.mark.parametrize(("dtype", "implementation"), [(jnp.bfloat16, "cudnn"), (jnp.float32, "xla")])
def test_rate_and_the_same_mask_backward(make_key, g, dtype, implementation):
    q, k, v, dout = arrays(g=g, dtype=dtype)
    got = run(q, k, v, dout, dropout_rate=RATE, dropout_rng=make_key(7), implementation=implementation)
    kept = masks(got["out"])
    assert abs(kept.mean() - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / kept.size)  # 4 sigma: 1 in 16000 fails
    check(got, attend(q, k, v, seen=True, scale=0.25, factor=kept / (1 - RATE), dout=dout), dtype)
    call = partial(dot_product_attention, q, k, v)
    np.testing.assert_array_equal(masks(call(dropout_rate=RATE, dropout_rng=make_key(7))), kept)
    assert np.any(masks(call(dropout_rate=RATE, dropout_rng=make_key(8))) != kept)
    flat = kept.reshape(-1, S * S)
    assert len(np.unique(flat, axis=0)) == len(flat)  # every row and head has its own
    none = call(dropout_rate=0.0, dropout_rng=make_key(7))
    check(dict(out=none), attend(q, k, v, seen=True, scale=0.25), dtype)


def test_packed_draws_the_same():
    qkv = on_device(np.random.default_rng(0).standard_normal((B, S, 3, H, D)), jnp.bfloat16)
    kwargs = dict(dropout_rate=RATE, dropout_rng=jax.random.key(1), attn_mask_type="causal")
    packed = lambda x: dot_product_attention_packed(x, **kwargs)
    apart = lambda x: dot_product_attention(*(x[:, :, i] for i in range(3)), **kwargs)
    both = [jax.vjp(f, qkv) for f in (packed, apart)]
    for got, want in zip(*((out, vjp(out)[0]) for out, vjp in both), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-8)
    no_mask = dot_product_attention_packed(qkv, **kwargs | dict(dropout_rate=0.0))
    assert np.any(np.asarray(no_mask) != np.asarray(both[0][0]))


def test_one_key_in_a_shard_map_is_another_on_every_device():
    """The key does not vary over the mesh axis, the tensor does; plain JAX and the op alike."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
    for dtype in (jnp.float32, jnp.bfloat16):
        q, k, v, _ = (jnp.broadcast_to(x[:1], x.shape) for x in arrays(dtype=dtype))
        call = lambda q, k, v, key: dot_product_attention(q, k, v, dropout_rate=RATE, dropout_rng=key)
        mapped = jax.shard_map(call, mesh=mesh, in_specs=(P("dp"),) * 3 + (P(),), out_specs=P("dp"))
        flat = masks(jax.jit(mapped)(q, k, v, jax.random.key(0))).reshape(B, -1)
        assert len(np.unique(flat, axis=0)) == B


# ---- as cuDNN draws: one seed for all of a shard -------------------------------------------------


def _kernel_factor(drawn, q, t):
    """One mask for all rows and heads from the first words, as the kernel draws it."""
    key = jax.random.wrap_key_data(drawn.reshape(-1, 4)[0, :2])
    kept = jax.random.bernoulli(key, 1 - RATE, (q.shape[0], q.shape[2], q.shape[1], t))
    return kept / jnp.float32(1 - RATE)


def _kernel(plain, is_forward):
    """`plain` with the kernel's mask in place of its own."""

    def call(*args, outputs=None, **attrs):
        *args, drawn = args
        q, k = args[:2] if is_forward else args[1:3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_dropped", lambda *_: _kernel_factor(drawn, q, k.shape[1]))
            results = plain(*args, drawn, **attrs)
        if is_forward:
            return results[:2]
        lost = jnp.any(jnp.isnan(args[-1]))  # XLA's exp on a CPU does not keep a NaN
        return [jnp.where(lost, jnp.nan, grad) for grad in results[:3]]

    return call


@pytest.fixture
def kernel(monkeypatch):
    """The ops with their CUDA lowering, around a kernel in plain JAX that draws as cuDNN does."""
    forward, backward = _kernel(reference.forward, True), _kernel(reference.backward, False)
    forward = partial(forward, outputs=("out", "lse"))
    lowered = lambda *args, **attrs: op._call_forward(forward, *args, **attrs)
    monkeypatch.setattr(attention.attention_fwd, "reference", lowered)
    lowered_bwd = lambda *args, **attrs: (*op._backward(backward, *args, **attrs), *(None,) * 3)
    monkeypatch.setattr(attention.attention_bwd, "reference", lowered_bwd)
    forget_traces(traced_run)
    yield
    forget_traces(traced_run)


def _check_gradients(got, q, k, v, dout):
    kept = masks(got["out"])
    check(got, attend(q, k, v, seen=True, scale=0.25, factor=kept / (1 - RATE), dout=dout), jnp.bfloat16)
    assert abs(kept.mean() - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / kept.size)
    return kept.reshape(-1, S * S)


def test_kernel_on_one_device(kernel):
    q, k, v, dout = arrays()
    got = run(q, k, v, dout, dropout_rate=RATE, dropout_rng=jax.random.key(3))
    flat = _check_gradients(got, q, k, v, dout)
    assert len(np.unique(flat, axis=0)) == B * H


PLACES = {"dp": ("dp", None), "tp": (None, "tp"), "dp_tp": ("dp", "tp"), "both_on_rows": (("dp", "tp"), None)}


@pytest.mark.parametrize("mesh_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("place", "remat"), [("dp", False), ("dp_tp", False), ("dp_tp", True)])
def test_shards_draw_apart_and_backward_draws_as_forward(kernel, mesh_type, place, remat):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(mesh_type,) * 2)
    rows, heads = PLACES[place]
    with jax.set_mesh(mesh):
        host = arrays()
        q, k, v, dout = (jax.device_put(np.asarray(x), NamedSharding(mesh, P(rows, None, heads, None))) for x in host)
        call = partial(dot_product_attention, dropout_rate=RATE)
        call = jax.checkpoint(call) if remat else call

        @jax.jit
        def step(q, k, v, dout, key):
            out, vjp = jax.vjp(lambda q, k, v: call(q, k, v, dropout_rng=key), q, k, v)
            return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))

        got = step(q, k, v, dout, jax.random.key(5))
    flat = _check_gradients(got, *host)
    assert len(np.unique(flat, axis=0)) == B * H


def test_constraints_that_differ_forward_and_backward(kernel):
    """Auto axes: gradients wanted on other devices than the results are right, or NaN; never of another mask."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    host = arrays()
    put = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    for spec in ((), ("tp", None, "dp")):

        @jax.jit
        def step(q, k, v, dout, key, spec=spec):
            call = lambda q, k, v: dot_product_attention(q, k, v, dropout_rate=RATE, dropout_rng=key)
            out, vjp = jax.vjp(call, *(put(x, "dp", None, "tp") for x in (q, k, v)))
            grads = [put(x, *spec) for x in vjp(put(dout, *spec))]
            return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))

        got = step(*host, jax.random.key(5))
        want = attend(*host[:3], seen=True, scale=0.25, factor=masks(got["out"]) / (1 - RATE), dout=host[3])
        for name in ("dq", "dk", "dv"):
            grad = np.asarray(got[name], np.float64)
            wrong = np.abs(grad - want[name]) > 2**-4 * np.abs(want[name]).max()
            assert not np.any(wrong & np.isfinite(grad)), (spec, name)


def test_a_mask_of_other_shards_gives_nan(kernel):
    q, k, v, dout = arrays()
    words = jax.random.bits(jax.random.key(0), (B, H, 4), jnp.uint32)
    none = (None,) * 4  # kv, qkv, bias and segments
    forward = partial(attention.attention_fwd, outputs=("out", "lse", "drawn"), **ATTRS)
    out, lse, drawn = jax.jit(lambda *args: forward(*args[:3], *none, args[3]))(q, k, v, words)
    backward = lambda *args: attention.attention_bwd(
        *args[:4], *none, *args[4:], outputs=("dq", "dk", "dv"), deterministic=False, **ATTRS
    )
    assert all(np.all(np.isfinite(x)) for x in jax.jit(backward)(dout, q, k, v, out, lse, drawn))
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    for rows, heads in PLACES.values():
        with jax.set_mesh(mesh):
            args = [
                jax.device_put(np.asarray(x), NamedSharding(mesh, P(rows, None, heads))) for x in (dout, q, k, v, out)
            ]
            args += [jax.device_put(np.asarray(x), NamedSharding(mesh, P(rows, heads))) for x in (lse, drawn)]
            grads = jax.jit(backward)(*args)
        for grad in grads:
            grad = np.asarray(grad, np.float32)
            assert np.isnan(grad[-1, :, -1]).all()  # the last shard; the first may be where it was
    # vmap only over dout: more rows backward than forward
    grads = jax.vmap(backward, (0, *(None,) * 6))(jnp.stack([dout] * 3), q, k, v, out, lse, drawn)
    assert all(np.isnan(np.asarray(grad, np.float32)).all() for grad in grads)


def test_vmap_over_keys_and_rows(kernel):
    q, k, v, dout = arrays()
    keys = jax.random.split(jax.random.key(9), B)

    def one(q, k, v, dout, key):
        out, vjp = jax.vjp(lambda q, k, v: dot_product_attention(q, k, v, dropout_rate=RATE, dropout_rng=key), q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))

    got = jax.jit(jax.vmap(one))(q, k, v, dout, keys)
    assert len(np.unique(_check_gradients(got, q, k, v, dout), axis=0)) == B * H
    shared = jax.jit(jax.vmap(one, (0, 0, 0, 0, None)))(q, k, v, dout, keys[0])
    assert len(np.unique(_check_gradients(shared, q, k, v, dout), axis=0)) == B * H
    # every key counts, not only the first
    other = jax.jit(jax.vmap(one))(q, k, v, dout, keys.at[-1].set(jax.random.key(10)))
    assert np.any(masks(other["out"]) != masks(got["out"]))


def test_checkpoint_name_saves_what_was_drawn():
    q, k, v, dout = arrays()
    call = lambda q, k, v: dot_product_attention(
        q, k, v, context_checkpoint_name="context", dropout_rate=RATE, dropout_rng=jax.random.key(0)
    )
    policy = jax.checkpoint_policies.save_only_these_names("context")
    text = str(jax.make_jaxpr(lambda *a: jax.vjp(jax.checkpoint(call, policy=policy), *a[:3])[1](a[3]))(q, k, v, dout))
    assert text.count("te_attention_fwd") == text.count("te_attention_bwd") > 0  # no second forward


def test_causal_mask_and_dropout():
    q, k, v, dout = arrays()
    got = run(q, k, v, dout, dropout_rate=RATE, dropout_rng=jax.random.key(2), attn_mask_type="causal")
    kept, seen = masks(got["out"]), visible(S, S, causal=True)
    assert not np.any(kept & ~seen)
    check(got, attend(q, k, v, seen=seen, scale=0.25, factor=kept / (1 - RATE), dout=dout), jnp.bfloat16)
