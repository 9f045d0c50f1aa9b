"""Tests that follow from each op's rule: every factor on every mesh axis, every vmap pattern, every kind of mesh."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from op_calls import call, close, forget_traces

from benchmarks.op_case import E4M3, Case
from benchmarks.op_cases import CASES
from te_jax.core.op import Op, ops
from te_jax.ops.attention import op as attention_op
from te_jax.ops.attention import reference as attention_reference
from te_jax.ops.gemm import gemm, gemm_sum

AXES = ("a", "b")  # mesh axes of 4 and 2 devices
KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# What a placement may cost, by `rank`.
ALLOWED = (set(), {"all-reduce"}, set(COLLECTIVES))
all_cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def quickly_drawn():
    """Dropout from one multiplication: an op's rule does not depend on the generator, and Threefry takes XLA a second
    of compilation for each of some hundred programs. Of the whole module: what was traced is forgotten twice."""

    def draw_kept(row, rate, s, t):
        mixed = (row[0] ^ jnp.arange(s * t, dtype=jnp.uint32)) * jnp.uint32(2654435761)
        return (mixed >> 8).reshape(s, t) >= jnp.uint32(rate * 2**24)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_reference, "draw_kept", draw_kept)
        forget_traces()
        yield
    forget_traces()


def solve(case, args):
    op = case.declared
    names = [o.name for o, a in zip(op.rule.inputs, args) if a is not None]
    rule = op.rule.select(names, case.outputs or [o.name for o in op.rule.outputs])
    given = [a for a in args if a is not None]
    known = {g: case.attrs[a] for g, a in op.rank_attrs.items()}
    ranks = rule.ranks(op.name, [a.ndim for a in given], known)
    return rule.broadcast([a.shape for a in given], ranks), ranks, given


def factors(case, args, devices):
    """{factor that so many devices can split: its rank}: 0 where all results have it, 1 where some are sums over it, 2
    where the op keeps it on one device. In this order."""
    rule, ranks, _ = solve(case, args)
    fixed, outs = rule.matches(case.declared.replicated, ranks), [rule.leading(o, ranks) for o in rule.outputs]
    rank = lambda f: 2 if f in fixed else int(any(f not in out for out in outs))
    found = dict.fromkeys(f for o in rule.operands for f in rule.leading(o, ranks))
    # not q, k, v side by side, nor what is broadcast
    ranks = {f: rank(f) for f in found if case.sizes.get(f, 1) % devices == 0}
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def on_both(ranks):
    """What lies on a first and on a second mesh axis: nothing; each factor on both, next to the one before and the one
    behind it, and in a placement that costs no more than the factor itself does."""
    names = list(ranks)
    pairs = list(zip(names, names[-1:] + names[:-1])) if len(names) != 1 else [(*names, None), (None, *names)]
    cost = lambda pair: max(ranks[f] for f in pair if f)
    single = [(f, None) for f in names if ranks[f] < min(cost(pair) for pair in pairs if f in pair)]
    return [(None, None), *pairs, *single]


def on_one(ranks):
    """Each factor on one of two mesh axes, next to another one of its rank. `place` looks at each mesh axis by itself,
    and asks of its name only which is first: with `on_both` on an Auto mesh, no other one is another path."""
    of_rank = [[f for f in ranks if ranks[f] == rank] for rank in range(3)]
    return [pair for names in of_rank for pair in itertools.zip_longest(names[::2], names[1::2])]


def specs_of(case, args, axis_of):
    """The specs of the operands where the factors lie on these mesh axes."""
    rule, ranks, _ = solve(case, args)
    return [P(*(axis_of.get(f) for f in rule.leading(o, ranks))) for o in rule.inputs]


def two_axes(case, types):
    """A mesh of 4 and 2 devices; of 2 and 2 for a small case, which has two blocks."""
    return jax.make_mesh((2, 2) if case.is_small else (4, 2), AXES, axis_types=types)


def three_axes(types):
    """A mesh with two axes that split factors, and a third of another type, which splits nothing."""
    return jax.make_mesh((2, 2, 2), (*AXES, "rest"), axis_types=types)


def put(mesh, arrays, specs):
    """On the mesh; numpy's, for jax compiles a program to cut each array of its own."""
    return [jax.device_put(np.asarray(a), NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


def call_without_tail(case, args):
    """As `call`, with zeros in what a GPU leaves undefined: rows behind the last group. On a CPU they are zeros."""
    fn, (rule, ranks, _) = call(case, args), solve(case, args)
    names = [o.name for o in rule.inputs]
    if "counts" not in names or jax.default_backend() == "cpu":
        return fn
    axes = [rule.leading(o, ranks) for o in rule.outputs]

    def clear(out, names_of_axes, is_row):
        for at, (name, size) in enumerate(zip(names_of_axes, out.shape)):
            if name == "r" and size == is_row.size:  # not blocks of rows
                return jnp.where(is_row.reshape([size if i == at else 1 for i in range(out.ndim)]), out, 0)
        return out

    def masked(*given):
        is_row = jnp.arange(case.sizes["r"]) < given[names.index("offsets")][-1]
        return [clear(out, of, is_row).astype(out.dtype) for out, of in zip(fn(*given), axes, strict=True)]

    return jax.jit(masked)


def joined(variants):
    """{name: (function, operands)} -> {name: results}, of one program: many small ones take far longer to compile."""
    return jax.jit(joined_fn(variants))({name: operands for name, (_, operands) in variants.items()})


def joined_fn(variants):
    """{name: (function, ...)} -> the function {name: operands} -> {name: results}."""
    fns = {name: fn for name, (fn, _) in variants.items()}
    return lambda operands: {name: fn(*operands[name]) for name, fn in fns.items()}


@all_cases
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_sharded(case: Case, kind, rng, on_host):
    """The numbers of one device; a factor costs an all-reduce where a result lacks it, and else nothing: no gather."""
    case = case.small()
    args = case.args(rng)
    want, (_, _, given), fn = case(*args), solve(case, args), call(case, args)
    mixed = (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)
    mesh = three_axes(mixed) if kind == "mixed" else two_axes(case, KINDS[kind])
    ranks, of_cost = factors(case, args, mesh.shape["a"]), [{}, {}, {}]
    ways = {"auto": on_both(ranks), "explicit": [(None, None), *on_one(ranks)], "mixed": on_one(ranks)}
    for way in ways[kind]:
        axis_of = {f: axis for f, axis in zip(way, AXES) if f}
        placed = put(mesh, given, specs_of(case, args, axis_of))
        of_cost[max(map(ranks.get, axis_of), default=0)][str(axis_of)] = fn, placed
    with jax.set_mesh(mesh):
        for allowed, variants in zip(ALLOWED, of_cost):
            if variants:
                run, text = compiled(joined_fn(variants), {name: placed for name, (_, placed) in variants.items()})
                assert set(counted(text)) <= allowed, {
                    name: collectives(fn, *placed) for name, (_, placed) in variants.items()
                }
                for name, got in run().items():
                    close(got, want, name)


@all_cases
@pytest.mark.parametrize("manual", ["all", "part"])
def test_shard_map(case: Case, manual, rng, on_host):
    """Manual axes, check_vma=True: the op sees one shard; the caller combines results that lack a sharded axis."""
    case = case.small()
    args = case.args(rng)
    want, (rule, ranks, given), fn = case(*args), solve(case, args), call(case, args)
    auto = (AxisType.Auto,) * 3
    mesh = two_axes(case, auto[:2]) if manual == "all" else three_axes(auto)
    op = case.declared
    once = any(o.name in op.once for o in rule.inputs)
    split = {f: r for f, r in factors(case, args, mesh.shape["a"]).items() if r < 2 and not (once and f[0] == "k")}
    collective, variants = {"sum": lax.psum, "max": lax.pmax}, {}
    for way in [(None, None), *on_one(split)] if manual == "all" else on_one(split):
        axis_of = {f: axis for f, axis in zip(way, AXES) if f}

        def shard(*local, axis_of=axis_of):
            outs = []
            for o, out in zip(rule.outputs, fn(*local)):
                dropped = tuple(n for f, n in axis_of.items() if f not in rule.leading(o, ranks))
                dropped = () if o.name in op.aside else dropped  # of its operand's type, which no axis splits
                outs.append(collective[op.combine[o.name]](out, dropped) if dropped else out)
            return tuple(outs)

        in_specs = tuple(specs_of(case, args, axis_of))
        out_specs = tuple(P(*(axis_of.get(f) for f in rule.leading(o, ranks))) for o in rule.outputs)
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES))
        variants[str(axis_of)] = mapped, list(map(np.asarray, given))
    for placement, got in joined(variants).items():
        close(got, want, placement)


