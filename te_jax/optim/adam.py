"""AdamW whose two moments take 3 bytes a parameter instead of 8.

Each parameter has two stored values:

- The square root of the second moment in f16, divided by a scale for each block of the last axis. An outlier costs
  precision only in its own block (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, section 2.1). The second
  moment needs the finer type: g**2 spans twice the exponents of g (Peng et al. 2023, https://arxiv.org/abs/2310.18313,
  section 2.2). The root in f16 has a range of 2**40 in each block.
- The first moment in E4M3, divided by that root: a scale for each element without further memory. The update is made
  of this quotient, which is bounded by Cauchy and Schwarz: |mu| <= sqrt(nu) (1 - b1) / sqrt((1 - b2) (1 - b1**2 / b2)).
  So no moment is lost next to a large neighbour, and no root is too small for its moment.

A step changes a moment by a small part of itself, 1 - b1 or 1 - b2, which rounding to nearest would drop below half a
unit in the last place. So rounding is stochastic: on average a moment decays as it should. The random numbers are a
hash of the step count and of the index in the array: runs repeat bit for bit, on any mesh, and need no key.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from te_jax.core.check import ARRAY, BOOL, FUNCTION, Kind, check, number, warn
from te_jax.core.placement import mesh_axes
from te_jax.core.types import on_explicit_mesh
from te_jax.layers.parameters import is_kernel
from te_jax.sharding.constraints import entries
from te_jax.state.fp8 import STATE_COLLECTIONS
from te_jax.state.misplaced import stray_state

_ADAMW = "te_jax.optim.adamw_fp8"
_BLOCK = 128  # Elements of the last axis that share a scale.
_UNITS = 16.0  # mu is stored in units of root / 16, which reach 448 / 16 = 28 roots; b1, b2 = 0.9, 0.999 need 7.3.
_ROOTS = 448 / _UNITS
_LARGEST = float(jnp.finfo(jnp.float32).max)
_ODD = 2654435769  # 2**32 over the golden ratio: its powers give neighbours along each axis distant numbers.

USE_MASTERS = "put te_jax.optim.master_weights around the whole optimizer, optax.MultiSteps included"
# `optax.inject_hyperparams` makes numbers arrays, whose values are not known.
_ARRAY = Kind("a scalar array", lambda value: isinstance(value, jax.Array), lambda value: value.ndim == 0)
_SIZE = number(least=0) | _ARRAY
_DECAY = number(least=0, below=1) | _ARRAY
_RATE = number(least=0) | Kind("a schedule", FUNCTION.is_type) | _ARRAY


class AdamFp8State(NamedTuple):
    """The state of `scale_by_adam_fp8`; each tree has the structure of the parameters."""

    count: jax.Array  # i32[], the number of steps.
    mu: Any  # E4M3, of the parameter's shape [..., n]: 16 times the first moment over the root of the second.
    root_nu: Any  # f16, of the parameter's shape: the square root of the second moment over its block's scale.
    exponent: Any  # i8[..., blocks], [1] for a scalar parameter: the scale is 2**exponent, which never rounds.


def adamw_fp8(
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """`optax.adamw` (https://arxiv.org/abs/1711.05101, algorithm 2) whose moments take 3 bytes a parameter, not 8.

    The arguments are the same as for `optax.adamw`; schedules, masks and `optax.inject_hyperparams` work as there.
    Moments and updates are computed in f32 (see `scale_by_adam_fp8`).

    Raises as `scale_by_adam_fp8`; ValueError for a negative weight_decay or learning_rate, TypeError for a mask that is
    not of bools.
    """
    check(_ADAMW, "learning_rate", learning_rate, _RATE)
    check(_ADAMW, "weight_decay", weight_decay, _SIZE)
    return optax.chain(
        _scale_by_adam(_ADAMW, b1, b2, eps, eps_root, nesterov),
        optax.add_decayed_weights(weight_decay, _check_mask(mask)),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam_fp8(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with an `AdamFp8State`.

    Parameters may have any floating dtype of 16 bits or more; updates have the dtype of the gradients. A block is 128
    elements of the last axis where 128 divides it, else a whole row. mu and root_nu are sharded as their parameter, and
    the scales too where the devices divide their number (`state_sharding`). Only maxima of blocks cross devices, where
    shards of the last axis cut blocks.

    A gradient that is inf or NaN makes its own element NaN, and one whose square is inf in f32 (from 1.9e19 on) stops
    that element for good, as in optax; no other element sees it.

    Raises TypeError for parameters and gradients that are not floating, and for arguments of another type; ValueError
    for arguments out of range (b2 has to be above b1**2, which bounds the quotient of the moments), for parameters in
    FP8 (see `master_weights`), for FP8 state among the parameters, and on an Explicit mesh whose shards of the last
    axis do not hold whole blocks (Auto axes have no such limit). Warns of b1 and b2 whose quotient may exceed the range
    of E4M3, and of eps and eps_root that are both 0.
    """
    return _scale_by_adam("te_jax.optim.scale_by_adam_fp8", b1, b2, eps, eps_root, nesterov)


def _scale_by_adam(where: str, b1, b2, eps, eps_root, nesterov) -> optax.GradientTransformation:
    """`scale_by_adam_fp8`; errors begin with `where`."""
    _check_constants(where, b1, b2, eps, eps_root, nesterov)

    def init(params):
        def fresh(path, p):
            _check_parameter(where, path, p)
            exponent = jnp.zeros_like(jnp.max(_blocks(p), -1), jnp.int8)
            return jnp.zeros_like(p, jnp.float8_e4m3fn), jnp.zeros_like(p, jnp.float16), exponent  # Sharded as p.

        check_no_fp8_state(where, params)
        state = jax.tree_util.tree_map_with_path(fresh, params, is_leaf=is_kernel)
        return AdamFp8State(jnp.zeros((), jnp.int32), *_unzip(state, params, 3))

    def update(updates, state, params=None):
        del params
        _check_updates(where, updates, state)
        count = optax.safe_increment(state.count)
        corrected = lambda moment, decay, steps: moment / (1 - decay**steps)

        def step(g, *stored):
            grad = _blocks(g.astype(jnp.float32))
            mu, nu = _moments(*stored)
            mu, nu = b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * grad**2
            ahead = corrected(mu, b1, count)
            if nesterov:  # Dozat 2016, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ, as in optax.
                ahead = b1 * corrected(mu, b1, count + 1) + (1 - b1) * corrected(grad, b1, count)
            by = ahead / (jnp.sqrt(corrected(nu, b2, count) + eps_root) + eps)
            return by.reshape(g.shape).astype(g.dtype), *_store_moment(mu, jnp.sqrt(nu), count, g.shape)

        by, *moments = _unzip(jax.tree.map(step, updates, *state[1:]), updates, 4)
        return by, AdamFp8State(count, *moments)

    return optax.GradientTransformation(init, update)


def _check_constants(where, b1, b2, eps, eps_root, nesterov):
    for name, value, kind in (
        *(("b1", b1, _DECAY), ("b2", b2, _DECAY), ("eps", eps, _SIZE), ("eps_root", eps_root, _SIZE)),
        ("nesterov", nesterov, BOOL),
    ):
        check(where, name, value, kind)
    known = lambda *values: not any(isinstance(value, jax.Array) for value in values)
    if known(eps, eps_root) and eps == eps_root == 0:
        warn(
            f"{where}: eps is {eps!r} and eps_root {eps_root!r}, so that an element whose gradients are 0 becomes NaN; "
            "pass eps=1e-8.",
        )
    if not known(b1, b2) or b1 == 0:  # With b1 = 0 no first moment is kept.
        return
    if b1**2 >= b2:
        raise ValueError(
            f"{where}: b2 is {b2!r}, but b1 is {b1!r}, and E4M3 cannot hold a first moment that outlives the root of "
            f"the second; pass b2 above b1**2 = {b1**2:g}, or use optax.adamw."
        )
    bound = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))
    if bound > _ROOTS:
        warn(
            f"{where}: b1 is {b1!r} and b2 {b2!r}: after a gradient {_ROOTS:g} times the usual size or more the first "
            f"moment can be {bound:.0f} roots of the second, of which {_ROOTS:g} are kept; pass a larger b1 or a "
            "smaller b2, or use optax.adamw.",
        )


