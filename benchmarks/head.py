"""Cases of the head of a language model with its loss: te_jax, plain JAX with all logits in f32, and in chunks by hand.

One step is the mean loss and the gradients of hidden states and kernel, both bf16. What te_jax is to keep next to whole
logits: a quarter of the peak memory, in bf16 the time, in FP8 0.7 of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from te_jax.layers import linear_cross_entropy
from te_jax.state import fp8

from .cases import Case
from .layers import RECIPES
from .timing import Call, compiled, normal

_SCALE = 64.0  # of x and kernel in FP8: standard normal data times this fits
_ROWS = 2048  # tokens of a chunk by hand


@dataclass(frozen=True)
class Head:
    tokens: int
    hidden: int
    words: int
    words_first: bool = False

    @property
    def name(self) -> str:
        tied = ", tied" if self.words_first else ""
        return f"head and loss {self.tokens}x{self.hidden}x{self.words}{tied} fwd+bwd"

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.hidden * self.words

    def inputs(self) -> tuple:
        shape = (self.words, self.hidden) if self.words_first else (self.hidden, self.words)
        labels = jax.random.randint(jax.random.key(2), (self.tokens,), 0, self.words)
        return normal(0, (self.tokens, self.hidden)), normal(1, shape, scale=self.hidden**-0.5), labels


def _whole(x, kernel, labels):
    """Logits in f32, all of them."""
    logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
    label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - label)


def _mapped(x, kernel, labels):
    """Chunks of tokens under jax.checkpoint: the backward pass computes the logits again."""
    rows = min(_ROWS, x.shape[0])
    one = jax.checkpoint(lambda chunk: _whole(chunk[0], kernel, chunk[1]))
    return jnp.mean(jax.lax.map(one, (x.reshape(-1, rows, x.shape[1]), labels.reshape(-1, rows))))


PLAIN = {"jax f32 logits": _whole, "jax lax.map": _mapped}
TE = ("te_jax bf16", "te_jax fp8", "te_jax fp8 current", "te_jax fp8 block")


def _step(head: Head, impl: str):
    if impl in PLAIN:
        orient = (lambda kernel: kernel.T) if head.words_first else (lambda kernel: kernel)
        return jax.value_and_grad(lambda x, kernel, labels: PLAIN[impl](x, orient(kernel), labels), (0, 1))
    recipe, metas = RECIPES[impl], None
    if recipe is not None and recipe.has_state:
        metas = fp8.DenseMetas(*[fp8.TensorMeta(jnp.float32(_SCALE), jnp.float32(0))] * 3)
    options = dict(recipe=recipe, metas=metas, words_first=head.words_first)
    loss = lambda x, kernel, labels: linear_cross_entropy(x, kernel, labels, **options)
    return jax.value_and_grad(loss, (0, 1))


def build(head: Head, impl: str) -> Call:
    return compiled(_step(head, impl), [head.inputs()])


def _case(head: Head, impl: str) -> Case:
    more = dict(suite="head", tokens=head.tokens, fp8_flops=head.flops if "fp8" in impl else 0.0)
    more["beside"] = tuple(PLAIN) if impl in TE else ()
    return Case(head.name, impl, build=lambda: build(head, impl), flops=head.flops, **more)


def cases(tiny: bool) -> Iterator[Case]:
    sizes = (64, 32, 96) if tiny else (16384, 4096, 128256)
    for head in (Head(*sizes), Head(*sizes, words_first=True)):
        for impl in (*TE, *PLAIN):
            yield _case(head, impl)
