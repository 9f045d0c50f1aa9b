"""FP8 state: the recipe in force, the scale of a tensor, and how a training step turns amaxes into new scales.

A recipe with state (`has_state`) has it in the collection `fp8_metas`, or in the other of `STATE_COLLECTIONS`: f32
leaves `{tensor}_scale` [1] and `{tensor}_amax_history` [L], and where it is probed (`te_jax.fp8_probes`)
`{tensor}_probe` [4], possibly with leading axes from `nn.scan` or `nn.vmap`. A tensor is x, kernel or grad of a GEMM,
or one of `AttentionMetas`. The cotangent of the collection is the new state, so `jax.grad` with respect to it is the
update, and a forward pass by itself changes nothing.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.typing import DTypeLike

from te_jax import sharding
from te_jax.core.amax import amax as amax_of
from te_jax.core.amax import amax_across
from te_jax.core.check import BOOL, NONE, Kind, check, one_of, warn
from te_jax.core.derivatives import custom_vjp
from te_jax.core.scope import Scope
from te_jax.core.types import varying_axes
from te_jax.ops.scale_update import next_state
from te_jax.ops.source import PerExpert
from te_jax.recipe import DelayedScaling, Recipe
from te_jax.recipe._exclude import warn_of_strays
from te_jax.recipe.delayed import HISTORY, SCALE
from te_jax.sharding.resource import MeshResource

FP8_COLLECTION = "fp8_metas"
# Flax's own FP8 products have their state here, and training loops that know them look here.
OVERWRITE_COLLECTION = "_overwrite_with_gradient"
STATE_COLLECTIONS = FP8_COLLECTION, OVERWRITE_COLLECTION
PROBE = "_probe"  # how the name of a leaf ends whose cotangent is what `observation` says of the tensor
ENDINGS = SCALE, HISTORY, PROBE

# In force where FP8 was switched off by name, or no recipe put in force, unlike None, where nobody said anything.
_OFF, _CLEARED = "off", "cleared"
_recipe, _collection = Scope("te_jax.autocast"), Scope("te_jax.autocast")


# -- the recipe in force ----------------------------------------------------------------------------------------


def _recipe_hint(value) -> str:
    is_recipe = isinstance(value, Recipe) or (isinstance(value, type) and issubclass(value, Recipe))
    return "a recipe goes by name: autocast(recipe=...)" if is_recipe else ""


_ENABLED = Kind("True or False", lambda value: value is None or BOOL.accepts(value), hint=_recipe_hint)


COLLECTION = NONE | one_of(*STATE_COLLECTIONS)


def autocast(
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    collection: str | None = None,
) -> "_Autocast":
    """A context manager, and decorator of functions: modules and layers called inside run their GEMMs in FP8.

    enabled:       True or False. False switches FP8 off, even inside another autocast: use it to run a model that has
                   FP8 state without FP8 on purpose. None: on if there is a recipe, else off.
    recipe:        a recipe instance; None means `recipe.DelayedScaling()`.
    mesh_resource: a `te_jax.MeshResource`; None keeps the outer one.
    collection:    where the Linen modules have their FP8 state, under recipes that have some: "fp8_metas", their own
                   default, or "_overwrite_with_gradient", for training loops that take the gradient of that collection
                   for its next value. None keeps the outer one.

    An autocast belongs to the task and the thread that enter it. Enter it around a call, never around an `await` or a
    `yield`, and in the function that a thread runs, for a thread knows nothing of its starter's. Two tasks that both
    wait inside of one raise RuntimeError, as do a module traced under another task's and blocks left in another order.

    Raises TypeError if `enabled` is not a bool or `recipe` not a recipe instance, and as a decorator of coroutines and
    generators; ValueError if a mesh axis of `mesh_resource` is not in the mesh, and for another collection. Warns where
    nothing is given at all.
    """
    check("autocast", "enabled", enabled, _ENABLED)
    if recipe is not None:
        check_recipe("autocast", recipe)
    check("autocast", "collection", collection, COLLECTION)
    if all(argument is None for argument in (enabled, recipe, mesh_resource, collection)):
        warn(
            "autocast: enabled is None and there is no recipe, so FP8 stays off; pass True, a recipe, or False.",
        )
    if enabled is None:
        return _Autocast(recipe, mesh_resource, collection)
    return _Autocast((recipe or DelayedScaling()) if enabled else _OFF, mesh_resource, collection)


def without_recipe(mesh_resource: MeshResource | None = None) -> AbstractContextManager[Any]:
    """As `autocast`, with no recipe in force inside. Unlike `autocast(False)` it does not switch off the recipes that
    modules have of their own."""
    return _Autocast(_CLEARED, mesh_resource, None)


class _Autocast(contextlib.ContextDecorator):
    """What `autocast` returns: a context manager that may be entered again, and a decorator of functions."""

    def __init__(self, value: Recipe | str | None, mesh_resource: MeshResource | None, collection: str | None) -> None:
        self._options = value, mesh_resource, collection
        self._entered = []  # (thread, what it is to leave), the innermost last
        self._lock = threading.Lock()  # a decorated function may run in several threads

    def __enter__(self) -> None:
        value, mesh_resource, collection = self._options
        with contextlib.ExitStack() as stack:
            if mesh_resource is not None:
                stack.enter_context(sharding.global_shard_guard(mesh_resource))
            if collection is not None:
                stack.enter_context(_collection(collection))
            stack.enter_context(_recipe(value))
            with self._lock:
                self._entered.append((threading.get_ident(), stack.pop_all()))

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            here = [at for at, (thread, _) in enumerate(self._entered) if thread == threading.get_ident()]
            _, stack = self._entered.pop(here[-1] if here else -1)
        stack.__exit__(*error)
        if isinstance(self._options[0], Recipe) and error[0] is None:
            warn_of_strays(self._options[0].exclude)

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        if any(is_so(f) for is_so in (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)):
            raise TypeError(
                f"autocast: it decorates {f.__qualname__}, whose body runs after the call of it is over; enter it "
                "inside of the function, around a call that neither waits nor yields."
            )
        return super().__call__(f)


def check_recipe(what: str, recipe: Any, argument: str = "recipe") -> None:
    """Raises TypeError, naming `what` and the argument, unless `recipe` is a recipe instance."""
    if not isinstance(recipe, Recipe) or type(recipe) is Recipe:
        is_class = isinstance(recipe, type) and recipe is not Recipe
        hint = f"pass an instance: {recipe.__name__}()" if is_class else "pass te_jax.recipe.DelayedScaling()"
        raise TypeError(f"{what}: {argument} is {recipe!r}; {hint}.")


def check_metas(what: str, argument: str, metas: Any, recipe: Recipe, way_out: str) -> None:
    """Raises ValueError, naming `what`, unless its `argument` is given just where `recipe` has state."""
    if recipe.has_state == (metas is not None):
        return
    have, way_out = ("None", way_out) if metas is None else ("given", "it has no state: pass None")
    raise ValueError(f"{what}: {argument} is {have} under {type(recipe).__name__}; {way_out}.")


def fp8_autocast(
    enabled: bool | None = None,
    fp8_recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    sharding_resource: MeshResource | None = None,
) -> "_Autocast":
    """The first name of `autocast`: the same with the recipe as `fp8_recipe`, and `sharding_resource` as an older name
    of `mesh_resource`. Raises TypeError for both names."""
    if mesh_resource is not None and sharding_resource is not None:
        raise TypeError(
            f"fp8_autocast: sharding_resource is {sharding_resource!r} next to mesh_resource, whose older name it is; "
            "pass one of them."
        )
    return autocast(enabled, fp8_recipe, sharding_resource if mesh_resource is None else mesh_resource)


def current_recipe() -> Recipe | None:
    """The recipe in force, None outside of `autocast` or where it is disabled.

    Raises RuntimeError under the autocast of another task or thread.
    """
    return None if is_off_by_request() else _recipe.value


def in_collection(collection: str) -> AbstractContextManager[Any]:
    """A context manager that puts FP8 state into `collection`, whatever an autocast around it says."""
    return _collection(collection)


def state_collection(default: str = FP8_COLLECTION) -> str:
    """The collection of FP8 state that the autocast in force says, else `default`."""
    return _collection.value or default


def is_off_by_request() -> bool:
    """Whether somebody said that no recipe is in force, by `autocast(False)` or `without_recipe`."""
    return _recipe.value in (_OFF, _CLEARED)


def is_switched_off() -> bool:
    """Whether `autocast(False)` is in force, unlike where there is no autocast at all."""
    return _recipe.value == _OFF


def get_delayed_scaling() -> DelayedScaling:
    """The `DelayedScaling` in force, or the default one where no recipe is.

    Raises ValueError where another recipe is in force.
    """
    recipe = current_recipe() or DelayedScaling()
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(f"get_delayed_scaling: the recipe in force is {recipe}; te_jax.fp8.current_recipe returns it.")
    return recipe


# -- the state of one tensor ------------------------------------------------------------------------------------


class TensorMeta(NamedTuple):
    """What a layer needs to quantize one tensor, and where it leaves what it saw; of E experts' tensor f32[E, ...]."""

    scale: jax.Array  # f32[], the tensor is multiplied by it
    amax: jax.Array  # f32[], a token: its cotangent is the tensor's amax in this step, 0 if it was not quantized
    # f32[4] where there is a probe: the cotangent is what `observation` says, 0 if it was not quantized


