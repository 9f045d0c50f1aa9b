"""The rule language: what one line says of the axes of a call. Nothing is traced."""

import pytest

from te_jax.core.rule import Operand, Rule

BIASED = "q: b... s (g r), k: b... t g, bias?: ~b... ~(g r) s t -> lse: b... (g r) s, dbias?: =bias"
Q, K = (2, 3, 5, 8), (2, 3, 7, 4)


def solved(rule, shapes, known=None, **chosen):
    """-> the rule of a call, its ranks and sizes."""
    rule = Rule.parse(rule)
    names = [[o.name for o in side] for side in (rule.inputs, rule.outputs)]
    rule = rule.select(chosen.get("inputs", names[0]), chosen.get("outputs", names[1]))
    ranks = rule.ranks("te_x", map(len, shapes), known or {})
    rule = rule.broadcast(shapes, ranks)
    return rule, ranks, rule.sizes("te_x", shapes, ranks)


def test_words():
    bias = Operand.parse("bias?: ~b... ~(g r) s t/128")
    assert bias == Operand("bias", ("b...", ("g", "r"), "s", "t/128"), True, frozenset({"b...", ("g", "r")}))
    assert str(bias) == "bias[~b... ~(g r) s t/128]"
    assert Operand.parse("amax:") == Operand("amax", ())
    assert str(Rule.parse(BIASED).outputs[1]) == "dbias[~b... ~(g r) s t]"


@pytest.mark.parametrize(
    "bias,axes",
    [
        ((2, 3, 8, 5, 7), ("b...0", "b...1", ("g", "r"), "s", "t")),
        ((1, 3, 8, 5, 7), ("b...0~", "b...1", ("g", "r"), "s", "t")),
        ((2, 1, 1, 5, 7), ("b...0", "b...1~", "g~", "s", "t")),
        ((1, 1, 1, 5, 7), ("b...0~", "b...1~", "g~", "s", "t")),
    ],
    ids=str,
)
def test_broadcast_axes(bias, axes):
    """An axis of 1 is a factor of its own, for an operand and for the result with its axes; other axes must agree."""
    rule, ranks, sizes = solved(BIASED, (Q, K, bias))
    given, (lse, dbias) = rule.inputs[2], rule.outputs
    assert rule.expand(given, ranks) == rule.expand(dbias, ranks) == axes
    assert rule.shape(dbias, ranks, sizes) == bias and rule.shape(lse, ranks, sizes) == (2, 3, 8, 5)
    assert {f: n for f, n in sizes.items() if "~" not in f} == {
        "b...0": 2, "b...1": 3, "s": 5, "t": 7, "g": 4, "r": 2,
    }  # fmt: skip
    assert all(n == 1 for f, n in sizes.items() if "~" in f)
    assert given.has("b...") == dbias.has("b...") == (bias[:2] == (2, 3)) and lse.has("b...")
    assert not given.has("m...")


@pytest.mark.parametrize(
    "bias,error",
    [
        ((2, 3, 8, 1, 7), r"axis `s` is 1 in bias\[~b\.\.\. ~\(g r\) s t\], but 5 in q"),
        ((2, 2, 8, 5, 7), r"axis `b\.\.\.1` is 2 in bias"),
        ((2, 3, 4, 5, 7), r"bias\[.*\] has an axis of 4, which g = 4, r = 2 does not divide"),
        ((8, 5, 7), r"bias\[.*\] has 3 axes, needs 5"),
    ],
    ids=str,
)
def test_what_does_not_broadcast(bias, error):
    with pytest.raises(ValueError, match=f"te_x: {error}"):
        solved(BIASED, (Q, K, bias))


def test_broadcast_axes_of_size_one():
    """Where the call has 1 as well nothing is lost: shapes agree, whatever the axis counts as."""
    rule, ranks, sizes = solved(BIASED, ((1, 5, 1), (1, 7, 1), (1, 1, 5, 7)))
    assert rule.shape(rule.outputs[1], ranks, sizes) == (1, 1, 5, 7)


