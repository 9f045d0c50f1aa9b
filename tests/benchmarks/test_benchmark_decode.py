"""The benchmark of decoding runs, at a tiny size. Speed is not tested here."""

import dataclasses

import pytest

pytest.importorskip("safetensors")

from benchmarks import decode


def test_decoding_a_checkpoint(tmp_path, monkeypatch):
    one_layer = dataclasses.replace(decode._TINY, layers=1)  # layers are unrolled
    monkeypatch.setattr(decode, "PROMPT", 8), monkeypatch.setattr(decode, "TOKENS", 4)
    monkeypatch.setattr(decode, "BATCHES", (2,)), monkeypatch.setattr(decode, "_TINY", one_layer)
    assert decode.write(tmp_path / "llama", tiny=True)["written_s"] > 0
    for way in decode.OURS:
        row = decode.measure(way, tmp_path / "llama")
        assert row["impl"] == way and row["tokens_per_s_b2"] > 0 and row["first_s_b2"] > 0
