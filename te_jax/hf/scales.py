"""Weights in FP8 as checkpoints have them: with scales of blocks of 128 x 128, of rows, or one for a tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.hf.rules import OF_LINEARS, Recast
from te_jax.layers import QuantizedKernel
from te_jax.layers.weight import swap_axes
from te_jax.ops.formats import SQUARES_128, TENSOR, ScaleFormat, transpose

# The leaf of the state by which the input of a parameter's product is scaled.
INPUTS = {"kernel": "x", "wi_kernel": "x_0", "wi_0": "x_0", "wi_1": "x_0", "wo_kernel": "x_1", "wo": "x_1"}


class Scheme(NamedTuple):
    """How a checkpoint scales its weights in FP8.

    format: SQUARES_128: `weight_scale_inv` f32 [ceil(out / 128), ceil(in / 128)] next to `weight` [out, in]
            (https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md); TENSOR: `weight_scale` f32 [] and,
            where activations have static scales, `input_scale` f32 [], as inference servers read them. Values are
            weight * scale in either.
    by_row: of TENSOR: each row of a weight, an output channel, is scaled by itself, by `weight_scale` f32 [out, 1].
    compressed: names and shapes as in the package compressed-tensors: `weight_scale` of blocks, too, and f32
            [1] instead of f32 [].
    """

    format: ScaleFormat
    by_row: bool = False
    compressed: bool = False

    @property
    def block(self) -> int:
        """How many numbers along each axis share a scale; 0: all."""
        return self.format.block

    def scale_of(self, name: str) -> str:
        """The name of the scale of weight `name`."""
        return f"{name}_scale_inv" if self.block and not self.compressed else f"{name}_scale"

    def unread_of(self, name: str) -> str:
        """The name of the scale of the inputs of weight `name`."""
        return f"{name.removesuffix('weight')}input_scale"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a weight of this shape."""
        if self.by_row:
            return shape[0], 1
        return tuple(-(-size // self.block) for size in shape) if self.block else ()

    def written_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale in a file, where one number may have an axis."""
        return self.scale_shape(shape) or ((1,) if self.compressed else ())


@partial(jax.tree_util.register_dataclass, data_fields=("data", "scale_inv"), meta_fields=("format",))
@dataclass(frozen=True)
class Scaled:
    """A weight in FP8 [out, in] and its scale."""

    data: Any
    scale_inv: Any  # f32, of `Scheme.scale_shape`
    format: ScaleFormat

    def dequantize(self, dtype: Any) -> jax.Array:
        """The values: products in f32, rounded once."""
        return self.format.read(self.data, self.scale_inv, self.data.ndim - 1).astype(dtype)


def scheme_of(kernels: Mapping[str, QuantizedKernel]) -> Scheme | None:
    """The scheme by which parameters in FP8, by path, can be written; None without any. Raises ValueError, naming one,
    for scales that no checkpoint has and where two differ."""
    schemes = {}
    for path, q in kernels.items():
        data, _ = q.tensor.held
        if data.dtype != jnp.float8_e4m3fn or q.format not in (TENSOR, SQUARES_128):
            raise ValueError(
                f"te_jax.hf.save: {path} is {data.dtype.name} with scales of blocks of {q.format.block}; checkpoints "
                f"have float8_e4m3fn with one scale, or of blocks of {SQUARES_128.block}: pass "
                "te_jax.flax.dequantize_params of it."
            )
        schemes[Scheme(q.format)] = path
    if len(schemes) > 1:
        raise ValueError(
            f"te_jax.hf.save: {' and '.join(schemes.values())} have scales of different forms; use one recipe."
        )
    return next(iter(schemes), None)


def held_rows(q: QuantizedKernel) -> tuple[jax.Array, jax.Array]:
    """FP8 [*C, *F], and the inverse scales, of a kernel with scales of blocks or one, without axes in front."""
    data, scale_inv = q.tensor.held
    if q.tensor.data is None:
        data, scale_inv = q.format.transpose(data, scale_inv, q.features)
    return data, scale_inv


def tensors_of_kernel(form: Recast, q: QuantizedKernel) -> list[Scaled]:
    """A kernel, or its bits, as tensors of a checkpoint. form: one of `OF_LINEARS`."""
    experts = q.stack == 1
    data, scale_inv = (jax.vmap(held_rows) if experts else held_rows)(q)
    weights = form.theirs(data)
    if q.format.block:
        scales = form.theirs(scale_inv)
    else:
        scales = list(scale_inv) if experts else [scale_inv] * len(weights)
    return [Scaled(a, s, q.format) for a, s in zip(weights, scales, strict=True)]


def keep_in_fp8(form: Recast, tensors: Sequence[Scaled], like: QuantizedKernel) -> QuantizedKernel | None:
    """The kernel with the checkpoint's data, as bits, and scales, in the layouts of `like`, which has no axis of
    layers; None where the scales are of another form."""
    if form not in OF_LINEARS or {like.format, *(a.format for a in tensors)} != {SQUARES_128}:
        return None
    if like.tensor.held[0].dtype != jnp.float8_e4m3fn:
        return None
    (data,) = form.ours(*(jax.lax.bitcast_convert_type(a.data, jnp.uint8) for a in tensors))
    (scale_inv,) = form.ours(*(a.scale_inv for a in tensors))
    turn = lambda a: transpose(a, like.contract)
    turn = jax.vmap(turn) if like.stack else turn
    made = {"data": data, "data_t": turn(data), "scale_inv": scale_inv, "scale_inv_t": turn(scale_inv)}
    made = {name: a for name, a in made.items() if getattr(like.tensor, name) is not None}
    return replace(like, tensor=like.tensor._replace(**made))


def spec_of_field(q: QuantizedKernel, name: str, spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """The mesh axes of a field of a kernel, given the mesh axes of its array [..., *C, *F]: scales lie on each
    device."""
    whole = (*spec, *[None] * (q.ndim - len(spec)))
    return {"data": whole, "data_t": swap_axes(whole, q.contract, q.features)}.get(name, ())


def input_scale(state: Mapping[str, Any], path: str, index: int | None, count: int) -> list[np.ndarray]:
    """f32[] for each of `count` tensors that parameter `path` becomes, 1 / the scale of their inputs. state: the
    collection `fp8_metas` by path.

    Raises ValueError for a parameter without such state, and for inputs that were never seen.
    """
    where, _, leaf = path.removeprefix("params/").rpartition("/")
    name = f"{where}/{INPUTS[leaf]}"
    if f"{name}_scale" not in state:
        raise ValueError(
            f"te_jax.hf.save: fp8_metas lacks {name}_scale, for the input_scale of {path}; pass variables with the "
            "whole collection, or without it for activations that are scaled as they come."
        )
    pick = lambda end: np.asarray(state[name + end] if index is None else state[name + end][index], np.float32)
    if not np.all(np.max(pick("_amax_history"), -1) > 0):
        raise ValueError(
            f"te_jax.hf.save: fp8_metas has never seen the inputs of {path}; run the model first, or pass variables "
            "without fp8_metas."
        )
    each = np.broadcast_to((1 / pick("_scale")).reshape(-1), (count,))
    return [np.asarray(value, np.float32) for value in each]
