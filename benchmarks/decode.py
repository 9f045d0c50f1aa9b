"""A checkpoint of the shape of Llama 3 8B, or of gpt-oss-20b (--shape), with random weights: how long te_jax.hf takes
to load it, in bf16 and straight into parameters in FP8, the memory that takes, and tokens per second after prompts,
next to Hugging Face's transformers.

The checkpoint is written first, to --folder where one is given, which then keeps it. Each way has a process of its own,
whose memory holds nothing else. All draw the likeliest token. The first call, which compiles, is timed apart. With
--mixer: contexts.py.
"""

import contextlib
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import te_jax as te
from te_jax import hf, models
from te_jax.models import families

from . import contexts, gpt_oss, machine, report
from .process import in_own_process

OURS = {"te_jax bf16": None, "te_jax fp8 current": te.recipe.Float8CurrentScaling()}
THEIRS = "transformers bf16"
SHAPES = {"llama3-8b": "Llama 3 8B", "gpt-oss-20b": "gpt-oss-20b"}
BATCHES, PROMPT, TOKENS = (1, 16), 128, 128
_TIMED = 2  # calls
_TINY = families.Size(64, 96, 4, 2, groups=2, vocab=160, tied=False)


def write(folder: pathlib.Path, tiny: bool, shape: str = "llama3-8b") -> dict:
    """A checkpoint with random weights in bf16, or as its shape is published, and how long that took."""
    began = time.perf_counter()
    if shape == "gpt-oss-20b":
        gpt_oss.write(folder, tiny)
        return dict(written_s=time.perf_counter() - began)
    config = families.llama3(_TINY) if tiny else models.published("llama3-8b")
    model, prompt = models.CausalLM(config, params_dtype=jnp.bfloat16), jnp.zeros((1, 8), jnp.int32)
    hf.save(folder, model, jax.jit(lambda key: nn.meta.unbox(model.init(key, prompt)))(jax.random.key(0)))
    return dict(written_s=time.perf_counter() - began)


def prompts(batch: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(0, vocabulary, (batch, PROMPT), dtype=np.int32)


def measure(way: str, folder: pathlib.Path, shape: str = "llama3-8b") -> dict:
    began = time.perf_counter()
    load = _transformers if way == THEIRS else _te_jax
    generate, memory, vocabulary = load(folder, way)
    row = dict(
        case=f"{SHAPES[shape]}: load and generate", impl=way, load_s=time.perf_counter() - began, loaded_bytes=memory()
    )
    for batch in BATCHES:
        tokens, times = prompts(batch, vocabulary), []
        for _ in range(_TIMED + 1):
            start = time.perf_counter()
            made = generate(tokens)
            times.append(time.perf_counter() - start)
        if made.shape != (batch, TOKENS):
            raise ValueError(f"{way}: {made.shape} tokens, not {(batch, TOKENS)}")
        row |= {f"first_s_b{batch}": times[0], f"tokens_per_s_b{batch}": batch * TOKENS / min(times[1:])}
    return row | dict(peak_bytes=memory())


def _te_jax(folder, way: str) -> tuple[Callable, Callable, int]:
    """What generates tokens, what tells the most memory so far, the vocabulary."""
    recipe = OURS[way]
    model, variables = hf.load(folder, fp8=recipe, scan=False)
    jax.block_until_ready(variables)
    write = jax.jit(lambda variables, tokens: models.generate(model, variables, tokens, TOKENS))

    def generate(tokens):
        with te.autocast(recipe is not None, recipe):
            return np.asarray(write(variables, tokens))

    memory = lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return generate, memory, model.config.vocab_size


def _transformers(folder, way: str) -> tuple[Callable, Callable, int]:
    import torch
    from transformers import AutoModelForCausalLM

    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=place)

    def generate(tokens):
        tokens = torch.as_tensor(tokens, dtype=torch.int64, device=place)
        options = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[:, PROMPT:].cpu().numpy()

    memory = lambda: torch.cuda.max_memory_allocated() if place == "cuda" else None
    return generate, memory, model.config.vocab_size


def main(args) -> int:
    if args.mixer:
        return contexts.main(args)
    if args.measure:
        writes = args.measure == "write"
        found = write(args.folder, args.tiny, args.shape) if writes else measure(args.measure, args.folder, args.shape)
        print(json.dumps(found))
        return 0
    result, failed = {"machine": machine.describe(), "rows": []}, False
    with contextlib.ExitStack() as stack:
        kept = args.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = kept / f"{args.shape}{'-tiny' * args.tiny}"
        run = lambda folder=folder, **given: in_own_process("decode", folder=folder, shape=args.shape, **given)
        if not folder.exists():
            part = kept / f"{folder.name}.part"  # what a run that was cut short has left is written anew
            written = run(part, tiny=args.tiny, measure="write")
            print(written, flush=True)
            if "error" in written:
                return 1
            part.rename(folder)
        for way in (*OURS, THEIRS):
            if not re.search(args.only or "", way):
                continue
            row = run(measure=way)
            failed |= "error" in row and way in OURS  # that a peer fails is a result
            result["rows"].append(row)
            print(row, flush=True)
            report.write(result, args.out)
    return int(failed)
