"""Generation behind contexts of growing length, of a model of Llama 3 8B's widths with attention, with Mamba-2, or with
both: the memory that a row of the context takes, what of it grows, and tokens per second (`decode --mixer`).

Each mixer and context has a process of its own, with random weights in bf16. One row is read; the rows of a batch are
copies of it.
"""

import dataclasses
import itertools
import json
import math
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_jax import models
from te_jax.flax.cache import KEYS_VALUES
from te_jax.models import families

from . import gpt, machine, report
from .process import in_own_process

MIXERS = tuple(name for name, mixer in gpt.config.MIXERS.items() if mixer is None or mixer.kind == "mamba2")
CASE = "Llama 3 8B's widths: generate behind {} tokens"
CONTEXTS, BATCHES, TOKENS = (2048, 8192, 32768), (1, 16), 64
_TINY_CONTEXTS = 32, 256
_TIMED = 2  # calls
_TINY = families.Size(64, 96, 4, 4, groups=2, vocab=160, tied=False)


def model(mixer: str, tiny: bool) -> models.CausalLM:
    """Layers as in `train_gpt.py --mixer`; Mamba-2 of twice the width in eight groups, as in Nemotron-H."""
    config = families.llama3(_TINY) if tiny else models.published("llama3-8b")
    sizes = dict(ssm_num_heads=4, ssm_head_dim=32) if tiny else dict(ssm_num_heads=128, ssm_num_groups=8)
    mixed = gpt.model.with_mixer(dict(config.layer), gpt.config.MIXERS[mixer], dict(ssm=sizes))
    config = dataclasses.replace(config, **mixed)
    return models.CausalLM(config, params_dtype=jnp.bfloat16)


def bytes_of_row(cache) -> dict[str, int]:
    """Of a cache of one row, arrays or their types: keys and values, which have a slot for each token, and the rest,
    which are Mamba-2's states and counts of tokens."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(cache)]
    of = lambda kinds: sum(math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in leaves if path.endswith(kinds))
    keys_values = of(tuple(f"'{name}']" for name in KEYS_VALUES))
    return dict(keys_values_bytes=keys_values, states_bytes=of("") - keys_values)


def measure(mixer: str, context: int, tiny: bool) -> dict:
    lm, prompt = model(mixer, tiny), jnp.zeros((1, 8), jnp.int32)
    variables = jax.jit(lambda key: nn.meta.unbox(lm.init(key, prompt)))(jax.random.key(0))
    lm, variables = models.unscan(lm, variables)  # after `init`, which so draws a stack at once
    return behind(lm, jax.block_until_ready(variables), context) | dict(impl=f"te_jax bf16, {mixer}")


def behind(lm: models.CausalLM, variables, context: int) -> dict:
    """The row of one context."""
    tokens = np.random.default_rng(context).integers(0, lm.config.vocab_size, (1, context), dtype=np.int32)
    lengths, slots = jnp.full((1,), context, jnp.int32), context + (_TIMED + 1) * TOKENS
    read = jax.jit(lambda variables: models.read_prompts(lm, variables, tokens, lengths, slots))
    times, state = [], None
    for _ in range(_TIMED + 1):
        state = None  # its memory is the next one's
        start = time.perf_counter()
        state = jax.block_until_ready(read(variables))
        times.append(time.perf_counter() - start)
    row = dict(case=CASE.format(context), **bytes_of_row(state[1]), read_s=min(times[1:]))
    options = dict(key=None, count=TOKENS, choose=models.GREEDY.choose)
    write = jax.jit(partial(models.write_tokens, lm, **options), donate_argnums=1)
    for batch in BATCHES:
        rows, at, times = _copies(state, batch), jnp.repeat(lengths, batch), []
        for _ in range(_TIMED + 1):
            start = time.perf_counter()
            made, rows = jax.block_until_ready(write(variables, rows, at))
            times.append(time.perf_counter() - start)
            at = at + TOKENS
        if made.shape != (batch, TOKENS):
            raise ValueError(f"{made.shape} tokens, not {(batch, TOKENS)}")
        del rows
        row[f"tokens_per_s_b{batch}"] = batch * TOKENS / min(times[1:])
    return row | dict(peak_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"))


def _copies(state, batch: int):
    """The state of `batch` rows, all as the one of `state`."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, 0) if leaf.ndim else jnp.copy(leaf), state)


def main(args) -> int:
    if args.measure:
        print(json.dumps(measure(args.mixer, int(args.measure), args.tiny)))
        return 0
    result, mixers = {"machine": machine.describe(), "rows": []}, MIXERS if args.mixer == "all" else (args.mixer,)
    for mixer, context in itertools.product(mixers, _TINY_CONTEXTS if args.tiny else CONTEXTS):
        found = in_own_process("decode", tiny=args.tiny, mixer=mixer, measure=context)
        result["rows"].append(dict(case=CASE.format(context), impl=f"te_jax bf16, {mixer}") | found)
        print(result["rows"][-1], flush=True)
        report.write(result, args.out)
    return any("error" in row for row in result["rows"])
