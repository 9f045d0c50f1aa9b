"""What modules share: parameters in boxes, default initializers, checks, low-rank adaptation."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from te_jax.core.arrays import as_jax
from te_jax.core.check import show
from te_jax.core.policies import GEMM, with_names
from te_jax.core.products import product
from te_jax.core.types import like, on_explicit_mesh, varying_axes
from te_jax.flax._calls import field_names
from te_jax.flax._fields import LORA_SCOPES
from te_jax.flax._state import describe
from te_jax.layers import QuantizedKernel
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, SEQLEN_CP_AXES, SEQLEN_TP_AXES, current_mesh_resource
from te_jax.sharding.constraints import explicit_spec

Initializer = Callable[..., Any]  # (key, shape, dtype) -> array
Axes = tuple[str | None, ...]  # Logical axis names, one for each dimension.


def split_tree(params: Mapping[str, Any], first: Callable[[tuple[str, ...]], bool]) -> tuple[dict, dict]:
    """Two trees: the leaves whose path `first` accepts, and all others."""
    leaves = flatten_dict(params)
    chosen = {path: leaf for path, leaf in leaves.items() if first(path)}
    return unflatten_dict(chosen), unflatten_dict({path: leaf for path, leaf in leaves.items() if path not in chosen})


def join_trees(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict:
    """The tree that `split_tree` split into these two."""
    return unflatten_dict(flatten_dict(others) | flatten_dict(some))


def parameter(
    module: nn.Module, name: str, init: Initializer, axes: Axes, shape: Sequence[int], given=None
) -> jax.Array | QuantizedKernel:
    """The parameter `name` of `module`, of `shape`.

    The parameter has the module's `params_dtype`, or `dtype` where that is None, and is created in a box with the
    logical axes `axes`. A QuantizedKernel that `fp8_params` put there is returned as it is.

    given: An array or QuantizedKernel that the caller uses instead of a parameter, which is then not created.

    Raises ValueError if the parameter or `given` has another shape, as where inputs are wider than at `init`, if the
    module holds the parameter as well as `given`, and for another number of logical axes; TypeError if `given` is not
    floating.
    """
    holds = module.has_variable("params", name)
    if given is not None:
        given = floating(module, name, given)
        if holds:
            raise ValueError(
                f"{describe(module)}: {name} is passed, but the parameters hold one too; leave it out of one of them."
            )
        if given.shape != tuple(shape):
            raise ValueError(
                f"{describe(module)}: {name} has shape {given.shape}, but the inputs and fields of this call need "
                f"{tuple(shape)}; pass it in this shape."
            )
        return given
    if holds:
        held = nn.meta.unbox(module.get_variable("params", name))
        if held.shape != tuple(shape):
            raise ValueError(
                f"{describe(module)}: parameter {name} has shape {held.shape}, but the inputs and fields of this call "
                f"need {tuple(shape)}; pass inputs of the width it was initialised with, or initialise again."
            )
        if isinstance(held, QuantizedKernel):
            if not module.scope.name_reserved(name, "params"):
                module.scope.reserve(name, "params")  # it is read, as `module.param` says of others
            return held
    dtype = module.dtype if module.params_dtype is None else module.params_dtype
    where = f"{describe(module)}: parameter {name}"
    if axes and len(axes) != len(shape) and not holds:
        field = next((field for field in field_names(type(module)) if getattr(module, field) is axes), "axes")
        raise _wrong_axes(module, field, axes, f"the parameter {name} has shape {tuple(shape)}")
    return module.param(name, _init_in_box(where, init, tuple(axes)), tuple(shape), dtype)


def check_input_axes(module: nn.Module, ndim: int, *fields: str) -> None:
    """Raises ValueError, under a mesh, for a field of logical axes that has not one for each of `ndim`. Its default
    fits any number."""
    if jax.sharding.get_abstract_mesh().empty:
        return
    for field in fields:
        axes = getattr(module, field)
        if axes is not None and axes != getattr(type(module), field) and len(axes) != ndim:
            raise _wrong_axes(module, field, axes, f"inputs have {ndim} axes")


def _wrong_axes(module, field: str, axes: Axes, but: str) -> ValueError:
    return ValueError(f"{describe(module)}: {field} is {axes!r}, but {but}; give a name, or None, for each axis.")


class Box(nn.LogicallyPartitioned):
    """A `LogicallyPartitioned` parameter, whose axes of layers may be unnamed, and whose names constrain nothing on a
    mesh of Explicit axes, where the array's type says how it is sharded.

    Flax's box raises under an `nn.scan` or `nn.vmap` without `metadata_params`, where here the new axis has the name
    None, and on such a mesh under logical axis rules.
    """

    def unbox(self, apply_constraint: bool = True) -> jax.Array:
        """The array; apply_constraint: as in Flax, except on a mesh of Explicit axes, where it is ignored."""
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        return super().unbox(apply_constraint and not explicit)

    def __eq__(self, other):
        same = isinstance(other, nn.LogicallyPartitioned)
        return self is other or ((self.value,) == (other.value,) if same else NotImplemented)

    def add_axis(self, index: int, params: Mapping[str, Any]) -> "Box":
        """The box with a new axis at `index`, of the name that `params` (`metadata_params`) has, or None."""
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: Mapping[str, Any]) -> "Box":
        """The box without the axis at `index`. Raises ValueError unless that has the name that `add_axis` gives it."""
        params = {nn.PARTITION_NAME: None, **params}
        held = self.names[index] if index < len(self.names) else None
        if held != (name := params[nn.PARTITION_NAME]):
            raise ValueError(
                f"nn.scan or nn.vmap: metadata_params names the axis of layers {name!r}, but parameters with the axes "
                f"{self.names} have {held!r} there; pass metadata_params={{nn.PARTITION_NAME: {held!r}}}, as where "
                "they were initialised."
            )
        return super().remove_axis(index, params)


def _init_in_box(where: str, init: Initializer, axes: Axes) -> Initializer:
    """An initializer for the array of `init`, in a box with the logical axes `axes`, or in the box of `init`.

    The initializer raises, naming `where`, TypeError for an array of another shape or no array, ValueError for another
    number of names than of axes.
    """

    def init_in_box(key, shape, dtype):
        made = init(key, shape, dtype)
        value = nn.meta.unbox(made)
        if not isinstance(value, jax.Array | np.ndarray) or value.shape != shape:
            raise TypeError(
                f"{where}: its initializer gave {show(value)} for shape {shape}; pass a function (key, shape, dtype) "
                "that gives an array of this shape, or one in a box of nn.with_partitioning."
            )
        box = made if isinstance(made, nn.meta.AxisMetadata) else Box(made, names=axes)
        names = getattr(box, "names", ())
        if names and len(names) != len(shape):
            raise ValueError(
                f"{where}: its logical axes are {names}, but its shape is {shape}; give a name, or None, for each axis."
            )
        return box

    return init_in_box


def stack_kernels(draws: Sequence[jax.Array], axis: int, name: str | None) -> jax.Array:
    """Weights of one initializer, stacked along a new axis; in a box as theirs, with `name` for the new axis."""
    values = list(map(nn.meta.unbox, draws))
    if not all(isinstance(value, jax.Array | np.ndarray) for value in values):
        return draws[0]  # `parameter` raises for it.
    stacked = jnp.stack(values, axis)
    if not isinstance(draws[0], nn.meta.AxisMetadata):
        return stacked
    return draws[0].replace_boxed(stacked).add_axis(axis % stacked.ndim, {nn.PARTITION_NAME: name})


def kernel_initializer(init: Initializer | None, contracted: int = 1, distribution="truncated_normal") -> Initializer:
    """`init`, or for None variance scaling by fan-in, the product of the first `contracted` axes."""
    if init is not None:
        return init

    def default(key, shape, dtype):
        inputs, outputs = tuple(range(contracted)), tuple(range(contracted, len(shape)))
        scaling = nn.initializers.variance_scaling(1.0, "fan_in", distribution, in_axis=inputs, out_axis=outputs)
        return scaling(key, shape, dtype)

    return default


def floating(module: nn.Module, name: str, x) -> jax.Array:
    """The argument x as a jax array. Raises TypeError, naming it, unless its dtype is floating."""
    (x,) = as_jax(x)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        kind = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{describe(module)}: {name} is {kind}; pass an array of a floating dtype.")
    return x


def in_compute_dtype(module: nn.Module, x: jax.Array) -> jax.Array:
    """x in `module.dtype` if the module has a `params_dtype`, which makes `dtype` the type of computation; else x."""
    return x if module.params_dtype is None else x.astype(module.dtype)


def activation_axes(module: nn.Module, *names: str | None) -> tuple[str | None, ...]:
    """The logical axes `names` (batch, sequence, ...) in the order of the module's arrays.

    Under a MeshResource with a cp_resource, that splits the sequence where it would be whole: only attention needs
    other shards of it.
    """
    resource = current_mesh_resource()
    if resource is not None and resource.cp_resource is not None:
        names = tuple(SEQLEN_CP_AXES if name == SEQLEN_AXES else name for name in names)
    return (names[1], names[0], *names[2:]) if module.transpose_batch_sequence else names


def residual_axes(module: nn.Module) -> tuple[str | None, ...]:
    """The logical axes of [b, s, H] outside the GEMMs, where sequence parallelism splits the sequence."""
    sequence = SEQLEN_TP_AXES if module.enable_sequence_parallel else SEQLEN_AXES
    return activation_axes(module, BATCH_AXES, sequence, HIDDEN_AXES)


def dropout_key(module: nn.Module, stream: str) -> jax.Array:
    """A key of the random stream `stream`. Raises Flax's InvalidRngError, naming the module, where nobody gave one."""
    if not (module.has_rng(stream) or module.has_rng("params")):  # Flax takes the stream "params" instead
        raise InvalidRngError(
            f"{describe(module)}: dropout needs a key; pass rngs={{{stream!r}: key}} to apply, or deterministic=True."
        )
    return module.make_rng(stream)


