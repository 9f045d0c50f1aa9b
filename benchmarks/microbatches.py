"""Steps of several microbatches: kernels quantized in each, or once for all of them (te_jax.flax.fp8_kernels), and
their gradients added up by XLA, or inside of the wgrad GEMM (te_jax.flax.wgrads)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import optax

import te_jax as te
import te_jax.flax as te_flax

from .cases import Case
from .layers import RECIPES, Layer, named, trainee
from .timing import Call, compiled, normal

MICROBATCHES = 4
IMPLS = ("te_jax fp8", "te_jax fp8 block")
WAYS = {"": (False, False), ", kernels once": (True, False), ", kernels once, wgrads fused": (True, True)}


def _build(model: Layer, impl: str, cached: bool, fused: bool) -> Call:
    one = trainee(model, impl)
    fields = dict(apply_fn=one.module.apply, params=one.params, tx=optax.identity())
    state = te_flax.TrainState.create(**fields, collections=one.state)

    def step(state, x, dy):
        """The mean loss and the gradients: of parameters the mean, of the FP8 state the next one."""
        given = one.module, state.variables, x[0]
        kernels = te_flax.fp8_kernels(*given, **one.options) if cached else {}
        wgrads = te_flax.wgrads(*given, **one.options) if fused else None

        def loss(params, fp8, microbatch):
            x, dy = microbatch
            return jnp.mean(one.forward(params, {**fp8, **kernels}, x, one.key).astype(jnp.float32) * dy)

        return state.accumulate_gradients(loss, (x, dy), wgrads=wgrads)

    shape = (MICROBATCHES, *model.shape)
    with te.autocast(True, RECIPES[impl]):
        return compiled(step, [(state, normal(1, shape), normal(2, shape))])


def models(tiny: bool) -> list[Layer]:
    """GPT layers: the fewer tokens in a microbatch, the more its kernels cost."""
    layer, name = named("gpt layer", tiny), f"gpt layer, {MICROBATCHES} microbatches of {{}} tokens".format
    return [replace(layer, name=name(batch * layer.seq), batch=batch) for batch in ([1] if tiny else [1, 4])]


def cases(tiny: bool) -> Iterator[Case]:
    for model in models(tiny):
        flops, fp8_flops = (MICROBATCHES * of(backward=True) for of in (model.flops, model.gemm_flops))
        more = dict(suite="microbatches", tokens=MICROBATCHES * model.tokens, calls=10)
        for impl in IMPLS:
            for name, way in WAYS.items():
                build = partial(_build, model, impl, *way)
                yield Case(model.name, impl + name, build, flops, fp8_flops=fp8_flops, **more)