class DenseMetas(NamedTuple):
    """The three tensors of one dense layer; None each under a recipe without state."""

    x: TensorMeta | None
    kernel: TensorMeta | None
    grad: TensorMeta | None  # of the layer's output


STATELESS = DenseMetas(None, None, None)


class AttentionMetas(NamedTuple):
    """The tensors of one attention."""

    q: TensorMeta
    k: TensorMeta
    v: TensorMeta
    o: TensorMeta
    do: TensorMeta
    dq: TensorMeta
    dk: TensorMeta
    dv: TensorMeta
    dp: TensorMeta  # the gradient of q k^T


def type_of(tensor: str, recipe: Recipe) -> DTypeLike:
    """The FP8 type of a tensor of a layer: a field of `DenseMetas`."""
    return recipe.fp8_format.dtype(direction_of(tensor))


def direction_of(tensor: str) -> str:
    """Activations and weights are "fwd", gradients "bwd": they have an FP8 type of their own."""
    return "bwd" if tensor.startswith("grad") or tensor in ("do", "dq", "dk", "dv", "dp") else "fwd"


@custom_vjp(2, 3, in_fp8=lambda *_: "te_jax.state.fp8.observe")
def observe(
    scale: jax.Array, amax_history: jax.Array, recipe: DelayedScaling, direction: str, probe: jax.Array | None = None
) -> TensorMeta:
    """State of a tensor -> what a layer consumes. Backward, the recorded amax becomes the new state.

    scale: f32[1], amax_history: f32[L], direction: "fwd" or "bwd", probe: f32[4], whose value is not read; each with
    an axis E in front for a tensor of experts. A history and a probe that `combine_by_max` has converted take the bare
    amax and what was seen, for the law is applied further up.
    """
    # The token's value is not read, but it is mapped or varies as the state does.
    return TensorMeta(scale[..., 0], scale[..., 0] if probe is None else jnp.broadcast_to(scale, probe.shape))


