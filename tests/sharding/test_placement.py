"""Placements: what a mesh splits of a call, from the shardings that are known. Nothing is traced."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.core.placement import place, spec_of_sharding
from te_jax.core.rule import Rule

MESH = {"a": 4, "b": 2}
GEMM = SimpleNamespace(replicated=frozenset(), combine={"out": "sum"}, once=frozenset({"c"}), apart=frozenset())


def placed(in_specs, out_specs=None, rule="lhs: m k, rhs: n k -> out: m n", shapes=((8, 16), (32, 16)), mapped=()):
    rule = Rule.parse(rule).mapped(mapped)
    ranks = rule.ranks("te_x", map(len, shapes), {})
    return place(GEMM, rule, ranks, rule.sizes("te_x", shapes, ranks), MESH, in_specs, out_specs)


def test_the_worked_example():
    known = [P("a", "b"), P(None, "b")]
    whole = placed(known)
    assert (whole.in_specs, whole.out_specs) == ([P(("a",), ("b",)), P(None, ("b",))], [P(("a",), None)])
    assert whole.dropped(("m", "n")) == ("b",)
    left = placed(known, [P("a", "b")])
    assert (left.in_specs, left.out_specs) == (whole.in_specs, [P(("a",), ("b",))])
    assert left.scattered == [{"n": ("b",)}]


@pytest.mark.parametrize("size", [6, 3, 1])
def test_shards_that_do_not_divide_an_axis(size):
    """It stays whole, and the mesh axis is free for others."""
    got = placed([P("a"), P("a")], shapes=((size, 16), (32, 16)))
    assert got.axes == {"n": ("a",)}


def test_mapped_axes():
    """Each has a factor of its own, which all results have; where only a residual is mapped, it enters the sum once."""
    got = placed([P("a", "b"), P()], shapes=((8, 4, 16), (32, 16)), mapped=[("lhs",)])
    assert got.out_specs == [P(("a",), ("b",), None)]
    rule, shapes = "lhs: m k, rhs: n k, c?: m n -> out: m n", ((8, 16), (32, 16), (4, 8, 32))
    known = [P(None, "b"), P(None, "b"), P("a")]
    assert placed(known, [P(None, None, "b")], rule, shapes, [("c",)]).later == frozenset()
    both = [("lhs", "c")], ((4, 8, 16), *shapes[1:])
    assert placed([P("a", None, "b"), *known[1:]], [P("a", None, "b")], rule, both[1], both[0]).later == {2}


@pytest.mark.parametrize("spec", [P("a"), P(None, ("a", "b")), P(("b", "a"), None, None), P("b", None, "a")], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 8), (3, 15, 1)], ids=str)
def test_shardings_of_any_size(spec, shape):
    """The compiler gives axes that the devices do not divide, too."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    info = SimpleNamespace(shape=shape, sharding=NamedSharding(mesh, spec))
    got = spec_of_sharding(mesh, info)
    assert got == P(*(*spec, None, None, None)[:3])
