"""Handwritten digits, the 1797 that scikit-learn ships, by a convolution and dense layers in FP8.

    python examples/digits.py --compare

A smaller MNIST: images of 8 x 8, nothing to download. The convolution and the classes' layer are Flax's own, the dense
layers between them te_jax's.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from tasks import loop

import te_jax.flax as te_flax

BATCH, HELD_OUT = 64, 297


class Net(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:  # [b, 8, 8, 1] -> [b, 10]
        x = nn.relu(nn.Conv(32, (3, 3), dtype=jnp.bfloat16)(image.astype(jnp.bfloat16)))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        for width in (256, 128):
            x = nn.relu(te_flax.DenseGeneral(width, use_bias=True)(x))
        return nn.Dense(10)(x)


def task() -> loop.Task:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("digits.py takes its images from scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    held_out, rest = order[:HELD_OUT], order[HELD_OUT:]
    pick = lambda rows: {"image": images[rows], "labels": labels[rows].astype(np.int32)}
    batch = lambda step: pick(np.random.default_rng(step).choice(rest, BATCH, replace=False))
    return loop.Task("digits", Net(), batch, pick(held_out), steps=400)


def main(argv: list[str] | None = None) -> int:
    return loop.main(task, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())
