"""The benchmark of Mamba-2 runs, at tiny sizes, and counts what it says it counts. Speed is not tested here."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ceilings, ssm, torch_peers
from benchmarks.__main__ import main

CEILINGS = {name: dict(sustained=rate, brief=rate) for name, rate in (("copy", 1e-3), ("bf16", 1e-2), ("fp8", 1e-2))}


@pytest.mark.parametrize("scan", ssm.scans(False), ids=lambda scan: scan.name)
def test_bytes_of_a_scan(scan):
    """Those of its operands and results."""
    operands = jax.eval_shape(scan.operands)
    y = jax.eval_shape(ssm.scan, *operands)
    of = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays)
    assert scan.bytes(backward=False) == of((*operands, y))
    assert scan.bytes(backward=True) == of((*operands, *operands, y, y))


def test_flops():
    """By hand, of 128 heads on 8192 tokens; the block's weights are those of its kernels."""
    scan, *_ = ssm.scans(False)
    # A token and head: half of 64 tokens of 64 channels, and twice a state; a token: half of 64 tokens of 128 numbers.
    assert scan.flops(False) == 2 * 8192 * (128 * (32 * 64 + 2 * 64 * 128) + 32 * 128)
    block = ssm.Block(64, 128, 2)
    variables = jax.eval_shape(block.te().init, jax.random.key(0), jax.ShapeDtypeStruct(block.shape, jnp.bfloat16))
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    kernels = [leaf for path, leaf in leaves if "'kernel'" in jax.tree_util.keystr(path)]
    assert block.weights == sum(np.prod(kernel.shape) for kernel in kernels)


def test_next_to_mamba_ssm(tmp_path, monkeypatch, capsys):
    """The peer's time and memory are of its own process, and a scan's bound is of the larger of products and bytes."""
    asked = []
    monkeypatch.setattr(ssm, "on_gpu", lambda: True)
    monkeypatch.setattr(torch_peers, "available", lambda *packages: packages == ("mamba_ssm",))
    monkeypatch.setattr(torch_peers, "measure_scan", lambda calls, graph, **of: asked.append(of) or 4.0 - 2.0 * graph)
    monkeypatch.setattr(torch_peers, "peak_of_scan", lambda **of: 7 * of["shape"][0])
    monkeypatch.setattr(ceilings, "measure", lambda tiny, metered: CEILINGS)
    out = tmp_path / "ssm.json"
    assert main(["ssm", "--tiny", "--quick", "--only", r"b1 s96 .*fwd\+bwd", "--out", str(out)]) == 0
    ours, eager, graph = json.loads(out.read_text())["rows"]
    assert ours["beside"] == {eager["impl"]: ours["ms"] / 4, graph["impl"]: ours["ms"] / 2}
    assert eager["peak_bytes"] == 7 and "peak_bytes" not in graph and ours["peak_bytes"] > 0
    assert asked[0] == dict(shape=(1, 96, 2, 1, 16, 16), backward=True)
    assert graph["bound_ms"] == pytest.approx(max(graph["flops"] / 1e-2, graph["bytes"] / 1e-3) / 1e9)
    assert "x mamba_ssm graph" in capsys.readouterr().out