def _check_parameter(where, path, p):
    name = jax.tree_util.keystr(path)
    if is_kernel(p):
        raise ValueError(f"{where}: parameter {name} lives in FP8; {USE_MASTERS}.")
    if not ARRAY.accepts(p):
        raise TypeError(f"{where}: parameter {name} is {p!r}; pass an array.")
    if not jnp.issubdtype(p.dtype, jnp.floating):
        raise TypeError(f"{where}: parameter {name} is {p.dtype}; mask it out, or pass a floating dtype.")
    if jnp.finfo(p.dtype).bits < 16:
        raise ValueError(
            f"{where}: parameter {name} is {p.dtype}, in which no update can be added up; keep it in FP8 by "
            "te_jax.flax.fp8_params with te_jax.optim.master_weights, or pass 16 bits or more."
        )


def _check_updates(where, updates, state):
    if not isinstance(state, AdamFp8State):
        raise TypeError(f"{where}: state is {type(state).__name__}; pass what init returned, or the last update.")
    have, held = jax.tree.structure(updates), jax.tree.structure(state.mu)
    if have != held:
        raise ValueError(
            f"{where}: updates are of another tree than the state, {have} instead of {held}; init again, or pass the "
            "gradients of the parameters that init was given."
        )

    def one(path, g, mu):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(g.dtype, jnp.floating):
            raise TypeError(f"{where}: the gradient of {name} is {g.dtype.name}; pass a floating dtype.")
        if g.shape != mu.shape:
            raise ValueError(
                f"{where}: the gradient of {name} has shape {g.shape}, but its parameter had {mu.shape}; pass the "
                "gradient of the same parameter, or init again."
            )

    jax.tree_util.tree_map_with_path(one, updates, state.mu)