class Dropout(nn.Dropout):
    """`flax.linen.Dropout` on any mesh: Flax's mask has no sharding on Explicit meshes, and inside `shard_map` all
    shards would draw the same one."""

    def __call__(self, inputs: jax.Array, deterministic: bool) -> jax.Array:
        """inputs [...] -> the same shape, type and sharding."""
        shards, explicit = varying_axes(inputs), on_explicit_mesh(jax.typeof(inputs))
        if deterministic or not 0 < self.rate < 1:
            return super().__call__(inputs, deterministic)
        key, kept = dropout_key(self, self.rng_collection), 1.0 - self.rate
        if not (shards or explicit):
            return super().__call__(inputs, deterministic, rng=key)
        for name in sorted(shards - varying_axes(key)):
            key = jax.random.fold_in(key, lax.axis_index(name))
        shared = [axis % inputs.ndim for axis in self.broadcast_dims]
        one_of = lambda values, one: [one if i in shared else v for i, v in enumerate(values)]
        spec = explicit_spec(jax.typeof(inputs))
        drawn = None if spec is None else PartitionSpec(*one_of(spec, None))
        mask = jax.random.bernoulli(key, kept, tuple(one_of(inputs.shape, 1)), out_sharding=drawn)
        mask = jnp.broadcast_to(mask, inputs.shape)
        mask = mask if spec is None else jax.sharding.reshard(mask, spec)
        return jnp.where(mask, inputs / kept, jnp.zeros_like(inputs))


