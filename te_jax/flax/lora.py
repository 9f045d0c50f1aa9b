"""Training only of low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1), and merging it.
The parameters of the modules that have `enable_low_rank_adaptation` are `*lora_a_kernel` and `*lora_b_kernel`."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from te_jax.core.check import NONE, check, number
from te_jax.flax._common import join_trees, split_tree
from te_jax.layers.parameters import is_kernel

_LORA_ENDINGS = ("lora_a_kernel", "lora_b_kernel")
_NONE = (
    "no parameter is of low-rank adaptation; set enable_low_rank_adaptation of the dense modules, or "
    "low_rank_adaptation_scope of a TransformerLayer."
)


def split_lora(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two trees: the parameters of low-rank adaptation, and all others.

    For a loss that is differentiated only with respect to the first, `join_lora` puts them together in it:

        lora, base = te_flax.split_lora(params)

        def loss_fn(lora, fp8):
            params = te_flax.join_lora(lora, base)
            return loss(model.apply({"params": params, **fp8}, x))

        loss, (grads, fp8) = te_jax.value_and_grad(loss_fn, (0, 1))(lora, fp8)

    The layers then compute no gradient of the other kernels, and keep nothing for one; an optimizer of `lora` has
    moments only of it. Raises ValueError if there is no such parameter, TypeError for what is no mapping.
    """
    return _adapters_and_base("te_jax.flax.split_lora", params)


def join_lora(lora: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that `split_lora` split into these two trees.

    Raises ValueError for a parameter that both have, or that lies where the other has parameters below; TypeError for
    what is no mapping.
    """
    where, trees = "te_jax.flax.join_lora", {"lora": lora, "base": base}
    for name, tree in trees.items():
        _check_mapping(where, name, tree)
    way_out = "pass the two trees of split_lora"
    paths = {name: flatten_dict(tree).keys() for name, tree in trees.items()}
    if both := sorted(map("/".join, paths["lora"] & paths["base"])):
        raise ValueError(f"{where}: lora and base both have the parameter {both[0]}; {way_out}.")
    for one, other in (("lora", "base"), ("base", "lora")):
        above = {path[:end]: path for path in paths[other] for end in range(1, len(path))}
        if hidden := sorted(paths[one] & above.keys()):
            at, below = ("/".join(path) for path in (hidden[0], above[hidden[0]]))
            raise ValueError(f"{where}: {one} has a parameter {at}, but {other} has {below} below it; {way_out}.")
    return join_trees(lora, base)


def merge_lora(params: Mapping[str, Any], *, alpha: float | None = None) -> dict[str, Any]:
    """params with A.B added to their kernels, and without A and B: parameters of the model without adapters.

    params: what `init` returns, or `join_lora(lora, base)`; of NNX modules `te_jax.nnx.to_linen(model)["params"]`.
            Kernels that `nn.scan` or `nn.vmap` stacked along axis 0 are merged each.
    alpha:  `low_rank_adaptation_alpha` of the modules: A.B counts alpha / r times, once if None.

    The sum is computed in f32 and rounded once, to the kernel's dtype. Boxes of logical axes stay. Raises ValueError
    if there are no adapters, if an adapter has no kernel of its shape next to it, if shapes do not tell an axis of
    layers from others, and for kernels in FP8; TypeError for what is no mapping, and for an alpha that is no number.
    """
    where = "te_jax.flax.merge_lora"
    check(where, "alpha", alpha, NONE | number())
    lora, base = (flatten_dict(tree) for tree in _adapters_and_base(where, params))
    for path, a in lora.items():
        if not path[-1].endswith("lora_a_kernel"):
            continue
        b_path = (*path[:-1], path[-1].replace("lora_a_kernel", "lora_b_kernel"))
        own = (*path[:-1], path[-1].replace("lora_a_kernel", "kernel"))
        name, boxed = "/".join(own), base.get(own)
        if b_path not in lora or boxed is None:
            at = "/".join(path)
            raise ValueError(f"{where}: {at} has no lora_b_kernel or no kernel next to it; pass all params.")
        if is_kernel(nn.meta.unbox(boxed)):
            raise ValueError(
                f"{where}: {name} is in FP8, which would be rounded twice; pass the kernels that it was made of, or "
                "te_jax.flax.dequantize_params of it."
            )
        kernel, a, b = (nn.meta.unbox(leaf) for leaf in (boxed, a, lora[b_path]))
        factor = 1.0 if alpha is None else alpha / a.shape[-1]
        merged = _with_adapter(kernel, a, b, factor, stacked=_axes_of_layers(where, name, kernel, a, b))
        base[own] = boxed.replace_boxed(merged) if isinstance(boxed, nn.meta.AxisMetadata) else merged
    return unflatten_dict(base)


def _axes_of_layers(where: str, name: str, kernel, a, b) -> int:
    """How many axes of layers are in front of kernel [*S, *C, *G, f], A [*S, *C, *G, r] and B [*S, *G, r, f]."""
    contracted = a.ndim - b.ndim + 1
    fits = {
        s
        for s in range(max(b.ndim - 1, 0))
        if contracted > 0
        and (*kernel.shape[:s], *kernel.shape[s + contracted : -1], a.shape[-1], kernel.shape[-1]) == b.shape
        and kernel.shape[:-1] == a.shape[:-1]
    }
    if len(fits) == 1:
        return fits.pop()
    shapes = f"{kernel.shape}, with adapters {a.shape} and {b.shape}"
    if not fits:
        raise ValueError(f"{where}: {name} is {shapes}, which are not of one layer; pass the params of one model.")
    raise ValueError(
        f"{where}: {name} is {shapes}; they do not tell which axis is of layers. Merge each layer's params apart."
    )


@partial(jax.jit, static_argnames="stacked")
def _with_adapter(kernel, a, b, factor, stacked: int):
    layers, rank = math.prod(kernel.shape[:stacked]), a.shape[-1]
    groups = math.prod(b.shape[stacked:-2])
    a, b = a.reshape(layers, -1, groups, rank), b.reshape(layers, groups, rank, -1)
    delta = jnp.einsum("lcgr,lgrf->lcgf", *(m.astype(jnp.float32) for m in (a, b)), precision="highest")
    return (kernel.astype(jnp.float32) + factor * delta.reshape(kernel.shape)).astype(kernel.dtype)


def lora_mask(params: Any) -> Any:
    """A tree like `params`: True for parameters of low-rank adaptation, False for the others. For optax:

        transforms = {True: optax.adamw(1e-4), False: optax.set_to_zero()}
        optax.partition(transforms, te_flax.lora_mask)

    (`optax.masked` by itself would pass the other gradients on as updates.) `split_lora` saves their computation too.
    Raises ValueError if there is no such parameter.
    """
    mask = jax.tree_util.tree_map_with_path(lambda path, _: _name(path).endswith(_LORA_ENDINGS), params)
    if not any(jax.tree.leaves(mask)):
        raise ValueError(f"te_jax.flax.lora_mask: {_NONE}")
    return mask


def _adapters_and_base(where: str, params) -> tuple[dict[str, Any], dict[str, Any]]:
    _check_mapping(where, "params", params)
    lora, base = split_tree(params, lambda path: path[-1].endswith(_LORA_ENDINGS))
    if not lora:
        raise ValueError(f"{where}: {_NONE}")
    return lora, base


def _check_mapping(where: str, name: str, tree):
    if not isinstance(tree, Mapping):
        raise TypeError(f"{where}: {name} is of the type {type(tree).__name__}; pass a mapping, as `init` returns it.")


def _name(path) -> str:
    """The last name in a key path; a box of logical axes adds a part behind it."""
    return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), "")
