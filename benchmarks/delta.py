"""Cases of the gated delta rule, with a gate for each head or, KDA, each channel of keys, next to the Triton kernels of
flash-linear-attention (the package `fla`), eager and as a CUDA graph, and as CUDA graphs to FlashQLA's of TileLang and,
in KDA's forward pass, FlashKDA's of CUTLASS, where these are installed. All divide queries and keys by their lengths.
FlashKDA makes gates and beta of logits in bf16 inside of its kernels; the others read gates as logarithms in f32.

A step with a backward pass holds y, as torch's does, and returns the gradients of all operands. `peak_bytes` of a peer
is what torch had allocated at most, te_jax's is XLA's account of the call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax.ops.delta import gated_delta

from . import torch_peers
from .cases import Case
from .timing import Call, compiled, normal, on_gpu

TE = "te_jax"
_CHUNK = 64  # tokens


class Peer(NamedTuple):
    package: str
    graph: bool  # whether it is a CUDA graph
    tells_peak: bool = False


PEERS = {
    "fla eager": Peer("fla", False, True),
    "fla graph": Peer("fla", True),
    "flash_qla graph": Peer("flash_qla", True, True),
    "flash_kda graph": Peer("flash_kda", True),
}


@dataclass(frozen=True)
class Rule:
    """Sizes of a call: q and k are [batch, seq, groups, d], v is [batch, seq, heads, d]."""

    batch: int
    seq: int
    groups: int
    heads: int
    d: int = 128
    by_channel: bool = False  # whether each channel of keys has a gate
    run: int = 0  # tokens of each of the sequences that a row packs; 0: it is one

    @property
    def name(self) -> str:
        rule = "KDA" if self.by_channel else "gated delta"
        packed = f" of {self.run}" if self.run else ""
        return f"{rule} b{self.batch} s{self.seq}{packed} g{self.groups} h{self.heads} d{self.d}"

    @property
    def gates(self) -> int:
        """How many a head has."""
        return self.d if self.by_channel else 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.seq, self.groups, self.heads, self.d

    def flops(self, backward: bool) -> float:
        """Products in chunks of 64 tokens. Those of keys, and of queries and keys, are of a group; what a token writes
        and reads of its chunk is of a head, and all four count half, since they are causal; each head reads its state
        for a key and a query, and adds to it. The inverse and gates do not count. The backward pass has two products
        for each; what it computes again does not count."""
        seen = _CHUNK / 2
        of_token = self.groups * 2 * seen * self.d + self.heads * (2 * seen * self.d + 3 * self.d * self.d)
        return 2 * self.batch * self.seq * of_token * (3 if backward else 1)

    def bytes(self, backward: bool) -> float:
        """Each operand once, and y; with the backward pass dy and gradients, too. The gate is of four bytes, the rest
        of two."""
        y = 2 * self.batch * self.seq * self.heads * self.d
        operands = (
            self.batch * self.seq * (2 * self.d * (2 * self.groups + self.heads) + (2 + 4 * self.gates) * self.heads)
        )
        return (operands + y) * (2 if backward else 1)

    def operands(self) -> tuple[jax.Array, ...]:
        """q, k, v, beta and gate; of a state about a twentieth fades with each token."""
        b, s, g, h, d = self.shape
        q, k, v = (normal(seed, (b, s, n, d)) for seed, n in enumerate((g, g, h)))
        of_gate = (b, s, h, d) if self.by_channel else (b, s, h)
        beta, gate = normal(3, (b, s, h)), normal(4, of_gate, jnp.float32)
        return q, k, v, jax.nn.sigmoid(beta), -jax.nn.softplus(gate - 3)

    def segments(self) -> jax.Array | None:
        if not self.run:
            return None
        return jnp.broadcast_to(jnp.arange(self.seq, dtype=jnp.int32) // self.run, (self.batch, self.seq))

    def build(self, backward: bool) -> Call:
        if not backward:
            return compiled(rule, [(*self.operands(), self.segments())])

        def both(operands, segments, dy):
            y, pull = jax.vjp(lambda *operands: rule(*operands, segments), *operands)
            return y, pull(dy)

        dy = normal(5, (self.batch, self.seq, self.heads, self.d))
        return compiled(both, [(self.operands(), self.segments(), dy)])

    def has(self, peer: Peer, backward: bool) -> bool:
        """Whether the peer computes this: FlashQLA has one gate a head, FlashKDA one a channel, as many heads of keys
        as of values, and no backward pass; both have 128 channels."""
        if peer.package == "flash_qla":
            return not self.by_channel and self.d == 128
        if peer.package == "flash_kda":
            return self.by_channel and not backward and self.groups == self.heads and self.d == 128
        return True

    def cases(self, peers: Mapping[str, Peer]) -> Iterator[Case]:
        """peers: those to run next to it, where they have it."""
        for backward in (False, True):
            others = {impl: peer for impl, peer in peers.items() if self.has(peer, backward)}
            name = f"{self.name} {'fwd+bwd' if backward else 'fwd'}"
            work = dict(flops=self.flops(backward), bytes=self.bytes(backward), suite="delta")
            yield Case(name, TE, partial(self.build, backward), beside=tuple(others), **work)
            asked = dict(shape=self.shape, backward=backward, by_channel=self.by_channel, run=self.run)
            for impl, peer in others.items():
                of_peer = asked | dict(package=peer.package)
                more = dict(figures=partial(_peak_of, of_peer)) if backward and peer.tells_peak else {}
                yield Case(name, impl, measure=partial(_measure, peer.graph, of_peer), **work, **more)


def rule(q, k, v, beta, gate, segments=None):
    return gated_delta(q, k, v, beta, gate, normalize=True, segments=segments)


def _measure(graph: bool, asked: dict, calls: int, repeat: int) -> list[float]:
    return [torch_peers.measure_delta(calls, graph, **asked) for _ in range(repeat)]


def _peak_of(asked: dict, ms: float) -> dict:
    return {"peak_bytes": torch_peers.peak_of_delta(**asked)}


def rules(tiny: bool) -> list[Rule]:
    if tiny:
        one, by_channel = Rule(1, 96, 1, 2, 16), Rule(1, 80, 2, 2, 16, by_channel=True)
        return [one, Rule(2, 64, 2, 2, 16, run=16), by_channel]
    sizes = [(1, 8192, 16, 32), (1, 32768, 16, 32), (1, 262144, 16, 32), (4, 8192, 16, 32), (1, 8192, 64, 64)]
    # fla's own sizes.
    fla = [(1, 8192, 96, 96), (2, 16384, 16, 16), (4, 2048, 16, 16), (4, 4096, 64, 64), (8, 2048, 32, 32, 256)]
    fla += [(8, 1024, 8, 8, 64)]
    by_channel = [(1, 8192, 32, 32), (1, 8192, 96, 96), (4, 4096, 64, 64)]  # Kimi Linear's, and two of fla's
    few = [(1, 32768, 2, 4), (1, 262144, 2, 4), (1, 32768, 1, 2)]  # Qwen3-Next's on one of 8 or 16 devices
    packed = Rule(1, 32768, 16, 32, run=1024)
    one_gate = [*(Rule(*size) for size in (*sizes, *fla, *few)), packed]
    return [*one_gate, *(Rule(*size, by_channel=True) for size in by_channel)]


def cases(tiny: bool) -> Iterator[Case]:
    peers = {impl: peer for impl, peer in PEERS.items() if on_gpu() and torch_peers.available(peer.package)}
    for one in rules(tiny):
        yield from one.cases(peers)
