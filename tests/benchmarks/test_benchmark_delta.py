"""The benchmark of the gated delta rule runs, at tiny sizes, and counts what it says it counts. Speed is not tested
here."""

import json

import jax
import pytest

from benchmarks import ceilings, delta, torch_peers
from benchmarks.__main__ import main

CEILINGS = {name: dict(sustained=rate, brief=rate) for name, rate in (("copy", 1e-3), ("bf16", 1e-2), ("fp8", 1e-2))}


def test_bytes_and_flops():
    """Bytes are those of operands and results; flops by hand, of 16 heads of keys and 32 of values on 8192 tokens."""
    rule, *_, by_channel = delta.rules(False)
    of = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays)
    for each in (rule, by_channel):
        operands = jax.eval_shape(each.operands)
        y = jax.eval_shape(delta.rule, *operands)
        assert each.bytes(backward=False) == of((*operands, y))
        assert each.bytes(backward=True) == of((*operands, *operands, y, y))
    assert rule.flops(False) == 2 * 8192 * (16 * 64 * 128 + 32 * (64 * 128 + 3 * 128 * 128))


def test_next_to_fla(tmp_path, monkeypatch, capsys):
    """The peer's time and memory are of its own process."""
    asked = []
    monkeypatch.setattr(delta, "on_gpu", lambda: True)
    monkeypatch.setattr(torch_peers, "available", lambda *packages: packages == ("fla",))
    monkeypatch.setattr(torch_peers, "measure_delta", lambda calls, graph, **of: asked.append(of) or 4.0 - 2.0 * graph)
    monkeypatch.setattr(torch_peers, "peak_of_delta", lambda **of: 7 * of["shape"][0])
    monkeypatch.setattr(ceilings, "measure", lambda tiny, metered: CEILINGS)
    out = tmp_path / "delta.json"
    assert main(["delta", "--tiny", "--quick", "--only", r"b1 s96 .*fwd\+bwd", "--out", str(out)]) == 0
    ours, eager, graph = json.loads(out.read_text())["rows"]
    assert ours["beside"] == {eager["impl"]: ours["ms"] / 4, graph["impl"]: ours["ms"] / 2}
    assert eager["peak_bytes"] == 7 and "peak_bytes" not in graph and ours["peak_bytes"] > 0
    assert asked[0] == dict(package="fla", shape=(1, 96, 1, 2, 16), backward=True, by_channel=False, run=0)
    assert graph["bound_ms"] == pytest.approx(max(graph["flops"] / 1e-2, graph["bytes"] / 1e-3) / 1e9)
    assert "x fla graph" in capsys.readouterr().out


def test_peers_of_each_pass():
    """fla has all rules; FlashQLA has those with a gate for each head, FlashKDA the forward pass of the others."""
    rules = [delta.Rule(1, 8, 2, 2), delta.Rule(1, 8, 2, 2, by_channel=True), delta.Rule(1, 8, 1, 2, by_channel=True)]
    rules.append(delta.Rule(1, 8, 2, 2, 64, by_channel=True))
    beside = [case.beside for rule in rules for case in rule.cases(delta.PEERS) if case.impl == delta.TE]
    fla = "fla eager", "fla graph"
    assert beside == [(*fla, "flash_qla graph")] * 2 + [(*fla, "flash_kda graph")] + [fla] * 5
