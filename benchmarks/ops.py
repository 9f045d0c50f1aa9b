"""Cases of single ops. `op_cases` lists those whose peer is XLA, with the op's reference; those with other peers, plain
JAX, Flax or torch, are here: GEMM, norms, activations with a quantization behind them, rope."""

import time
from collections.abc import Iterator
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from te_jax.ops.formats import ROWS_128, SQUARES_128
from te_jax.ops.gemm.dense import gemm
from te_jax.ops.quantize import activation as activation_op
from te_jax.ops.quantize import norm as norm_op
from te_jax.ops.quantize.array import quantize
from te_jax.ops.rope import rope

from . import attention, op_cases, torch_peers
from .cases import Case
from .timing import compiled, normal, on_gpu, passes, queued, sets

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)

# m n k
GEMM_MNK = ["8192 8192 8192", "8192 4096 16384", "8192 16384 4096", "8192 12288 4096", "8192 4096 4096"]
GEMM_MNK += ["4096 4096 7168", "4096 7168 16384", "4096 4096 4096", "2048 2048 2048", "1024 1024 1024"]
GEMM_MNK = [tuple(map(int, sizes.split())) for sizes in GEMM_MNK]
BLOCK_MNK = [(8192, 8192, 8192), (4096, 4096, 7168), (8192, 2880, 2880)]  # of the last, blocks are cut
RESIDUAL_MNK = (8192, 4096, 16384)
FP8_RESULTS = ("data", "data_t", "amax")
BLOCKS = dict(power_2=True, epsilon=0.0)  # the law of block scales
ACTIVATIONS = {"gelu": ("gelu",), "swiglu": ("silu", "linear")}
ACTIVATION_SHAPE = (8192, 16384)
ROPE = (1, 8192, 32, 128)  # b, s, h, d
NORM_SHAPES = [(8192, 4096), (32768, 8192)]


def cases(tiny: bool) -> list[Case]:
    """All cases; `tiny` keeps each kind at a size that a CPU does at once."""
    found = [*_copy(tiny), *_gemms([(32, 48, 64)] if tiny else GEMM_MNK)]
    found += _block_gemms([(32, 128, 256)] if tiny else BLOCK_MNK)
    found += _listed(tiny)
    found += _residual_gemm((32, 48, 64) if tiny else RESIDUAL_MNK)
    found += _activations((32, 64) if tiny else ACTIVATION_SHAPE)
    found += _norms([(16, 64)] if tiny else NORM_SHAPES)
    found += _ropes((1, 16, 4, 32) if tiny else ROPE)
    return [*found, *attention.cases(tiny), *_collectives(tiny)]


def _by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def named(op, reference, *operands, outputs, **attrs) -> dict:
    """The results of `op` or of its reference that `outputs` names, by name."""
    if not reference:
        return dict(zip(outputs, op(*operands, outputs=outputs, **attrs)))
    results = zip((output.name for output in op.rule.outputs), op.reference(*operands, **attrs))
    return {name: result for name, result in results if name in outputs}


# -- ceilings ------------------------------------------------------------------------------------------------


def _copy(tiny) -> Iterator[Case]:
    n = 64 if tiny else 32768
    build = lambda: compiled(lambda x: x + 1, [(normal(0, (n, n)),)])
    yield Case(f"copy {_by(n, n)}", "xla", build, bytes=2 * 2 * n * n)