@functools.cache
def mapped_axes(count):
    """Over which axis each of `count` operands is mapped, if any: any two operands are mapped or not in each
    combination, and each is mapped over its first and over its last axis. `jax.custom_batching.custom_vmap` moves
    mapped axes to the front, so an op sees only which operands have one."""
    if count == 1:
        return [(0,), (-1,)]
    ways = list(itertools.product([True, False], repeat=count))[:-1]
    beside = {way: set(itertools.combinations(enumerate(way), 2)) for way in ways}
    chosen, left = [], set().union(*beside.values())
    assert len(left) == 4 * math.comb(count, 2) - (count == 2)  # no way maps neither of two
    while left:
        chosen.append(max(beside, key=lambda way: len(beside[way] & left)))
        left -= beside[chosen[-1]]
    axes = [itertools.cycle([0, -1] if i % 2 else [-1, 0]) for i in range(count)]
    return [tuple(next(axis) if m else None for m, axis in zip(way, axes)) for way in chosen]


@all_cases
def test_vmap(case: Case, rng):
    """Each operand mapped over its first axis, its last axis, or not at all: equal to a loop over examples."""
    case = case.small()
    args = case.args(rng)
    fn = call_without_tail(case, args)
    examples = [[np.asarray(a) for a in case.args(rng) if a is not None] for _ in range(3)]
    patterns = mapped_axes(len(examples[0]))
    stack = lambda axes: [xs[0] if ax is None else np.stack(xs, ax) for ax, xs in zip(axes, zip(*examples))]
    got = joined({str(axes): (jax.vmap(fn, axes), stack(axes)) for axes in patterns})
    one = functools.cache(lambda *of: fn(*(examples[i][j] for j, i in enumerate(of))))
    for axes in patterns:
        for i in range(len(examples)):
            want = one(*(0 if ax is None else i for ax in axes))
            close([g[i] for g in map(np.asarray, got[str(axes)])], want, f"{axes}, example {i}")


