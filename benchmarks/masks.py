"""Cases of attention beyond causal rows: packed segments, a sliding window, a decoding step on a long cache."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from cases import Case
from timing import compiled, normal, on_gpu

from te_jax.ops.attention import SequenceDescriptor, dot_product_attention


def _implementation():
    return "cudnn" if on_gpu() else None


def _operands(b, s, h, g, d):
    return tuple(normal(i, (b, s, heads, d)) for i, heads in enumerate((h, g, g, h)))


def _both(forward, backward, q, k, v, dout, *others):
    def run(q, k, v, dout, *others):
        out, vjp = jax.vjp(lambda q, k, v: forward(q, k, v, *others), q, k, v)
        return out, vjp(dout)

    if backward:
        return compiled(run, [(q, k, v, dout, *others)])
    return compiled(forward, [(q, k, v, *others)])


def _segments(sizes, n, backward):
    """n segments of equal length in each row."""
    b, s, *_ = sizes
    lens = jnp.full((b, n), s // n, jnp.int32)
    starts = jnp.broadcast_to(jnp.arange(n + 1, dtype=jnp.int32) * (s // n), (b, n + 1))

    def forward(q, k, v, lens, starts):
        described = SequenceDescriptor.from_seqlens_and_offsets(lens, starts)
        kwargs = dict(attn_mask_type="padding_causal", sequence_descriptor=described)
        return dot_product_attention(q, k, v, implementation=_implementation(), **kwargs)

    return _both(forward, backward, *_operands(*sizes), lens, starts)


def _as_rows(sizes, n, backward):
    """The same work for jax.nn, which has no segments: each is a row."""
    b, s, *rest = sizes
    forward = partial(jax.nn.dot_product_attention, is_causal=True, implementation=_implementation())
    return _both(forward, backward, *_operands(b * n, s // n, *rest))


def _window(sizes, width, ours, backward):
    """Each query sees itself and the `width` - 1 keys before it."""
    if ours:
        kwargs = dict(attn_mask_type="causal", window_size=(width - 1, 0))
        forward = partial(dot_product_attention, implementation=_implementation(), **kwargs)
    else:
        kwargs = dict(is_causal=True, local_window_size=(width - 1, 0))
        forward = partial(jax.nn.dot_product_attention, implementation=_implementation(), **kwargs)
    return _both(forward, backward, *_operands(*sizes))


def _decode(sizes, ours):
    """One query of each row on all keys of its cache, of lengths that the device knows."""
    b, t, h, g, d = sizes
    q, k, v = (normal(i, (b, length, heads, d)) for i, (length, heads) in enumerate(((1, h), (t, g), (t, g))))
    lens = jnp.full(b, t, jnp.int32)

    def forward(q, k, v, lens):
        if not ours:
            return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lens, implementation="xla")
        described = SequenceDescriptor.from_seqlens((jnp.ones_like(lens), lens))
        kwargs = dict(attn_mask_type="padding_causal_bottom_right", sequence_descriptor=described)
        return dot_product_attention(q, k, v, implementation=_implementation(), **kwargs)

    return compiled(forward, [(q, k, v, lens)])


def cases(tiny: bool) -> Iterator[Case]:
    b, s, h, g, d = sizes = (2, 128, 4, 2, 64) if tiny else (4, 8192, 32, 8, 128)
    for suffix, backward in (("fwd", False), ("fwd+bwd", True)):
        factor = 3.5 if backward else 1
        name, flops = f"segments 8x{s // 8} b{b} h{h}/{g} d{d} causal {suffix}", 4 * b * h * s * (s // 8) * d / 2
        yield Case(name, "te_jax", partial(_segments, sizes, 8, backward), flops * factor)
        yield Case(name, "jax.nn cudnn, rows", partial(_as_rows, sizes, 8, backward), flops * factor)
    b, s, *_ = sizes = (2, 128, 4, 2, 64) if tiny else (2, 16384, 32, 8, 128)
    width = s // 16
    for suffix, backward in (("fwd", False), ("fwd+bwd", True)):
        flops = 4 * b * h * s * width * d * (3.5 if backward else 1)
        for impl, ours in (("te_jax", True), ("jax.nn cudnn", False)):
            name = f"window {width} b{b} s{s} h{h}/{g} d{d} {suffix}"
            yield Case(name, impl, partial(_window, sizes, width, ours, backward), flops)
    b, t, *_ = sizes = (2, 128, 4, 2, 64) if tiny else (16, 32768, 32, 8, 128)
    for impl, ours in (("te_jax", True), ("jax.nn xla", False)):
        yield Case(f"decode b{b} t{t} h{h}/{g} d{d}", impl, partial(_decode, sizes, ours), bytes=2 * 2 * b * t * g * d)
