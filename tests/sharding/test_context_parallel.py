"""context_parallel_attention against dot_product_attention on one device; what its compiled programs hold."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_jax.ops.attention import SequenceDescriptor, dot_product_attention, explain_attention
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.recipe import DelayedScaling
from te_jax.sharding import (
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)

pytestmark = pytest.mark.usefixtures("on_host")
STRATEGIES = ("ring", "all_gather")
BOTH = [dict(strategy=strategy) for strategy in STRATEGIES]
B, S, H, G, D = 4, 36, 4, 2, 16


def operands(s=S, t=S, g=G, b=B, e=D, h=H, dtype=jnp.float32):
    """q, k, v, dout."""
    rng = np.random.default_rng(0)
    sizes = (b, s, h, D), (b, t, g, D), (b, t, g, e), (b, s, h, e)
    return [on_device(rng.standard_normal(size), dtype) for size in sizes]


def with_gradients(f, offset=None):
    """(q, k, v, dout) -> out, lse, dq, dk, dv, and of an offset the gradient."""

    def run(q, k, v, dout, *offset):
        out, vjp, lse = jax.vjp(lambda *x: f(*x), q, k, v, *offset, has_aux=True)
        return out, lse, *vjp(dout)

    return run


@cache
def on_one_device(**options):
    """The program of (descriptor, *arrays); tests of the same options and shapes share it."""

    def run(described, *arrays):
        f = lambda q, k, v, offset=None: dot_product_attention(
            q, k, v, softmax_offset=offset, sequence_descriptor=described, return_lse=True, **options
        )
        return with_gradients(f)(*arrays)

    return jax.jit(run)


def wanted(arrays, sequence_descriptor=None, **options):
    """On one device."""
    return on_one_device(**options)(sequence_descriptor, *arrays)


def mesh_of(cp, types, other=2):
    return jax.make_mesh((other, cp), ("other", "cp"), axis_types=types)


def line_of(cp):
    """A mesh of the cut sequence only, within which nothing is left to partition: its programs compile soonest."""
    return jax.make_mesh((cp,), ("cp",), axis_types=(AxisType.Auto,))


AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
MIXED = (AxisType.Auto, AxisType.Explicit)


IN_PARTS = PartitionSpec(None, "cp")


def program(mesh, spec=IN_PARTS, balanced=False, **kwargs):
    """-> the function on `mesh`, and what places its arguments there and takes its results back."""
    cp = mesh.shape["cp"]
    f = lambda q, k, v, offset=None: context_parallel_attention(
        q, k, v, axis="cp", load_balanced=balanced, return_lse=True, softmax_offset=offset, **kwargs
    )

    def place(x):
        if x.ndim == 1:
            return x
        x = np.asarray(x)  # of an array of its own jax compiles a program to cut it
        x = reorder_causal_load_balancing(x, cp) if balanced else x
        return jax.device_put(x, NamedSharding(mesh, spec))

    def back(x):
        if x.ndim == 1 or not balanced:
            return x
        return inverse_reorder_causal_load_balancing(np.asarray(x), cp, 1 if x.ndim == 4 else 2)

    return with_gradients(f), place, back


@cache
def wanted_of(case):
    """The same of `operands()`, for one of CASES."""
    return wanted(operands(), **CASES[case])


def check(arrays, mesh, variants, *, bound=1e-5, **kwargs):
    """All `variants`, options of `program` and the case of CASES that they compute, are one program: it compiles sooner
    than one each."""
    named = {name: kwargs.pop(name) for name in ("batch_axis", "head_axis") if name in kwargs}
    cases = [variant.get("case") for variant in variants]
    wants = [wanted_of(case) if case else wanted(arrays, **kwargs) for case in cases]
    options = [{name: x for name, x in variant.items() if name != "case"} for variant in variants]
    with jax.set_mesh(mesh):
        programs = [
            program(mesh, **of, **named, **(CASES[case] if case else kwargs)) for of, case in zip(options, cases)
        ]
        placed = [list(map(place, arrays)) for _, place, _ in programs]
        got = jax.jit(lambda placed: [run(*args) for (run, _, _), args in zip(programs, placed)])(placed)
    for variant, want, (_, _, back), results in zip(variants, wants, programs, got):
        compare(list(map(back, results)), want, bound, variant)


def compare(got, want, bound, variant):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "doffset"), got, want, strict=len(got) == 6):
        assert a.shape == b.shape and a.dtype == b.dtype, (variant, name)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), (variant, name)
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        assert np.max(np.abs(a - b)) <= bound * max(1, np.max(np.abs(b))), (variant, name, np.max(np.abs(a - b)))


def lengths(*lens):
    return SequenceDescriptor.from_seqlens(jnp.asarray(lens, jnp.int32))


PACKED = SequenceDescriptor.from_seqlens_and_offsets(
    jnp.asarray([[5, 11, 9], [20, 3, 0], [19, -1, -1], [S, -1, -1]], jnp.int32),
    jnp.asarray([[0, 5, 19, -1], [2, 25, -1, -1], [0, -1, -1, -1], [0, -1, -1, -1]], jnp.int32),
)  # with gaps and a tail; one segment, and a whole row
IDS = SequenceDescriptor.from_segment_ids_and_pos(
    jnp.asarray(
        [
            [1] * 5 + [2] * 11 + [0] * 3 + [3] * 9 + [0] * 8,
            [0] * 2 + [1] * 20 + [2] * 14,
            [1] * 19 + [0] * 17,
            [1] * S,
        ],
        jnp.int32,
    )
)
CASES = {
    "full": {},
    "causal": dict(attn_mask_type="causal"),
    "causal_window": dict(attn_mask_type="causal", window_size=(9, 0)),
    "short_window": dict(attn_mask_type="causal", window_size=(2, 0)),
    "window": dict(window_size=(5, 3)),
    "window_right": dict(window_size=(-1, 6)),
    "wide_window": dict(window_size=(20, 17)),
    "bottom_right": dict(attn_mask_type="causal_bottom_right"),
    "bottom_right_lengths": dict(
        attn_mask_type="padding_causal_bottom_right", sequence_descriptor=lengths(7, 25, 36, 0)
    ),
    "packed": dict(attn_mask_type="padding", sequence_descriptor=PACKED),
    "causal_packed": dict(attn_mask_type="padding_causal", sequence_descriptor=PACKED),
    "packed_window": dict(attn_mask_type="padding_causal", sequence_descriptor=PACKED, window_size=(4, 0)),
    "packed_full_window": dict(attn_mask_type="padding", sequence_descriptor=PACKED, window_size=(4, 2)),
    "ids": dict(attn_mask_type="padding_causal", sequence_descriptor=IDS),
    "ids_window": dict(attn_mask_type="padding", sequence_descriptor=IDS, window_size=(6, 1)),
}


# Each case on 2 devices, balanced and not; one of each kind of rows also, or only, on 3, where the ring has steps in
# between.
ON_THREE = {"causal": (True, False), "window": (True,), "causal_packed": (True,), "ids_window": (False,)}
ON_TWO = {case: tuple(way for way in (True, False) if way not in ON_THREE.get(case, ())) for case in CASES}
EACH = [(cp, case, ways) for cp, of in ((3, ON_THREE), (2, ON_TWO)) for case, ways in of.items() if ways]


@pytest.mark.parametrize("cp, case, ways", EACH)
def test_equals_one_device(cp, case, ways):
    """2 or 3 devices along the sequence, and 2 along the batch for two kinds of rows; balanced or not."""
    batch = case in ("full", "ids_window")
    spec = PartitionSpec("other", "cp") if batch else IN_PARTS
    variants = [dict(strategy=strategy, balanced=way, spec=spec, case=case) for strategy in STRATEGIES for way in ways]
    check(operands(), mesh_of(cp, AUTO) if batch else line_of(cp), variants)


MESHES = {
    "explicit": (EXPLICIT, {}),
    "mixed": (MIXED, {}),
    "auto_batch": (AUTO, dict(batch_axis="other")),
    "auto_heads": (AUTO, dict(head_axis="other")),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_meshes(strategy, mesh):
    """Split by batch and by heads; packed segments where the mesh is of that."""
    types, named = MESHES[mesh]
    specs = [PartitionSpec("other", "cp"), PartitionSpec(None, "cp", "other")]  # of batch, of heads
    packed, plain = reversed(specs) if mesh == "auto_heads" else specs
    variants = [
        dict(strategy=strategy, balanced=True, spec=packed, case="causal_packed"),
        dict(strategy=strategy, balanced=mesh == "explicit", spec=plain, case="causal"),
    ]
    check(operands(), mesh_of(2, types), variants, **named)


@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups(strategy, g):
    """Also of groups that the mesh does not divide, on an Explicit one; values of another width."""
    arrays, spec = operands(g=g, e=8), PartitionSpec(None, "cp", "other" if g > 1 else None)
    q_spec = PartitionSpec(None, "cp", "other")
    mesh = mesh_of(2, EXPLICIT)
    want = wanted(arrays, attn_mask_type="causal")
    with jax.set_mesh(mesh):
        f = lambda q, k, v: context_parallel_attention(
            q, k, v, axis="cp", strategy=strategy, attn_mask_type="causal", return_lse=True
        )
        placed = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(arrays, (q_spec, spec, spec, q_spec))]
        out = jax.eval_shape(lambda q, k, v: f(q, k, v)[0], *placed[:3])
        dout = jax.device_put(arrays[3], NamedSharding(mesh, out.sharding.spec))
        got = jax.jit(with_gradients(f))(*placed[:3], dout)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("names", [("cp",), ("cp", "other")], ids=str)
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_inside_shard_map(types, names, case="causal_packed"):
    """With check_vma=True; the segments are of whole rows there too."""
    kwargs, balanced = dict(CASES[case]), types is AUTO
    described = kwargs.pop("sequence_descriptor", None)
    arrays, mesh = operands(), mesh_of(2, types)
    want = wanted_of(case)
    spec = PartitionSpec("other", "cp") if len(names) > 1 else PartitionSpec(None, "cp")
    rows = jax.tree.map(lambda x: PartitionSpec(*spec[:1]), described)

    def local(strategy, described, *arrays):
        f = partial(
            context_parallel_attention, axis="cp", strategy=strategy, load_balanced=balanced, return_lse=True,
            sequence_descriptor=described, **kwargs,
        )  # fmt: skip
        return with_gradients(f)(*arrays)

    with jax.set_mesh(mesh):
        lse_spec = PartitionSpec(spec[0], None, "cp")
        specs = dict(in_specs=(rows, *(spec,) * 4), out_specs=(spec, lse_spec, *(spec,) * 3), axis_names=set(names))
        runs = {strategy: jax.shard_map(partial(local, strategy), **specs) for strategy in STRATEGIES}
        order = partial(reorder_causal_load_balancing, cp_size=2) if balanced else lambda x: x
        place = lambda x: jax.device_put(order(np.asarray(x)), NamedSharding(mesh, spec))
        described = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec[:1]))), described)
        both = jax.jit(lambda *args: {strategy: run(*args) for strategy, run in runs.items()})
        got = both(described, *map(place, arrays))
    for strategy, results in got.items():
        for i, (a, b) in enumerate(zip(results, want)):
            a = inverse_reorder_causal_load_balancing(np.asarray(a), 2, 2 if i == 1 else 1) if balanced else a
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=strategy)


@pytest.mark.parametrize("kind", ["off_by_one", "learnable"])
@pytest.mark.parametrize("types, named", [(AUTO, {}), (EXPLICIT, {}), (AUTO, dict(head_axis="other"))], ids=str)
def test_softmax_types(kind, types, named):
    arrays = operands() + ([jnp.asarray([0.5, -1.0, 2.0, 0.0])] if kind == "learnable" else [])
    check(arrays, mesh_of(2, types), BOTH, softmax_type=kind, attn_mask_type="causal", **named)


@pytest.mark.parametrize("case, s, t", [("causal_bottom_right", 32, 16), ("no_mask", 16, 32), ("causal", 16, 32)])
def test_queries_and_keys_of_other_lengths(case, s, t):
    """With more queries than keys, bottom right, the first ones see none."""
    balanced = [dict(strategy=strategy, balanced=True) for strategy in STRATEGIES]
    check(operands(s, t), line_of(2), balanced, attn_mask_type=case)


def test_lengths_of_queries_and_of_keys():
    described = SequenceDescriptor.from_seqlens((jnp.asarray([9, 32]), jnp.asarray([17, 3])))
    arrays, mesh = operands(b=2), line_of(2)
    check(arrays, mesh, BOTH, attn_mask_type="padding", sequence_descriptor=described)
    same = SequenceDescriptor.from_seqlens((jnp.asarray([9, 32]), jnp.asarray([9, 3])))
    options = dict(attn_mask_type="padding_causal", sequence_descriptor=same)
    cut = lambda strategy: partial(context_parallel_attention, axis="cp", strategy=strategy, **options)
    with jax.set_mesh(mesh):
        outs = jax.jit(lambda *x: [cut(strategy)(*x) for strategy in STRATEGIES])(*arrays[:3])
    want = jax.jit(partial(dot_product_attention, **options))(*arrays[:3])
    for out, strategy in zip(outs, STRATEGIES):
        np.testing.assert_allclose(out[0], want[0], atol=1e-5, err_msg=strategy)
        assert np.all(np.isnan(out[1])), strategy  # never silently wrong


def test_bf16():
    """The op of cuDNN, here its reference. Each of 3 partial results is rounded to bf16: 2**-9 of values up to 4."""
    arrays = operands(dtype=jnp.bfloat16)
    variants = [dict(strategy=strategy, balanced=True) for strategy in STRATEGIES]
    check(arrays, line_of(3), variants, attn_mask_type="causal", bound=2**-6)


def test_one_device_along_the_axis():
    mesh = jax.make_mesh((2, 1), ("other", "cp"), axis_types=AUTO)
    check(operands(), mesh, [dict(balanced=True)], attn_mask_type="causal")


# -- the compiled programs -----------------------------------------------------------------------------------


def compiled(strategy, s=256, cp=4, **kwargs):
    """The texts of forward and backward on cp devices. In one program the CPU's compiler, which drops optimization
    barriers, would merge the collectives of both."""
    mesh = jax.make_mesh((cp,), ("cp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, IN_PARTS)) for x in operands(s, s, b=1)]
        f = partial(context_parallel_attention, axis="cp", strategy=strategy, load_balanced=True, **kwargs)
        forward = jax.jit(lambda *x: jax.vjp(f, *x)).lower(*arrays[:3]).compile()
        _, vjp = forward(*arrays[:3])
        backward = jax.jit(lambda vjp, dout: vjp(dout)).lower(vjp, arrays[3])
    assert "optimization_barrier" in backward.as_text()  # what keeps other compilers from it
    return forward.as_text(), backward.compile().as_text()


def shapes_in(text):
    return [tuple(map(int, x.split(","))) for x in re.findall(r"\w\d+\[([\d,]+)\]", text)]


def count(text, op):
    return len(re.findall(rf"= \S+ {op}(?:-start)?\(", text))


def test_ring_program():
    """k and v go around in cp - 1 steps each, twice, their f32 gradients in cp: nothing is gathered, and no array is
    of S x S numbers, nor of all keys."""
    forward, backward = compiled("ring", attn_mask_type="causal")
    assert count(forward, "collective-permute") == 2 * 3 and count(backward, "collective-permute") == 2 * 3 + 2 * 4
    for text in (forward, backward):
        assert count(text, "all-gather") == 0 and count(text, "all-reduce") == 0
        shapes = shapes_in(text)
        assert shapes and all(256 not in shape and np.prod(shape) < 256 * 256 for shape in shapes)


def test_ring_program_of_a_window():
    """A window of less than a chunk needs the keys of the neighbours: 2 steps of k and v, and their gradients home."""
    forward, backward = compiled("ring", cp=8, attn_mask_type="causal", window_size=(16, 0), s=512)
    assert count(forward, "collective-permute") == 2 * 2 and count(backward, "collective-permute") == 2 * 2 + 2 * 3


def test_all_gather_program():
    """k and v forward, again backward, and their gradients scattered."""
    forward, backward = compiled("all_gather", attn_mask_type="causal")
    assert count(forward, "all-gather") == 2 and count(backward, "all-gather") == 2
    assert count(forward, "reduce-scatter") == 0 and count(backward, "reduce-scatter") == 2
    for text in (forward, backward):
        assert count(text, "collective-permute") == 0 and count(text, "all-reduce") == 0
        assert not any(shape[-2:] == (256, 256) for shape in shapes_in(text))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_residuals_are_local(strategy):
    """q, k, v, out and lse: what the backward pass keeps of the forward pass."""
    arrays = operands(256, 256, b=1)
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        f = lambda q, k, v: context_parallel_attention(
            q, k, v, axis="cp", strategy=strategy, load_balanced=True, attn_mask_type="causal"
        )
        saved = jax.eval_shape(lambda *x: jax.vjp(f, *x)[1], *arrays[:3])
    q, k, v, dout = arrays
    sizes = sum(x.size for x in jax.tree.leaves(saved))
    assert sizes <= sum(x.size for x in (q, k, v, dout)) + H * 256 + 64


def test_kernels_get_what_is_on_a_device():
    """On CUDA: plain cuDNN calls, without lengths or biases, of local batch and heads, for the causal ring."""
    mesh = mesh_of(4, AUTO)
    arrays = operands(64, 64, b=2, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        run, place, _ = program(
            mesh, PartitionSpec("other", "cp"), True, strategy="ring", batch_axis="other", attn_mask_type="causal"
        )
        text = jax.jit(run).trace(*map(place, arrays)).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_attention_" in line]
    assert calls and all("tensor<1x" in line and "tensor<2x" not in line for line in calls)
    assert all("xi32>" not in line for line in calls)


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        (dict(axis="sp"), ValueError, r"axis is 'sp', but the mesh in force has the axes \('other', 'cp'\)"),
        (dict(axis=None), ValueError, "axis is None; pass the name of one mesh axis"),
        (dict(axis=("cp", "other")), ValueError, "pass the name of one mesh axis"),
        (dict(batch_axis="cp"), ValueError, "mesh axis 'cp' is both axis and batch_axis"),
        (dict(batch_axis="other", head_axis="other"), ValueError, "'other' is both batch_axis and head_axis"),
        (dict(head_axis="tp"), ValueError, "head_axis is 'tp', but the mesh in force has"),
        (dict(s=30), ValueError, "q has 30 positions, which 4 pieces do not divide; .* 'cp' has 4 devices"),
        (
            dict(s=40, t=20, load_balanced=True),
            ValueError,
            "k and v has 20 positions, which 8 pieces .2 for each device",
        ),
        (dict(b=1, batch_axis="other"), ValueError, "axis `b` is 1, which the 2 devices"),
        (dict(g=1, head_axis="other"), ValueError, "axis `g` is 1, which the 2 devices"),
        (dict(strategy="star"), ValueError, "strategy is 'star'; pass one of default, all_gather, ring"),
        (
            dict(mask=jnp.ones((S, S), bool)),
            ValueError,
            r"mask is of shape \(36, 36\), .* every attn_mask_type, window",
        ),
        (dict(bias=jnp.ones((S, S))), ValueError, "bias is of shape .* it takes every attn_mask_type"),
        (dict(alibi_slopes=jnp.ones(H)), ValueError, "alibi_slopes is of shape"),
        (dict(dropout_rate=0.1), ValueError, "dropout_rate is 0.1, which attention over a cut sequence does not"),
        (dict(return_max_logit=True), ValueError, "return_max_logit is True"),
        (dict(attn_mask_type="diagonal"), ValueError, "attn_mask_type is 'diagonal'; pass one of no_mask"),
        (dict(sequence_descriptor=jnp.ones(2)), TypeError, "pass a SequenceDescriptor"),
        (
            dict(sequence_descriptor=lengths(1, 2, 3)),
            ValueError,
            r"seqlens of the queries has shape \(3,\), needs \(4,",
        ),
        (dict(load_balanced=1), TypeError, "load_balanced is 1"),
        (dict(scale=-1.0), ValueError, "scale is -1.0; pass a positive one"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_errors(kwargs, error, text):
    kwargs = dict(kwargs)
    sizes = {name: kwargs.pop(name) for name in ("s", "t", "b", "g") if name in kwargs}
    q, k, v, _ = operands(**sizes)
    with jax.set_mesh(mesh_of(4, AUTO)), pytest.raises(error, match="^context_parallel_attention: .*" + text):
        context_parallel_attention(q, k, v, **{"axis": "cp", **kwargs})


def test_no_mesh():
    with pytest.raises(ValueError, match="axis is 'cp', but the mesh in force is none; enter jax.set_mesh"):
        context_parallel_attention(*operands()[:3], axis="cp")


def test_an_axis_that_cuts_something_else():
    mesh = mesh_of(4, EXPLICIT)
    q, k, v = (jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "cp"))) for x in operands(g=4)[:3])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="'cp' cuts the sequence, but q has its head axis on it"):
        context_parallel_attention(q, k, v, axis="cp")


def test_explain_speaks_for_a_cut_sequence():
    q, k, v, _ = operands()
    with jax.set_mesh(mesh_of(4, AUTO)):
        choice = explain_attention(q, k, v, axis="cp", strategy="ring", attn_mask_type="causal")
        assert choice.implementation == "context_parallel" and "'cp' cuts the sequence" in choice.refused["cudnn"]
        assert "'cp' cuts" in explain_attention(q, k, v, axis="cp", recipe=DelayedScaling(fp8_dpa=True)).refused["fp8"]
        with pytest.raises(ValueError, match="context_parallel_attention: bias is of shape"):
            explain_attention(q, k, v, axis="cp", bias=jnp.ones((S, S)))
    with jax.set_mesh(mesh_of(1, AUTO)):
        assert explain_attention(q, k, v, axis="cp").implementation == "xla"  # nothing is cut
