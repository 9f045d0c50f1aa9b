"""The three FP8 GEMMs of a dense layer, and the two tensors that all of them share.

fprop  y  = x  w      lhs x   [*B, *C], rhs w_t  [*F, *C]
dgrad  dx = dy w^T    lhs dy  [*B, *F], rhs w    [*C, *F]
wgrad  dw = x^T dy    lhs x_t [*C, *B], rhs dy_t [*F, *B]

So each tensor is wanted in two layouts, and both come from one reading of it. A GEMM that the recipe's
`override_linear_precision` takes out of FP8 uses the unquantized operands instead. Under a recipe of block scales each
layout has scales of its own, and te_quantize_block and te_gemm_block, or te_quantize_mx and te_gemm_mx, take the place
of te_quantize and te_gemm. Where the kernel is not differentiated (a frozen one, as beside LoRA), there is no wgrad,
and nothing is written or kept for it: autodiff says so by `symbolic_zeros` of the layers' custom_vjp.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from te_jax import fp8
from te_jax._arrays import as_rank
from te_jax._types import like, varying
from te_jax.checkpoint_policies import GEMM, KERNEL, QUANTIZED, STATISTICS, named
from te_jax.fp8 import DenseMetas, cotangent
from te_jax.layers._specs import dense_spec, explicit_spec
from te_jax.ops.gemm import dot, gemm, gemm_sum
from te_jax.ops.gemm_block import gemm_block
from te_jax.ops.gemm_mx import gemm_mx
from te_jax.ops.quantize import quantize, transpose
from te_jax.ops.quantize_block import BLOCK, quantize_block
from te_jax.ops.quantize_mx import BLOCK as MX_BLOCK
from te_jax.ops.quantize_mx import quantize_mx
from te_jax.recipe import Recipe
from te_jax.sharding import stage_axes
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


class Accumulator(NamedTuple):
    """Where a kernel's gradient goes instead of to the kernel: its cotangent is the sum after this pass, and the number
    of uses. More than one would add up `grad` as often, as do devices of `shard_map` that share it."""

    grad: jax.Array  # f32 [*C, *F], the sum of the passes before
    uses: jax.Array  # f32[], a token


class Fp8Tensor(NamedTuple):
    """A tensor as its GEMMs read it; what no GEMM reads is None. x ~= data * scale_inv, or that of each block."""

    data: jax.Array | None = None  # FP8 [*m, *n]
    data_t: jax.Array | None = None  # FP8 [*n, *m]
    wide: jax.Array | None = None  # [*m, *n], unquantized, for a GEMM out of FP8
    scale_inv: jax.Array | None = None  # f32[], or of each block of data
    scale_inv_t: jax.Array | None = None  # of each block of data_t; None with one scale for both
    amax: jax.Array | None = None  # f32[], or f32[4] of a probed tensor (`fp8.seen`); None without state
    onto: Accumulator | None = None  # of a kernel

    @classmethod
    def of(cls, results: dict[str, jax.Array], wide, scale) -> "Fp8Tensor":
        """From an op's results by name; `scale` is what it multiplied by."""
        return cls(results.get("data"), results.get("data_t"), wide, 1.0 / scale, None, results.get("amax"))

    @classmethod
    def of_blocks(cls, results: dict[str, jax.Array]) -> "Fp8Tensor":
        """From the results by name of an op that quantizes in blocks."""
        inverse = (results.get(f"scale_inv{t}", results.get(f"block_inv{t}")) for t in ("", "_t"))
        return cls(results.get("data"), results.get("data_t"), None, *inverse)

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """[*m, *n] and what it is multiplied by."""
        return self.data, self.scale_inv

    @property
    def columns(self) -> tuple[jax.Array, jax.Array]:
        """[*n, *m] and what it is multiplied by."""
        return self.data_t, self.scale_inv if self.scale_inv_t is None else self.scale_inv_t

    @property
    def held(self) -> tuple[jax.Array, jax.Array]:
        """`rows`, or `columns` where these alone are there."""
        return self.columns if self.data is None else self.rows

    @property
    def in_rows(self) -> bool:
        """Of a kernel, whether its blocks are those of MXFP8, 1 x 32 in either layout: not each other's transpose."""
        _, scale_inv = self.held
        return scale_inv is not None and scale_inv.dtype == jnp.float8_e8m0fnu

    def read(self, use: "Uses", split: int) -> "Fp8Tensor":
        """What is to be read of it; `split` axes in m. A layout that is missing is transposed from the other, as are
        the scales of its blocks of 128 x 128. Raises ValueError for one that is missing of MXFP8."""
        got = self
        lacks = (use.data and self.data is None) or (use.data_t and self.data_t is None)
        if lacks and self.in_rows:
            raise ValueError(
                "te_jax.layers: an MXFP8 kernel holds one layout, and its blocks of 1 x 32 are not those of the other, "
                "which a backward pass reads; quantize it with gradients=True, or take dgrad out of FP8: "
                "override_linear_precision=(False, True, False)."
            )
        if use.data and self.data is None:
            back = self.data_t.ndim - split
            scale_inv = self.scale_inv if self.scale_inv_t is None else transpose(self.scale_inv_t, back)
            got = got._replace(data=transpose(self.data_t, back), scale_inv=scale_inv)
        if use.data_t and self.data_t is None:
            scale_inv_t = transpose(self.scale_inv, split) if self.scale_inv.ndim else None
            got = got._replace(data_t=transpose(self.data, split), scale_inv_t=scale_inv_t)
        return got._replace(**{name: None for name, is_read in use._asdict().items() if not is_read})

    @property
    def for_wgrad(self) -> bool:
        """Of x, as `saved` left it: whether wgrad is to be computed."""
        return (self.wide if self.data_t is None else self.data_t).size > 0


