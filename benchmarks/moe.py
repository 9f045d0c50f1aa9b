"""Cases of a layer of experts, forward and backward: x + moe(rmsnorm(x)) by te_jax in bf16 and in FP8, with weights
quantized in the step or before, next to the same layer of `jax.lax.ragged_dot` in bf16.

`routing` of a row is the share of its kernels' time that the router, permute and combine take, from a trace of some
steps after the timing; the product that makes the logits is not in it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from te_jax.layers import MoEOptions, quantize_experts
from te_jax.layers import moe as experts_layer
from te_jax.layers.weight import GradientTarget
from te_jax.ops.experts.router import RouterOptions
from te_jax.recipe import Recipe
from te_jax.state import fp8

from . import account, experts
from .cases import Case
from .layers import RECIPES, WITH_ATTENTION
from .timing import Call, compiled, normal, on_gpu

BF16, RAGGED = "te_jax bf16", "ragged_dot bf16"
ONCE, FP8_WEIGHTS = ", weights once", ", FP8 weights"
IMPLS = (
    *(name for name in RECIPES if name not in ("te_jax fp8 fixed", WITH_ATTENTION)),
    *(f"te_jax fp8{kind}{ONCE}" for kind in (" fast", " current", " block")),
    f"te_jax fp8 current{FP8_WEIGHTS}",
    RAGGED,
)
_SETTLE = 2  # steps, after which the scales of delayed scaling are those of this data


def cases(tiny: bool) -> Iterator[Case]:
    for model in experts.models(tiny):
        if model.skewed:  # here the router chooses, and random tokens choose evenly
            continue
        pairs = 3 * 2 * 3 * model.pairs * model.hidden * model.ffn
        gate = 3 * 2 * model.tokens * model.hidden * model.experts
        for impl in IMPLS:
            more = dict(fp8_flops=pairs if "fp8" in impl else 0, suite="moe", tokens=model.tokens, profiled=routing)
            more["beside"] = tuple(other for other in (BF16, RAGGED) if other != impl and impl != RAGGED)
            name = f"{model.name} {model.tokens} tokens: layer of experts fwd+bwd"
            yield Case(name, impl, partial(build, model, impl), pairs + gate, **more)


def build(model: experts.Experts, impl: str) -> Call:
    return _ragged(model) if impl == RAGGED else _te_jax(model, impl)


@lru_cache(maxsize=1)  # the contenders of a case share them
def parameters(model: experts.Experts) -> dict[str, jax.Array]:
    """bf16, of a size that keeps each tensor's variance."""
    e, h, f = model.experts, model.hidden, model.ffn
    return {
        "gamma": 1 + normal(1, (h,), scale=0.1),
        "gate": normal(2, (h, e), scale=h**-0.5),
        "wi_0": normal(3, (e, h, f), scale=h**-0.5),
        "wi_1": normal(4, (e, h, f), scale=h**-0.5),
        "wo": normal(5, (e, f, h), scale=f**-0.5),
    }


@lru_cache(maxsize=1)
def _data(model: experts.Experts):
    """x, and the gradient of y."""
    return normal(6, (model.tokens, model.hidden)), normal(7, (model.tokens, model.hidden))


def _compiled(step, inputs) -> Call:
    """XLA replaces CUDA graphs by single launches while a profiler watches, unless told not to."""
    options = {"xla_enable_command_buffers_during_profiling": True} if on_gpu() else {}
    return compiled(step, [inputs], **options)


def routing(profile: dict) -> dict:
    """What a row says of its trace."""
    own = sum(kernel["ms"] for kernel in profile["top"] if account.family(kernel["name"]) == account.ROUTING)
    return {"profile": profile} | ({"routing": own / profile["kernel_ms"]} if profile["kernel_ms"] else {})


# -- te_jax --------------------------------------------------------------------------------------------------


def fresh_metas(model: experts.Experts) -> tuple[fp8.DenseMetas, fp8.DenseMetas]:
    """Scales of 1, of wi and wo: of x and the gradient of y one, of all else one for each expert."""
    one = lambda *shape: fp8.TensorMeta(jnp.ones(shape), jnp.zeros(shape))
    e = model.experts
    return fp8.DenseMetas(one(), one(e), one(e)), fp8.DenseMetas(one(e), one(e), one())


def settled(metas, seen, recipe: Recipe):
    """`metas` with the scales that the amaxes of `seen`, their cotangents, call for; an amax of 0 leaves a scale."""

    def one(name, meta, got):
        largest = float(jnp.finfo(recipe.fp8_format.dtype(fp8.direction_of(name))).max)
        return meta._replace(scale=jnp.where(got.amax > 0, largest / got.amax, meta.scale))

    of_layer = lambda layer, got: type(layer)(*map(one, layer._fields, layer, got))
    return tuple(map(of_layer, metas, seen))


