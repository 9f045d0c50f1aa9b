"""y = norm(x) . kernel + bias: the norm writes FP8 in both layouts, its output is never read back to be quantized."""

from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, NONE, STRING, Kind, check, tuple_of
from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, like
from te_jax.layers.config import Config
from te_jax.layers.linear import OperandNames, check_dense, dense
from te_jax.layers.projections import Operands, Static, project
from te_jax.layers.tensor import wide_of
from te_jax.layers.weight import Projection, resolve_weight
from te_jax.ops.gemm.dense import gemm_sum
from te_jax.ops.quantize import norm as norm_op
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import check_spec, explicit_spec
from te_jax.state import fp8


def layernorm(
    x: ArrayLike,
    gamma: ArrayLike,
    beta: ArrayLike | None = None,
    *,
    norm: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    name: str = "te_jax.layers.layernorm",
) -> jax.Array:
    """LayerNorm, or RMSNorm where norm is "rmsnorm" and beta None, over the last axis of x [..., h]; gamma, beta [h].

    zero_centered_gamma: gamma + 1 is applied. epsilon: above 0. name: what errors call this layer.

    Returns an array of x's shape and type. Raises ValueError for an unknown norm or sizes that do not match, TypeError
    for operands that are not floating point.
    """
    return norm_op.norm(x, gamma, beta, kind=norm, zero_centered=zero_centered_gamma, eps=epsilon, name=name)


_ALSO = tuple_of(Kind("a Projection", lambda p: isinstance(p, Projection)))


def layernorm_dense(
    x: ArrayLike,
    kernel: ArrayLike,
    gamma: ArrayLike,
    beta: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    norm: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    return_layernorm_output: bool = False,
    return_input: bool = False,
    also: Sequence[Projection] = (),
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    checkpoint: str | None = None,
    tokens: PartitionSpec | None = None,
    name: str = "te_jax.layers.layernorm_dense",
) -> tuple[jax.Array, ...]:
    """y[*B, *F] = ln_out[*B, h] . kernel[h, *F] + bias[*F] with ln_out = norm(x).

    x [*B, h]; gamma, beta [h]; the other arguments are described in `layernorm` and `dense`. Under a recipe ln_out is
    quantized from f32, before it is rounded to x's type; under a recipe of block scales it is rounded first.

    return_layernorm_output: the second result is ln_out, else None.
    return_input: a third result is x itself, for a residual connection: the gradient that comes back through it is
                  added in the norm's backward kernel, not in a pass of its own.
    also:         more kernels that read ln_out, such as of keys and values, where `kernel` is of queries. y is then
                  the tuple of all products, and under a recipe ln_out is quantized once, with the scale of the first.
                  The gradient that ln_out gets from all of them crosses devices as one sum.
    tokens:       under Auto mesh axes, the sharding [*B] of x, if the GEMMs read x in another one: for
                  `MeshResource.tpsp_pieces`.

    Returns (y, ln_out or None), or (y, ln_out or None, x). Raises ValueError for sizes that do not match, TypeError for
    operands that are not float.
    """
    check(name, "also", also, _ALSO)
    check(name, "checkpoint", checkpoint, NONE | STRING)
    x, gamma, beta = as_jax(x, gamma, beta)
    projections = [Projection(*as_jax(*p)) for p in ((kernel, bias, metas), *also)]
    names = [OperandNames(), *(_names_of_also(at) for at in range(len(also)))]
    projections = [
        p._replace(kernel=resolve_weight(name, p.kernel, 1, recipe, of.kernel)) for p, of in zip(projections, names)
    ]
    norm_op.check_norm(name, x, gamma, beta, norm, epsilon, zero_centered_gamma)
    check(name, "return_layernorm_output", return_layernorm_output, BOOL)
    check(name, "return_input", return_input, BOOL)
    check_spec(name, "tokens", tokens, x.ndim)
    for p, of in zip(projections, names):
        check_dense(name, x, wide_of(p.kernel), p.bias, 1, recipe, p.metas, of)
    if recipe is None:
        of_norm = dict(kind=norm, zero_centered=zero_centered_gamma, eps=epsilon, name=name)
        if return_input:
            ln_out, x = norm_op.norm_and_input(x, gamma, beta, **of_norm)
        else:
            ln_out = norm_op.norm(x, gamma, beta, **of_norm)
        precision = jax.config.jax_default_matmul_precision
        each = partial(_dense_of_one_sum, precision) if also else _dense_each
        y = each(*align(ln_out, *(w for p in projections for w in (p.kernel, p.bias))))
    else:
        options = dict(checkpoint=checkpoint, tokens=tokens, gathers=True)
        configs = tuple(Config.of(x, p.kernel, p.bias, 1, recipe, **options) for p in projections)
        metas = [p.metas or fp8.STATELESS for p in projections]
        x, gamma, beta, weights = align(x, gamma, beta, [p[:2] for p in projections])
        operands = Operands(x, tuple(Projection(*w, m) for w, m in zip(weights, metas)), (gamma, beta))
        static = configs, norm_op.Norm.of(norm, zero_centered_gamma, epsilon)
        y, ln_out, x = project(operands, Static(*static, bool(return_layernorm_output), bool(return_input)))
    out = y if also else y[0], ln_out if return_layernorm_output else None
    return (*out, x) if return_input else out


def _names_of_also(at: int) -> OperandNames:
    kernel, bias, metas = (f"also[{at}].{field}" for field in Projection._fields)
    return OperandNames("x", kernel, bias, metas)


def _dense_each(x, *weights):
    """Dense layers of one x, of kernel, bias, kernel, bias, ..."""
    return tuple(dense(x, *w) for w in zip(weights[::2], weights[1::2]))


@custom_vjp(0)
def _dense_of_one_sum(precision, *args):
    """What autodiff gives, but x's gradient crosses devices as one sum: XLA would sum over devices what each layer
    adds.

    precision: `jax.default_matmul_precision` of the call, which is over when the backward pass is traced.
    """
    return _dense_each(*args)


def _dense_bwd(precision, residuals, dy):
    x, *weights = residuals
    terms = [(d, kernel, None, None) for d, kernel in zip(dy, weights[::2])]
    terms.reverse()  # autodiff's order: the same bits
    with jax.default_matmul_precision(precision):
        _, weight_grads = jax.vjp(partial(_dense_each, x), *weights)
        dx = gemm_sum(terms, lead=x.ndim - 1, out_dtype=x.dtype, out_spec=explicit_spec(jax.typeof(x)))
        return like(dx, x), *weight_grads(dy)


_dense_of_one_sum.defvjp(lambda precision, *args: (_dense_each(*args), args), _dense_bwd)
