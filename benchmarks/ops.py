"""Cases of single ops: GEMM, quantize, norms, attention; beside them plain JAX, Flax, jax.nn and torch."""

import time
from collections.abc import Iterator
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
import torch_gemm
from cases import Case
from flax import linen as nn
from jax.sharding import PartitionSpec
from timing import compiled, normal, on_gpu, queued, sets

from te_jax.ops import norm as norm_op
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.gemm import gemm
from te_jax.ops.quantize import quantize

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)

GEMM_MNK = [
    (8192, 8192, 8192),
    (8192, 4096, 16384),
    (8192, 16384, 4096),
    (8192, 12288, 4096),
    (8192, 4096, 4096),
    (4096, 4096, 7168),
    (4096, 7168, 16384),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (1024, 1024, 1024),
]
ROWS_COLUMNS = [(8192, 4096), (8192, 16384)]
NORM_SHAPES = [(8192, 4096), (32768, 8192)]
ATTENTION = [  # b, s, h, g, d
    (4, 4096, 32, 32, 128),
    (4, 4096, 32, 8, 128),
    (4, 2048, 32, 32, 128),
    (1, 8192, 32, 8, 128),
    (1, 8192, 64, 8, 128),
    (1, 16384, 32, 8, 128),
    (8, 4096, 32, 32, 64),
]


def cases(tiny: bool) -> list[Case]:
    """All cases; `tiny` keeps each kind at a size that a CPU does at once."""
    found = [*_copy(tiny), *_gemms([(32, 48, 64)] if tiny else GEMM_MNK)]
    found += _quantizes([(32, 64)] if tiny else ROWS_COLUMNS)
    found += _norms([(16, 64)] if tiny else NORM_SHAPES)
    found += _attentions([(1, 128, 4, 2, 64)] if tiny else ATTENTION)
    return [*found, *_collectives(tiny)]


def _by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


# -- ceilings ------------------------------------------------------------------------------------------------


def _copy(tiny) -> Iterator[Case]:
    n = 64 if tiny else 32768

    def build():
        return compiled(lambda x: x + 1, [(normal(0, (n, n)),)])

    yield Case(f"copy {_by(n, n)}", "xla", build, bytes=2 * 2 * n * n)


