"""examples/generate.py on a checkpoint of examples/train_gpt.py. How well it writes is not tested here."""

import contextlib
import importlib.machinery
import io
import json
import pathlib
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import compiled_once, unrendered  # noqa: F401

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402
import train_gpt  # noqa: E402

from te_jax.recipe import Float8CurrentScaling  # noqa: E402

PROMPTS = [b"import ", b"a", b"python examples"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint of a few steps of `tiny` in FP8."""
    out = tmp_path_factory.mktemp("gpt")
    options = "--preset tiny --seq-len 48 --batch-size 4 --steps 10 --amax-history-len 4 --eval-every 0"
    with contextlib.redirect_stdout(io.StringIO()):
        text = str(EXAMPLES / "README.md")
        assert train_gpt.main([*options.split(), "--data", text, "--out", str(out)]) == 0
    return out / "fp8"


def said(capsys, *arguments) -> list[str]:
    """The lines of generate.py, with the prompts."""
    capsys.readouterr()
    assert generate.main([*arguments, *(f"--prompt={prompt.decode()}" for prompt in PROMPTS)]) == 0
    return capsys.readouterr().out.splitlines()


def test_greedy_text_is_the_one_without_a_cache(trained, capsys):
    options = ["--checkpoint", str(trained), "--greedy", "--tokens", "33"]
    *text, speed = said(capsys, *options)
    *same, slower = said(capsys, *options, "--no-cache")
    assert text == same and text[0] == "=== 'import '" and text[1].startswith("import ")
    assert sum(map(len, text[1::2])) == sum(map(len, PROMPTS)) + 3 * 33
    assert speed.startswith("=== fp8, cache: 99 tokens in") and "tokens/s; prompts read" in speed
    assert slower.startswith("=== fp8, no cache: 99 tokens in")


def test_logits_are_those_without_a_cache(trained):
    model, variables, recipe = generate.load(trained, bf16=False)
    assert recipe.amax_history_len == 4 and model.config.layers == 2 and model.max_len == 48
    scales = [x for path, x in jax.tree_util.tree_leaves_with_path(variables) if path[-1].key.endswith("_scale")]
    assert scales and all((scale != 1).all() for scale in scales), "FP8 state is the checkpoint's"
    for name, factor in (("positions", 30), ("embedding", 10)):  # a few steps leave them without weight in the text
        variables["params"][name] *= factor

    def run(cache):
        seen = []

        def choose(key, logits):
            jax.debug.callback(lambda logits: seen.append(np.asarray(logits)), logits, ordered=True)
            return jnp.argmax(logits, -1).astype(jnp.int32)

        tokens, *_ = generate.generate(model, variables, recipe, PROMPTS, 33, choose, cache=cache)
        return tokens, np.stack(seen, 1)  # [b, 33], [b, 33, 256]

    (tokens, logits), (due_tokens, due) = run(True), run(False)
    alike = np.cumprod(tokens == due_tokens, 1).astype(bool)
    comparable = np.pad(alike, ((0, 0), (1, 0)), constant_values=True)[:, :-1]  # up to a tie that was cut otherwise
    assert comparable.mean() > 0.5
    varying = (due - due.mean(1, keepdims=True))[comparable]  # what does not hang on the text is always right
    # Activations are bf16, and FP8 before the GEMMs: a sum of another order crosses an edge, 2**-4 apart, now and then.
    assert np.linalg.norm((logits - due)[comparable]) < 0.15 * np.linalg.norm(varying)


def test_the_recipe_is_that_of_training(tmp_path, capsys):
    options = "--preset tiny --layers 1 --seq-len 16 --batch-size 2 --steps 2 --eval-every 0 --recipe current".split()
    options += ["--data", str(EXAMPLES / "README.md"), "--out", str(tmp_path)]
    train = lambda *more: train_gpt.main([*options, *more])
    assert train() == 0
    model, variables, recipe = generate.load(tmp_path / "fp8", bf16=False)
    assert isinstance(recipe, Float8CurrentScaling) and set(variables) == {"params"}
    assert model.config.layers == 1
    assert train("--resume", "--recipe", "delayed") == 2
    assert "recipe current there, delayed now" in capsys.readouterr().err


def test_bf16_and_sampling(trained, capsys):
    model, variables, recipe = generate.load(trained, bf16=True)
    assert recipe is None and set(variables) == {"params"}
    logits = jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    keys = jax.random.split(jax.random.key(0), 2000)
    draw = lambda **options: np.asarray(jax.vmap(generate.chooser(**options), (0, None))(keys, logits))
    share = lambda tokens: np.stack([np.mean(tokens == i, 0) for i in range(4)], 1)
    # Of 2000 draws a share has a sigma of at most 0.011.
    np.testing.assert_allclose(share(draw(greedy=False, temperature=1.0, top_k=0)), np.exp(logits), atol=0.05)
    want = [[0, 0, 9 / 25, 16 / 25], [16 / 25, 9 / 25, 0, 0]]
    np.testing.assert_allclose(share(draw(greedy=False, temperature=0.5, top_k=2)), want, atol=0.05)
    assert (draw(greedy=True, temperature=1.0, top_k=0) == [3, 0]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt="], "a prompt is empty"),
        (["--tokens", "47", "--prompt", "ab"], "learned 48 positions, but the longest prompt has 2 bytes"),
        (["--checkpoint", "none"], "there is no checkpoint in none"),
    ],
)
def test_errors(trained, arguments, message, capsys):
    assert generate.main(["--checkpoint", str(trained), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_of_any_bytes(trained, capsys):
    """Python has a byte of a command line that is no UTF-8 as a lone surrogate. To this model it is a byte."""
    options = [f"--checkpoint={trained}", "--greedy", "--tokens=3", "--prompt=caf\udce9 "]
    assert generate.main(options) == 0
    first, text, _ = capsys.readouterr().out.splitlines()
    assert first == "=== 'caf\ufffd '" and text.startswith("caf\ufffd ")
    with pytest.raises(SystemExit):
        generate.main(["--hf=somewhere", "--prompt=caf\udce9"])
    assert r"--prompt 'caf\udce9' is no text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--temperature", "0"], ["--top-k", "300"]])
def test_senseless_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        generate.main(arguments)
    assert f"{arguments[0]} is {arguments[1]}" in capsys.readouterr().err.replace("0.0", "0")


def test_a_checkpoint_of_another_house(monkeypatch, capsys, tmp_path):
    """--hf: greedy words of a fixture of test_hf.py, behind prompts of two lengths, by a stand-in for `tokenizers`. One
    row ends with its first word, the second of the two that end texts."""
    pytest.importorskip("safetensors")
    fixtures, folder = pathlib.Path(__file__).parents[1] / "hf_fixtures", tmp_path / "llama3"
    shutil.copytree(fixtures / "llama3", folder)
    assert generate.main([f"--hf={folder}"]) == 2
    assert "llama3 has no tokenizer.json: put the model's there" in capsys.readouterr().err
    (folder / "tokenizer.json").touch()
    due = np.load(folder / "expected.npz")
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | dict(eos_token_id=[0, int(due["words"][1][0])])))

    class Tokenizer:
        @staticmethod
        def from_file(path):
            assert path == str(folder / "tokenizer.json")
            return Tokenizer

        encode = staticmethod(lambda text: types.SimpleNamespace(ids=[int(word) for word in text.split()]))
        decode = staticmethod(lambda ids: "".join(f" {word}" for word in ids))

    stub = types.ModuleType("tokenizers")
    stub.__spec__, stub.Tokenizer = importlib.machinery.ModuleSpec("tokenizers", None), Tokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", stub)
    texts = [" ".join(map(str, row)) for row in (due["tokens"][0], due["tokens"][1][:4], due["tokens"][1])]
    prompts = [f"--prompt={text}" for text in texts]
    with jax.default_matmul_precision("highest"):
        assert generate.main([f"--hf={folder}", "--greedy", "--tokens=8", *prompts]) == 0
    first, text, _, other, _, ended, speed = capsys.readouterr().out.splitlines()
    assert first == f"=== {texts[0]!r}" and text == " ".join([texts[0], *map(str, due["words"][0][:8])])
    assert other.startswith(f"{texts[1]} ") and len(other.split()) == 12 and ended == texts[2]
    assert speed.startswith("=== float32: 24 tokens in")
    assert generate.main([f"--hf={fixtures / 'bert'}"]) == 2
    assert "is a BertForMaskedLM, which continues no text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main(["--hf=somewhere", "--no-cache"])
