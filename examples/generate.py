"""Continue texts with a GPT that train_gpt.py trained, with a KV cache.

    python examples/generate.py --prompt "def main(" --prompt "import " --tokens 100

The program reads the last checkpoint of --checkpoint, and runs in the precision of training; or, with --hf DIR, a
checkpoint of Hugging Face's form. See examples/README.md; `--help` lists the options.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys
import time
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import checkpoint, config, steps
from gpt.model import GPT, VOCAB
from gpt.numbers import SEED, number, whole
from train_gpt import fp8_recipe

from te_jax import models
from te_jax.models import GREEDY, Sampling, read_prompts, write_tokens


def load(directory: pathlib.Path, bf16: bool):
    """(model, variables, recipe or None) of the last whole checkpoint in `directory`. ValueError if there is none."""

    def read(path):
        run = checkpoint.read_run(path)
        model, trained = model_of(run)
        init = lambda key: nn.meta.unbox(steps.initial(model, optax.identity(), trained, key, 1))
        shapes = jax.eval_shape(init, jax.random.key(0))
        return checkpoint.read_weights(path, shapes.params, {} if bf16 else shapes.fp8, shapes.experts), run

    found = checkpoint.newest(directory, read)
    if found is None:
        raise ValueError(f"there is no checkpoint in {directory}: train one with train_gpt.py, or give --checkpoint")
    items, run, _ = found
    model, trained = model_of(run)
    state = items["state"]
    variables = {"params": state["params"], **state.get("experts", {}), **items.get("fp8", {})}
    return model, variables, None if bf16 else trained


def model_of(run: dict):
    """(model, recipe or None) of a checkpoint's `run`."""
    key = run["key"]
    model = GPT(config.Model.of(key), max_len=key["seq_len"], fp8_params=key.get("fp8_params", False))
    return model, fp8_recipe(argparse.Namespace(**key)) if run["precision"] == "fp8" else None


def chooser(greedy: bool, temperature: float, top_k: int):
    """(key, logits f32[b, 256]) -> the next byte of each row, i32[b]."""
    return sampler(greedy, temperature, top_k).choose


def sampler(greedy: bool, temperature: float, top_k: int) -> Sampling:
    return GREEDY if greedy else Sampling(temperature, top_k or None)


def last(logits: jax.Array, lengths: jax.Array) -> jax.Array:
    """logits [b, s, 256] of each row's last token: [b, 256]."""
    return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]


def with_cache(model: GPT, choose, count: int):
    """(read, write): read(variables, prompts i32[b, s], lengths i32[b]) -> state,
    write(variables, state, lengths, key) -> (i32[b, count], state).

    The prompts are padded on the right; the lengths tell the layers, whose caches then know where each row is.
    """

    def read(variables, prompts, lengths):
        return read_prompts(model, variables, prompts, lengths, prompts.shape[1] + count)

    return read, partial(write_tokens, model, count=count, choose=choose)


def without_cache(model: GPT, choose, count: int):
    """As `with_cache`, but the model reads the whole text again for each token."""

    def read(variables, prompts, lengths):
        return jnp.pad(prompts, ((0, 0), (0, count)))

    def write(variables, text, lengths, key):
        def step(text, i):  # what stands behind a row's end is not seen from it
            token = choose(jax.random.fold_in(key, i), last(model.apply(variables, text), lengths + i))
            return text.at[jnp.arange(len(text)), lengths + i].set(token), token

        text, tokens = jax.lax.scan(step, text, jnp.arange(count))
        return tokens.T, text

    return read, write