def test_a_group_without_axes():
    rule, ranks, _ = solved(BIASED, (Q[2:], K[2:], (1, 5, 7)))
    assert ranks == {"b...": 0} and rule.inputs[2].has("b...") and rule.inputs[2].ones == {"g"}


def test_mapped_axes_come_before_broadcast_ones():
    rule = Rule.parse(BIASED).mapped([("q", "bias")])
    shapes = ((9, *Q), K, (9, 1, 1, 1, 5, 7))
    ranks = rule.ranks("te_x", map(len, shapes), {})
    rule = rule.broadcast(shapes, ranks)
    assert rule.leading(rule.outputs[1], ranks) == ("#0", "b...0~", "b...1~", "g~", "s", "t")


def test_shardy_text():
    """What is broadcast has a factor of its own."""
    rule, ranks, sizes = solved(BIASED, (Q, K, (1, 3, 1, 5, 7)))
    text, inner, fixed = rule.shardy(ranks, sizes, {"s", "t"})
    assert text == "f0 f1 f2 (f3 f4), f0 f1 f5 f3, f6 f1 f7 f2 f5 -> f0 f1 (f3 f4) f2, f6 f1 f7 f2 f5"
    assert inner == {"f4": 2} and fixed == ("f2", "f5")


def test_blocks_of_an_axis_that_stays_on_one_device_stay_there_too():
    rule, ranks, sizes = solved("x: r h -> data: r h, scale_inv: h r/128", ((512, 24),), inputs=("x",))
    text, _, fixed = rule.shardy(ranks, sizes, {"r"})
    assert text == "(f0 f1) f2 -> (f0 f1) f2, f2 f0" and fixed == ("f0", "f1")


def test_inner_factor_that_no_operand_tells():
    rule, ranks, sizes = solved("q?: s (g r), qkv?: s c g -> out: s (g r)", ((5, 3, 8),), inputs=("qkv",))
    assert sizes == {"s": 5, "c": 3, "g": 8, "r": 1} and rule.shape(rule.outputs[0], ranks, sizes) == (5, 8)


def test_sizes_clash():
    rule = Rule.parse("lhs: m... k, rhs: n k -> out: m... n")
    with pytest.raises(ValueError, match=r"te_x: axis `k` is 1000 in rhs\[n k\], but 1024 in lhs\[m\.\.\. k\]"):
        rule.sizes("te_x", [(8, 4, 1024), (7, 1000)], {"m...": 2})


def test_sizes_that_attributes_say():
    """An axis that no operand has, and one that an operand has otherwise."""
    rule = Rule.parse("x: m... e -> y: m... k")
    assert rule.sizes("te_op", [(3, 8)], {"m...": 1}, known={"k": 2}) == {"k": 2, "m...0": 3, "e": 8}
    with pytest.raises(ValueError, match=r"te_op: axis `e` is 8 in x\[m\.\.\. e\], but 4 in the attributes; make both"):
        rule.sizes("te_op", [(3, 8)], {"m...": 1}, known={"e": 4})


def test_rank():
    rule = Rule.parse("lhs: m k, rhs: n k -> out: m n")
    with pytest.raises(ValueError, match=r"te_x: lhs\[m k\] has 3 axes, needs 2"):
        rule.ranks("te_x", [3, 2], {})


def test_open_group():
    rule = Rule.parse("x: m... n... -> y: n... m...")
    with pytest.raises(ValueError, match="leaves the rank of its axis groups open"):
        rule.ranks("te_x", [3], {})
    assert rule.ranks("te_x", [3], {"m...": 1}) == {"m...": 1, "n...": 2}


def test_split_axis():
    rule = Rule.parse("q: s (g r), k: t g -> o: s (g r)")
    assert rule.sizes("te_x", [(3, 8), (5, 2)], {}) == {"s": 3, "t": 5, "g": 2, "r": 4}
    with pytest.raises(ValueError, match=r"q\[s \(g r\)\] has an axis of 8, which g = 3 does not divide"):
        rule.sizes("te_x", [(3, 8), (5, 3)], {})