def _collective(name, size, count):
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, gathers = PartitionSpec("data"), name == "all_gather"
    collective = lambda x: getattr(jax.lax, name)(x, axis_name="data")
    out = dict(out_specs=spec, check_vma=False) if gathers else dict(out_specs=PartitionSpec())
    x = jax.device_put(normal(0, (count, size // 2)), jax.sharding.NamedSharding(mesh, spec))
    return compiled(jax.shard_map(collective, mesh=mesh, in_specs=spec, **out), [(x,)])


def _collectives(tiny) -> Iterator[Case]:
    count = jax.device_count()
    for megabytes in ([0.001] if tiny else [512, 64]) if count > 1 else []:
        size = int(megabytes * 1e6)
        for name in ("psum", "all_gather"):
            build = partial(_collective, name, size, count)
            yield Case(f"{name} {megabytes} MB per GPU, {count} GPUs", "xla", build, bytes=size, link=True)


# -- GEMM ----------------------------------------------------------------------------------------------------


def fp8_gemm(m, n, k, times=1, **attrs):
    """`times` GEMMs in one jitted call, one after the other."""
    lhs, rhs, one = normal(0, (m, k), E4M3), normal(1, (n, k), E4M3), jnp.float32(1.0)

    def fn(lhs, rhs, a, b):
        outs = []
        for _ in range(times):
            outs.append(gemm(lhs, rhs, a, b, out_dtype=jnp.bfloat16, **attrs))
            lhs, _ = jax.lax.optimization_barrier((lhs, outs[-1]))
        return outs

    return compiled(fn, [(lhs, rhs, one, one)])


def bf16_gemm(m, n, k):
    return compiled(jnp.dot, [(normal(0, (m, k)), normal(1, (k, n)))])


@cache
def _turns(shape, accumulation, times, calls, repeat):
    """-> ms of ours and ms of torch's, in turns. An H200 under GEMMs draws all its power and its clock follows: by 15 %
    in the first 0.3 s, by some 5 % after that. In turns both have the same clock."""
    call = fp8_gemm(*shape, times=times, fast_accum=accumulation == "fast")
    turn = lambda calls: (queued(call, calls, 1)[0], times * torch_peers.measure(shape, accumulation, calls * times))
    began = time.perf_counter()
    while time.perf_counter() - began < 0.5:
        turn(calls)
    return list(zip(*(turn(calls) for _ in range(repeat))))


def _ours_and_torch(row, shape, accumulation, times=1):
    """The rows of one GEMM by te_jax and, where there is torch, by torch."""
    impls = [f"{who} fp8 {accumulation}" for who in ("te_jax", "torch")]
    if not (on_gpu() and torch_peers.available()):
        yield row(impls[0], partial(fp8_gemm, *shape, times=times, fast_accum=accumulation == "fast"))
        return
    for i, impl in enumerate(impls):
        yield row(impl, measure=lambda calls, repeat, i=i: _turns(shape, accumulation, times, calls, repeat)[i])


def _gemm_plus_residual(m, n, k, inside):
    """inside: `c` is added by te_gemm, else by XLA."""

    def fn(lhs, rhs, a, b, c):
        run = partial(gemm, lhs, rhs, a, b, out_dtype=jnp.bfloat16, fast_accum=True)
        return run(c=c) if inside else run() + c

    one = jnp.float32(1.0)
    return compiled(fn, [(normal(0, (m, k), E4M3), normal(1, (n, k), E4M3), one, one, normal(2, (m, n)))])


def _residual_gemm(mnk) -> Iterator[Case]:
    row = partial(_gemm_case, *mnk, name=f"gemm + residual {_by(*mnk)}", residual=True)
    yield row("te_jax fp8 fast", partial(_gemm_plus_residual, *mnk, True))
    yield row("te_gemm, xla adds", partial(_gemm_plus_residual, *mnk, False))


def _gemm_case(m, n, k, impl, build=None, measure=None, name=None, times=1, residual=False):
    flops = times * 2 * m * n * k
    fp8_flops, size = (0, 2) if "bf16" in impl else (flops, 1)
    moved = times * (size * (m * k + n * k) + (4 if residual else 2) * m * n)
    return Case(name or f"gemm {_by(m, n, k)}", impl, build, flops, moved, fp8_flops, measure)


def _gemms(shapes) -> Iterator[Case]:
    for mnk in shapes:
        row = partial(_gemm_case, *mnk)
        yield from _ours_and_torch(row, mnk, "fast")
        if mnk == (4096, 4096, 4096):
            yield row("te_jax fp8 fast tuned", partial(fp8_gemm, *mnk, fast_accum=True, tune=True))
        yield from _ours_and_torch(row, mnk, "split")
        yield row("xla bf16", partial(bf16_gemm, *mnk))
    for mnk in [shape for shape in shapes if max(shape) <= 2048]:  # jax's dispatch of one call takes longer
        row = partial(_gemm_case, *mnk, name=f"20 gemms {_by(*mnk)}", times=20)
        yield from _ours_and_torch(row, mnk, "fast", times=20)


def _block_gemm(m, n, k, square):
    """Scales of 1x128 by 128x128 blocks (fprop, dgrad), or 1x128 by 1x128 (wgrad)."""
    blocks = [-(-size // 128) for size in (n, k)]
    scales = jnp.ones((blocks[1], m)), jnp.ones(blocks if square else (blocks[1], n))
    return compiled(
        partial(gemm, formats=(ROWS_128, SQUARES_128 if square else ROWS_128)),
        [(normal(0, (m, k), E4M3), normal(1, (n, k), E4M3), *scales)],
    )


def _block_gemms(shapes) -> Iterator[Case]:
    for mnk in shapes:
        for impl, square in (("te_jax fp8 block", True), ("te_jax fp8 block wgrad", False)):
            yield _gemm_case(*mnk, impl, partial(_block_gemm, *mnk, square))


# -- ops of the list ------------------------------------------------------------------------------------------


def _listed(tiny) -> Iterator[Case]:
    """The cases that tests and benchmarks share, by te_jax and by XLA."""
    for case in op_cases.CASES:
        for name, impl, call in case.measured(tiny):
            for by in (impl, "xla") if impl == "te_jax" else (impl,):
                yield Case(name, by, partial(_call, call, by == "xla"), bytes=call.bytes())


def _call(case: op_cases.Case, reference: bool):
    def operands(seed):
        names, types = [operand.name for operand in case.declared.rule.inputs], case.types()
        draw = lambda i: normal(len(types) * seed + i, types[i].shape, types[i].dtype)
        draw_scale = lambda i: jnp.full(types[i].shape, 64.0, types[i].dtype)
        given = lambda i: draw_scale(i) if names[i] == "scale" else draw(i)
        return tuple(None if types[i] is None else given(i) for i in range(len(types)))

    fn = partial(named, case.declared, reference, outputs=case.outputs, **case.attrs)
    return compiled(fn, sets(operands))


# -- activations ---------------------------------------------------------------------------------------------


def _quantized_after(names, shape, backward, outputs):
    """The activation or its gradient in plain JAX, and te_quantize behind it."""

    def fn(*operands):
        *operands, scale = operands
        result = lambda x: activation_op.activation(x, names)
        if backward:
            dy, x = operands
            (unquantized,) = jax.vjp(result, x)[1](dy)
        else:
            unquantized = result(*operands)
        return quantize(unquantized, scale, split=1, dtype=E5M2 if backward else E4M3, outputs=outputs)

    def operands(seed):
        x = normal(2 * seed, (shape[0], len(names), shape[1]))
        return *((normal(2 * seed + 1, shape),) if backward else ()), x, jnp.float32(64.0)

    return compiled(fn, sets(operands))


def _activations(shape) -> Iterator[Case]:
    for backward in (False, True):
        for kind, names in ACTIVATIONS.items():
            slots = len(names)
            # Forward, of each element: x of all slots, both layouts. Backward: dy, x, both layouts of all slots.
            size = prod(shape) * (2 * slots + 2 * backward + 2 * (slots if backward else 1))
            name = f"{'d' * backward}{kind} to fp8, both layouts{', dbias' * backward} {_by(*shape)}"
            outputs = (*FP8_RESULTS, *(("dbias",) if backward else ()))
            build = partial(_quantized_after, names, shape, backward, outputs)
            yield Case(name, "xla, te_quantize", build, bytes=size)


# -- norms ---------------------------------------------------------------------------------------------------


def _norm_operands(kind, shape, seed):
    """x, gamma, beta (not with RMSNorm), dy."""
    gamma, beta = 1 + normal(seed, shape[1:], scale=0.1), normal(seed + 1, shape[1:], scale=0.1)
    weights = (gamma,) if kind == "rmsnorm" else (gamma, beta)
    return normal(seed + 2, shape), weights, normal(seed + 3, shape)


def _norm(kind, shape, impl, backward):
    def forward(x, *weights):
        if impl == "te_jax":
            return norm_op.norm(x, *weights, kind=kind)
        module = (nn.RMSNorm if kind == "rmsnorm" else nn.LayerNorm)(dtype=x.dtype, param_dtype=x.dtype)
        return module.apply({"params": dict(zip(("scale", "bias"), weights))}, x)

    def inputs(seed):
        x, weights, dy = _norm_operands(kind, shape, 4 * seed)
        return (x, *weights), dy, ()

    return passes(forward, sets(inputs), backward)


def _norm_to_fp8(kind, shape, reference):
    """Forward and backward."""
    rms = kind == "rmsnorm"
    law = dict(rms=rms, zero_centered=False)

    def both(x, weights, scale, dy):
        operands = (x, weights[0], None if rms else weights[1], None, None, scale)
        outputs = ("data", "data_t", *(() if rms else ("mean",)), "rstd", "amax")
        y = named(norm_op.norm_fwd, reference, *operands, outputs=outputs, eps=1e-6, dtype=E4M3, **law)
        operands = (dy, x, y.get("mean"), y["rstd"], weights[0], None)
        outputs = ("dx", "dgamma", *(() if rms else ("dbeta",)))
        return y, named(norm_op.norm_bwd, reference, *operands, outputs=outputs, **law)

    def inputs(seed):
        x, weights, dy = _norm_operands(kind, shape, 4 * seed)
        return x, weights, jnp.float32(64.0), dy

    return compiled(both, sets(inputs))


def _norms(shapes) -> Iterator[Case]:
    for shape in shapes:
        for kind in ("layernorm", "rmsnorm"):
            size, name = prod(shape), f"{kind} {_by(*shape)}"
            for impl in ("te_jax", "flax"):
                yield Case(f"{name} fwd", impl, partial(_norm, kind, shape, impl, False), bytes=4 * size)
                yield Case(f"{name} fwd+bwd", impl, partial(_norm, kind, shape, impl, True), bytes=10 * size)
            for impl in ("te_jax", "xla"):
                build = partial(_norm_to_fp8, kind, shape, impl == "xla")
                yield Case(f"{kind} to fp8, both layouts {_by(*shape)} fwd+bwd", impl, build, bytes=10 * size)


# -- rope ----------------------------------------------------------------------------------------------------


def rotate(x):
    """Rotary embedding in plain JAX, pairs (i, i + d/2), in f32."""
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def _ropes(shape) -> Iterator[Case]:
    b, s, h, d = shape
    for impl, turn in (("te_jax", partial(rope, group_method="alternate")), ("xla", rotate)):
        build = lambda turn=turn: compiled(turn, sets(lambda seed: (normal(seed, shape),)))
        yield Case(f"rope b{b} s{s} h{h} d{d}", impl, build, bytes=4 * prod(shape))