def _observe_fwd(scale, amax_history, recipe, direction, probe):
    return observe(scale, amax_history, recipe, direction, probe), (scale, amax_history, probe)


def _observe_bwd(recipe, direction, state, cotangent):
    scale, history, probe = state
    amax, dprobe = cotangent.amax, None
    if probe is not None:
        amax, dprobe = cotangent.amax[..., 0], lax.convert_element_type(cotangent.amax, probe.dtype)
    if jax.dtypes.issubdtype(history.dtype, jax.dtypes.extended):
        amaxes = jnp.broadcast_to(amax[..., None], history.shape)
        return jnp.zeros_like(scale), lax.convert_element_type(amaxes, history.dtype), dprobe
    return *next_state(recipe, (scale, history), amax, direction), dprobe


observe.defvjp(_observe_fwd, _observe_bwd)


@partial(jax.jit, inline=True)  # outside of it `jax.shard_map` has no rule for symbolic zeros
@custom_vjp(in_fp8=lambda: "te_jax.state.fp8.fork")
def fork(meta: TensorMeta) -> tuple[TensorMeta, TensorMeta]:
    """Two uses of one state, as where a module is applied twice: their amaxes combine by max, not by autodiff's sum."""
    return meta, meta


def _fork_fwd(meta):
    meta = TensorMeta(*(leaf.value for leaf in meta))
    return (meta, meta), None