@all_cases
def test_eager_jit_scan_remat(case: Case, rng):
    case = case.small()
    args = case.args(rng)
    _, _, given = solve(case, args)
    fn = call_without_tail(case, args)
    want = fn(*given)

    def steps(*given):
        step = lambda c, _: (c, jax.checkpoint(fn)(*given))
        return [results[1] for results in lax.scan(step, 0, None, length=2)[1]]

    variants = {"jit": fn, "scan, remat": steps}
    for name, got in joined({name: (variant, given) for name, variant in variants.items()}).items():
        close(got, want, name)
    with jax.disable_jit():
        close(fn(*given), want, "disable_jit")
        stacked = jax.device_put([np.asarray(a)[None] for a in given])
        close([np.asarray(each)[0] for each in jax.vmap(fn)(*stacked)], want, "vmap, disable_jit")


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(ops)


@all_cases
def test_vmap_joins_a_group(case: Case, rng):
    """A mapped axis that the kernel can take as one more of its own axes does not become a loop."""
    args = case.args(rng)
    rule, _, given = solve(case, args)
    results = [o for o in rule.outputs if o.name not in case.declared.aside]
    free = [g for g in rule.groups if g not in case.declared.replicated and all(o.has(g) for o in results)]
    mapped = [o.has(free[0]) for o in rule.inputs] if free else [True] * len(given)
    axes = [0 if m else None for m in mapped]
    stacked = [np.stack([a, a]) if m else a for a, m in zip(given, mapped)]
    jaxpr = jax.make_jaxpr(jax.vmap(call(case, args), axes))(*stacked)
    assert ("scan" in str(jaxpr)) != bool(free)