class Config(NamedTuple):
    """What is static of one FP8 dense layer."""

    recipe: Recipe
    contract: int  # axes in C
    features: int  # axes in F
    x: ShapedArray | None  # the types of the operands: their gradients have the same
    kernel: ShapedArray
    bias: ShapedArray | None = None
    residual: ShapedArray | None = None
    checkpoint: str | None = None  # name of the saved tensors, for jax.checkpoint policies
    stage_axes: frozenset[str] = frozenset()  # over which layers differ, read here: the backward pass is elsewhere
    spec: PartitionSpec | None = None  # of y, on an Explicit mesh; as are the next two
    x_spec: PartitionSpec | None = None
    kernel_spec: PartitionSpec | None = None
    grad_spec: PartitionSpec | None = None  # of the gradient of y where its GEMMs read it, if that is not `spec`
    grad_axes: tuple[str | None, ...] | None = None  # the same under Auto axes, by logical names
    stored: bool = False  # the kernel is an Fp8Tensor: its `wide` alone has a gradient
    on_mesh: bool = False  # one of several devices is in force (`jax.set_mesh`): there may be sums over them

    @classmethod
    def of(cls, x, kernel, bias, contract, recipe, checkpoint, residual=None, out=None, grad_axes=None) -> "Config":
        """The config of a layer with these operands. out: a type of y's shape, whose sharding y takes where it can."""
        typeof = lambda a: a if a is None or isinstance(a, ShapedArray) else jax.typeof(a)
        stored, kernel = isinstance(kernel, Fp8Tensor), wide_of(kernel)
        types = [typeof(a) for a in (x, kernel, bias, residual)]
        specs = dense_spec(*types[:2], contract, out or types[3]), *map(explicit_spec, types[:2])
        whole = dense_spec(*types[:2], contract)
        gathered = None if whole == specs[0] else whole, grad_axes
        on_mesh = jax.sharding.get_abstract_mesh().size > 1
        static = checkpoint, stage_axes(), *specs, *gathered, stored, on_mesh
        return cls(recipe, contract, kernel.ndim - contract, *types, *static)


class Uses(NamedTuple):
    """Which of the two layouts a GEMM reads, and whether one reads the unquantized tensor."""

    data: bool
    data_t: bool
    wide: bool

    @property
    def layouts(self) -> tuple[str, ...]:
        """The FP8 results that an op has to write, in its order."""
        return tuple(name for name in ("data", "data_t") if getattr(self, name))


