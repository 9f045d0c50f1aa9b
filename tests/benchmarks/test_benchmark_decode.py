"""The benchmark of decoding runs, at a tiny size. Speed is not tested here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("safetensors")

from benchmarks import contexts, decode
from te_jax import hf, models


def test_decoding_a_checkpoint(tmp_path, monkeypatch):
    one_layer = dataclasses.replace(decode._TINY, layers=1)  # layers are unrolled
    monkeypatch.setattr(decode, "PROMPT", 8), monkeypatch.setattr(decode, "TOKENS", 4)
    monkeypatch.setattr(decode, "BATCHES", (2,)), monkeypatch.setattr(decode, "_TINY", one_layer)
    assert decode.write(tmp_path / "llama", tiny=True)["written_s"] > 0
    for way in decode.OURS:
        row = decode.measure(way, tmp_path / "llama")
        assert row["impl"] == way and row["tokens_per_s_b2"] > 0 and row["first_s_b2"] > 0


def test_a_checkpoint_in_mxfp4(tmp_path):
    decode.write(tmp_path, True, "gpt-oss-20b")
    model, variables = hf.load(tmp_path, scan=False)
    assert model.config.family == "gpt_oss" and all(jnp.isfinite(a).all() for a in jax.tree.leaves(variables))


def test_what_grows_with_a_context():
    """Keys and values of the one layer of four that has attention; states do not."""
    lm = contexts.model("hybrid", tiny=True)
    variables = jax.eval_shape(lambda: lm.init(jax.random.key(0), jnp.zeros((1, 8), int)))
    read = lambda context: lambda *of: models.read_prompts(lm, *of, context)[1]
    args = variables, jnp.zeros((1, 8), int), jnp.ones((1,), int)
    short, long = (contexts.bytes_of_row(jax.eval_shape(read(context), *args)) for context in (2048, 32768))
    slot = 2 * 2 * 16 * 2  # keys and values of two groups of 16, in 16 bits
    assert [row["keys_values_bytes"] for row in (short, long)] == [slot * 2048, slot * 32768]
    states = 4 * 4 * 32 * 128 + 2 * 3 * (4 * 32 + 2 * 128)  # a layer's, of the scan and of the convolutions
    assert short["states_bytes"] == long["states_bytes"] == 3 * states + 4 * 4 + 4  # counts of tokens, of padding


def test_generating_behind_a_context(monkeypatch):
    small = dataclasses.replace(contexts._TINY, layers=2)  # one of each kind
    monkeypatch.setattr(contexts, "_TINY", small), monkeypatch.setattr(contexts, "TOKENS", 2)
    monkeypatch.setattr(contexts, "BATCHES", (2,))
    row = contexts.measure("hybrid", 8, tiny=True)
    assert row["impl"] == "te_jax bf16, hybrid" and row["tokens_per_s_b2"] > 0 and row["read_s"] > 0
