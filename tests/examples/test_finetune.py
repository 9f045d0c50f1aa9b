"""examples/finetune_lora.py: what it trains, what it leaves as it is, and what it saves."""

import importlib.machinery
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import EXAMPLES
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

import finetune_lora  # isort: skip

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, safe_open

import te_jax.flax as te_flax
from te_jax import hf

FIXTURES = Path(__file__).parents[1] / "hf_fixtures"
SMALL = "--steps 6 --batch-size 2 --seq-len 16 --eval-batches 2 --rank 4".split()
SMALL += ["--data", str(EXAMPLES / "README.md")]


@pytest.mark.parametrize("name", ["llama2", "gemma2"])  # q, k and v as one, of a stack of layers; apart, in each
def test_joined_weights_are_those_with_adapters(name):
    folder = FIXTURES / name
    args = finetune_lora.parse([f"--hf={folder}", "--rank=4", "--alpha=6"])
    plain, weights, _ = finetune_lora.load(args, folder)
    assert not any(a.committed for a in jax.tree.leaves(weights)), "a step of them and of new arrays compiles twice"
    plain = plain.clone(dtype=jnp.float32)
    model = finetune_lora.adapted(plain, args)
    tokens = jnp.asarray(np.load(folder / "expected.npz")["tokens"])
    init = lambda key: te_flax.split_lora(meta.unbox(model.init(key, tokens)["params"]))[0]
    lora = jax.eval_shape(init, jax.random.key(0))
    draw = lambda path, a: 0.1 * jax.random.normal(jax.random.key(len(str(path))), a.shape)
    lora = jax.tree_util.tree_map_with_path(draw, lora)
    with jax.default_matmul_precision("highest"):
        due = jax.jit(model.apply)({"params": te_flax.join_lora(lora, weights)}, tokens)
        apply = jax.jit(plain.apply)
        y = apply({"params": te_flax.merge_lora(te_flax.join_lora(lora, weights), alpha=6)}, tokens)
        before = apply({"params": weights}, tokens)
    assert jnp.abs(due - before).max() > 0.1 * jnp.abs(before).max(), "the adapters do something"
    np.testing.assert_allclose(y, due, atol=1e-5 * float(jnp.abs(due).max()))


def test_experts_keep_their_bias(tmp_path):
    """The bias that chooses experts is no parameter: it comes with the checkpoint, and is saved again."""
    folder = FIXTURES / "deepseek-v3"
    args = finetune_lora.parse([f"--hf={folder}", "--rank=4", "--bf16", "--seq-len=8"])
    tuning, (_, loaded) = finetune_lora.prepare(args, folder, None), hf.load(folder)
    (bias,), (due,) = (jax.tree.leaves(tree["expert_bias"]) for tree in (tuning.state.fp8, loaded))
    np.testing.assert_array_equal(bias, due)
    assert np.any(due)
    finetune_lora.save_model(tmp_path / "joined", args, folder, tuning)
    before, after = tensors(folder), tensors(tmp_path / "joined")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(np.float32(after[name]), np.float32(before[name]))


def tensors(folder):
    return {name: a for file in sorted(folder.glob("*.safetensors")) for name, a in load_file(file).items()}