def uses(recipe: Recipe, train: bool, wgrad: bool) -> dict[str, Uses]:
    """What the GEMMs of one layer read of x, kernel and grad; without `train` there is only fprop. wgrad: whether the
    kernel has a gradient."""
    in_fprop, in_dgrad, in_wgrad = (not high for high in recipe.override_linear_precision)
    wgrad = train and wgrad
    return {
        "x": Uses(in_fprop, wgrad and in_wgrad, not in_fprop or (wgrad and not in_wgrad)),
        "kernel": Uses(train and in_dgrad, in_fprop, not in_fprop or (train and not in_dgrad)),
        "grad": Uses(in_dgrad, wgrad and in_wgrad, not in_dgrad or (wgrad and not in_wgrad)),
    }


def statistics(use: Uses, config: Config) -> tuple[str, ...]:
    """The results beside the layouts that an op has to write: the amax, where there is state that it goes to."""
    return ("amax",) if use.layouts and config.recipe.has_state else ()


def fp8_type(tensor: str, config: Config) -> jnp.dtype:
    """What `tensor`, a field of `DenseMetas`, is quantized to."""
    return config.recipe.fp8_format.dtype(fp8.direction_of(tensor))


def probed(got: dict, tensor: str, meta, scale, wide, config: Config) -> dict:
    """`got`, the results by name of the op that quantized `tensor`, with all that was seen of it (`fp8.seen`, which
    has `wide`) in the place of its amax."""
    if "amax" not in got:
        return got
    return got | dict(amax=fp8.seen(meta, got["amax"], scale, wide, fp8_type(tensor, config)))


def scale_of(tensor: str, meta, measure, shards_of: ShapedArray, use: Uses, config: Config) -> jax.Array:
    """`fp8.scale_of` a tensor of a layer.

    shards_of: a type that varies over the mesh axes that shard the tensor inside `shard_map`: of an operand, that from
               before `align`, which makes replicated ones vary.
    """
    if not use.layouts:  # no GEMM reads it in FP8
        return jnp.ones(())
    shards = varying(shards_of) - config.stage_axes
    return fp8.scale_of(meta, measure, config.recipe, tensor, shards)


def quantize_blocks(
    tensor: str, x, split, use: Uses, config: Config, with_dbias=False
) -> tuple[Fp8Tensor, jax.Array | None]:
    """`quantize_tensor` under a recipe of block scales."""
    wide = x if use.wide else None
    if not use.layouts:
        return Fp8Tensor(wide=wide), _column_sums(x, split) if with_dbias else None
    op = quantize_mx if config.recipe.block == MX_BLOCK else quantize_block
    others = ("dbias",) if with_dbias else ()
    q, got = _of_blocks(tensor, partial(op, x, lead=split - 1), use, config, others)
    return q._replace(wide=wide), got.get("dbias")


def fuses_blocks(use: Uses, config: Config) -> bool:
    """Whether the op that makes a tensor, if it quantizes in blocks, makes all that is read of it (`fused_blocks`).
    Else the tensor is written in its own type and quantized from there."""
    return config.recipe.block == BLOCK and bool(use.layouts) and not use.wide


def fused_blocks(tensor: str, op, use: Uses, config: Config, others: tuple[str, ...] = ()) -> tuple[Fp8Tensor, dict]:
    """What `op`, which has its operands, makes of `tensor` in blocks of 1 x 128, and its results `others` by name."""
    return _of_blocks(tensor, lambda square, **attrs: op(**attrs), use, config, others)


def _of_blocks(tensor: str, op, use: Uses, config: Config, others: tuple[str, ...]) -> tuple[Fp8Tensor, dict]:
    law = config.recipe.block_law(tensor)
    kind = "block_inv" if law.get("square") else "scale_inv"
    outputs = (*use.layouts, *(name.replace("data", kind) for name in use.layouts), *others)
    got = dict(zip(outputs, op(outputs=outputs, dtype=fp8_type(tensor, config), **law), strict=True))
    return Fp8Tensor.of_blocks(got), got


def wide_of(kernel):
    """The array of a layer's kernel: itself, or that of an Fp8Tensor."""
    return kernel.wide if isinstance(kernel, Fp8Tensor) else kernel


