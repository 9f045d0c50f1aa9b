"""Training of low-rank adaptation alone (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1): the parameters
of the modules that have `enable_low_rank_adaptation` are `*lora_a_kernel` and `*lora_b_kernel`, all others stay."""

from collections.abc import Mapping
from typing import Any

import jax

from te_jax.flax._common import join_trees, split_tree

ENDINGS = ("lora_a_kernel", "lora_b_kernel")


def split_lora(params: Mapping[str, Any]) -> tuple[dict, dict]:
    """params -> (those of low-rank adaptation, all others), each a tree without the other's leaves.

    For a loss that is differentiated with respect to the first alone, `join_lora` puts them together in it:

        lora, base = te_flax.split_lora(params)
        loss_fn = lambda lora, fp8: loss(model.apply({"params": te_flax.join_lora(lora, base), **fp8}, x))
        loss, (grads, fp8) = te_jax.value_and_grad(loss_fn, (0, 1))(lora, fp8)

    The layers then compute no gradient of the other kernels, and keep nothing for one; an optimizer of `lora` has
    moments of it alone. Raises ValueError if there is no such parameter.
    """
    lora, base = split_tree(params, lambda path: path[-1].endswith(ENDINGS))
    if not lora:
        raise ValueError(
            "split_lora: no parameter is of low-rank adaptation; set enable_low_rank_adaptation of the dense modules, "
            "or low_rank_adaptation_scope of a TransformerLayer."
        )
    return lora, base


def join_lora(lora: Mapping[str, Any], base: Mapping[str, Any]) -> dict:
    """The params of which `split_lora` made the two."""
    return join_trees(lora, base)


def lora_mask(params):
    """params -> True for those of low-rank adaptation, False for the others, for optax:

        optax.partition({True: optax.adamw(1e-4), False: optax.set_to_zero()}, te_flax.lora_mask)

    (`optax.masked` alone would pass the other gradients on as updates.) `split_lora` saves their computation too.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path).endswith(ENDINGS), params)


def _name(path) -> str:
    """The last name in a key path; a box of logical axes adds a part behind it."""
    return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), "")