@product("lora")
def add_lora(module: nn.Module, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """y + x.A.B * (alpha / r): low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    y [..., *G, f], x [..., *C], a [*C, *G, r], b [*G, r, f] -> [..., *G, f] of y's type and sharding. The factor is 1
    if alpha is None.
    """
    group, rank = b.shape[:-2], b.shape[-2]
    contracted = a.ndim - len(group) - 1
    dims = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    down = with_names(lax.dot_general(x, a.astype(x.dtype), (dims, ((), ()))), GEMM)
    down = down.reshape(*x.shape[: x.ndim - contracted], math.prod(group), rank)
    up = with_names(jnp.einsum("...gr,grf->...gf", down, b.astype(x.dtype).reshape(-1, *b.shape[-2:])), GEMM)
    alpha = module.low_rank_adaptation_alpha
    factor = 1.0 if alpha is None else alpha / rank
    return y + like((up * factor).reshape(y.shape), y)


def lora_parameters(
    module: nn.Module, init: Initializer, contracted: Sequence[int], features: Sequence[int], prefix=""
):
    """The parameters (A, B) of `add_lora`: `init` draws A, B starts at 0."""
    rank = module.low_rank_adaptation_dim
    a_shape, b_shape = (*contracted, *features[:-1], rank), (*features[:-1], rank, features[-1])
    draw = lambda *args: nn.meta.unbox(init(*args))  # A box of `init` has names for another shape.
    a = parameter(module, f"{prefix}lora_a_kernel", draw, (None,) * len(a_shape), a_shape)
    b = parameter(module, f"{prefix}lora_b_kernel", nn.initializers.zeros, (None,) * len(b_shape), b_shape)
    return a, b


def lora_scope(module: nn.Module) -> tuple[bool, bool, bool]:
    """Whether `low_rank_adaptation_scope` adapts (qkv projections, output projection, MLP)."""
    return LORA_SCOPES[module.low_rank_adaptation_scope]