def has_gradient(kernel) -> bool:
    """Whether a layer's kernel, as its custom_vjp gets it, is differentiated.

    Raises ValueError if its array is, but not the accumulator that the gradient would go to.
    """
    differentiated = wide_of(kernel).perturbed
    if not isinstance(kernel, Fp8Tensor) or kernel.onto is None:
        return differentiated
    if differentiated and not kernel.onto.grad.perturbed:
        raise ValueError(
            "te_jax.layers: a kernel is differentiated, but not its entry in the collection wgrads, which its gradient "
            "would go to; differentiate with respect to the collection, or leave it out."
        )
    return kernel.onto.grad.perturbed


def quantize_kernel(kernel, meta, use: Uses, config: Config) -> Fp8Tensor:
    """kernel [*C, *F] as its GEMMs read it; an Fp8Tensor was quantized before, if it has data."""
    if isinstance(kernel, Fp8Tensor):
        if kernel.data is not None or kernel.data_t is not None:
            return kernel.read(use, config.contract)
        return quantize_kernel(kernel.wide, meta, use, config)._replace(onto=kernel.onto)
    q = quantize_tensor("kernel", kernel, meta, config.contract, config.kernel, use, config)[0]
    # Not what fprop alone reads, nor the array itself, which is kept anyway.
    return _tagged(q, KERNEL, config, leave=("data_t", "scale_inv_t", "wide", "onto"))


def _column_sums(x, split):
    return jnp.sum(x.astype(jnp.float32), tuple(range(split)))


def quantize_tensor(
    tensor: str, x, meta, split, shards_of: ShapedArray, use: Uses, config: Config, with_dbias=False
) -> tuple[Fp8Tensor, jax.Array | None]:
    """-> the tensor as its GEMMs read it, and its column sums f32[*n] if asked for.

    tensor: a field of `DenseMetas`. split: axes in m. shards_of: see `scale_of`.
    """
    if config.recipe.block_scaled:
        return quantize_blocks(tensor, x, split, use, config, with_dbias)
    got, dtype = {}, fp8_type(tensor, config)
    measure = lambda: quantize(x, None, outputs=("amax",), split=split, dtype=dtype)[0]
    scale = scale_of(tensor, meta, measure, shards_of, use, config)
    if use.layouts:
        outputs = (*use.layouts, *statistics(use, config), *(["dbias"] if with_dbias else []))
        got = dict(zip(outputs, quantize(x, scale, outputs=outputs, split=split, dtype=dtype)))
        got = probed(got, tensor, meta, scale, lambda: x, config)
    elif with_dbias:
        got["dbias"] = _column_sums(x, split)
    return Fp8Tensor.of(got, x if use.wide else None, scale), got.get("dbias")


def _multiply(which: int, lhs, rhs, config: Config, bias=None, c=None, **options) -> jax.Array:
    """lhs @ rhs^T of two layouts, as `rows` or `columns`. which: 0 fprop, 1 dgrad, 2 wgrad, whose c is a sum so far."""
    recipe, operands = config.recipe, (lhs[0], rhs[0], lhs[1], rhs[1], bias, c)
    if recipe.block == MX_BLOCK:
        return gemm_mx(*operands, **options)
    options |= dict(in_place=which == 2 and c is not None)
    if recipe.block_scaled:
        return gemm_block(*operands, square=which < 2, **options)  # rhs is the kernel
    return gemm(*operands, fast_accum=not recipe.split_accumulator[which], **options)


def fprop(x: Fp8Tensor, w: Fp8Tensor, bias, config: Config, residual=None) -> jax.Array:
    """x [*B, *C], w [*C, *F] -> [*B, *F], plus bias [*F] and residual [*B, *F]."""
    recipe, contract, dtype = config.recipe, config.contract, config.x.dtype
    if recipe.override_linear_precision[0]:
        lead = x.wide.ndim - contract
        y = dot(x.wide, range(lead, lead + contract), w.wide, range(contract), dtype, out_spec=config.spec)
        return plain_sum(named(y, GEMM), bias, residual)
    options = dict(contract=contract, out_dtype=dtype, out_spec=config.spec)
    y = _multiply(0, x.rows, w.columns, config, bias, residual, **options)
    # A layer has one type, however its operands may be split: blocks that a mesh would cut are not.
    return y if config.spec is None else jax.sharding.reshard(y, config.spec)