@all_cases
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_over_a_sharded_axis(case: Case, kind, rng, on_host):
    """All operands mapped, or only the first, next to another axis on the other mesh axis: the numbers of one device,
    examples stay where they are, and nothing is gathered."""
    case, mesh = case.small(), jax.make_mesh((4, 2), AXES, axis_types=KINDS[kind])
    args = case.args(rng)
    fn, (rule, ranks, given) = call(case, args), solve(case, args)
    stacked = [np.stack(of) for of in zip(*([a for a in case.args(rng) if a is not None] for _ in range(8)))]
    free = [f for f in rule.leading(rule.inputs[0], ranks) if f not in rule.matches(case.declared.replicated, ranks)]
    split = {f: "b" for f in free[:1]}
    inner, variants = [tuple(split.get(f) for f in rule.leading(o, ranks)) for o in rule.inputs], {}
    for mapped in {(True,) * len(given), (True,) + (False,) * (len(given) - 1)}:
        operands = [of if m else np.asarray(a) for of, a, m in zip(stacked, given, mapped)]
        specs = [P("a", *spec) if m else P(*spec) for spec, m in zip(inner, mapped)]
        variants[mapped] = jax.vmap(fn, [0 if m else None for m in mapped]), put(mesh, operands, specs)
    with jax.set_mesh(mesh):
        run, text = compiled(joined_fn(variants), {mapped: operands for mapped, (_, operands) in variants.items()})
        found = set(counted(text))
        assert found <= {"all-reduce"} if split else not found
        outs = run()
    for mapped, got in outs.items():
        assert kind == "auto" or all(jax.typeof(each).sharding.spec[0] == "a" for each in got)
        for i in range(8):
            example = [of[i] if m else a for of, a, m in zip(stacked, given, mapped)]
            close([each[i] for each in map(np.asarray, got)], fn(*example), f"{mapped}, example {i}")


def test_lost_axis_is_refused():
    with pytest.raises(ValueError, match=r"te_bad: amax\[\] drops \['\.\.\.', 'h'\]"):
        Op("te_bad", "x: ... h -> y: ... h, amax:", dtypes=None, reference=None)


def test_missing_operand_is_refused():
    with pytest.raises(ValueError, match=r"te_gemm: operand rhs\[n\.\.\. k\.\.\.\] is None"):
        ops["te_gemm"](jnp.ones((2, 2)), None, None, None, None, None, contract=1)


def compiled(fn, *args):
    """-> the call of `fn` with these operands, its HLO."""
    program = jax.jit(fn).lower(*args).compile()
    return lambda: program(*args), program.as_text()


def counted(text):
    return {c: n for c in COLLECTIVES if (n := text.count(f" {c}(") + text.count(f" {c}-start("))}


def collectives(fn, *args):
    return counted(compiled(fn, *args)[1])


@pytest.mark.parametrize(
    "lhs,rhs,want",
    [
        (P("a"), P(), {}),  # data parallel
        (P("a"), P("b"), {}),  # tensor parallel, columns
        (P("a", None, "b"), P(None, "b"), {"all-reduce": 1}),  # tensor parallel, rows
        (P("a"), P(None, "a"), {"all-gather": 1}),  # FSDP: the weight is gathered, not the batch
    ],
    ids=["dp", "tp-column", "tp-row", "fsdp"],
)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gemm_collectives(lhs, rhs, want, kind, rng):
    """Each placement costs the collectives that it must, and no other."""
    mesh = jax.make_mesh((4, 2), AXES, axis_types=KINDS[kind])
    one = jnp.float32(1.0)
    with jax.set_mesh(mesh):
        operands = [rng.standard_normal(shape).astype(np.float32).astype(E4M3) for shape in ((8, 16, 64), (32, 64))]
        attrs = dict(contract=1, out_dtype=jnp.dtype(jnp.float32), fast_accum=False, tune=False)
        fn = lambda x, w: ops["te_gemm"](x, w, one, one, None, None, **attrs)[0]
        assert collectives(fn, *put(mesh, operands, (lhs, rhs))) == want