def check_no_fp8_state(where: str, params: Any) -> None:
    """Raises ValueError, naming `where`, for FP8 state among `params`: no optimizer may update it."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kernel)
    names = (getattr(key, "key", None) for path, _ in leaves for key in path)
    held = [f"the collection {name}" for name in names if name in STATE_COLLECTIONS]
    held += [f"FP8 state at {'/'.join(path)}" for path in stray_state(params)]
    if held:
        raise ValueError(
            f"{where}: params holds {held[0]}, whose next value is its gradient, no update; pass "
            "only params, as te_jax.flax.TrainState does, or wrap the optimizer by te_jax.flax.fp8_masked."
        )


def _check_mask(mask):
    """`mask` of `optax.add_decayed_weights`. Raises TypeError unless its leaves are bools: a string would be true."""
    if callable(mask):
        return lambda params: _check_mask(mask(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if not BOOL.accepts(leaf):
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{_ADAMW}: mask has {leaf!r}{at}; pass a tree of True and False like params, or a function to one."
            )
    return mask


def state_sharding(leaf: Any, sharding: Sharding) -> Sharding:
    """The sharding of a leaf of the optimizer's state, for a parameter with `sharding`.

    leaf: An array or its type. It is sharded as its parameter; but scales whose number the devices along the last axis
          do not divide are replicated along it.

    For `jax.jit(out_shardings=...)` map it over the state:

        forms = jax.eval_shape(tx.init, params)
        optax.tree.map_params(tx, te_jax.optim.state_sharding, forms, shardings)

    Raises TypeError for a sharding or a leaf of another type.
    """
    where = "te_jax.optim.state_sharding"
    if not isinstance(sharding, Sharding):
        raise TypeError(f"{where}: sharding is {sharding!r}; pass a sharding, such as NamedSharding(mesh, spec).")
    if not hasattr(leaf, "shape"):
        raise TypeError(f"{where}: leaf is {leaf!r}; pass an array, or its jax.ShapeDtypeStruct.")
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < max(len(leaf.shape), 1):
        return sharding
    *lead, last = sharding.spec
    if leaf.shape[-1] % math.prod(sharding.mesh.shape[name] for name in mesh_axes(last)) == 0:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*lead), memory_kind=sharding.memory_kind)


def _unzip(tree, outer, width: int):
    """A list of `width` trees of the structure of `outer`, from one whose leaves are tuples of `width`."""
    structure = jax.tree.structure(outer)
    leaves = structure.flatten_up_to(tree)
    return [structure.unflatten([leaf[i] for leaf in leaves]) for i in range(width)]


def _blocks(x):
    """x [..., n] as [..., blocks, elements]. Raises ValueError for shards on an Explicit mesh that cut blocks."""
    n = x.shape[-1] if x.ndim else 1
    block = n if n % _BLOCK else _BLOCK
    if x.ndim and n != block and on_explicit_mesh(jax.typeof(x)):
        aval = jax.typeof(x)
        shard = n // math.prod(aval.sharding.mesh.shape[name] for name in entries(aval)[-1])
        if shard % block:
            raise ValueError(
                f"{_ADAMW}: the last axis of a parameter of shape {x.shape} has shards of {shard}, but scales are of "
                f"blocks of {block}; divide another axis, or use a mesh of Auto axes."
            )
    return x.reshape(*x.shape[:-1], n // block, block)


def _moments(mu, root_nu, exponent):
    """(mu, nu) in f32 [..., blocks, elements] from the stored values."""
    root, ratio = _blocks(root_nu).astype(jnp.float32) * _power_of_2(exponent), _blocks(mu).astype(jnp.float32) / _UNITS
    is_inf = jnp.isinf(root)  # Then the quotient of a finite mu is 0, and of inf NaN, which stays.
    nu = jnp.where(is_inf, root, jnp.minimum(root**2, _LARGEST))  # Rounded up, the largest root's square would be inf.
    return jnp.where(is_inf, ratio, ratio * root), nu


def _store_moment(mu, root, count, shape):
    """(mu, root_nu, exponent) as AdamFp8State stores them, mu and root_nu in `shape`.

    mu, root: The first moment and the root of the second, f32 [..., blocks, elements].
    """
    random = _random(count, root)
    largest = jnp.max(jnp.where(jnp.isfinite(root), root, 0), -1)
    bits = lax.bitcast_convert_type(largest / float(jnp.finfo(jnp.float16).max), jnp.int32)
    exponent = (bits >> 23) - 127 + (bits & 0x7FFFFF != 0)  # ceil(log2(.)), at least -127.
    exponent = jnp.clip(exponent, -126, 126).astype(jnp.int8)
    root_nu = _round_stochastically(root / _power_of_2(exponent), random, jnp.float16)
    unit = root_nu.astype(jnp.float32) * _power_of_2(exponent) / _UNITS
    ratio = jnp.where(unit == 0, 0, mu / unit)
    return _round_stochastically(ratio, random, jnp.float8_e4m3fn).reshape(shape), root_nu.reshape(shape), exponent


def _power_of_2(exponent):
    """2**exponent, exactly: i8[..., blocks] -> f32[..., blocks, 1]."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)[..., None]


