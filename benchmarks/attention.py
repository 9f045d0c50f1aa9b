"""Cases of attention: causal rows, FP8, packed segments, a sliding window, a decoding step on a long cache."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from te_jax.layers import attention_fp8
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.recipe import DelayedScaling
from te_jax.state.fp8 import AttentionMetas, TensorMeta

from .cases import Case
from .timing import Call, compiled, normal, on_gpu, passes

CAUSAL = ["4 4096 32 32 128", "4 4096 32 8 128", "4 2048 32 32 128", "1 8192 32 8 128", "1 8192 64 8 128"]
CAUSAL += ["1 16384 32 8 128", "8 4096 32 32 64"]  # b s h g d
FP8 = (1, 8192, 64, 8, 128)
PASSES = (("fwd", False), ("fwd+bwd", True))


def flops(b, s, h, d, backward=False) -> float:
    """Causal: half of the two products; the backward pass has five, with one computed again."""
    return 4 * b * h * s * s * d / 2 * (3.5 if backward else 1)


def ours(q, k, v, **options) -> jax.Array:
    """te_jax's, through cuDNN on a GPU."""
    return dot_product_attention(q, k, v, implementation="cudnn" if on_gpu() else None, **options)


def of_jax(q, k, v, **options) -> jax.Array:
    """jax.nn's, through cuDNN on a GPU."""
    options = dict(implementation="cudnn" if on_gpu() else None) | options
    return jax.nn.dot_product_attention(q, k, v, **options)


def _operands(b, s, h, g, d, queries=None):
    return [normal(i, (b, length, heads, d)) for i, (length, heads) in enumerate(((queries or s, h), (s, g), (s, g)))]


def _call(sizes, backward, forward, *others) -> Call:
    """others: operands of `forward` behind q, k and v."""
    b, s, h, _, d = sizes
    return passes(forward, [(_operands(*sizes), normal(3, (b, s, h, d)), others)], backward)


def _causal(sizes, backward, is_te):
    forward = partial(ours, attn_mask_type="causal") if is_te else partial(of_jax, is_causal=True)
    return _call(sizes, backward, forward)


def _fp8(sizes, backward):
    """As a layer calls it: operands are quantized with delayed scales, results and gradients are bf16."""
    recipe = DelayedScaling(fp8_dpa=True)
    by = dict(q=100.0, k=100.0, v=100.0, o=100.0, do=1e4, dq=1e4, dk=1e4, dv=1e4, dp=1e4)  # of normal data
    metas = AttentionMetas(**{name: TensorMeta(jnp.float32(scale), jnp.float32(0)) for name, scale in by.items()})
    return _call(sizes, backward, partial(attention_fp8, recipe=recipe, metas=metas, attn_mask_type="causal"))


def _segments(sizes, n, backward):
    """n segments of equal length in each row."""
    b, s, *_ = sizes
    lens = jnp.full((b, n), s // n, jnp.int32)
    starts = jnp.broadcast_to(jnp.arange(n + 1, dtype=jnp.int32) * (s // n), (b, n + 1))

    def forward(q, k, v, lens, starts):
        described = SequenceDescriptor.from_seqlens_and_offsets(lens, starts)
        return ours(q, k, v, attn_mask_type="padding_causal", sequence_descriptor=described)

    return _call(sizes, backward, forward, lens, starts)


def _as_rows(sizes, n, backward):
    """The same work for jax.nn, which has no segments: each is a row."""
    b, s, *rest = sizes
    return _causal((b * n, s // n, *rest), backward, is_te=False)


def _window(sizes, width, backward, is_te):
    """Each query sees itself and the `width` - 1 keys before it."""
    window = (width - 1, 0)
    of_te = partial(ours, attn_mask_type="causal", window_size=window)
    forward = of_te if is_te else partial(of_jax, is_causal=True, local_window_size=window)
    return _call(sizes, backward, forward)


def _decode(sizes, is_te):
    """One query of each row on all keys of its cache, of lengths that the device knows."""

    def forward(q, k, v, lens):
        if not is_te:
            return of_jax(q, k, v, key_value_seq_lengths=lens, implementation="xla")
        described = SequenceDescriptor.from_seqlens((jnp.ones_like(lens), lens))
        return ours(q, k, v, attn_mask_type="padding_causal_bottom_right", sequence_descriptor=described)

    return compiled(forward, [(*_operands(*sizes, queries=1), jnp.full(sizes[0], sizes[1], jnp.int32))])


def cases(tiny: bool) -> Iterator[Case]:
    small = (1, 128, 4, 2, 64)
    for sizes in [small] if tiny else [tuple(map(int, sizes.split())) for sizes in CAUSAL]:
        yield from _causal_cases(*sizes, fp8=sizes == (small if tiny else FP8))
    yield from _masked_cases(tiny)


def _causal_cases(b, s, h, g, d, fp8) -> Iterator[Case]:
    """fp8: with rows in FP8, whose gradients are bf16 by the layer's rule."""
    sizes, name = (b, s, h, g, d), f"attention b{b} s{s} h{h}/{g} d{d} causal"
    for impl, is_te in (("te_jax", True), ("jax.nn cudnn", False)):
        for suffix, backward in PASSES:
            build = partial(_causal, sizes, backward, is_te)
            yield Case(f"{name} {suffix}", impl, build, flops(b, s, h, d, backward))
    for suffix, backward in PASSES if fp8 else ():
        work = dict(flops=flops(b, s, h, d, backward), fp8_flops=flops(b, s, h, d))
        yield Case(f"{name} {suffix}", "te_jax fp8", partial(_fp8, sizes, backward), **work)


def _masked_cases(tiny) -> Iterator[Case]:
    h, g, d = (4, 2, 64) if tiny else (32, 8, 128)
    b, s = (2, 128) if tiny else (4, 8192)
    for suffix, backward in PASSES:
        name, work = f"segments 8x{s // 8} b{b} h{h}/{g} d{d} causal {suffix}", flops(8 * b, s // 8, h, d, backward)
        yield Case(name, "te_jax", partial(_segments, (b, s, h, g, d), 8, backward), work)
        yield Case(name, "jax.nn cudnn, rows", partial(_as_rows, (b, s, h, g, d), 8, backward), work)
    b, s = (2, 128) if tiny else (2, 16384)
    width = s // 16
    for suffix, backward in PASSES:
        name, work = f"window {width} b{b} s{s} h{h}/{g} d{d} {suffix}", flops(b, s, h, d, backward) * 2 * width / s
        for impl, is_te in (("te_jax", True), ("jax.nn cudnn", False)):
            yield Case(name, impl, partial(_window, (b, s, h, g, d), width, backward, is_te), work)
    b, t = (2, 128) if tiny else (16, 32768)
    for impl, is_te in (("te_jax", True), ("jax.nn xla", False)):
        build = partial(_decode, (b, t, h, g, d), is_te)
        yield Case(f"decode b{b} t{t} h{h}/{g} d{d}", impl, build, bytes=2 * 2 * b * t * g * d)