def plain_sum(y, bias, residual) -> jax.Array:
    """y [*B, *F] with bias [*F] and residual [*B, *F], where they are given."""
    y = y if bias is None else y + as_rank(bias.astype(y.dtype), y.ndim)
    return y if residual is None else y + residual.astype(y.dtype)


def dgrad(terms, onto=None) -> jax.Array:
    """The sum of dy w^T over terms (dy [*B, *F], w [*C, *F], config) of one x -> dx [*B, *C], plus `onto` of its shape
    and type: what reaches x by another way."""
    config = terms[0][2]
    high, fast = config.recipe.override_linear_precision[1], not config.recipe.split_accumulator[1]
    options = dict(out_dtype=config.x.dtype, out_spec=config.x_spec)
    if config.recipe.block_scaled and not high:
        for dy, w, config in terms:
            onto = _multiply(1, dy.rows, w.rows, config, c=onto, contract=config.features, **options)
        return onto
    lead = len(config.x.shape) - config.contract
    narrow = lambda dy, w: (dy.data, w.data, dy.scale_inv, w.scale_inv)
    pairs = [(dy.wide, w.wide, None, None) if high else narrow(dy, w) for dy, w, _ in terms]
    return gemm_sum(pairs, onto, lead=lead, fast_accum=fast, **options)


def _wgrad(x: Fp8Tensor, dy: Fp8Tensor, config: Config, onto=None) -> jax.Array:
    """x [*B, *C] and dy [*B, *F] -> dw [*C, *F], of the kernel's type, or f32 plus `onto`."""
    recipe, dtype = config.recipe, config.kernel.dtype if onto is None else onto.dtype
    lead = len(config.x.shape) - config.contract
    if recipe.override_linear_precision[2]:
        product = dot(x.wide, range(lead), dy.wide, range(lead), dtype, out_spec=config.kernel_spec)
        return product if onto is None else onto + product
    options = dict(contract=lead, out_dtype=dtype, out_spec=config.kernel_spec)
    return _multiply(2, x.columns, dy.columns, config, c=onto, **options)


def saved(x: Fp8Tensor, w: Fp8Tensor, config: Config, wgrad: bool) -> tuple[Fp8Tensor, Fp8Tensor]:
    """What is left of x and w for the backward pass: only what dgrad and, if it is wanted, wgrad read.

    Without wgrad there are empty arrays in the place of what it would read, and an amax of 0 where nothing else wanted
    one: jax remembers one structure of a traced function's residuals, whatever it is differentiated by.
    """
    fprop_wide, dgrad_wide, wgrad_wide = config.recipe.override_linear_precision
    in_blocks, has_state = config.recipe.block_scaled, config.recipe.has_state
    for_wgrad = lambda a, read: (a if wgrad else jnp.zeros((0,))) if read else None
    observed = has_state and not (fprop_wide and wgrad_wide)
    kept = (
        Fp8Tensor(
            data=None,
            data_t=for_wgrad(x.data_t, not wgrad_wide),
            wide=for_wgrad(x.wide, wgrad_wide),
            scale_inv=None if in_blocks else x.scale_inv,
            scale_inv_t=for_wgrad(x.scale_inv_t, in_blocks and not wgrad_wide),
            amax=jnp.zeros(()) if observed and x.amax is None else x.amax,
        ),
        w._replace(
            data_t=None,
            scale_inv_t=None,
            wide=w.wide if dgrad_wide else None,
            onto=w.onto and w.onto._replace(grad=for_wgrad(w.onto.grad, True)),
        ),
    )
    return kept


def by_name(x: Fp8Tensor, config: Config) -> Fp8Tensor:
    """`x` for `saved`, named for `jax.checkpoint` policies: once for all layers that read it, for each name that is
    given to an array makes another one of it to keep."""
    of_fprop = ("data", *(("scale_inv",) if config.recipe.block_scaled else ()))
    return _tagged(x, QUANTIZED, config, leave=(*of_fprop, "onto"))