def _random(count, x):
    """Multiples of 2**-12 in [0, 1), f32 in the shape of x, a hash of the step count and the index."""
    bits = jnp.zeros_like(x, jnp.uint32) + count.astype(jnp.uint32) * jnp.uint32(_ODD)
    for axis in range(x.ndim):
        place = jnp.arange(x.shape[axis], dtype=jnp.uint32)
        place = place.reshape(*[1] * axis, place.size, *[1] * (x.ndim - 1 - axis))
        bits += place * jnp.uint32(pow(_ODD, axis + 2, 2**32))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # The end of MurmurHash3: each bit depends on all.
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits >> 20).astype(jnp.float32) * 2.0**-12


def _round_stochastically(x, random, dtype):
    """x, f32, rounded to the narrower `dtype`.

    The result is the neighbour away from 0 if `random` is at least its distance in units in the last place, else the
    other one. Finite values saturate; inf and NaN stay, as NaN in E4M3.
    """
    info = jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    exponent = jnp.maximum(bits, (info.minexp + 127) << 23) & 0x7F800000  # Subnormals have the smallest one.
    ulp = lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-info.nmant
    size = jnp.minimum(jnp.floor(jnp.abs(x) / ulp + random) * ulp, float(info.max))
    return jnp.where(jnp.isfinite(x), jnp.copysign(size, x), x).astype(dtype)
