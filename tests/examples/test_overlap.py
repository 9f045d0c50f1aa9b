"""`python -m benchmarks overlap` at tiny sizes, and how it counts."""

import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import QUICK

from benchmarks import kernels, overlap
from benchmarks.__main__ import main


def test_a_candidate_runs_in_its_own_process(tmp_path, capsys, monkeypatch):
    """Unrolled layers, on all devices; what fails is a row with its error."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {QUICK}")
    monkeypatch.setattr(overlap, "CANDIDATES", dict(overlap.CANDIDATES))
    overlap.CANDIDATES["unrolled, no flags"] = overlap.Candidate("--xla_gpu_no_such_flag=true", unrolled=True)
    out = tmp_path / "overlap.json"
    args = "overlap --tiny --calls 1 --repeat 1 --only".split() + ["unrolled, (rec|no flags)", "--out", str(out)]
    assert main(args) == 1
    result = json.loads(out.read_text())
    row, failed = (result["rows"][f"unrolled, {name}"] for name in ("recommended", "no flags"))
    assert "fsdp=2" in result["model"] and row["ms"] > 0 and row["peak_bytes"] > 0
    assert row["flags"] == overlap.recommended_xla_flags() and "xla_gpu_no_such_flag" in failed["error"]
    said = capsys.readouterr().out
    assert "unrolled, recommended" in said and "unrolled, no flags: " in said


def test_all_flags_are_known_to_this_jaxlib():
    """XLA aborts at one that it does not know."""
    flags = " ".join({flag for candidate in overlap.CANDIDATES.values() for flag in candidate.flags.split()})
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, check=True, timeout=120)


TRACE = """
planes { id: 1 name: "/device:GPU:0"
  lines { id: 1 name: "Stream #1" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 2000000 } }
  lines { id: 2 name: "Stream #2" timestamp_ns: 0
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 5000000 } }
  event_metadata { key: 1 value { id: 1 name: "nvjet_a" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather_RING_LL" } } }
planes { id: 2 name: "/device:GPU:1"
  lines { id: 1 name: "Stream #1" timestamp_ns: 0 events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "ncclDevKernel_AllGather_RING_LL" } } }
"""


def test_exposed_collectives():
    """5 us of a collective in two steps, 1 of them next to a kernel; another GPU does not count."""
    data = jax.profiler.ProfileData
    found = kernels.exposure(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(TRACE)), steps=2)
    assert found == pytest.approx({"collective_ms": 2.5e-3, "exposed_ms": 2e-3})


def test_weak_scaling_compares_programs_unrolled_alike():
    row = lambda ms: {"ms": ms, "collective_ms": 1.0, "exposed_ms": 0.5, "peak_bytes": None}
    times = {"one GPU": 10.0, "one GPU, unrolled": 8.0, "recommended": 12.5, "unrolled, recommended": 9.0}
    text = overlap.table({"rows": {name: row(ms) for name, ms in times.items()} | {"no flags": {"error": "x"}}})
    cells = {line[:21].strip(): line.split() for line in text.splitlines()}
    assert cells["recommended"][2] == "0.800" and cells["unrolled, recommended"][3] == "0.889"
    assert "no flags" not in text
