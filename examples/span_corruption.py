"""T5's pre-training in FP8: spans of a text are cut out, an encoder reads the rest, a decoder writes the spans.

    python examples/span_corruption.py --compare

After Raffel et al., "Exploring the Limits of Transfer Learning" (https://arxiv.org/abs/1910.10683), section 3.1.4: 15 %
of the tokens in spans of 3; each span becomes a sentinel, and the target is each sentinel with its span. Tokens are
bytes; the text is the source of Python's library. The blocks are T5's in models.py.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from gpt import data
from models import Size, t5_decoder_block, t5_encoder_block
from tasks import loop

SENTINELS, START = 256, 288  # token ids: bytes, 32 sentinels, the start of the target
BATCH, LENGTH, SPANS, SPAN = 16, 128, 6, 3  # 18 of 128 tokens are cut out: 14 %
TARGET = SPANS * (SPAN + 1)
SIZE = Size(hidden=128, ffn=512, heads=4, layers=2)


class T5(nn.Module):
    @nn.compact
    def __call__(self, text: jax.Array, target: jax.Array) -> jax.Array:  # [b, s], [b, t] -> [b, t, tokens]
        embedding = nn.Embed(304, SIZE.hidden, dtype=jnp.bfloat16)  # a multiple of 16 tokens
        options = dict(
            hidden_dropout=0.0, attention_dropout=0.0, intermediate_dropout=0.0, self_attn_mask_type="no_mask"
        )
        encoded = embedding(text)
        for _ in range(SIZE.layers):
            encoded = t5_encoder_block(SIZE, **options)(encoded)
        x = embedding(target)
        for _ in range(SIZE.layers):
            x = t5_decoder_block(SIZE, **options | dict(self_attn_mask_type="causal"))(x, encoded)
        return embedding.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x) * SIZE.hidden**-0.5)


def corrupt(text: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A text with sentinels for spans, i32[LENGTH - SPANS * (SPAN - 1)], and its target, i32[TARGET]."""
    gaps = rng.multinomial(len(text) - SPANS * (SPAN + 1), [1 / (SPANS + 1)] * (SPANS + 1))
    starts = np.cumsum(gaps[:-1] + 1) + SPAN * np.arange(SPANS)  # a token or more is left between spans
    kept, cut, at = [], [], 0
    for i, start in enumerate(starts):
        kept += [*text[at:start], SENTINELS + i]
        cut += [SENTINELS + i, *text[start : start + SPAN]]
        at = start + SPAN
    return np.array([*kept, *text[at:]], np.int32), np.array(cut, np.int32)


def task() -> loop.Task:
    corpus = data.load()

    def examples(text: np.ndarray, seed: int, count: int) -> loop.Batch:
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, len(text) - LENGTH, count)
        pairs = [corrupt(text[start : start + LENGTH], rng) for start in starts]
        texts, targets = (np.stack(rows) for rows in zip(*pairs))
        shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        return {"text": texts, "target": shifted, "labels": np.where(targets >= SENTINELS, -1, targets)}

    batch = lambda step: examples(corpus.train, step, BATCH)
    return loop.Task("span corruption", T5(), batch, examples(corpus.held_out, 10**6, 128), steps=600)


def main(argv: list[str] | None = None) -> int:
    return loop.main(task, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
