"""y = norm(x) . kernel + bias: the norm writes FP8 in both layouts, its output is never read back to be quantized."""

from functools import partial

import jax
import jax.numpy as jnp

from te_jax import fp8
from te_jax._op import align, like
from te_jax.layers import _fp8
from te_jax.layers._fp8 import Config, Fp8Tensor
from te_jax.layers.dense import check_dense, dense
from te_jax.ops import norm as norm_op


def layernorm(x, gamma, beta=None, *, norm="layernorm", zero_centered_gamma=False, epsilon=1e-6) -> jax.Array:
    """LayerNorm or RMSNorm ("rmsnorm", beta None) over the last axis of x [..., h]; gamma, beta [h]. -> x's type.

    zero_centered_gamma: gamma + 1 is applied. Raises ValueError or TypeError as `te_jax.ops.norm.norm`.
    """
    return norm_op.norm(x, gamma, beta, kind=norm, zero_centered=zero_centered_gamma, eps=epsilon)


def layernorm_dense(
    x,
    kernel,
    gamma,
    beta=None,
    bias=None,
    *,
    norm="layernorm",
    zero_centered_gamma=False,
    epsilon=1e-6,
    return_layernorm_output=False,
    recipe=None,
    metas: fp8.DenseMetas | None = None,
    checkpoint=None,
    name: str = "te_jax.layers.layernorm_dense",
) -> tuple[jax.Array, jax.Array | None]:
    """(y, ln_out or None): ln_out = norm(x), y[*B, *F] = ln_out[*B, h] . kernel[h, *F] + bias[*F].

    x [*B, h]; gamma, beta [h]; the other arguments as in `layernorm` and `dense`. Under a recipe ln_out is quantized
    from f32, before it is rounded to x's type. Raises ValueError or TypeError as they do.
    """
    norm_op.check(name, x, gamma, beta, norm)
    check_dense(name, x, kernel, bias, 1, recipe, metas)
    if recipe is None:
        ln_out = layernorm(x, gamma, beta, norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon)
        return dense(ln_out, kernel, bias), ln_out if return_layernorm_output else None
    config = Config.of(x, kernel, bias, 1, recipe, checkpoint)
    attrs = (("eps", float(epsilon)), ("rms", norm == "rmsnorm"), ("zero_centered", bool(zero_centered_gamma)))
    operands = align(x, kernel, gamma, beta, bias)
    return _norm_dense(*operands, metas, config, attrs, bool(return_layernorm_output))


def _forward(x, kernel, gamma, beta, bias, metas, config, attrs, with_ln_out, train):
    use, dtype = _fp8.uses(config.recipe, train), config.recipe.fp8_format.dtype("fwd")
    layouts = tuple(name for name in ("data", "data_t") if getattr(use["x"], name))
    amax = ("amax",) if layouts else ()
    y = ("y",) if with_ln_out or use["x"].wide else ()
    mean = () if dict(attrs)["rms"] else ("mean",)
    outputs = (*y, *layouts, *mean, "rstd", *amax)  # in the op's order
    scale = metas.x.scale if layouts else None
    got = dict(zip(outputs, norm_op.norm_fwd(x, gamma, beta, scale, outputs=outputs, dtype=dtype, **dict(attrs))))
    wide = got["y"] if use["x"].wide else None
    q = Fp8Tensor(got.get("data"), got.get("data_t"), wide, 1.0 / metas.x.scale, got.get("amax"))
    w, _ = _fp8.quantize_tensor(kernel, metas.kernel.scale, 1, dtype, use["kernel"])
    out = (_fp8.fprop(q, w, bias, config), got["y"] if with_ln_out else None)
    return out, (q, w), (got.get("mean"), got["rstd"])


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _norm_dense(x, kernel, gamma, beta, bias, metas, config, attrs, with_ln_out):
    return _forward(x, kernel, gamma, beta, bias, metas, config, attrs, with_ln_out, train=False)[0]


def _norm_dense_fwd(x, kernel, gamma, beta, bias, metas, config, attrs, with_ln_out):
    out, operands, stats = _forward(x, kernel, gamma, beta, bias, metas, config, attrs, with_ln_out, train=True)
    return out, (_fp8.saved(*operands, config), metas, (x, *stats, gamma, beta))


def _norm_dense_bwd(config, attrs, with_ln_out, residuals, cotangents):
    (q, w), metas, (x, mean, rstd, gamma, beta) = residuals
    dy, dln_out = cotangents
    dnorm, dkernel, dbias, dmetas = _fp8.backward(q, w, metas, dy, config)
    if with_ln_out:
        dnorm = like(dnorm.astype(jnp.float32) + dln_out.astype(jnp.float32), x)
    attrs = dict(attrs)
    kind = dict(rms=attrs["rms"], zero_centered=attrs["zero_centered"])
    dx, dgamma, dbeta = norm_op.backward(dnorm, x, mean, rstd, gamma, beta, **kind)
    return dx, dkernel, dgamma, dbeta, dbias, dmetas


_norm_dense.defvjp(_norm_dense_fwd, _norm_dense_bwd)