def _tagged(q: Fp8Tensor, name: str, config: Config, leave: tuple[str, ...] = ()) -> Fp8Tensor:
    """`q` named for `jax.checkpoint` policies: `name` (scalars, and what was seen of the tensor: STATISTICS), and the
    config's name too. leave: fields that are not named."""

    def tag(field, a):
        small = field == "amax" or a is None or not a.ndim
        return named(a, STATISTICS if small else name, config.checkpoint)

    return q._replace(**{field: tag(field, a) for field, a in q._asdict().items() if field not in leave})


@custom_vmap
def _once(total, before):
    """`total`, made of `before`, which examples must not share: autodiff would add it up as often."""
    return total


@_once.def_vmap
def _once_vmap(size, batched, total, before):
    if batched[0] and not batched[1]:
        raise ValueError(
            f"te_jax.layers: jax.vmap of {size} examples shares an entry of the collection wgrads; map the collection "
            "too, or leave it out."
        )
    return _once(total, before), batched[0]


def kernel_grads(x: Fp8Tensor, w: Fp8Tensor, grad: Fp8Tensor, metas: DenseMetas, config: Config):
    """-> the gradient of the kernel [*C, *F], of its type (None without wgrad; in an Fp8Tensor that of `onto`, or else
    of `wide`), and the cotangents of `metas`, from the gradient [*B, *F] of y as `quantize_grad` gives it."""
    amaxes = (x.amax, w.amax, grad.amax)
    dmetas = DenseMetas(*(cotangent(m, amax, config.recipe, config.stage_axes) for m, amax in zip(metas, amaxes)))
    if not x.for_wgrad:
        return Fp8Tensor() if config.stored else None, dmetas
    if w.onto is not None:
        total = like(_wgrad(x, grad, config, w.onto.grad), w.onto.grad)
        return Fp8Tensor(onto=Accumulator(_once(total, w.onto.grad), w.onto.uses * 0 + 1)), dmetas
    dkernel = like(_wgrad(x, grad, config), config.kernel)
    return Fp8Tensor(wide=dkernel) if config.stored else dkernel, dmetas


def staged(layer, config: int):
    """A custom_vjp with symbolic zeros, under jit: outside of it `jax.shard_map` has no rule for one. config: index of
    the static argument."""
    return jax.jit(layer, static_argnums=config, inline=True)


def materialized(cotangent):
    """A cotangent as an array, which autodiff passes as a `SymbolicZero` where it is 0; None stays None."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval = cotangent.aval
    zeros, varies = jnp.zeros(aval.shape), tuple(sorted(varying(aval)))
    return like(lax.pcast(zeros, varies, to="varying") if varies else zeros, aval)


def quantize_grad(dy, meta, config: Config, wgrad: bool) -> tuple[Fp8Tensor, jax.Array | None]:
    """dy [*B, *F] -> the tensor as the backward GEMMs read it, and the gradient of the bias, if there is one.

    Both GEMMs read all of dy where y was left scattered: it crosses devices once, and is transposed there. In blocks
    the layouts differ, and are as many bytes as dy in 16 bits: dy crosses.
    """
    use = uses(config.recipe, train=True, wgrad=wgrad)["grad"]
    split, has_bias = dy.ndim - config.features, config.bias is not None

    def gathered(a):
        a = constrain(a, config.grad_axes)
        return a if config.grad_spec is None else jax.sharding.reshard(a, config.grad_spec)

    if config.recipe.block_scaled and use.layouts:
        dy = gathered(dy)
    crosses = not config.recipe.block_scaled and (config.grad_spec is not None or config.grad_axes is not None)
    in_fp8 = crosses and use.data and use.data_t
    written = use._replace(data_t=False) if in_fp8 else use
    grad, dbias = quantize_tensor("grad", dy, meta, split, jax.typeof(dy), written, config, has_bias)
    if in_fp8:
        data = gathered(grad.data)
        grad = grad._replace(data=data, data_t=transpose(data, split))
    return grad, like(dbias, config.bias) if has_bias else None