def _collectives(tiny) -> Iterator[Case]:
    count = jax.device_count()
    if count < 2:
        return
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    for megabytes in [0.001] if tiny else [512, 64]:
        size = int(megabytes * 1e6)
        for name in ("psum", "all_gather"):

            def build(name=name, size=size):
                reduce = partial(getattr(jax.lax, name), axis_name="data")
                out = spec if name == "all_gather" else PartitionSpec()
                gather = dict(check_vma=False) if name == "all_gather" else {}
                fn = jax.shard_map(lambda x: reduce(x), mesh=mesh, in_specs=spec, out_specs=out, **gather)
                x = jax.device_put(normal(0, (count, size // 2)), jax.sharding.NamedSharding(mesh, spec))
                return compiled(fn, [(x,)])

            yield Case(f"{name} {megabytes} MB per GPU, {count} GPUs", "xla", build, bytes=size)


# -- GEMM ----------------------------------------------------------------------------------------------------


def _fp8_gemm(m, n, k, times=1, **attrs):
    """`times` GEMMs in one jitted call, one after the other."""
    lhs, rhs, one = normal(0, (m, k), E4M3), normal(1, (n, k), E4M3), jnp.float32(1.0)

    def fn(lhs, rhs, a, b):
        outs = []
        for _ in range(times):
            outs.append(gemm(lhs, rhs, a, b, out_dtype=jnp.bfloat16, **attrs))
            lhs, _ = jax.lax.optimization_barrier((lhs, outs[-1]))
        return outs

    return compiled(fn, [(lhs, rhs, one, one)])


def _bf16_gemm(m, n, k):
    return compiled(jnp.dot, [(normal(0, (m, k)), normal(1, (k, n)))])


@cache
def _turns(shape, accumulation, times, calls, repeat):
    """-> ms of ours and ms of torch's, in turns. An H200 under GEMMs draws all its power and its clock follows: by 15 %
    in the first 0.3 s, by some 5 % after that. In turns both have the same clock."""
    call = _fp8_gemm(*shape, times=times, fast_accum=accumulation == "fast")
    turn = lambda calls: (queued(call, calls, 1)[0], times * torch_gemm.measure(shape, accumulation, calls * times))
    began = time.perf_counter()
    while time.perf_counter() - began < 0.5:
        turn(calls)
    return list(zip(*(turn(calls) for _ in range(repeat))))


def _ours_and_torch(row, shape, accumulation, times=1):
    """The rows of one GEMM by te_jax and, where there is torch, by torch."""
    impls = [f"{who} fp8 {accumulation}" for who in ("te_jax", "torch")]
    if not (on_gpu() and torch_gemm.available()):
        yield row(impls[0], partial(_fp8_gemm, *shape, times=times, fast_accum=accumulation == "fast"))
        return
    for i, impl in enumerate(impls):
        yield row(impl, measure=lambda calls, repeat, i=i: _turns(shape, accumulation, times, calls, repeat)[i])


def _gemms(shapes) -> Iterator[Case]:
    for m, n, k in shapes:
        row = partial(Case, f"gemm {_by(m, n, k)}", flops=2 * m * n * k)
        yield from _ours_and_torch(row, (m, n, k), "fast")
        if m == n == k == 4096:
            yield row("te_jax fp8 fast untuned", partial(_fp8_gemm, m, n, k, fast_accum=True, tune=False))
        yield from _ours_and_torch(row, (m, n, k), "split")
        yield row("xla bf16", partial(_bf16_gemm, m, n, k))
    for m, n, k in [shape for shape in shapes if max(shape) <= 2048]:  # jax's dispatch of one call takes longer
        row = partial(Case, f"20 gemms {_by(m, n, k)}", flops=20 * 2 * m * n * k)
        yield from _ours_and_torch(row, (m, n, k), "fast", times=20)


# -- quantize ------------------------------------------------------------------------------------------------


def _quantize(shape, dtype, outputs, reference):
    attrs = dict(split=1, dtype=dtype)

    def plain(x, scale):
        results = dict(zip(("data", "data_t", "amax", "dbias"), quantize.reference(x, scale, **attrs)))
        return [results[name] for name in outputs]

    fn = plain if reference else partial(quantize, outputs=outputs, **attrs)
    return compiled(fn, sets(lambda seed: (normal(seed, shape), jnp.float32(64.0))))


def _quantizes(shapes) -> Iterator[Case]:
    for shape in shapes:
        for text, dtype, more in (("both layouts", E4M3, ()), ("both layouts, dbias", E5M2, ("dbias",))):
            row = partial(Case, f"quantize {text} {_by(*shape)}", bytes=4 * prod(shape))
            outputs = ("data", "data_t", "amax", *more)
            for impl in ("te_jax", "xla"):
                yield row(impl, partial(_quantize, shape, dtype, outputs, impl == "xla"))


# -- norms ---------------------------------------------------------------------------------------------------


def _norm_operands(kind, shape, seed):
    """x, gamma, beta (not with RMSNorm), dy."""
    gamma, beta = 1 + normal(seed, shape[1:], scale=0.1), normal(seed + 1, shape[1:], scale=0.1)
    weights = (gamma,) if kind == "rmsnorm" else (gamma, beta)
    return normal(seed + 2, shape), weights, normal(seed + 3, shape)


def _flax_norm(kind, x, weights):
    types = dict(dtype=x.dtype, param_dtype=x.dtype)
    module = nn.RMSNorm(**types) if kind == "rmsnorm" else nn.LayerNorm(**types)
    return module.apply({"params": dict(zip(("scale", "bias"), weights))}, x)


def _norm(kind, shape, impl, backward):
    def forward(x, weights):
        if impl == "flax":
            return _flax_norm(kind, x, weights)
        return norm_op.norm(x, *weights, kind=kind)

    def both(x, weights, dy):
        y, vjp = jax.vjp(forward, x, weights)
        return y, vjp(dy)

    inputs = sets(lambda seed: _norm_operands(kind, shape, 4 * seed))
    return compiled(both, inputs) if backward else compiled(forward, [each[:2] for each in inputs])


def _norm_to_fp8(kind, shape, reference):
    rms = kind == "rmsnorm"
    outputs = ("data", "data_t", *(() if rms else ("mean",)), "rstd", "amax")
    attrs = dict(eps=1e-6, rms=rms, zero_centered=False, dtype=E4M3)

    def fn(x, weights, scale):
        operands = (x, weights[0], None if rms else weights[1], scale)
        if not reference:
            return norm_op.norm_fwd(*operands, outputs=outputs, **attrs)
        results = norm_op.norm_fwd.reference(*operands, **attrs)
        names = [o.name for o in norm_op.norm_fwd.rule.outputs]
        return [out for name, out in zip(names, results) if name in outputs]

    return compiled(fn, sets(lambda seed: (*_norm_operands(kind, shape, 4 * seed)[:2], jnp.float32(64.0))))


def _norms(shapes) -> Iterator[Case]:
    for shape in shapes:
        for kind in ("layernorm", "rmsnorm"):
            size, name = prod(shape), f"{kind} {_by(*shape)}"
            for impl in ("te_jax", "flax"):
                yield Case(f"{name} fwd", impl, partial(_norm, kind, shape, impl, False), bytes=4 * size)
                yield Case(f"{name} fwd+bwd", impl, partial(_norm, kind, shape, impl, True), bytes=10 * size)
            for impl in ("te_jax", "xla"):
                build = partial(_norm_to_fp8, kind, shape, impl == "xla")
                yield Case(f"{kind} to fp8, both layouts {_by(*shape)}", impl, build, bytes=4 * size)


# -- attention -----------------------------------------------------------------------------------------------


def jax_nn_attention(q, k, v):
    """Causal attention as plain JAX users have it: through cuDNN on a GPU."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if on_gpu() else None)


def _te_attention(q, k, v):
    implementation = "cudnn" if on_gpu() else None
    return dot_product_attention(q, k, v, attn_mask_type="causal", implementation=implementation)


def _attention(sizes, forward, backward):
    b, s, h, g, d = sizes
    q, k, v, dout = (normal(i, (b, s, heads, d)) for i, heads in enumerate((h, g, g, h)))

    def both(q, k, v, dout):
        out, vjp = jax.vjp(forward, q, k, v)
        return out, vjp(dout)

    return compiled(both, [(q, k, v, dout)]) if backward else compiled(forward, [(q, k, v)])


def attention_flops(b, s, h, d, backward=False) -> float:
    """Causal: half of the two products; the backward pass has five, with one computed again."""
    return 4 * b * h * s * s * d / 2 * (3.5 if backward else 1)


def _attentions(sizes) -> Iterator[Case]:
    for b, s, h, g, d in sizes:
        name = f"attention b{b} s{s} h{h}/{g} d{d} causal"
        for impl, forward in (("te_jax", _te_attention), ("jax.nn cudnn", jax_nn_attention)):
            for suffix, backward in (("fwd", False), ("fwd+bwd", True)):
                build = partial(_attention, (b, s, h, g, d), forward, backward)
                yield Case(f"{name} {suffix}", impl, build, attention_flops(b, s, h, d, backward))