@pytest.mark.filterwarnings("error::UserWarning")
def test_adapters_are_trained_beside_weights_in_fp8(tmp_path, capsys):
    assert (
        finetune_lora.main([*SMALL, "--fp8-params", "--recipe=delayed", "--join", "--compare", f"--out={tmp_path}"])
        == 0
    )
    said = capsys.readouterr().out
    assert f"warning: {tmp_path / 'random_llama'} has no tokenizer.json" in said
    rows = re.findall(r"(FP8 \(delayed\)|bf16): held out ([\d.]+) -> ([\d.]+), loss ([\d.]+)", said)
    assert [name for name, *_ in rows] == ["FP8 (delayed)", "bf16"] and "gap (FP8 - bf16)" in said
    assert all(float(after) < float(before) < 6 for _, before, after, _ in rows) and rows[0][1:] != rows[1][1:]

    adapters = load_file(tmp_path / "adapters.safetensors")
    with safe_open(tmp_path / "adapters.safetensors", framework="numpy") as file:
        assert file.metadata() == {"base": str(tmp_path / "random_llama"), "rank": "4", "scope": "all"}
    assert all(path.endswith(("lora_a_kernel", "lora_b_kernel")) for path in adapters)
    assert all((a != 0).any() and a.dtype == np.float32 for a in adapters.values())

    before, after = (tensors(tmp_path / name) for name in ("random_llama", "model"))
    assert before.keys() == after.keys()
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert moved == {name for name in before if re.search(r"_proj\.weight$", name)}, "kernels, and nothing else"
    model, variables = hf.load(tmp_path / "random_llama")
    joined = te_flax.merge_lora(te_flax.join_lora(unflatten_dict(adapters, sep="/"), variables["params"]))
    written = flatten_dict(hf.load(tmp_path / "model")[1]["params"])
    for path, a in flatten_dict(joined).items():
        np.testing.assert_array_equal(a, written[path])
    assert model.config == hf.read_config(tmp_path / "model")

    assert finetune_lora.main([*SMALL, f"--out={tmp_path}"]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_all_weights_are_trained(tmp_path, capsys):
    assert finetune_lora.main([*SMALL, "--full", f"--out={tmp_path}"]) == 0
    found = re.search(r"held out ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert float(found[2]) < float(found[1]) - 0.2
    before, after = (tensors(tmp_path / name) for name in ("random_llama", "model"))
    assert not (tmp_path / "adapters.safetensors").exists()
    assert all((before[name] != after[name]).any() and after[name].dtype == before[name].dtype for name in before)


def test_words_are_those_of_the_tokenizer(tmp_path, monkeypatch):
    class Tokenizer:
        @staticmethod
        def from_file(path):
            assert path == str(tmp_path / "tokenizer.json")
            return Tokenizer

        @staticmethod
        def encode_batch(texts, add_special_tokens):
            assert not add_special_tokens
            return [types.SimpleNamespace(ids=[len(line) for line in text.splitlines()]) for text in texts]

    stub = types.ModuleType("tokenizers")
    stub.__spec__, stub.Tokenizer = importlib.machinery.ModuleSpec("tokenizers", None), Tokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", stub)
    text = "".join("x" * (i % 50) + "\n" for i in range(2 * finetune_lora.LINES + 7))
    as_bytes = np.frombuffer(text.encode(), np.uint8)
    np.testing.assert_array_equal(finetune_lora.words_of(as_bytes, tmp_path, 256), as_bytes)
    (tmp_path / "tokenizer.json").touch()
    due = [len(line) for line in text.splitlines()]
    np.testing.assert_array_equal(finetune_lora.words_of(as_bytes, tmp_path, 50), due)
    with pytest.raises(ValueError, match="has a vocabulary of 49, the text has token 49: give the model"):
        finetune_lora.words_of(as_bytes, tmp_path, 49)


def test_what_does_not_start(tmp_path, capsys):
    run = lambda *arguments: finetune_lora.main([*SMALL, f"--out={tmp_path}", *arguments])
    assert run(f"--hf={FIXTURES / 'bert'}") == 2 and "is a BertForMaskedLM: give a causal" in capsys.readouterr().err
    assert run(f"--hf={FIXTURES / 'llama3'}") == 2 and "has a vocabulary of 83, the text has" in capsys.readouterr().err
    assert run("--hf=nowhere") == 2 and "nowhere/config.json" in capsys.readouterr().err
    for arguments in (["--full", "--join"], ["--bf16", "--compare"], ["--check-gap=1"], ["--rank=0"]):
        with pytest.raises(SystemExit) as stopped:
            finetune_lora.parse(arguments)
        assert stopped.value.code == 2
