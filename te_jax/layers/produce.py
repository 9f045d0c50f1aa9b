"""From a tensor's source to the tensor as GEMMs read it: measure, scale, choose results, run, probe.

A source (`ops.source.Source`) says which ops compute its tensor, and from which operands; the recipe says what shares
a scale (`ops.formats.format_of`). An op of that format writes FP8 at once. Where no op does, or none that also writes
what else is asked for, the tensor is written in its own type and quantized from there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from te_jax.core.amax import amax as amax_of
from te_jax.core.policies import KERNEL, STATISTICS, with_names
from te_jax.core.types import like, varying_axes
from te_jax.layers.config import Config
from te_jax.layers.tensor import Fp8Tensor, LayerUses, Uses
from te_jax.ops.formats import format_of, invert, transpose
from te_jax.ops.quantize.array import array_source
from te_jax.ops.quantize.stacked import stacked_source
from te_jax.ops.source import Source
from te_jax.sharding.constraints import constrain_to_spec, gather_over
from te_jax.state import fp8


class Role(NamedTuple):
    """What a tensor is in a layer."""

    name: str  # a field of `DenseMetas`
    meta: fp8.TensorMeta | None
    uses: Uses
    # A type that varies over the mesh axes that shard the tensor inside `shard_map`. For an operand it is the type that
    # the operand had before `align`, which makes replicated operands vary.
    shards_of: ShapedArray


def produce(
    source: Source, role: Role, config: Config, others: tuple[str, ...] = ()
) -> tuple[Fp8Tensor, dict[str, jax.Array]]:
    """The tensor of `source` as its GEMMs read it, and the results of its op by name.

    others: names of results that are wanted as well.
    """
    recipe, uses = config.recipe, role.uses
    form = format_of(recipe, role.name)
    dtype = fp8.type_of(role.name, recipe)
    wanted = (*others, source.unquantized) if uses.wide and source.unquantized else others
    if not (uses.layouts and source.offers(form, wanted)):
        got = source.run((*others, source.unquantized), dtype)
        return quantize_tensor(got[source.unquantized], source.split, role, config)[0], got
    scale, known = None, {}

    def measure():
        kept = [name for name in others if source.takes(f"known_{name}", form)]
        known.update(source.run(("amax", *kept), dtype))
        return known.pop("amax")

    if source.takes("scale", form):
        shards = varying_axes(role.shards_of) - config.unshared_axes(bool(source.scales))
        scale = fp8.scale_of(role.meta, measure, recipe, role.name, shards)
    statistics = ("amax",) if recipe.has_state else ()
    if statistics and source.offers(form, ("amax", "scale_inv")):
        statistics += ("scale_inv",)  # next to an amax it takes no launch of its own
    names = [name for name in (*wanted, *uses.layouts, *statistics) if name not in known]
    got = known | source.run(names, dtype, form, scale, known, recipe.scale_law)
    if "amax" in got:
        one_state = bool(source.scales) and role.meta.scale.ndim == 0  # of all experts
        amax, experts = (amax_of(got["amax"]), None) if one_state else (got["amax"], source.experts)
        unshared = config.unshared_axes(role.meta is not None and role.meta.scale.ndim > 0)
        across = fp8.reduced_axes(amax, recipe, unshared)
        got["amax"] = fp8.observation(role.meta, amax, scale, lambda: source.exact(dtype), dtype, experts, across)
    if scale is not None and "scale_inv" not in got:
        got["scale_inv"] = invert(scale)
    fields = {name: got[name] for name in Fp8Tensor._fields if name in got}
    return Fp8Tensor(**fields, wide=got[source.unquantized] if uses.wide and source.unquantized else None), got


def quantize_tensor(
    x: jax.Array, split: int, role: Role, config: Config, with_dbias: bool = False
) -> tuple[Fp8Tensor, jax.Array | None]:
    """x [*m, *n], with `split` axes in m, as its GEMMs read it, and its column sums f32[*n] if asked for."""
    if role.uses.layouts:
        q, got = produce(array_source(x, split), role, config, ("dbias",) if with_dbias else ())
    else:
        q, got = Fp8Tensor(), dict(dbias=jnp.sum(x.astype(jnp.float32), tuple(range(split)))) if with_dbias else {}
    return q._replace(wide=x if role.uses.wide else None), got.get("dbias")


def quantize_weight(
    weight: jax.Array | Fp8Tensor, meta: fp8.TensorMeta | None, uses: Uses, config: Config
) -> Fp8Tensor:
    """weight [*C, *F] as its GEMMs read it. An Fp8Tensor that has data was quantized before."""
    form, held = format_of(config.recipe, "kernel"), isinstance(weight, Fp8Tensor)
    one_crosses = config.kept_along is not None and uses.data and uses.data_t
    if held and weight.data is None and weight.data_t is None:
        return quantize_weight(weight.wide, meta, uses, config)._replace(onto=weight.onto)
    if held and not one_crosses:
        return weight.read(uses, config.contract, form)
    q = weight
    if not held:
        written = uses._replace(data_t=False) if one_crosses else uses
        q, _ = quantize_tensor(weight, config.contract, Role("kernel", meta, written, config.weight), config)
    if one_crosses:
        q = _gather_one_layout(q, config.kept_along).read(uses, config.contract, form)
    return tag_weight(q, config)


def _gather_one_layout(q: Fp8Tensor, along: str) -> Fp8Tensor:
    """A weight with one of its layouts, whole along the mesh axis `along`."""
    if q.data is not None:
        q = q._replace(data_t=None, scale_inv_t=None)
    crossing = {name: getattr(q, name) for name in ("data", "data_t", "scale_inv", "scale_inv_t")}
    return q._replace(**{name: gather_over(a, along) for name, a in crossing.items() if a is not None and a.ndim})


def quantize_stacked(
    weight: jax.Array,
    meta: fp8.TensorMeta | None,
    uses: Uses,
    config: Config,
    stack: int = 1,
    second: jax.Array | None = None,
    named: bool = True,
) -> Fp8Tensor:
    """weight [*E, *C, *F], with `stack` axes in E, as GEMMs read each: the weights of experts, or of layers. Each entry
    of E has blocks, or one scale, of its own.

    second: an array of the shape and type of `weight`, as a gated activation has. The tensor is then [*E, *C, 2, *F];
            an unquantized array of that shape is made only where a GEMM reads it.
    named:  False where the layout that fprop reads is still to be made of the one for dgrad, as `tag_weight` says.
    """
    role, q = Role("kernel", meta, uses, config.weight), Fp8Tensor()
    source = stacked_source(weight, second, stack, config.contract)
    if uses.layouts:
        q, _ = produce(source, role._replace(uses=uses._replace(wide=False)), config)
    if q.scale_inv is not None and not q.scale_inv.ndim:  # one scale for all, such as a recipe's constant
        q = q._replace(scale_inv=jnp.broadcast_to(q.scale_inv, source.scales))
    q = q._replace(wide=source.elements() if uses.wide else None)
    return tag_weight(q, config) if named else q


def quantize_grad(
    dy: jax.Array, meta: fp8.TensorMeta | None, config: Config, needs_wgrad: bool
) -> tuple[Fp8Tensor, jax.Array | None]:
    """dy [*B, *F] -> the tensor as the backward GEMMs read it, and the gradient of the bias, if there is one.

    Both GEMMs read all of dy where y was left scattered. Where both layouts have the same scales, one layout crosses
    devices once, and is transposed there; in pieces that is left to `dgrad_and_read`. Elsewhere the layouts differ, and
    are as many bytes as dy in 16 bits: dy crosses.
    """
    uses = LayerUses.of(config.recipe, train=True, wgrad=needs_wgrad).grad
    split, has_bias = dy.ndim - config.features, config.bias is not None
    one_crosses = format_of(config.recipe, "grad").shared
    if uses.layouts and not one_crosses:
        dy = _gather(dy, config)
    late = one_crosses and config.grad_spec is not None and uses.data and uses.data_t
    written = uses._replace(data_t=False) if late else uses
    grad, dbias = quantize_tensor(dy, split, Role("grad", meta, written, jax.typeof(dy)), config, has_bias)
    if late and (config.pieces is None or config.pieces.gathers):
        data = _gather(grad.data, config)
        grad = grad._replace(data=data, data_t=transpose(data, split))
    return grad, like(dbias, config.bias) if has_bias else None


def _gather(a, config: Config):
    """The gradient of y as its GEMMs read it on a mesh."""
    if config.spec is None:
        return constrain_to_spec(a, config.grad_spec)
    return a if config.grad_spec is None else jax.sharding.reshard(a, config.grad_spec)


def tag_weight(q: Fp8Tensor, config: Config) -> Fp8Tensor:
    """A weight in both layouts, named for `jax.checkpoint` policies, but for what only fprop reads, and for the array
    itself, which is kept anyway.

    fprop's layout must not be made of the named one: jax rounds floats that a policy keeps and the forward pass reads
    to the width of their type, by which E4M3 above 240 becomes NaN.
    """
    return tag(q, KERNEL, config, leave=("data_t", "scale_inv_t", "wide", "onto"))


def tag(q: Fp8Tensor, name: str, config: Config, leave: tuple[str, ...] = ()) -> Fp8Tensor:
    """`q` named for `jax.checkpoint` policies: by `name` (scalars and what was seen of the tensor: STATISTICS) and by
    the config's name. leave: fields that are not named."""

    def one(field, a):
        small = field == "amax" or a is None or not a.ndim
        return with_names(a, STATISTICS if small else name, config.checkpoint)

    return q._replace(**{field: one(field, a) for field, a in q._asdict().items() if field not in leave})
