"""Rows gathered from numbers that are in FP8 already, and rows in other arrays' memory, against the same of one array.

On a GPU, and with --host-kernels, these tests run the kernels; without them there is no memory to read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from te_jax.ops.experts.peers import address_op, combine_of_peers, keep_op, permute_of_peers, tell_peers
from te_jax.ops.experts.permute import combine_bwd_op, combine_op, permute_fp8_op, permute_fp8_source
from te_jax.ops.formats import ROWS_128, TENSOR
from te_jax.ops.permute import group, permute_source

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
SCALE = jnp.float32(8)


def tokens(rng, width, scaled):
    """x in E4M3, with NaN, scales that are powers of 2, and what both stand for."""
    x = jnp.asarray(rng.standard_normal((101, width)) * 16, E4M3).at[3, 2].set(jnp.nan)
    scales = jnp.asarray(2.0 ** rng.integers(-6, 6, (-(-width // 128), 101)), jnp.float32) if scaled else None
    wide = x.astype(jnp.float32)
    return x, scales, wide if scales is None else ROWS_128.read(x, scales, 1)


def groups_of(rng):
    experts = rng.choice([0, 2, 3, 5], (101, 2), p=[0.7, 0.1, 0.1, 0.1]).astype(np.int32)
    return group(jnp.asarray(experts), 5)


def same(got, want, end):
    """The rows of groups; behind them is what memory held."""
    for name in want:
        a, b = (np.asarray(v[name], np.float32) for v in (got, want))
        cut = (lambda v: v[:, :end]) if name == "data_t" else lambda v: v[:end] if v.ndim == 2 else v
        np.testing.assert_array_equal(cut(a), cut(b), err_msg=name)


@pytest.mark.parametrize("width, weighted, scaled", [(200, True, True), (13, False, True), (64, True, False)])
def test_permute_fp8(width, weighted, scaled, rng):
    """Of numbers in f32 each product is rounded as often: scales are powers of 2."""
    (x, scales, wide), groups = tokens(rng, width, scaled), groups_of(rng)
    weights = jnp.asarray(rng.random((101, 2)), jnp.float32) if weighted else None
    names = ("rows", "data", "data_t", "amax")
    got = permute_fp8_source(x, groups, scales, weights).run(names, E4M3, TENSOR, SCALE)
    want = permute_source(wide, groups, weights).run(names, E4M3, TENSOR, SCALE)
    want["rows"] = want["rows"].astype(jnp.bfloat16)
    same(got, want, int(groups.offsets[-1]))


@pytest.mark.parametrize("width, weighted", [(256, True), (200, False)])
def test_permute_fp8_in_blocks(width, weighted, rng):
    (x, scales, wide), groups = tokens(rng, width, True), groups_of(rng)
    weights = jnp.asarray(rng.random((101, 2)), jnp.float32) if weighted else None
    law = dict(power_2=True, epsilon=0.0)
    run = lambda source: source.run(("data", "data_t"), E4M3, ROWS_128, law=law)
    got = run(permute_fp8_source(x, groups, scales, weights))
    want = run(permute_source(wide.astype(jnp.bfloat16), groups, weights))
    end, cut = int(groups.offsets[-1]), {}
    for name, each in (("got", got), ("want", want)):
        cut[name] = each["data"][:end], each["scale_inv"][:, :end], each["data_t"][:, :end], each["scale_inv_t"]
        cut[name] = [np.asarray(a, np.float32) for a in (*cut[name][:3], cut[name][3][: end // 128])]
    jax.tree.map(np.testing.assert_array_equal, cut["got"], cut["want"])


def test_combine_bwd_of_fp8(rng):
    """The sums are of 200 numbers in one order or another, each product being exact: 200 roundings of 2**-24."""
    (dy, scales, wide), groups = tokens(rng, 200, True), groups_of(rng)
    dy, wide = dy.at[3, 2].set(1), wide.at[3, 2].set(scales[0, 3])
    rows = jnp.asarray(rng.standard_normal((groups.slots.size, 200)), jnp.bfloat16)
    (got,) = combine_bwd_op(dy, rows, groups.rows, scales)
    (want,) = combine_bwd_op(wide.astype(jnp.bfloat16), rows, groups.rows, None)
    bound = 200 * 2.0**-23 * float(jnp.abs(wide).max() * jnp.abs(rows).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_fp8_is_expected(rng):
    (_, scales, wide), groups = tokens(rng, 24, True), groups_of(rng)
    with pytest.raises(TypeError, match="x is float32; pass float8_e4m3fn"):
        permute_fp8_source(wide, groups, scales).run(("data",), E4M3, TENSOR, SCALE)


@pytest.fixture
def kernels(request):
    if not (request.config.getoption("--host-kernels") or jax.default_backend() == "gpu"):
        pytest.skip("no kernel runs here")


@pytest.mark.parametrize("dtype, width", [("float32", 24), ("bfloat16", 13), ("bfloat16", 1024)])
def test_combine_of_addresses_permute(dtype, width, kernels, rng):
    """Rows of three arrays: those of their concatenation, to the bit."""
    parts = [jnp.asarray(rng.standard_normal((40, width)), dtype) for _ in range(3)]
    positions = jnp.asarray(rng.integers(-1, 120, (33, 4)), jnp.int32)
    weights = jnp.asarray(rng.random((33, 4)), jnp.float32)

    @jax.jit
    def run(parts, positions, weights):
        told = [address_op(a) for a in parts]
        (y,) = combine_op(told[0][0], positions, weights, jnp.stack([address for _, address in told]))
        for a, address in told:
            (y,) = keep_op(y, a, address[None])
        return y, combine_op(jnp.concatenate(parts), positions, weights, None)[0]

    got, want = run(parts, positions, weights)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_addresses_in_stacks(kernels, rng):
    """Arrays that are slices of stacks, as layers in `lax.scan` have them: XLA on GPUs fuses a call with the slice that
    it reads or writes, so that the result is not where the operand is."""
    stack = jnp.asarray(rng.standard_normal((3, 40, 64)), jnp.bfloat16)
    positions = jnp.asarray(rng.integers(-1, 40, (33, 4)), jnp.int32)

    def body(last, rows):
        a, address = address_op(rows + last)
        (y,) = combine_op(a, positions, None, address[None])
        (y,) = keep_op(y, a, address[None])
        return last + 1, (a, y)

    def again(_, both):
        a, address = address_op(both[0])
        return None, (keep_op(both[1], a, address[None])[0], combine_op(a, positions, None, address[None])[0])

    @jax.jit
    def run(stack):
        _, both = jax.lax.scan(body, jnp.bfloat16(0), stack)
        return *both, *jax.lax.scan(again, None, both)[1]

    a = stack + jnp.arange(3, dtype=jnp.bfloat16)[:, None, None]
    y = jnp.stack([combine_op(each, positions, None, None)[0] for each in a])
    for got, want in zip(run(stack), (a, y, y, y), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("width", [24, 13, 640])
def test_permute_of_addresses(width, kernels, rng):
    parts = [jnp.asarray(rng.standard_normal((101, width)), E4M3) for _ in range(3)]
    experts = jnp.asarray(rng.integers(0, 5, (303, 2)), jnp.int32)

    @jax.jit
    def run(parts, experts):
        groups, told, one = group(experts, 5), [address_op(a) for a in parts], jnp.float32(1)
        addresses = jnp.stack([address for _, address in told])
        fixed = dict(outputs=("data", "data_t"), topk=2, dtype=E4M3)
        got = permute_fp8_op(told[0][0], None, groups.slots, groups.offsets, None, addresses, one, **fixed)
        for a, address in told:
            got = keep_op(got[0], a, address[None])[0], got[1]
        whole = permute_fp8_op(jnp.concatenate(parts), None, groups.slots, groups.offsets, None, None, one, **fixed)
        return groups, dict(zip(("data", "data_t"), got)), dict(zip(("data", "data_t"), whole))

    groups, got, want = run(parts, experts)
    same(got, want, int(groups.offsets[-1]))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_device_among_one(mapped, rng):
    """What it reads is its own, by its address on a GPU, in a recomputed pass and under vmap too."""
    x, rows = (
        jnp.asarray(rng.standard_normal((101, 256)), E4M3),
        jnp.asarray(rng.standard_normal((1024, 256)), "bfloat16"),
    )
    weights, groups = jnp.asarray(rng.random((101, 2)), jnp.float32), groups_of(rng)

    def layouts(read, x):
        if read:
            return permute_of_peers(x, groups, ("data", "data_t"), ("a",))
        got = permute_fp8_source(x, groups).run(("data", "data_t"), E4M3, TENSOR, jnp.float32(1))
        return {name: got[name] for name in ("data", "data_t")}

    def sums(read, rows):
        if read:
            return combine_of_peers(*tell_peers(rows, ("a",)), groups.rows, weights, ("a",))
        return combine_op(rows, groups.rows, weights, None)[0]

    def both(read, x, rows):
        got = jax.checkpoint(lambda x: layouts(read, x))(x)
        in_groups = jnp.arange(groups.slots.size) < groups.offsets[-1]
        got = {"data": jnp.where(in_groups[:, None], got["data"], 0), "data_t": jnp.where(in_groups, got["data_t"], 0)}
        return got, sums(read, rows)

    def run(read):
        call = jax.vmap(lambda *args: both(read, *args)) if mapped else lambda *args: both(read, *args)
        mesh = jax.make_mesh((1,), ("a",))
        lead = (lambda a: jnp.stack([a, a[::-1]])) if mapped else lambda a: a
        with jax.set_mesh(mesh):
            shard = jax.shard_map(call, in_specs=P(), out_specs=P(), check_vma=False)
            return jax.jit(shard)(lead(x), lead(rows))

    as_f32 = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float32), tree)
    jax.tree.map(np.testing.assert_array_equal, as_f32(run(True)), as_f32(run(False)))