def test_a_sum_of_many_products(rng):
    """More terms than one op takes, of sums of different sizes and ranks."""
    terms = [[on_device(rng.standard_normal((m, *k)), jnp.float32) for m in (4, 6)] for k in [(8,), (2, 5)] * 3]
    got = gemm_sum([(*term, None, None) for term in terms], lead=1, out_dtype=jnp.float32)
    close(got, sum(gemm(*term, contract=term[0].ndim - 1) for term in terms))


@pytest.mark.parametrize("second", [P(None, "b"), P()], ids=["split", "whole"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float32], ids=["fp8", "f32"])
def test_gemm_sum_collectives(dtype, kind, second, rng, on_host):
    """One mesh axis splits the sums of both terms, or of one: products are added before they cross devices."""
    mesh = jax.make_mesh((4, 2), AXES, axis_types=KINDS[kind])
    scale = jnp.float32(0.5) if dtype != jnp.float32 else None
    of = lambda *shape: on_device(rng.standard_normal(shape), jnp.float32).astype(dtype)
    arrays = of(8, 32), of(16, 32), of(8, 64), of(16, 64), jnp.ones((8, 16))
    specs = P("a", "b"), P(None, "b"), P("a", *second[1:]), second, P("a")

    def fn(lhs0, rhs0, lhs1, rhs1, c):
        terms = [(lhs0, rhs0, scale, scale), (lhs1, rhs1, scale, scale)]
        return gemm_sum(terms, c, lead=1, out_dtype=jnp.float32, tune=False)

    with jax.set_mesh(mesh):
        placed = put(mesh, arrays, specs)
        assert collectives(fn, *placed) == {"all-reduce": 1}
        got = jax.jit(fn)(*placed)
    close(got, fn(*arrays))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_quantize_collectives(kind, rng, on_host):
    """A sharded tensor is quantized where it lies, to the same bits; one scalar crosses devices."""
    mesh, x = jax.make_mesh((4, 2), AXES, axis_types=KINDS[kind]), jnp.asarray(rng.normal(size=(8, 16, 64)) * 200)
    fn = lambda x: ops["te_quantize"](x, jnp.float32(1), outputs=("data", "data_t", "amax"), split=2,
                                      dtype=jnp.dtype(jnp.float8_e4m3fn))  # fmt: skip
    want = fn(x)
    with jax.set_mesh(mesh):
        placed = put(mesh, [x], [P("a", None, "b")])
        assert collectives(fn, *placed) == {"all-reduce": 1}
        for a, b in zip(jax.jit(fn)(*placed), want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_nan_in_one_shard_reaches_the_amax(kind):
    """A collective max drops a NaN; an amax must not, or a spoiled step would be recorded."""
    mesh = jax.make_mesh((4, 2), AXES, axis_types=KINDS[kind])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 16)).at[3, 5].set(jnp.nan), NamedSharding(mesh, P(("a", "b"))))
        fn = lambda x: ops["te_quantize"](x, jnp.float32(1), outputs=("amax",), split=1, dtype=jnp.dtype("float8_e5m2"))
        assert jnp.isnan(jax.jit(fn)(x)[0])


def test_outputs_are_checked():
    args = (jnp.ones((4, 4)), jnp.float32(1))
    for outputs in (("dta", "amax"), ("amax", "data")):
        with pytest.raises(ValueError, match=r"te_quantize: outputs is .*choose from data\[m\.\.\. n\.\.\.\]"):
            ops["te_quantize"](*args, outputs=outputs, split=1, dtype=jnp.dtype("float8_e5m2"))
    with pytest.raises(ValueError, match=r"te_norm_block_fwd: outputs is \('data',\).*; rstd may not be left out"):
        ops["te_norm_block_fwd"](jnp.ones((2, 4)), jnp.ones(4), None, outputs=("data",), eps=0.0, rms=True)