def _fork_bwd(_, uses):
    # No maximum with a zero that nobody wrote: XLA would not know that it is none, and run a kernel for it.
    seen = [use.amax for use in uses if not isinstance(use.amax, SymbolicZero)]
    return (TensorMeta(None, functools.reduce(jnp.maximum, seen) if seen else None),)


fork.__wrapped__.defvjp(_fork_fwd, _fork_bwd, symbolic_zeros=True)


def scale_of(
    meta: TensorMeta | None, measure: Callable[[], jax.Array], recipe: Recipe, tensor: str, shards: frozenset[str]
) -> jax.Array:
    """The scale (f32[]) that a layer quantizes a tensor with.

    measure: -> the tensor's amax, f32[]; called where the recipe scales by it. tensor: a field of `DenseMetas`.
    shards:  inside `shard_map`, the mesh axes over which the tensor is sharded; its amax is the largest of all shards.

    Raises ValueError under `shard_map(check_vma=False)`, where these axes are not known, unless the recipe reduces no
    amax.
    """
    amax = measure() if recipe.needs_amax else None
    if amax is not None and recipe.reduce_amax:
        _check_vma()
        amax = amax_across(amax, tuple(sorted(shards))) if shards else amax
    fp8_max = recipe.fp8_format.max(direction_of(tensor))
    return recipe.scale(tensor, None if meta is None else meta.scale, amax, fp8_max)


def observation(
    meta: TensorMeta | None,
    amax: jax.Array,
    scale: jax.Array,
    exact: Callable[[], jax.Array],
    dtype: DTypeLike,
    experts: PerExpert | None = None,
    across: frozenset[str] = frozenset(),
) -> jax.Array:
    """The amax (f32[]) of a tensor that a layer quantized to `dtype` with `scale`; for a probed one f32[4]: its amax,
    the scale, the fraction of its elements that are beyond the largest FP8 value (inf too), and the fraction of its
    elements other than 0 that become 0.

    exact:   -> the tensor before it was quantized, called only for a probe.
    experts: of a tensor that has an amax and a scale for each expert, f32[E]: the result is then f32[E] or f32[E, 4].
    across:  the mesh axes of `reduced_axes`: elements are counted on all devices along them.
    """
    if meta is None or meta.amax.ndim == meta.scale.ndim:
        return amax
    x, limits = exact().astype(jnp.float32), jnp.finfo(dtype)
    spread, total, size = experts or (lambda a: a, jnp.sum, float(x.size))
    scaled = jnp.abs(x * spread(scale))
    count = lambda mask: total(jnp.count_nonzero(mask, axis=-1).astype(jnp.float32))  # integers end at 2**31
    beyond = count(scaled > float(limits.max))
    # By size, for XLA may drop a cast to FP8 and back; half of the smallest number is rounded to the even one, 0.
    lost = count((x != 0) & (scaled <= float(limits.smallest_subnormal) / 2))
    counts = beyond, size, lost, count(x != 0)
    # What several devices have alike enters the sums of parts and wholes as often.
    beyond, size, lost, other = lax.psum(counts, tuple(sorted(across))) if across else counts
    return jnp.stack([amax, scale, beyond / jnp.maximum(size, 1), lost / jnp.maximum(other, 1)], -1)


