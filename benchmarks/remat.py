"""Steps of a stack of Llama layers, each under nn.remat: what the policies of te_jax.checkpoint_policies save of the
memory, and what that takes."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax

from te_jax.checkpoint_policies import ATTENTION, GEMM, NAMES, QUANTIZED, offload, save, te_gemms_saveable

from . import layers
from .cases import Case
from .layers import Stack
from .timing import Call

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
    one = layers.trainee(model, impl)
    return one.build(backward=True)._replace(saved_bytes=one.saved_bytes())


def model(tiny: bool) -> Stack:
    """Eight layers of the width of Llama's 8B; the parameters take 3.5 GB, their gradients as much."""
    depth, layer = 2 if tiny else 8, layers.named("llama layer", tiny)
    return Stack(f"{depth} llama layers, {layer.tokens} tokens", depth, layer)


def cases(tiny: bool) -> Iterator[Case]:
    plain = model(tiny)
    remat = lambda policy: dataclasses.replace(plain, remat=True, policy=policy)
    stacks = {"no remat": plain, **{f"remat saves {name}": remat(policy) for name, policy in POLICIES.items()}}
    for impl in IMPLS:
        for way, stack in stacks.items():
            build = partial(_build, stack, impl)
            case = layers.case(stack, impl, backward=True, suite="remat", calls=10, build=build)
            yield dataclasses.replace(case, name=plain.name, impl=f"{impl}, {way}")
