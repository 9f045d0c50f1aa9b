"""Mixtures of experts as benchmarks see them: sizes of published models, and tokens that choose experts."""

from dataclasses import dataclass
from functools import cache, cached_property

import jax
import numpy as np

from te_jax.ops.experts.permute import Groups, buffer_rows, group


@dataclass(frozen=True)
class Experts:
    """Sizes of the experts of one layer on one GPU, with gated activations: wi is [E, h, 2 f], wo [E, f, h].

    topk: the experts of this GPU that a token goes to. skewed: experts are chosen with odds 1 : 1/2 : 1/3 ... (Zipf);
    else all get the same number of tokens.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int
    skewed: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.tokens} tokens, {'zipf' if self.skewed else 'balanced'}"

    pairs = property(lambda self: self.tokens * self.topk)
    rows = property(lambda self: buffer_rows(self.pairs, self.experts))

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """(inputs, features) of each stacked weight."""
        return {"wi": (self.hidden, 2 * self.ffn), "wo": (self.ffn, self.hidden)}

    @cached_property
    def choices(self) -> np.ndarray:
        """i32[T, k]: the experts of each token, all different."""
        rng = np.random.default_rng(5)
        if self.skewed:
            odds = -np.log(np.arange(1, self.experts + 1)) + rng.gumbel(size=(self.tokens, self.experts))
            return rng.permutation(self.experts)[np.argsort(-odds)[:, : self.topk]].astype(np.int32)
        each = np.arange(self.pairs).reshape(self.tokens, self.topk) % self.experts
        return rng.permutation(self.experts)[rng.permutation(each)].astype(np.int32)

    @cached_property
    def counts(self) -> list[int]:
        """The tokens of each expert."""
        return np.bincount(self.choices.reshape(-1), minlength=self.experts).tolist()

    @property
    def active(self) -> int:
        """How many experts have tokens."""
        return sum(count > 0 for count in self.counts)


@cache
def groups(model: Experts) -> Groups:
    return jax.jit(lambda experts: group(experts, model.experts))(model.choices)


def models(tiny: bool) -> list[Experts]:
    """Each balanced, then skewed. Of DeepSeek-V3's 256 experts a GPU has 64, a quarter: of a token's 8 experts it has
    2, and as many tokens as give each of its experts 256 or 1024 rows."""
    mixtral, deepseek = ("Mixtral 8x7B", 4096, 14336, 8, 2), ("DeepSeek-V3, 64 of 256 experts,", 7168, 2048, 64, 2)
    sizes = [(*mixtral, 8192), (*mixtral, 32768), ("Qwen3-30B-A3B", 2048, 768, 128, 8, 8192)]
    sizes += [("gpt-oss-20b", 2880, 2880, 32, 4, 8192)]  # which 128 does not divide
    sizes += [(*deepseek, 8192), (*deepseek, 32768)]
    sizes = [("tiny", 128, 64, 3, 2, 48)] if tiny else sizes
    return [Experts(*each, skewed) for each in sizes for skewed in (False, True)]