def generate(model: GPT, variables, recipe, prompts: list[bytes], count: int, choose, seed=0, cache=True):
    """(bytes behind each prompt u8[b, count], seconds of reading the prompts, seconds of writing).

    Raises ValueError for an empty prompt, and for texts beyond the learned positions.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not lengths.all():
        raise ValueError("a prompt is empty: give at least one byte")
    if not model.config.rope and lengths.max() + count > model.max_len:
        raise ValueError(
            f"the model learned {model.max_len} positions, but the longest prompt has {lengths.max()} bytes and "
            f"{count} follow: give less --tokens, or train with a larger --seq-len"
        )
    padded = np.stack([np.frombuffer(prompt.ljust(lengths.max(), b"\0"), np.uint8) for prompt in prompts])
    read, write = (with_cache if cache else without_cache)(model, choose, count)
    key = jax.random.key(seed)
    with steps.autocast(recipe):
        args = variables, jnp.asarray(padded, jnp.int32), jnp.asarray(lengths)
        state = jax.eval_shape(read, *args)
        read = jax.jit(read).lower(*args).compile()
        # The memory of the caches that `read` made is the loop's from there on.
        write = jax.jit(write, donate_argnums=1).lower(variables, state, args[-1], key).compile()
    began = time.perf_counter()
    state = jax.block_until_ready(read(*args))
    was_read = time.perf_counter()
    tokens = np.asarray(write(variables, state, args[-1], key)[0], np.uint8)
    return tokens, was_read - began, time.perf_counter() - was_read


def ends_of(folder: pathlib.Path) -> list[int]:
    """The tokens that end a text, by config.json."""
    found = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def generate_hf(args: argparse.Namespace, sampling: Sampling) -> int:
    """Continues the prompts with a checkpoint of Hugging Face's form."""
    config.need("safetensors")
    from te_jax import hf

    folder = pathlib.Path(args.hf)
    family = hf.FAMILIES[hf.read_config(folder).family]
    if family.model is not models.CausalLM:
        raise ValueError(f"{folder} is a {family.architecture}, which continues no text: give one of a causal model")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: put the model's there")
    config.need("tokenizers")
    import tokenizers

    ends = ends_of(folder)
    model, variables = hf.load(folder, scan=False)  # faster: see te_jax.models.unscan
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.encode(prompt).ids for prompt in args.prompt]
    lengths = np.array([len(text) for text in texts], np.int32)
    if not lengths.all():
        raise ValueError("a prompt is empty: give at least one token")
    padded = np.stack([np.pad(text, (0, lengths.max() - len(text))) for text in texts]).astype(np.int32)
    key = None if args.greedy else jax.random.key(args.seed)
    # One of several ends stops the row; where another comes first, the row is cut there.
    options = dict(lengths=lengths, sampling=sampling, key=key, stop_at=ends[0] if ends else None)
    run = jax.jit(lambda variables: models.generate(model, variables, padded, args.tokens, **options))
    run = run.lower(variables).compile()
    began = time.perf_counter()
    tokens = np.asarray(run(variables))
    seconds = time.perf_counter() - began
    for prompt, row in zip(args.prompt, tokens):
        kept = itertools.takewhile(lambda token: token not in ends, row.tolist())
        print(f"=== {prompt!r}", prompt + tokenizer.decode(list(kept)), sep="\n")
    print(
        f"=== {model.params_dtype.name}: {tokens.size} tokens in {seconds:.2f} s, {tokens.size / seconds:,.0f} tokens/s"
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Continue texts with a GPT that train_gpt.py trained, with a KV cache.")
    add = p.add_argument
    add("--checkpoint", help="of train_gpt.py [default: runs/gpt/fp8, else runs/gpt/bf16]", metavar="DIR")
    add("--hf", help="a checkpoint of Hugging Face's form instead, with its tokenizer.json", metavar="DIR")
    add("--prompt", help="text to continue; repeat it for a batch", action="append", metavar="TEXT")
    add("--tokens", help="bytes to add to each prompt [default: 100]", default=100, metavar="N", **whole())
    add("--temperature", help="divides the logits [default: 0.8]", default=0.8, metavar="T", **number(above=0))
    add("--top-k", help="sample among the k likeliest bytes; 0: all [default: 40]", default=40, metavar="K", **whole(0))
    add("--greedy", help="take the likeliest byte", action="store_true")
    add("--seed", help="of sampling [default: 0]", default=0, **SEED)
    add("--bf16", help="run a model that was trained in FP8 in bf16", action="store_true")
    add("--no-cache", help="read the whole text for every byte, to compare", action="store_true")
    args = p.parse_args(argv)
    if args.top_k > VOCAB and not args.hf:
        p.error(f"--top-k is {args.top_k}: give 0 to {VOCAB}")
    if args.hf and (args.checkpoint or args.bf16 or args.no_cache):
        p.error("--hf takes neither --checkpoint nor --bf16 nor --no-cache: leave them out")
    if args.checkpoint is None:
        args.checkpoint = next((d for d in ("runs/gpt/fp8", "runs/gpt/bf16") if pathlib.Path(d).is_dir()), "runs/gpt")
    args.prompt = args.prompt or ["def ", "class Parser:\n"]
    for prompt in args.prompt:
        try:
            prompt.encode() if args.hf else os.fsencode(prompt)
        except UnicodeEncodeError:
            p.error(f"--prompt {prompt!r} is no text in UTF-8, which --hf reads: give one that is")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    prompts = [os.fsencode(prompt) for prompt in args.prompt]  # bytes, which need be no text
    sampling = sampler(args.greedy, args.temperature, args.top_k)
    choose = sampling.choose
    try:
        if args.hf:
            return generate_hf(args, sampling)
        model, variables, recipe = load(pathlib.Path(args.checkpoint), args.bf16)
        tokens, reading, writing = generate(
            model, variables, recipe, prompts, args.tokens, choose, args.seed, not args.no_cache
        )
    except (OSError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    for prompt, row in zip(prompts, tokens):
        print(f"=== {prompt.decode(errors='replace')!r}", (prompt + row.tobytes()).decode(errors="replace"), sep="\n")
    read = "" if args.no_cache else f"; prompts read in {reading * 1e3:.1f} ms"
    print(
        f"=== {'bf16' if recipe is None else 'fp8'}, {'no cache' if args.no_cache else 'cache'}: "
        f"{tokens.size} tokens in {writing:.2f} s, {tokens.size / writing:,.0f} tokens/s{read}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
