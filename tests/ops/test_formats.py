"""A format that no recipe has, declared in one line: every producer writes it, on one device, mapped and sharded."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from op_calls import call, close

from benchmarks.op_case import E4M3
from benchmarks.op_cases import CASES
from te_jax.core.op import ops
from te_jax.ops import producers
from te_jax.ops.formats import ROWS_32, ScaleFormat
from te_jax.ops.producers import PRODUCERS, declare

ROWS_64 = ScaleFormat("rows_64", "_block64", 64)
LAW = dict(power_2=False, epsilon=0.0)


@pytest.fixture(scope="module")
def cases():
    """{producer: a call of its op of ROWS_64}, which is MXFP8's with the law of floats. The ops are forgotten then."""
    known, of_mx = dict(producers._declared), {case.op: case for case in CASES}
    made = {name: declare(producer, ROWS_64) for name, producer in PRODUCERS.items()}

    def case_of(name):
        case = of_mx[PRODUCERS[name].op_of(ROWS_32).name]
        return replace(case, op=made[name].name, attrs=case.attrs | LAW | dict(dtype=E4M3), outputs=None)

    yield {name: case_of(name) for name in made}
    for op in made.values():
        del ops[op.name]
    for key in producers._declared.keys() - known.keys():
        del producers._declared[key]


def named(case, args):
    """The case as a function of its present operands, which it gives too: -> results by name."""
    fn, names = call(case, args), [o.name for o in case.declared.rule.outputs]
    return lambda *given: dict(zip(names, fn(*given), strict=True)), [a for a in args if a is not None]


def run_together(calls):
    """{name: (function, operands)} -> {name: results}, of one program."""
    every = jax.jit(lambda operands: {name: fn(*operands[name]) for name, (fn, _) in calls.items()})
    return jax.device_get(every({name: operands for name, (_, operands) in calls.items()}))


def attributes_of_value(case):
    """The attributes that a producer's `value` and `split` take."""
    attrs = {name: value for name, value in case.attrs.items() if name not in ("dtype", *LAW)}
    return attrs | (dict(split=attrs.pop("lead") + 1) if "lead" in attrs else {})


def test_both_layouts_hold_the_tensor(cases, rng):
    """Data times scales are what the producer computes, within half a step of E4M3, 2**-4 of a number down to 2**-15 of
    its block's largest, and a rounding to bf16, 2**-8. Scales lie with the blocks of the contracted axis in front."""
    args = {name: case.args(rng) for name, case in cases.items()}
    got = run_together({name: named(case, args[name]) for name, case in cases.items()})
    value = lambda name, attrs: lambda *operands: PRODUCERS[name].value(*operands, **attrs)[0]
    tensors = run_together({name: (value(name, attributes_of_value(case)), args[name]) for name, case in cases.items()})
    for name, case in cases.items():
        y = tensors[name].astype(np.float32)
        lead, split = PRODUCERS[name].split(y, **attributes_of_value(case))
        turned = y.transpose(*range(lead), *range(split, y.ndim), *range(lead, split))
        for which, want, contract in (("", y, y.ndim - split), ("_t", turned, split - lead)):
            data, inverse = got[name][f"data{which}"], got[name][f"scale_inv{which}"]
            rows, k = want.shape[lead : want.ndim - contract], want.shape[want.ndim - contract :]
            assert inverse.shape == (*want.shape[:lead], *k[:-1], -(-k[-1] // 64), *rows), name
            read = lambda *layout, contract=contract: ROWS_64.read(*layout, contract)
            for _ in range(lead):
                read = jax.vmap(read)
            atol = float(np.abs(want).max()) * 2.0**-17
            np.testing.assert_allclose(read(data, inverse), want, rtol=2.0**-4 + 2.0**-8, atol=atol, err_msg=name)


def test_mapped(cases, rng):
    """Over the first axis of every operand: the results of each example."""
    calls, each = {}, {}
    for name, case in cases.items():
        examples = [named(case, case.args(rng)) for _ in range(2)]
        fn, stacked = examples[0][0], [np.stack(a) for a in zip(*(operands for _, operands in examples))]
        calls[name] = jax.vmap(fn), stacked
        each |= {(name, i): (fn, operands) for i, (_, operands) in enumerate(examples)}
    got, want = run_together(calls), run_together({str(key): one for key, one in each.items()})
    for name, i in each:
        close({result: a[i] for result, a in got[name].items()}, want[str((name, i))], term=1)


def test_sharded(cases, rng, on_host):
    """Each axis on two devices, where its shards have whole blocks or not: the results of one device."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    single, calls = {}, {}
    for name, case in cases.items():
        args = case.args(rng)
        single[name] = fn, given = named(case, args)
        rule, op = case.declared.rule, case.declared
        rule = rule.select([o.name for o, a in zip(rule.inputs, args) if a is not None], [o.name for o in rule.outputs])
        ranks = rule.ranks(name, [a.ndim for a in given], {g: case.attrs[a] for g, a in op.rank_attrs.items()})
        leading = [rule.leading(o, ranks) for o in rule.inputs]
        for axis in dict.fromkeys(f for axes in leading for f in axes if case.sizes.get(f, 1) % 2 == 0):
            specs = [P(*("a" if f == axis else None for f in axes)) for axes in leading]
            calls[name, axis] = fn, [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs)]
    want = run_together(single)
    got = run_together({str(key): one for key, one in calls.items()})
    for name, axis in calls:
        close(got[str((name, axis))], want[name], term=1)