def _te_jax(model: experts.Experts, impl: str) -> Call:
    recipe = RECIPES[impl.removesuffix(ONCE).removesuffix(FP8_WEIGHTS)]
    options = MoEOptions(RouterOptions(model.topk))

    def forward(params, metas, x, wi, wo):
        fields = dict(gamma=params["gamma"], norm="rmsnorm", residual=True, options=options, recipe=recipe)
        return experts_layer(x, params["gate"], wi, wo, metas=metas, **fields)[0]

    def step(params, metas, x, dy, quantized):
        """y and all gradients. quantized: wi and wo in FP8, or None."""

        def of(params, metas, x):
            wi, wo = (params["wi_0"], params["wi_1"]), params["wo"]
            if impl.endswith(ONCE):
                wi, wo = (q.with_wide(wide) for q, wide in zip(quantized, (wi, wo)))
            elif impl.endswith(FP8_WEIGHTS):
                *wi, wo = (q.with_wide(GradientTarget(slot)) for q, slot in zip(quantized, (*wi, wo)))
            return forward(params, metas, x, wi, wo)

        y, vjp = jax.vjp(of, params, metas, x)
        return y, vjp(dy)

    params, (x, dy) = parameters(model), _data(model)
    metas = fresh_metas(model) if recipe and recipe.has_state else None
    if metas is not None:
        plain = compiled(partial(_metas_seen, forward), [(params, metas, x, dy)])
        for _ in range(_SETTLE):
            metas = settled(metas, plain.run(params, metas, x, dy), recipe)
    quantized = _quantized(params, metas, recipe, impl)
    if impl.endswith(FP8_WEIGHTS):
        return _with_targets(step, params, x, dy, quantized)
    return _compiled(step, (params, metas, x, dy, quantized))


def _metas_seen(forward, params, metas, x, dy):
    """The cotangents of metas."""
    layer = lambda metas: forward(params, metas, x, (params["wi_0"], params["wi_1"]), params["wo"])
    return jax.vjp(layer, metas)[1](dy)[0]


def _quantized(params, metas, recipe, impl: str):
    """The weights in FP8 that a step is given, as for several microbatches or as parameters."""
    of = [None, None] if metas is None else [layer.kernel for layer in metas]
    if impl.endswith(ONCE):
        run = jax.jit(lambda kernel, meta: quantize_experts(kernel, recipe=recipe, meta=meta))
        return [run(kernel, meta) for kernel, meta in zip(((params["wi_0"], params["wi_1"]), params["wo"]), of)]
    if impl.endswith(FP8_WEIGHTS):
        run = jax.jit(lambda kernel: quantize_experts(kernel, recipe=recipe))
        return [_one_layout(run(params[name])) for name in ("wi_0", "wi_1", "wo")]
    return None


def _one_layout(q):
    """As parameters are: in fprop's layout only."""
    return replace(q, tensor=q.tensor._replace(data=None))


def _with_targets(step, params, x, dy, quantized) -> Call:
    """The step without the arrays of the weights: zeros, which nothing reads, stand where their gradients go."""
    wide = {name: (a.shape, a.dtype) for name, a in params.items() if name.startswith("w")}
    others = {name: a for name, a in params.items() if name not in wide}

    def with_zeros(others, x, dy, quantized):
        zeros = {name: jnp.zeros(*of) for name, of in wide.items()}
        return step(others | zeros, None, x, dy, quantized)

    return _compiled(with_zeros, (others, x, dy, quantized))


# -- ragged_dot ----------------------------------------------------------------------------------------------


def ragged_layer(params, x, topk: int):
    """The same layer in plain JAX: pairs of a token and a choice, sorted by expert, through `jax.lax.ragged_dot`."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    h = (wide * rstd * params["gamma"].astype(jnp.float32)).astype(x.dtype)
    logits = jnp.dot(h, params["gate"], preferred_element_type=jnp.float32)
    top, chosen = jax.lax.top_k(logits, topk)
    weights, chosen = jax.nn.softmax(top, -1), chosen.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=params["gate"].shape[1]).astype(jnp.int32)
    product = partial(jax.lax.ragged_dot, group_sizes=sizes)
    rows = h[order // topk]
    wi = jnp.concatenate([params["wi_0"], params["wi_1"]], -1)
    gate, linear = jnp.split(product(rows, wi), 2, -1)
    rows = product(jax.nn.silu(gate) * linear, params["wo"])
    rows = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return x + jnp.zeros(wide.shape).at[order // topk].add(rows).astype(x.dtype)


def _ragged(model: experts.Experts) -> Call:
    def step(params, x, dy):
        y, vjp = jax.vjp(lambda params, x: ragged_layer(params, x, model.topk), params, x)
        return y, vjp(dy)

    return _compiled(step, (parameters(model), *_data(model)))
