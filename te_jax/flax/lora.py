"""Training only of low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1): the parameters
of the modules that have `enable_low_rank_adaptation` are `*lora_a_kernel` and `*lora_b_kernel`, all others stay."""

from collections.abc import Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from te_jax.flax._common import join_trees, split_tree

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
    _check_mapping("te_jax.flax.split_lora", "params", params)
    lora, base = split_tree(params, lambda path: path[-1].endswith(_LORA_ENDINGS))
    if not lora:
        raise ValueError(f"te_jax.flax.split_lora: {_NONE}")
    return lora, base


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


def _check_mapping(where: str, name: str, tree):
    if not isinstance(tree, Mapping):
        raise TypeError(f"{where}: {name} is of the type {type(tree).__name__}; pass a mapping, as `init` returns it.")


def _name(path) -> str:
    """The last name in a key path; a box of logical axes adds a part behind it."""
    return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), "")
