"""Steps of a stack of Llama layers, each under nn.remat: what the policies of te_jax.checkpoint_policies save of the
memory, and what that takes."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
from cases import Case
from layers import Layer, Stack, trainee
from timing import Call

from te_jax.checkpoint_policies import ATTENTION, GEMM, NAMES, QUANTIZED, offload, save, te_gemms_saveable

IMPLS = ("te_jax bf16", "te_jax fp8", "te_jax fp8 current")
PROJECTIONS = ("query_proj", "combined_kv_proj", "out_proj")
POLICIES = {
    "nothing": None,
    "jax's dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": save(ATTENTION),
    "attention, projections": save(ATTENTION, *PROJECTIONS),
    "GEMMs": te_gemms_saveable,
    "GEMMs, attention": save(GEMM, ATTENTION),
    "GEMMs, attention, quantized": save(GEMM, ATTENTION, QUANTIZED),
    "all names": save(*NAMES),
    "GEMMs on the host, attention": offload(GEMM, save=(ATTENTION,)),
}


def _build(model: Stack, impl: str) -> Call:
    one = trainee(model, impl)
    return one.build(backward=True)._replace(saved_bytes=one.saved_bytes())


def model(tiny: bool) -> Stack:
    """Eight layers of the width of Llama's 8B; the parameters take 3.5 GB, their gradients as much."""
    batch, seq, *rest = (1, 64, 64, 96, 4, 2) if tiny else (1, 8192, 4096, 14336, 32, 8)
    depth = 2 if tiny else 8
    return Stack(f"{depth} llama layers, {batch * seq} tokens", depth, Layer("", batch, seq, *rest, llama=True))


def cases(tiny: bool) -> Iterator[Case]:
    plain = model(tiny)
    flops, fp8_flops = plain.flops(backward=True), plain.gemm_flops(backward=True)
    for impl in IMPLS:
        more = dict(suite="remat", tokens=plain.tokens, calls=10, fp8_flops=fp8_flops if "fp8" in impl else 0.0)
        yield Case(plain.name, f"{impl}, no remat", partial(_build, plain, impl), flops, **more)
        for name, policy in POLICIES.items():
            stack = dataclasses.replace(plain, remat=True, policy=policy)
            yield Case(plain.name, f"{impl}, remat saves {name}", partial(_build, stack, impl), flops, **more)