@pytest.mark.parametrize("rms, mean, rstd", [(False, 1, 0), (False, 0, 1), (True, 1, 1), (True, 1, 0)])
def test_known_statistics_are_complete(rms, mean, rstd):
    known = [jnp.ones(2) if given else None for given in (mean, rstd)]
    attrs = dict(outputs=("y",), eps=1e-6, rms=rms, zero_centered=False, dtype=jnp.dtype(jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="known_mean and known_rstd go together"):
        ops["te_norm_fwd"](jnp.ones((2, 4)), jnp.ones(4), None, *known, None, **attrs)


def test_attributes_of_another_type_lower_anew():
    """1, 1.0 and True are equal in Python, and three different attributes of a custom call."""
    attrs = dict(outputs=("y", "rstd"), rms=True, zero_centered=False, dtype=jnp.dtype("float8_e5m2"))

    def text(eps):
        fn = jax.jit(lambda x: ops["te_norm_fwd"](x, jnp.ones(8), *[None] * 4, eps=eps, **attrs))
        return fn.trace(jnp.ones((2, 8))).lower(lowering_platforms=("cuda",)).as_text()

    assert "eps = 1 : i64" in text(1) and "eps = 1.000000e+00 : f64" in text(1.0)


@pytest.mark.parametrize("ones", [(), (0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
def test_bias_of_a_part_of_the_batch(ones, rng):
    """The CUDA lowering, with plain JAX instead of the kernel, which has one batch axis: of 1 or all rows."""
    draw = lambda *shape: on_device(rng.standard_normal(shape), jnp.bfloat16)
    q, k, v, dout = draw(2, 3, 8, 4, 16), draw(2, 3, 8, 2, 16), draw(2, 3, 8, 2, 8), draw(2, 3, 8, 4, 8)
    bias = draw(*(1 if axis in ones else size for axis, size in enumerate((2, 3, 4))), 8, 8)
    attrs = dict(left=-1, right=0, bottom_right=False, seq_major=False, interleaved=False, scale=0.3, dropout_rate=0.0)
    operands = q, k, v, None, None, bias, None
    seen = []

    def kernel(plain, at):
        def call(*args, outputs=("dq", "dk", "dv", None, None, "dbias"), **attrs):
            seen.append(args[at].shape)
            return [r for r, name in zip(plain(*args, **attrs), outputs) if name]

        return call

    forward = functools.partial(kernel(attention_reference.forward, 5), outputs=("out", "lse"))
    forwards = functools.partial(attention_op._call_forward, forward), attention_reference.forward
    (out, lse), wanted = jax.jit(lambda *a: [run(*a, None, **attrs)[:2] for run in forwards])(*operands)
    close((out, lse), wanted)
    backward = kernel(attention_reference.backward, 6)
    backwards = functools.partial(attention_op._backward, backward), attention_reference.backward
    after = out, lse, None
    both = jax.jit(lambda *a: [run(*a, **attrs, deterministic=True) for run in backwards])
    got, want = both(dout, *operands, *after)
    close(got[:3], want[:3])
    of_bias, wanted = (np.asarray(grads[-1], np.float32) for grads in (got, want))
    assert of_bias.shape == bias.shape  # rounded before up to 3 rows are added up
    assert np.abs(of_bias - wanted).max() <= (0 if len({0, 1} & set(ones)) != 1 else 4 * 2**-8) * np.abs(wanted).max()
    rows = 1 if {0, 1} <= set(ones) else 6
    assert seen == [(rows, 1 if 2 in ones else 4, 8, 8)] * 2


def test_a_result_that_follows_from_an_absent_operand():
    quantize = ops["te_quantize"]
    with pytest.raises(ValueError, match="outputs has scale_inv, but operand scale is None"):
        quantize(jnp.ones((4, 8)), None, outputs=("amax", "scale_inv"), split=1, dtype=jnp.dtype(jnp.float8_e4m3fn))
