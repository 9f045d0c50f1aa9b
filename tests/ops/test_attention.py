"""dot_product_attention against float64 numpy: every mask, bias and softmax; transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from attention_oracle import BOUND, OPEN, attend, check, error, operands, run, visible
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_jax.ops import attention
from te_jax.ops.attention import MASK_TYPES, SequenceDescriptor, dot_product_attention

SHAPES = {  # b, s, t, h, g, d, e
    "mha": (2, 6, 6, 2, 2, 16, 16),
    "gqa_s<t": (2, 5, 9, 4, 2, 16, 8),
    "mqa_s>t": (1, 9, 5, 4, 1, 8, 16),
    "one_query": (2, 1, 7, 2, 2, 16, 16),
}


def mask_args(mask_type):
    meaning = MASK_TYPES[mask_type]
    return dict(causal=meaning.causal, bottom_right=meaning.bottom_right)


PATHS = [(shape, dtype, None) for shape in SHAPES for dtype in (jnp.float32, jnp.bfloat16)]  # plain, and the op
PATHS += [("gqa_s<t", jnp.float16, None), ("gqa_s<t", jnp.float16, "xla"), ("gqa_s<t", jnp.bfloat16, "xla")]


@pytest.mark.parametrize("shape, dtype, implementation", PATHS)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_against_float64(shape, mask_type, implementation, dtype):
    q, k, v, dout = operands(SHAPES[shape], dtype)
    got = run(q, k, v, dout, attn_mask_type=mask_type, implementation=implementation)
    assert all(got[name].dtype == dtype for name in got)
    seen = visible(q.shape[1], k.shape[1], **mask_args(mask_type))
    check(got, attend(q, k, v, seen=seen, scale=q.shape[-1] ** -0.5, dout=dout), dtype)


SPELLINGS = {
    "no_mask": (), "padding": (), "causal": (), "padding_causal": ("causal_padding",),
    "causal_bottom_right": ("bottom_right_causal",),
    "padding_causal_bottom_right": (
        "causal_padding_bottom_right", "bottom_right_causal_padding", "bottom_right_padding_causal",
    ),
}  # fmt: skip


def test_spellings():
    assert set(MASK_TYPES) == {name for first, others in SPELLINGS.items() for name in (first, *others)}
    for first, others in SPELLINGS.items():
        assert all(MASK_TYPES[name] == MASK_TYPES[first] for name in others)


@pytest.mark.parametrize("window", [None, (2, -1), (-1, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("mask_type", SPELLINGS)
def test_mask_types_and_windows_with_a_users_mask(mask_type, window):
    q, k, v, dout = operands(SHAPES["gqa_s<t"])
    users = np.random.default_rng(1).random((2, 1, 5, 9)) < 0.3
    seen = visible(5, 9, window=window or (-1, -1), **mask_args(mask_type)) & ~users
    mask = jnp.asarray(users, jnp.int32 if window is None else bool)
    got = run(q, k, v, dout, mask=mask, attn_mask_type=mask_type, window_size=window)
    check(got, attend(q, k, v, seen=seen, scale=0.25, dout=dout))


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_window_without_a_mask(mask_type):
    q, k, v, dout = operands(SHAPES["mqa_s>t"])
    got = run(q, k, v, dout, attn_mask_type=mask_type, window_size=(1, 2))
    seen = visible(9, 5, window=(1, 2), **mask_args(mask_type))
    check(got, attend(q, k, v, seen=seen, scale=8**-0.5, dout=dout))


@pytest.mark.parametrize("shape", [(5, 9), (1, 1, 1, 9), (2, 1, 5, 1), (1, 4, 5, 9), (2, 4, 5, 9)])
def test_mask_broadcasts(shape):
    q, k, v, dout = operands(SHAPES["gqa_s<t"])
    mask = np.random.default_rng(2).random(shape) < 0.4
    got = run(q, k, v, dout, mask=jnp.asarray(mask))
    check(got, attend(q, k, v, seen=np.broadcast_to(~mask, (2, 4, 5, 9)), scale=0.25, dout=dout))


@pytest.mark.parametrize("implementation", ["xla", None])
def test_fully_masked_rows_are_zero(implementation):
    q, k, v, dout = operands(SHAPES["gqa_s<t"], jnp.bfloat16)
    mask = np.zeros((2, 1, 5, 9), bool)
    mask[0, 0, 3], mask[1] = True, True
    got = run(q, k, v, dout, mask=jnp.asarray(mask), implementation=implementation)
    assert not np.any(got["out"][0, 3]) and not np.any(got["dq"][0, 3])
    assert all(not np.any(got[name][1]) for name in ("out", "dq", "dk", "dv"))
    check(got, attend(q, k, v, seen=~mask, scale=0.25, dout=dout), jnp.bfloat16)
    # bottom right with more queries than keys: the first ones see none
    q, k, v, dout = operands(SHAPES["mqa_s>t"])
    got = run(q, k, v, dout, attn_mask_type="causal_bottom_right", bias=jnp.full((9, 5), -jnp.inf).at[6:].set(0.0))
    assert not np.any(got["out"][:, :6]) and all(np.all(np.isfinite(x)) for x in got.values())


def test_large_numbers_where_nobody_looks_give_no_nan():
    """In f16 the gradient of a probability, dout v, is inf there."""
    q, k, v, dout = operands(SHAPES["mha"], jnp.float16)
    mask = np.zeros((2, 1, 6, 6), bool)
    mask[:, :, :, 4:], mask[:, :, 3:, :] = True, True
    v, dout = v.at[:, 4:].multiply(1000), dout.at[:, 3:].multiply(1000)
    offset = jnp.zeros(2)
    got = run(q, k, v, dout, mask=jnp.asarray(mask), softmax_type="learnable", softmax_offset=offset)
    want = attend(q, k, v, seen=~mask, scale=0.25, joins=offset, dout=dout)
    assert error(got.pop("dsoftmax_offset"), want["djoins"]) <= 2 * BOUND[jnp.float16][1]
    check(got, want, jnp.float16)


@pytest.mark.parametrize("kind", [None, "post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("shape", [(5, 9), (1, 1, 1, 1), (1, 4, 5, 9), (2, 1, 1, 9), (1, 4, 5, 1), (2, 4, 5, 9)])
def test_bias_and_its_gradient(kind, shape):
    q, k, v, dout = operands(SHAPES["gqa_s<t"])
    bias = on_device(np.random.default_rng(3).standard_normal(shape), jnp.float32)
    got = run(q, k, v, dout, bias=bias, attn_bias_type=kind, attn_mask_type="causal")
    seen, pre_scale = visible(5, 9, causal=True), kind == "pre_scale_bias"
    want = attend(q, k, v, seen=seen, scale=0.25, bias=bias, pre_scale=pre_scale, dout=dout)
    summed = tuple(i for i, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1)
    want["dbias"] = want["dbias"].sum(summed, keepdims=True).reshape(shape)
    # a gradient that is a sum of n terms that cancel has n times the error of one, relative to the terms
    terms = np.linalg.norm(attend(q, k, v, seen=seen, scale=0.25, bias=bias, dout=dout)["dbias"])
    assert np.linalg.norm(got["dbias"] - want.pop("dbias")) <= BOUND[jnp.float32][1] * terms * np.sqrt(bias.size)
    check({name: got[name] for name in ("out", "dq", "dk", "dv")}, want)
    assert got["dbias"].dtype == bias.dtype


@pytest.mark.parametrize("kind", ["off_by_one", "off-by-one", "learnable"])
@pytest.mark.parametrize("mask_type", ["no_mask", "padding_causal"])
def test_softmax_variants(kind, mask_type):
    q, k, v, dout = operands(SHAPES["gqa_s<t"])
    offset = jnp.asarray([-2.0, 0.0, 0.7, 5.0]).reshape(1, 4, 1, 1) if kind == "learnable" else None
    mask = np.zeros((2, 1, 5, 9), bool)
    mask[0, 0, 2] = True  # a row whose whole softmax is the joined term
    options = dict(softmax_type=kind, softmax_offset=offset, attn_mask_type=mask_type, mask=jnp.asarray(mask))
    got = run(q, k, v, dout, **options)
    joins = np.zeros(4) if offset is None else np.asarray(offset).ravel()
    seen = visible(5, 9, **mask_args(mask_type)) & ~mask
    want = attend(q, k, v, seen=seen, scale=0.25, joins=joins, dout=dout)
    if offset is not None:
        assert error(got.pop("dsoftmax_offset").ravel(), want["djoins"]) <= 2 * BOUND[jnp.float32][1]
    check(got, want)


def test_scale_and_no_batch_and_two_batch_axes():
    q, k, v, dout = operands(SHAPES["gqa_s<t"])
    want = attend(q, k, v, seen=True, scale=1.5, dout=dout)
    check(run(q, k, v, dout, scale=1.5), want)
    one = run(q[0], k[0], v[0], dout[0], scale=1.5)
    check(one, {name: want[name][0] for name in one})
    two = run(*(x[:, None] for x in (q, k, v, dout)), scale=1.5)
    check({name: x[:, 0] for name, x in two.items()}, want)


def test_max_logit():
    q, k, v, _ = operands(SHAPES["gqa_s<t"])
    bias = on_device(np.random.default_rng(4).standard_normal((1, 4, 5, 9)), jnp.float32)
    out, top = dot_product_attention(q, k, v, bias=bias, attn_mask_type="causal", return_max_logit=True)
    logits = 0.25 * np.einsum("bshd,bthd->bhst", q, np.repeat(k, 2, 2)) + bias
    want = np.where(visible(5, 9, causal=True), logits, -np.inf).max((0, 2, 3))
    assert out.shape == (2, 5, 4, 8) and top.dtype == jnp.float32
    np.testing.assert_allclose(top, want, rtol=1e-5)


# ---- segments ------------------------------------------------------------------------------------


def segments_seen(rows_q, rows_k, s, t, *, causal=False, bottom_right=False, window=(-1, -1)):
    """rows_*: per row the (start, length) of each segment -> bool[b, 1, s, t]."""
    seen = np.zeros((len(rows_q), 1, s, t), bool)
    for n, (row_q, row_k) in enumerate(zip(rows_q, rows_k, strict=True)):
        for (q0, nq), (k0, nk) in zip(row_q, row_k, strict=True):
            block = visible(nq, nk, causal=causal, bottom_right=bottom_right, window=window)
            seen[n, 0, q0 : q0 + nq, k0 : k0 + nk] = block
    return seen


@pytest.mark.parametrize("window", [(-1, -1), (1, 1)])
@pytest.mark.parametrize("mask_type", ["no_mask", "padding_causal", "padding_causal_bottom_right"])
def test_sequence_descriptors(mask_type, window):
    b, s, t, h = 2, 7, 9, 4
    q, k, v, dout = operands((b, s, t, h, 2, 16, 8))
    rows_q, rows_k = [[(0, 3), (3, 2)], [(0, 4), (5, 2)]], [[(0, 4), (4, 2)], [(1, 5), (6, 3)]]

    def ids(rows, size):
        out = np.zeros((b, size), np.int32)
        for n, row in enumerate(rows):
            for number, (start, length) in enumerate(row):
                out[n, start : start + length] = number + 1
        return jnp.asarray(out)

    lens = tuple(jnp.asarray([[length for _, length in row] for row in rows]) for rows in (rows_q, rows_k))
    starts = tuple(jnp.asarray([[start for start, _ in row] + [-1] for row in rows]) for rows in (rows_q, rows_k))
    lens_pad = tuple(jnp.pad(x, ((0, 0), (0, 1)), constant_values=-1) for x in lens)
    starts_pad = tuple(jnp.pad(x, ((0, 0), (0, 1)), constant_values=-1) for x in starts)
    seen = segments_seen(rows_q, rows_k, s, t, window=window, **mask_args(mask_type))
    want = attend(q, k, v, seen=seen, scale=0.25, dout=dout)
    for descriptor in (
        SequenceDescriptor.from_segment_ids_and_pos((ids(rows_q, s), ids(rows_k, t))),
        SequenceDescriptor.from_seqlens_and_offsets(lens, starts),
        SequenceDescriptor.from_seqlens_and_offsets(lens_pad, starts_pad),
    ):
        got = run(q, k, v, dout, sequence_descriptor=descriptor, attn_mask_type=mask_type, window_size=window)
        check(got, want)
        assert not np.any(np.asarray(got["out"])[~seen.any(-1)[:, 0]])


@pytest.mark.parametrize("mask_type", ["padding", "causal", "padding_causal_bottom_right"])
def test_lengths(mask_type):
    b, s, t = 3, 6, 6
    q, k, v, dout = operands((b, s, t, 2, 1, 16, 8))
    q_lens, k_lens = [6, 3, 0], [4, 6, 2]
    descriptor = SequenceDescriptor.from_seqlens((jnp.asarray(q_lens), jnp.asarray(k_lens)))
    rows = lambda lens: [[(0, length)] for length in lens]
    seen = segments_seen(rows(q_lens), rows(k_lens), s, t, **mask_args(mask_type))
    got = run(q, k, v, dout, sequence_descriptor=descriptor, attn_mask_type=mask_type)
    check(got, attend(q, k, v, seen=seen, scale=0.25, dout=dout))
    assert not np.any(got["out"][2]) and not np.any(got["out"][1, 3:])


def test_descriptor_is_a_pytree_and_derives_positions():
    ids = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [3, 1, 1, 1, 0, 2, 2]])
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids)
    np.testing.assert_array_equal(descriptor.segment_pos[0], [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 0, 1]])
    assert len(jax.tree.leaves(descriptor)) == 4
    again = jax.jit(lambda x: x)(descriptor)
    assert isinstance(again, SequenceDescriptor) and again.seqlens is None
    mapped = jax.vmap(lambda d: d.tokens(7, 7)[0][0])(descriptor)
    np.testing.assert_array_equal(mapped, ids)


# ---- the ops, and transformations ----------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_op_results(causal):
    q, k, v, dout = operands(SHAPES["gqa_s<t"], jnp.bfloat16)
    want = attend(q, k, v, seen=visible(5, 9, causal=causal), scale=0.3, dout=dout)
    attrs = dict(OPEN, right=0 if causal else -1, scale=0.3)
    none = (None,) * 4  # kv, qkv, bias and segments
    out, lse = attention.attention_fwd(q, k, v, *none, None, outputs=("out", "lse"), **attrs)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, want["lse"], rtol=1e-5, atol=1e-5)
    grads = attention.attention_bwd(
        dout, q, k, v, *none, out, lse, None, outputs=("dq", "dk", "dv"), deterministic=True, **attrs
    )
    check(dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)), want, jnp.bfloat16)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_runs_of_segment_ids(mask_type):
    """As lengths they mean the same; an id that is not there, gaps and padding are in the rows."""
    ids = np.array([[1, 1, 1, 0, 3, 3, 0, 0, 0], [2, 2, 1, 1, 1, 1, 3, 0, 3]])
    ids[1, 8] = 0
    keys = np.array([[1, 1, 2, 2, 3, 3, 3, 0, 0], [0, 2, 2, 2, 1, 1, 1, 1, 1]])
    q, k, v, dout = operands((2, 9, 9, 4, 2, 16, 8), jnp.bfloat16)
    described = SequenceDescriptor.from_segment_ids_and_pos((jnp.asarray(ids), jnp.asarray(keys)))
    runs = described.of_runs(3)
    assert runs.segment_ids is None and runs.seqlens[0].tolist() == [[3, 0, 2], [4, 2, 1]]
    want, got = (run(q, k, v, dout, attn_mask_type=mask_type, sequence_descriptor=x) for x in (described, runs))
    for name in want:  # the same logits, masked as a bias and by segments
        assert error(got[name], want[name]) <= BOUND[jnp.bfloat16][1], name
    assert not np.any(np.asarray(got["out"])[ids == 0])


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_no_segment_at_all(implementation):
    q, k, v, dout = operands(SHAPES["mha"], jnp.bfloat16)
    none = SequenceDescriptor.from_seqlens_and_offsets(jnp.zeros((2, 0), jnp.int32), jnp.zeros((2, 1), jnp.int32))
    got = run(q, k, v, dout, sequence_descriptor=none, implementation=implementation)
    assert all(not np.any(np.asarray(x, np.float32)) for x in got.values())
    assert none.segments().shape == (2, 1, 4) and np.all(np.asarray(none.segments())[..., 0] < 0)


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_a_bias_of_the_lowest_number_hides(implementation):
    """As users write masks; a query of which all keys are hidden gives zeros."""
    q, k, v, dout = operands(SHAPES["mha"], jnp.bfloat16)
    bias = np.zeros((6, 6), np.float32)
    bias[2, 3:], bias[4] = np.finfo(np.float32).min, np.finfo(np.float32).min
    got = run(q, k, v, dout, bias=jnp.asarray(bias), implementation=implementation)
    assert not np.any(np.asarray(got["out"][:, 4], np.float32))
    del got["dbias"]
    check(got, attend(q, k, v, seen=bias == 0, scale=0.25, dout=dout), jnp.bfloat16)


def test_empty_operands():
    for b, s, t in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q, k, v, dout = operands((b, s, t, 2, 2, 16, 8), jnp.bfloat16)
        got = run(q, k, v, dout, attn_mask_type="causal")
        assert all(not np.any(x) for x in got.values()) and got["out"].shape == (b, s, 2, 8)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 0, 2)])
def test_vmap(axes):
    shape, dtype = SHAPES["gqa_s<t"], jnp.bfloat16
    args = [[operands(shape, dtype, seed)[i] for seed in range(3)] for i in range(4)]
    call = lambda q, k, v: dot_product_attention(q, k, v, attn_mask_type="causal")
    loss = lambda q, k, v: jnp.sum(call(q, k, v).astype(jnp.float32) * args[3][0].astype(jnp.float32))
    each = [jax.grad(loss, (0, 1, 2))(*(a[0 if axis is None else i] for a, axis in zip(args, axes))) for i in range(3)]
    stacked = [a[0] if axis is None else jnp.stack(a, axis) for a, axis in zip(args, axes)]
    got = jax.vmap(jax.grad(loss, (0, 1, 2)), axes)(*stacked)
    for i, want in enumerate(each):
        for name, ours, theirs in zip("qkv", (x[i] for x in got), want, strict=True):
            assert error(ours, theirs) <= 2**-9, name


@pytest.mark.parametrize("mesh_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("g", [8, 4, 2, 1])  # a group of one head; groups that do not divide among the devices
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sharded(mesh_type, g, dtype):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(mesh_type,) * 2)
    if (mesh_type, g, dtype) == (AxisType.Auto, 2, jnp.bfloat16):
        pytest.skip("custom_partitioning knows no sharding over a part of a mesh axis")
    shape = (2, 6, 6, 8, g, 16, 8)
    want = run(*operands(shape, dtype), attn_mask_type="causal")
    heads = "tp" if g % 4 == 0 else None
    specs = {name: NamedSharding(mesh, PartitionSpec("dp", None, heads, None)) for name in ("dk", "dv")}
    specs |= {name: NamedSharding(mesh, PartitionSpec("dp", None, "tp", None)) for name in ("dq", "out")}
    with jax.set_mesh(mesh):
        placed = zip(operands(shape, dtype), (specs[name] for name in ("dq", "dk", "dv", "out")), strict=True)
        got = run(*(jax.device_put(x, sharding) for x, sharding in placed), attn_mask_type="causal")
    for name in want:
        assert error(got[name], want[name]) <= BOUND[dtype][1], name
        if mesh_type == AxisType.Explicit:
            assert got[name].sharding.is_equivalent_to(specs[name], 4), name


def test_checkpoint_name_saves_what_the_backward_pass_needs():
    q, k, v, dout = operands(SHAPES["mha"], jnp.bfloat16)
    call = lambda q, k, v: dot_product_attention(q, k, v, context_checkpoint_name="context")
    policy = jax.checkpoint_policies.save_only_these_names("context")
    text = str(jax.make_jaxpr(lambda *a: jax.vjp(jax.checkpoint(call, policy=policy), *a[:3])[1](a[3]))(q, k, v, dout))
    assert text.count("te_attention_fwd") == text.count("te_attention_bwd") > 0  # no second forward
    plain = str(jax.make_jaxpr(lambda *a: jax.vjp(jax.checkpoint(call), *a[:3])[1](a[3]))(q, k, v, dout))
    assert plain.count("te_attention_fwd") > plain.count("te_attention_bwd")


def test_only_what_is_named_is_saved(capsys):
    q, k, v, _ = operands(SHAPES["mha"], jnp.bfloat16)
    call = lambda q, k, v: jnp.sin(dot_product_attention(jnp.sin(q), k, v, context_checkpoint_name="context"))
    policy = jax.checkpoint_policies.save_only_these_names("context")
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(call, policy=policy), q, k, v)
    saved = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert len(saved) == 2 and all("named 'context'" in line for line in saved), saved  # out and lse


def test_what_is_named_can_be_kept_on_the_host():
    q, k, v, dout = operands(SHAPES["mha"], jnp.bfloat16)
    call = lambda q, k, v: dot_product_attention(q, k, v, attn_mask_type="causal", context_checkpoint_name="context")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["context"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    step = lambda f: lambda q, k, v, dout: jax.vjp(f, q, k, v)[1](dout)
    offloaded = step(jax.checkpoint(call, policy=policy))
    text = str(jax.make_jaxpr(offloaded)(q, k, v, dout))
    assert text.count("te_attention_fwd") == text.count("te_attention_bwd") > 0  # no second forward
    moved = [line for line in text.splitlines() if "device_put" in line]
    assert len(moved) == 4, text  # out and lse, there and back
    for got, want in zip(jax.jit(offloaded)(q, k, v, dout), jax.jit(step(call))(q, k, v, dout), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_memory_type_of_logits_is_float32():
    q, k, v, _ = operands(SHAPES["mha"], jnp.bfloat16)
    big = dot_product_attention(q * 64, k * 64, v, implementation="xla")
    want = attend(q * 64, k * 64, v, seen=True, scale=0.25)["out"]
    assert error(big, want) <= BOUND[jnp.bfloat16][0]  # logits of some 1000 in bf16 would be off by 4
