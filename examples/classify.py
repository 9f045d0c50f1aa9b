"""Which package of Python's library a piece of source is from: an encoder that classifies text in FP8.

    python examples/classify.py --compare

The text is on every machine that has Python, so nothing is downloaded. Held out are the last tenth of each file.
"""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from tasks import loop

import te_jax.flax as te_flax

PACKAGES = ("asyncio", "email", "json", "logging", "multiprocessing", "tkinter", "unittest", "xml")
BATCH, LENGTH, HIDDEN, LAYERS = 32, 64, 128, 2


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:  # bytes [b, s] -> [b, packages]
        x = nn.Embed(256, HIDDEN, dtype=jnp.bfloat16)(text)
        for _ in range(LAYERS):
            x = te_flax.TransformerLayer(
                hidden_size=HIDDEN,
                mlp_hidden_size=4 * HIDDEN,
                num_attention_heads=4,
                self_attn_mask_type="no_mask",
                enable_rotary_pos_emb=True,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            )(x)
        return nn.Dense(len(PACKAGES))(te_flax.LayerNorm()(x).mean(1))


def sources(package: str) -> np.ndarray:
    """The bytes of a package's sources, one file after the other."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"classify.py: this Python's library lacks the package {package}")
    files = sorted(pathlib.Path(found.submodule_search_locations[0]).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def task() -> loop.Task:
    texts = [sources(package) for package in PACKAGES]

    def pieces(seed: int, count: int, part: tuple[float, float]) -> loop.Batch:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, len(PACKAGES), count)
        starts = [int(len(texts[i]) * rng.uniform(*part)) for i in labels]
        rows = [texts[i][at : at + LENGTH] for i, at in zip(labels, starts)]
        rows = [np.pad(row, (0, LENGTH - len(row))) for row in rows]
        return {"text": np.stack(rows).astype(np.int32), "labels": labels.astype(np.int32)}

    batch = lambda step: pieces(step, BATCH, (0.0, 0.89))
    return loop.Task("classify", Encoder(), batch, pieces(10**6, 512, (0.9, 0.99)), steps=600)


def main(argv: list[str] | None = None) -> int:
    return loop.main(task, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
