"""Cases of Mamba-2: the scan, next to mamba_ssm's Triton kernels, eager and as a CUDA graph, where these are installed;
rows of growing length; the convolution; and the whole block in bf16 and FP8.

The scan's step with a backward pass holds y, as torch's does, and returns the gradients of all operands. `peak_bytes`
of mamba_ssm is what torch had allocated at most, te_jax's is XLA's account of the call.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import te_jax.flax as te_flax
from te_jax.ops.ssm import causal_conv1d, ssd

from . import layers, torch_peers
from .cases import Case
from .timing import Call, compiled, normal, on_gpu, passes

TE = "te_jax"
PEERS = {"mamba_ssm eager": False, "mamba_ssm graph": True}  # whether it is a CUDA graph
BF16 = "te_jax bf16"
BLOCK_IMPLS = (BF16, "te_jax fp8", "te_jax fp8 current", "te_jax fp8 block")
_CHUNK = 64  # tokens


@dataclass(frozen=True)
class Scan:
    """Sizes of a scan: x is [batch, seq, heads, p], B and C [batch, seq, groups, n]."""

    batch: int
    seq: int
    heads: int
    groups: int
    p: int = 64
    n: int = 128

    @property
    def name(self) -> str:
        return f"ssd b{self.batch} s{self.seq} h{self.heads} g{self.groups} p{self.p} n{self.n}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.seq, self.heads, self.groups, self.p, self.n

    def flops(self, backward: bool) -> float:
        """Products in chunks of 64 tokens. Scores C B' are of a group, their product with x of a head, and of both half
        counts, since they are causal; each head adds x B' to its state, and reads C of it. The backward pass has two
        products for each; what it computes again does not count."""
        seen = _CHUNK / 2
        of_token = self.groups * seen * self.n + self.heads * (seen * self.p + 2 * self.p * self.n)
        return 2 * self.batch * self.seq * of_token * (3 if backward else 1)

    def bytes(self, backward: bool) -> float:
        """Each operand once, and y; with the backward pass dy and gradients, too. x, B, C and dt are of two bytes, A,
        D and dt_bias of four."""
        y = 2 * self.batch * self.seq * self.heads * self.p
        of_token = self.heads * self.p + self.heads + 2 * self.groups * self.n
        operands = 2 * self.batch * self.seq * of_token + 4 * 3 * self.heads
        return (operands + y) * (2 if backward else 1)

    def operands(self) -> tuple[jax.Array, ...]:
        """x, dt, A, B, C, D and dt_bias, with steps around 0.02."""
        b, s, h, g, p, n = self.shape
        A, D, bias = (normal(seed, (h,), jnp.float32) for seed in (5, 6, 7))
        B, C = normal(2, (b, s, g, n), scale=0.1), normal(3, (b, s, g, n))
        return normal(0, (b, s, h, p)), normal(1, (b, s, h)), -jnp.exp(A), B, C, D, bias - 4

    def build(self, backward: bool) -> Call:
        if not backward:
            return compiled(scan, [self.operands()])

        def both(operands, dy):
            y, pull = jax.vjp(scan, *operands)
            return y, pull(dy)

        return compiled(both, [(self.operands(), normal(4, (self.batch, self.seq, self.heads, self.p)))])

    def cases(self, peers: bool) -> Iterator[Case]:
        """peers: with those that they have."""
        for backward in (False, True):
            name = f"{self.name} {'fwd+bwd' if backward else 'fwd'}"
            work = dict(flops=self.flops(backward), bytes=self.bytes(backward), suite="ssm")
            others = PEERS if peers else {}
            yield Case(name, TE, partial(self.build, backward), beside=tuple(others), **work)
            asked = dict(shape=self.shape, backward=backward)
            for impl, graph in others.items():
                more = dict(figures=partial(_peak_of_peer, asked)) if backward and not graph else {}
                yield Case(name, impl, measure=partial(_peer, graph, asked), **work, **more)


def scan(x, dt, A, B, C, D, dt_bias):
    return ssd(x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)


def _peer(graph: bool, asked: dict, calls: int, repeat: int) -> list[float]:
    return [torch_peers.measure_scan(calls, graph, **asked) for _ in range(repeat)]


def _peak_of_peer(asked: dict, ms: float) -> dict:
    return {"peak_bytes": torch_peers.peak_of_scan(**asked)}


def scans(tiny: bool) -> list[Scan]:
    if tiny:
        return [Scan(1, 96, 2, 1, 16, 16), Scan(2, 64, 4, 2, 16, 16)]
    sizes = [(1, 8192, 128, 1), (8, 2048, 80, 1), (2, 8192, 80, 1), (1, 65536, 80, 1), (2, 4096, 128, 8)]
    return [Scan(*size) for size in sizes]


def lengthening(tiny: bool) -> list[Scan]:
    """Rows of a length, and of four times as much: time is to be linear in it."""
    return [Scan(1, s, 1, 1, 16, 16) for s in (128, 512)] if tiny else [Scan(1, s, 16, 1) for s in (65536, 262144)]


# -- the convolution, and the block --------------------------------------------------------------------------


def _convolutions(tiny: bool) -> Iterator[Case]:
    """Of x, B and C of 128 heads with one group. Bytes are its floor: x and y, backward dy and dx too."""
    tokens, channels, width = (64, 32, 4) if tiny else (8192, 8448, 4)
    conv = partial(causal_conv1d, activation="silu")
    filters = 4 * (width + 1) * channels  # kernel and bias, f32

    def build(backward: bool) -> Call:
        x, dy = (normal(seed, (1, tokens, channels)) for seed in (0, 3))
        operands = x, normal(1, (width, channels), jnp.float32), normal(2, (channels,), jnp.float32)
        return passes(conv, [(operands, dy, ())], backward)

    for backward in (False, True):
        name = f"causal_conv1d {tokens}x{channels} w{width} silu {'fwd+bwd' if backward else 'fwd'}"
        moved = 2 * tokens * channels * (4 if backward else 2) + filters * (2 if backward else 1)
        yield Case(name, TE, partial(build, backward), bytes=moved, suite="ssm")


@dataclass(frozen=True)
class Block(layers.Model):
    """Sizes of a `te_flax.Mamba2`, with its norm in front: heads of 64 channels, twice as many in all as the width."""

    seq: int
    hidden: int
    groups: int
    n: int = 128

    heads = property(lambda self: 2 * self.hidden // 64)
    name = property(lambda self: f"Mamba2 h{self.hidden} s{self.seq}, {self.heads} heads, {self.groups} groups")
    shape = property(lambda self: (1, self.seq, self.hidden))

    def te(self):
        fields = dict(ssm_num_heads=self.heads, ssm_num_groups=self.groups, ssm_state_size=self.n)
        return te_flax.Mamba2(**fields, dtype=jnp.bfloat16)

    @property
    def weights(self) -> int:
        """Those that project to x and z, B and C, dt, and back."""
        return self.hidden * (3 * 64 * self.heads + 2 * self.groups * self.n + self.heads)

    def flops(self, backward: bool) -> float:
        return self.gemm_flops(backward) + Scan(1, self.seq, self.heads, self.groups, n=self.n).flops(backward)


def _blocks(tiny: bool) -> Iterator[Case]:
    block = Block(64, 64, 1, 16) if tiny else Block(8192, 4096, 8)
    for impl in BLOCK_IMPLS:
        beside = (BF16,) if impl != BF16 else ()
        yield layers.case(block, impl, backward=True, suite="ssm", beside=beside)


def cases(tiny: bool) -> Iterator[Case]:
    peers = on_gpu() and torch_peers.available("mamba_ssm")
    for one in scans(tiny):
        yield from one.cases(peers)
    for one in lengthening(tiny):
        yield from one.cases(peers=False)
    yield from _convolutions(tiny)
    yield from _blocks(tiny)
