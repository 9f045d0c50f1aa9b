"""FP8 state as versions of TransformerEngine before 2.3 stored it, in the names of today.

Up to 1.7 it was a collection `fp8_meta_collection`. A module with n GEMMs had `fp8_meta_amax` f32[3n, L],
`fp8_meta_scale` f32[3n, 1] and, of the same shape, `fp8_meta_scale_inv` and `fp8_max`. Rows 3i, 3i + 1 and 3i + 2 are
x, kernel and gradient of GEMM i. From 1.8 to 2.2 it was `fp8_metas`, with `amax_{i,w,g}_{gemm}` f32[L] and
`scale_{i,w,g}_{gemm}` f32[1], also `_0` where a module has one GEMM. A loop over layers put axes in front. Entry 0 of
a history had the newest amax, entry 1 the oldest. From 1.8 on a scale was computed when it was used next, so that a
stored one is a step old.

(https://github.com/NVIDIA/TransformerEngine, transformer_engine/jax/fp8.py)
"""

import re
from collections.abc import Mapping, Set
from typing import Any

import jax.numpy as jnp

from te_jax.recipe.delayed import HISTORY, SCALE
from te_jax.state.fp8 import DenseMetas

COLLECTION = "fp8_meta_collection"
_STACKED_ROWS = {"fp8_meta_amax": HISTORY, "fp8_meta_scale": SCALE}  # what has a row for each tensor
_REDUNDANT = "fp8_meta_scale_inv", "fp8_max"
_LEAF = re.compile(r"(amax|scale)_([iwg])_(\d+)")
_TENSORS = dict(zip("iwg", DenseMetas._fields))
INVERSE = "_scale_inv"  # how a leaf ends that is 1 over a scale


def is_old(name: Any) -> bool:
    """Whether a leaf of FP8 state has a name of these versions."""
    return name in _STACKED_ROWS or name in _REDUNDANT or bool(_LEAF.fullmatch(str(name)))


def has_pair(path: tuple[str, ...], paths: Set[tuple[str, ...]]) -> bool:
    """Whether a leaf has a name of these versions, and the leaf that belongs to it is among `paths`, since a parameter
    may have one of these names too."""
    *node, name = path
    if match := _LEAF.fullmatch(name):
        kind, *tensor = match.groups()
        due = ["_".join(("scale" if kind == "amax" else "amax", *tensor))]
    else:
        due = [*_STACKED_ROWS] if is_old(name) else []
    return bool(due) and all((*node, each) in paths for each in due)


def names_of_today(what: str, node: Any, path: str) -> Any:
    """`node`, a collection of FP8 state, with the names of today for the leaves of these versions. Inverses of scales
    are left out; other leaves stay.

    A history becomes f32[..., 1 + L]: entry 0 is free, and the newest amax is last. So the law of the step that the
    scale still lacks sees all L amaxes.

    Raises ValueError, naming `what` and the path, for another number of rows and for a leaf that is there by two names.
    """
    if not isinstance(node, Mapping):
        return node
    out, several = {}, any(re.fullmatch(r".*_[iwg]_1", str(name)) for name in node)
    for name, leaf in node.items():
        if name in _STACKED_ROWS:
            new = _split_rows(what, leaf, _STACKED_ROWS[name], f"{path}/{name}")
        elif match := _LEAF.fullmatch(str(name)):
            kind, tensor, gemm = match.groups()
            ending = HISTORY if kind == "amax" else SCALE
            new = {f"{_TENSORS[tensor]}{f'_{gemm}' if several else ''}{ending}": _newest_last(leaf, ending)}
        elif name in _REDUNDANT or (str(name).endswith(INVERSE) and str(name).removesuffix("_inv") in node):
            continue
        else:
            new = {name: names_of_today(what, leaf, f"{path}/{name}")}
        for each, value in new.items():
            if each in out:
                raise ValueError(f"{what}: {path}/{each} is there by an older name too; drop one of the two.")
            out[each] = value
    return type(node)(out)


def _split_rows(what: str, leaf, ending: str, path: str) -> dict[str, Any]:
    shape = getattr(leaf, "shape", ())
    if len(shape) < 2 or not shape[-2] or shape[-2] % len(_TENSORS):
        raise ValueError(
            f"{what}: {path} has shape {tuple(shape)}; pass [..., 3n, L], as a module of n GEMMs stored it."
        )
    gemms = shape[-2] // len(_TENSORS)
    names = [f"{tensor}{f'_{i}' if gemms > 1 else ''}{ending}" for i in range(gemms) for tensor in DenseMetas._fields]
    return {name: _newest_last(leaf[..., row, :], ending) for row, name in enumerate(names)}


def _newest_last(leaf, ending: str):
    """A history in the order of today; anything else as it is."""
    if ending == SCALE or not getattr(leaf, "shape", ()):
        return leaf
    leaf = jnp.asarray(leaf)
    return jnp.concatenate([jnp.zeros_like(leaf[..., :1]), leaf[..., 1:], leaf[..., :1]], -1)
