"""te_jax.hf on folders that are damaged, or that mean harm: what is refused by name, and at what cost."""

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hf_folders import (
    CLASSES,
    FIXTURES,
    ITEMS,
    Accepted,
    Held,
    content,
    load_nothing,
    outcome,
    pack,
    unpack,
    with_header,
)

from te_jax import hf
from te_jax.hf import checkpoints, files

pytest.importorskip("safetensors")

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))
JUNK = [None, True, 3, -1.5, "x", [], [1], {}, {"a": 1}]  # what JSON has
SHARD = "model-00002-of-00003.safetensors"


class Case(NamedTuple):
    """A folder that is to be refused: a fixture, and what becomes of it. says: words of the error."""

    fixture: str
    change: Callable[[Any], Any]
    says: str = ""
    may_pass: bool = False


# -- files ------------------------------------------------------------------------------------------------------


def put(name: str, data: bytes) -> Callable:
    return lambda folder: (folder / name).write_bytes(data)


def say(**words) -> Callable:
    """Words of config.json."""

    def change(folder):
        there = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(there | words))

    return change


def tensors(fixture: str, **changed: Held | None) -> Callable:
    held = {**unpack(FIXTURES / fixture / files.ONE), **changed}
    return put(files.ONE, pack({name: a for name, a in held.items() if a is not None}))


def also(*changes: Callable) -> Callable:
    return lambda folder: [change(folder) for change in changes]


def instead(name: str, how: str) -> Callable:
    """Something else where a file is due."""

    def change(folder):
        path = folder / name
        path.unlink()
        if how == "a folder":
            path.mkdir()
        if how == "a link to nothing":
            path.symlink_to("nothing")
        if how == "a pipe":
            os.mkfifo(path)

    return change


INSTEAD = ("nothing", "a folder", "a link to nothing", "a pipe")


# -- cases ------------------------------------------------------------------------------------------------------