def reduced_axes(amax: jax.Array, recipe: Recipe, unshared: frozenset[str]) -> frozenset[str]:
    """Inside `shard_map`, the mesh axes whose devices' parts of a tensor with this amax have one state: all over which
    it varies but the `unshared` ones; none where the recipe forbids that."""
    return varying_axes(amax) - unshared if recipe.reduce_amax else frozenset()


def cotangent(
    meta: TensorMeta | None, amax: jax.Array | None, recipe: Recipe, stage_axes: frozenset[str] = frozenset()
) -> TensorMeta | None:
    """The cotangent that a layer returns for `meta`.

    amax: as `observation` returns it; None where the layer quantized nothing. A tensor that never leaves its CUDA
          kernel has f32[] for a probe too, whose fractions are then inf: not known.

    Inside `shard_map` the amax is reduced over the devices along all mesh axes but `stage_axes`. Raises ValueError
    where `recipe.reduce_amax` forbids that but the state is shared, and under `shard_map(check_vma=False)`.
    """
    _check_vma()
    if meta is None:
        return None
    if amax is None:
        return TensorMeta(jnp.zeros_like(meta.scale), jnp.zeros_like(meta.amax))
    if amax.ndim < meta.scale.ndim:  # 0: nothing was quantized
        amax = jnp.broadcast_to(amax, meta.scale.shape)
    if amax.ndim < meta.amax.ndim:  # 0 where nothing was quantized, too
        unknown = jnp.full_like(amax, jnp.inf)
        whole = jnp.stack([amax, meta.scale, unknown, unknown], -1)
        amax = jnp.where(amax[..., None] == 0, 0.0, whole)
    shared = varying_axes(amax) - varying_axes(meta.amax)
    sizes = jax.sharding.get_abstract_mesh().shape
    if any(sizes[name] > 1 for name in shared) and not recipe.reduce_amax:
        raise ValueError(
            f"DelayedScaling(reduce_amax=False): fp8_metas do not vary over mesh axis {sorted(shared)}, but the "
            "tensor does; pass fp8_metas sharded over that axis, or use reduce_amax=True."
        )
    if reduced := (reduced_axes(amax, recipe, stage_axes) if recipe.reduce_amax else shared):
        amax = amax_across(amax, tuple(sorted(reduced)))
    lacks = tuple(sorted(varying_axes(meta.amax) - varying_axes(amax)))
    amax = lax.pcast(amax, lacks, to="varying") if lacks else amax
    amax, token = lax.stop_gradient((amax, meta.amax))  # state: jax cannot differentiate what maps as `_per_state` does
    return TensorMeta(jnp.zeros_like(meta.scale), _per_state(amax, token))


def _check_vma():
    """Without check_vma nothing tells which values differ between devices: each would train a state of its own."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = [n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Manual]
    if any(name not in varying_axes(lax.axis_index(name)) for name in manual):
        raise ValueError(
            f"FP8 layers need shard_map(check_vma=True), here over mesh axes {manual}; leave it at its default."
        )


@custom_vmap
def _per_state(amax, token):
    """amax, but one for all examples of a vmapped axis over which the state (`token`) is shared: their max."""
    return amax


@_per_state.def_vmap
def _per_state_vmap(size, batched, amax, token):
    amax_batched, token_batched = batched
    if amax_batched and not token_batched:
        return _per_state(amax_of(amax, (0,)), token), False
    amax = amax if amax_batched else jnp.broadcast_to(amax, (size, *amax.shape))
    return _per_state(amax, token), True