def of_json(name: str, fixture: str) -> Iterator[Case]:
    """What a file in JSON may be."""
    whole = content(FIXTURES / fixture / name)
    case = lambda data: Case(fixture, put(name, data), name)
    for part in range(20):
        yield case(whole[: len(whole.rstrip()) * part // 20])
    for place in range(1, len(whole), len(whole) // 20):
        yield case(whole[:place] + b"\xff" + whole[place:])
        yield case(whole[:place] + b"\x00" + whole[place + 1 :])
    for junk in JUNK:
        if not isinstance(junk, dict):
            yield case(json.dumps(junk).encode())
    text = whole.decode()
    yield case(b"\xef\xbb\xbf" + whole)
    yield case(text.encode("utf-16"))
    yield case(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    for deep in (b"[" * 10**5, b'{"a":' * 10**5, b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"):
        yield case(deep)
    for digits in (25, 400, 5000):
        yield case(b'{"a": ' + b"9" * digits + b"}")
        yield case(b'{"a": [-' + b"9" * digits + b"]}")
    yield from (Case(fixture, instead(name, how), "there is no") for how in INSTEAD)


def of_config() -> Iterator[Case]:
    yield from of_json("config.json", "llama3")
    yield Case("llama3", put("config.json", b" " * (4 * 2**20) + b"{}"), "config.json has more than")
    for junk in JUNK:
        yield Case("llama3", say(model_type=junk), "model_type" if not isinstance(junk, str) else "family 'x'")
        if junk is not None:
            yield Case("llama3", say(quantization_config=junk), "quantization_config")
        for word in ("quant_method", "fmt", "weight_block_size", "activation_scheme"):
            said = {**dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic"), word: junk}
            if (word, junk) != ("weight_block_size", None):
                yield Case("llama3", say(quantization_config=said), word)
    yield Case("llama3", say(model_type="x" * 10**6), "there is no family")
    yield Case("llama3", say(model_type="\ud800"), "there is no family")


def of_index() -> Iterator[Case]:
    yield from of_json(files.INDEX, "llama2")
    there = json.loads(content(FIXTURES / "llama2" / files.INDEX))
    weights = there["weight_map"]

    def case(says: str, **changed):
        said = {name: file for name, file in {**weights, **changed}.items() if file != "left out"}
        return Case("llama2", put(files.INDEX, json.dumps(there | dict(weight_map=said)).encode()), says)

    for junk in JUNK:
        if junk not in ({}, {"a": 1}):
            yield Case("llama2", put(files.INDEX, json.dumps(dict(weight_map=junk)).encode()), "weight_map")
        if not isinstance(junk, str):
            yield case("lm_head.weight", **{"lm_head.weight": junk})
    yield Case("llama2", put(files.INDEX, b"{}"), "weight_map")
    yield Case("llama2", put(files.INDEX, b'{"weight_map": {}}'), "lacks tensors")
    out = (
        "..",
        "../x",
        "/x",
        "a/../../x",
        "..\\x",
        "C:\\x",
        "C:x",
        "\\\\host\\share\\x",
        "",
        "a/..",
        f"../llama2/{SHARD}",
    )
    for file in out:
        yield case("the name of a file in its folder is due", **{"lm_head.weight": file})
    for file in (".", "x", "\0", "x" * 200, "\ud800", "config.json", SHARD + "/x", "é/x"):
        yield case("config.json can not be read" if file == "config.json" else "there is no", new=file)
    for name, file in weights.items():
        other = "model-00001-of-00003.safetensors" if file == SHARD else SHARD
        yield case(f"names {name}, which no file has where it says, in {other}", **{name: other})
        yield case(f"lacks tensors of a llama of its config.json: {name}.", **{name: "left out"})
    for name in ("more", "", "a\nb", "\0"):
        yield case("which no file has", **{name: SHARD})


def of_bytes() -> Iterator[Case]:
    """What a safetensors file may be."""
    whole = content(FIXTURES / "llama2" / SHARD)
    case = lambda data, passes=False: Case("llama2", put(SHARD, data), "llama2", passes)
    size = int.from_bytes(whole[:8], "little")
    for part in range(40):
        yield case(whole[: (8 + size) * part // 20])
    for place in np.random.default_rng(0).integers(0, 8 * (8 + size), 100):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        yield case(bytes(flipped), passes=True)  # a key of the header's metadata may be another one
    for length in (0, 1, size - 1, size + 1, 2**31, 2**32, 2**63, 2**64 - 1):
        yield case(length.to_bytes(8, "little") + whole[8:])
    yield from (case(data) for data in (b"", whole + b"\0", whole * 2, b"PK\3\4" + bytes(100), bytes(2**16)))
    yield Case("llama2", put(SHARD, b"version https://git-lfs.github.com/spec/v1\nsize 4\n"), "git lfs pull")
    yield from (Case("llama2", instead(SHARD, how), SHARD) for how in INSTEAD)
    one = lambda **said: dict(a=dict(dict(dtype="F32", shape=[2], data_offsets=[0, 8]), **said))
    headers = [one(dtype=junk) for junk in JUNK] + [one(shape=junk) for junk in JUNK]
    headers += [one(data_offsets=junk) for junk in JUNK] + [dict(a=junk) for junk in JUNK] + JUNK
    headers += [one(data_offsets=ends) for ends in ([8, 0], [0, 4], [4, 12], [0, 16], [-8, 0], [0, 2**63])]
    headers += [one(shape=shape) for shape in ([2**40], [2**62, 4], [-2], [2.5], [1] * 1000 + [2], [2**64, 0])]
    headers += [one() | dict(b=one()["a"]), dict(__metadata__=3), dict(__metadata__={"a": 1}), one(dtype="F4")]
    for header in headers:
        yield case(with_header(json.dumps(header).encode(), bytes(8)))
    empty = dict(a=dict(dtype="F32", shape=[2**40, 0], data_offsets=[0, 0]))
    yield case(with_header(json.dumps(empty).encode()))
    yield from (case(with_header(header)) for header in (b"[" * 10**5, b"\xff{}", b"", b'{"a":' * 10**5))


def of_tensors() -> Iterator[Case]:
    """Names, shapes and types."""
    change = lambda says, **changed: Case("llama3", tensors("llama3", **changed), says)
    for name, a in unpack(FIXTURES / "llama3" / files.ONE).items():
        yield change(name, **{name: None})
        for shape in ((), (1,), (*a.shape, 1), (0, *a.shape), (*a.shape[:-1], a.shape[-1] + 1)):
            yield change(name, **{name: a.of("F32", *shape)})
        for dtype in ("F64", "I64", "U8", "BOOL", "F8_E5M2"):
            yield change(name, **{name: a.of(dtype, *a.shape)})
        yield change("quantization_config", **{name: a.of("F8_E4M3", *a.shape)})
        scaled = tensors("llama3", **{name: a.of("F8_E4M3", *a.shape)})
        yield Case("llama3", also(scaled, say(quantization_config=dict(quant_method="fp8"))), f"{name}_scale")
    some = Held("F32", (1,), bytes(4))
    for name in ("more", "", "a\nb", "\0", "x" * 10**5, "model.layers.2.mlp.up_proj.weight"):
        yield change("tensors that are none of", **{name: some})


def of_scales() -> Iterator[Case]:
    """Of a weight in FP8, in blocks or with one scale."""
    name = "model.layers.0.mlp.up_proj.weight"
    weight = unpack(FIXTURES / "llama3" / files.ONE)[name]
    for blocks, end in ([128, 128], "_scale_inv"), (None, "_scale"):
        said = say(quantization_config=dict(quant_method="fp8", weight_block_size=blocks))
        shape, scale = (1, 1) if blocks else (), f"{name}{end}"
        other = f"{name}{'_scale' if blocks else '_scale_inv'}"
        wrong = [(dtype, shape) for dtype in ITEMS if dtype not in ("F32", "F16", "BF16")]
        wrong += [("F32", each) for each in ((0,), (2,), (1, 1, 1), (2, 1), (1, 2), (0, 0))]
        for dtype, of in wrong:
            held = {name: weight.of("F8_E4M3", *weight.shape), scale: weight.of(dtype, *of)}
            yield Case("llama3", also(said, tensors("llama3", **held)), scale)
        held = {name: weight.of("F8_E4M3", *weight.shape), other: weight.of("F32", *shape)}
        yield Case("llama3", also(said, tensors("llama3", **held)), "scale")
        yield Case("llama3", also(said, tensors("llama3", **{scale: weight.of("F32", *shape)})), scale)


COPIES = {
    "llama3": {"lm_head.weight": "model.embed_tokens.weight"},
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "t5": {f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")},
}


def of_copies() -> Iterator[Case]:
    for fixture, copies in COPIES.items():
        held = unpack(FIXTURES / fixture / files.ONE)
        for copy, source in copies.items():
            a = np.frombuffer(held[source].data, np.float32)
            for value in (np.inf, np.nan, np.nextafter(a[-1], 9), -a[-1]):
                other = np.append(a[:-1], np.float32(value))
                yield Case(fixture, tensors(fixture, **{copy: held[source]._replace(data=other.tobytes())}), copy)
            for dtype, shape in (
                ("F32", ()),
                ("F32", (1,)),
                ("I32", held[source].shape),
                ("F8_E4M3", held[source].shape),
            ):
                yield Case(fixture, tensors(fixture, **{copy: held[source].of(dtype, *shape)}), copy)
    one = unpack(FIXTURES / "bert" / files.ONE)
    for name in [name for name in one if name.endswith("LayerNorm.weight")]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        yield Case("bert", tensors("bert", **{old: one[name]}), "names of one tensor")


KINDS = (of_config, of_index, of_bytes, of_tensors, of_scales, of_copies)


def test_every_error_has_a_class_and_a_name(monkeypatch, tmp_path):
    load_nothing(monkeypatch)
    cases, wrong = [case for kind in KINDS for case in kind()], []
    for number, (fixture, change, says, may_pass) in enumerate(cases):
        folder = tmp_path / str(number) / fixture
        shutil.copytree(FIXTURES / fixture, folder, ignore=shutil.ignore_patterns("expected.npz"))
        change(folder)
        error = outcome(hf.load, folder)
        named = type(error) in CLASSES and says in str(error) and len(str(error)) < 2000
        if not (named and "te_jax.hf" in str(error)) and not (may_pass and isinstance(error, Accepted)):
            wrong.append((number, says, repr(error)[:300]))
        shutil.rmtree(folder)
    assert len(cases) >= 400 and not wrong, (len(cases), len(wrong), wrong[:20])


# -- costs ------------------------------------------------------------------------------------------------------

# Words in numbers that are no sizes of tensors, or that a family has no use for.
NO_SIZES = {
    "max_position_embeddings",
    "model_max_length",
    "sliding_window",
    "num_nextn_predict_layers",
    "pretraining_tp",
}
NO_SIZES |= {"pad_token_id", "decoder_start_token_id", "max_window_layers", "mamba_chunk_size"}
NO_SIZES |= {"chunk_size", "expand", "num_logits_to_keep", "original_max_position_embeddings"}
NO_SIZES |= {"_sliding_window_pattern", "query_pre_attn_scalar", "no_rope_layer_interval"}
NO_SIZES |= {"encoder_stride", "local_attention", "sparse_pred_ignore_index", "global_attn_every_n_layers"}
NO_SIZES |= {"attention_chunk_size", "floor_scale", "interleave_moe_layer_step"}
UNREAD = {
    "deepseek-v3": {"head_dim", "qk_head_dim", "num_key_value_heads"},
    "falcon-40b": {"num_ln_in_parallel_attn"},
    "falcon-7b": {"num_kv_heads"},
    "granite4": {"intermediate_size", "num_experts_per_tok"},  # without experts
    "kimi-linear": {"head_dim", "qk_head_dim"},
    **dict.fromkeys(("gemma4", "gemma4-a4b"), {"vocab_size_per_layer_input"}),
    "qwen2-moe": {"intermediate_size"},
    "qwen3-moe": {"intermediate_size"},
    **dict.fromkeys(("qwen3-next", "qwen3.5-moe"), {"intermediate_size"}),
}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers")


def test_sizes_that_nothing_has_cost_nothing(monkeypatch, tmp_path):
    """A config.json of a few bytes is refused before a model of it is traced, in 2 s and 200 MB."""

    def traced(model):
        raise Accepted

    monkeypatch.setattr(checkpoints, "plan_of", traced)
    passed, slowest = {}, 0.0
    tracemalloc.start()
    try:
        for fixture in NAMES:
            folder, unread = shutil.copytree(FIXTURES / fixture, tmp_path / fixture), UNREAD.get(fixture, set())
            words = json.loads((folder / "config.json").read_text())
            whole = sorted(word for word, value in words.items() if type(value) is int)
            changes = [{word: value} for word in whole for value in (2**20 + 1, 10**18)]
            changes += [dict.fromkeys(whole, value) for value in (1000, 10**9)]
            changes += [{word: 9999} for word in whole if word in LAYERS]
            for said in changes:
                say(**words | said)(folder)
                begun = time.process_time()
                error = outcome(hf.load, folder)
                slowest = max(slowest, time.process_time() - begun)
                if isinstance(error, Accepted) and not said.keys() <= NO_SIZES | unread:
                    passed[fixture] = said.keys() | passed.get(fixture, set())
        assert not passed and slowest < 2, (passed, slowest)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


def test_a_config_costs_nothing_to_read(tmp_path):
    for fixture in NAMES:
        words = json.loads((FIXTURES / fixture / "config.json").read_text())
        for word in words.keys() & set(LAYERS):
            (tmp_path / "config.json").write_text(json.dumps(words | {word: 10**9}))
            with pytest.raises(ValueError, match=f"config.json.*{word} is 1000000000; pass .*an int from 1 to 10000"):
                hf.read_config(tmp_path)
