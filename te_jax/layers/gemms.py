"""The three GEMMs of a dense layer, grouped ones too, of tensors as `tensor.Fp8Tensor` holds them."""

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from te_jax.core.arrays import as_rank
from te_jax.core.policies import GEMM, with_names
from te_jax.core.products import DGRAD, FPROP, WGRAD, product
from te_jax.layers.config import Config
from te_jax.layers.tensor import Fp8Tensor, Uses, is_held_for_fprop
from te_jax.layers.token_pieces import Turn
from te_jax.ops.experts.paired import gemm_grouped_paired, gemm_grouped_paired_wgrad
from te_jax.ops.experts.permute import Groups
from te_jax.ops.formats import format_of, transpose
from te_jax.ops.gemm.dense import ONE_SCALE, Formats, dot, gemm, gemm_sum
from te_jax.ops.gemm.grouped import GROUPED_IN_FP8, gemm_grouped, gemm_grouped_wgrad, gemm_grouped_wide_wgrad
from te_jax.ops.gemm.into import gemm_into
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import explicit_spec
from te_jax.state import fp8

_FACTORS = ("x", "kernel"), ("grad", "kernel"), ("x", "grad")  # of fprop, dgrad and wgrad
_FPROP, _DGRAD, _WGRAD = range(3)  # places in `override_linear_precision` and `split_accumulator`


def _options(which: int, config: Config) -> dict:
    """What the recipe says of this GEMM in FP8."""
    return dict(formats=_formats(which, config.recipe), fast_accum=not config.recipe.split_accumulator[which])


def _formats(which: int, recipe: Recipe) -> Formats:
    left, right = (format_of(recipe, tensor) for tensor in _FACTORS[which])
    return left, right


def fprop(
    x: Fp8Tensor, w: Fp8Tensor, bias: jax.Array | None, config: Config, residual: jax.Array | None = None
) -> jax.Array:
    """x [*B, *C], w [*C, *F] -> [*B, *F], plus bias [*F] and residual [*B, *F]."""
    return fprop_each(x, [(w, bias, config)], residual)[0]


@product(FPROP)
def fprop_each(
    x: Fp8Tensor, terms: Sequence[tuple[Fp8Tensor, jax.Array | None, Config]], residual: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """`fprop` of each of terms (w, bias, config), which read one x. A residual is of each."""
    config = terms[0][2]
    if config.recipe.override_linear_precision[_FPROP]:
        return tuple(_wide_fprop(x, *term, residual) for term in terms)

    def multiply(piece, turn=None):
        ((lhs, lhs_inv),), residual = piece
        return tuple(of_term(lhs, lhs_inv, residual, turn, at, *term) for at, term in enumerate(terms))

    def of_term(lhs, lhs_inv, residual, turn, at, w, bias, config):
        rhs, rhs_inv = w.columns
        options = dict(contract=config.contract, out_dtype=config.x.dtype, out_spec=config.spec)
        options |= _options(_FPROP, config)
        if turn:
            return _into(turn, at, lhs, rhs, lhs_inv, rhs_inv, bias, options)
        y = gemm(lhs, rhs, lhs_inv, rhs_inv, bias, residual, **options)
        # A layer has one type, however its operands may be split: blocks that a mesh would cut are not.
        return y if config.spec is None else jax.sharding.reshard(y, config.spec)

    if (pieces := config.pieces) is None:
        return multiply(([x.rows], residual))
    kernels = [w.columns for w, *_ in terms]
    results = len(terms) if residual is None and _writes_entries(_FPROP, config) else 0
    options = dict(gathers=pieces.gathers, results=results)
    return pieces.multiply(multiply, [x.rows], residual, kernels, config.lead, **options)[0]


def _writes_entries(which: int, config: Config) -> bool:
    """Whether products of pieces are written where they lie in the whole: te_gemm_into has factors of one scale."""
    return config.pieces.lie_together and _formats(which, config.recipe) == ONE_SCALE


def _into(turn: Turn, at: int, lhs, rhs, lhs_inv, rhs_inv, bias, options) -> jax.Array:
    """A product as the entry of result `at` that `turn` says."""
    options, spec = {name: a for name, a in options.items() if name != "formats"}, options["out_spec"]
    where = dict(into=turn.into[at], entry=turn.entry, entries=turn.entries)
    y = gemm_into(lhs, rhs, lhs_inv, rhs_inv, bias, **where, **options)
    y = with_names(y, GEMM) if turn.entry + 1 == turn.entries else y  # the whole, not what is still written to
    return y if spec is None else jax.sharding.reshard(y, PartitionSpec(None, *spec))


def _wide_fprop(x, w, bias, config, residual):
    axes = range(config.lead, config.x.ndim), range(config.contract)
    y = dot(x.wide, axes[0], w.wide, axes[1], config.x.dtype, out_spec=config.spec)
    return plain_sum(with_names(y, GEMM), bias, residual)


def plain_sum(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """y [*B, *F] with bias [*F] and residual [*B, *F], where they are given."""
    y = y if bias is None else y + as_rank(bias.astype(y.dtype), y.ndim)
    return y if residual is None else y + residual.astype(y.dtype)


def dgrad(terms: Sequence[tuple[Fp8Tensor, Fp8Tensor, Config]], onto: jax.Array | None = None) -> jax.Array:
    """The sum of dy w^T over terms (dy [*B, *F], w [*C, *F], config) of one x -> dx [*B, *C], plus `onto` of the shape
    and type of dx: the gradient that reaches x by another way."""
    return dgrad_and_read(terms, onto)[0]


@product(DGRAD)
def dgrad_and_read(
    terms: Sequence[tuple[Fp8Tensor, Fp8Tensor, Config]], onto: jax.Array | None = None
) -> tuple[jax.Array, list[Fp8Tensor]]:
    """`dgrad`, and each dy as wgrad reads it: what `quantize_grad` left where it lay is gathered here, in pieces."""
    terms = [(dy, _for_dgrad(w, config), config) for dy, w, config in terms]
    config = terms[0][2]
    high = config.recipe.override_linear_precision[_DGRAD]
    lead, options = config.lead, dict(out_dtype=config.x.dtype, out_spec=explicit_spec(config.x))
    options |= {} if high else _options(_DGRAD, config)
    tensors = [dy for dy, *_ in terms]

    def multiply(piece, turn=None):
        pairs = zip(piece[0], (w.rows for _, w, _ in terms))
        pairs = [(lhs, rhs, lhs_inv, rhs_inv) for (lhs, lhs_inv), (rhs, rhs_inv) in pairs]
        if turn:
            contract = pairs[0][0].ndim - lead
            return (_into(turn, 0, *pairs[0], None, options | dict(contract=contract)),)
        return (gemm_sum(pairs, piece[1], lead=lead, **options),)

    with jax.default_matmul_precision(config.precision):
        if high:
            wide = [(dy.wide, w.wide, None, None) for dy, w, _ in terms]
            return gemm_sum(wide, onto, lead=lead, **options), tensors
        rows = [dy.rows for dy in tensors]
        if (pieces := config.pieces) is None:
            return multiply((rows, onto))[0], tensors
        kernels = [w.rows for _, w, _ in terms]
        in_place = len(terms) == 1 and onto is None and _writes_entries(_DGRAD, config)
        ways = dict(gathers=not pieces.gathers, results=int(in_place))
        (dx,), read = pieces.multiply(multiply, rows, onto, kernels, lead, **ways)
    if pieces.gathers or not format_of(config.recipe, "grad").shared:
        return dx, tensors
    whole = [pieces.join([data for data, _ in of_term]) for of_term in read]
    return dx, [dy._replace(data=a, data_t=transpose(a, lead)) for dy, a in zip(tensors, whole)]


def _for_dgrad(w: Fp8Tensor, config: Config) -> Fp8Tensor:
    """A weight as dgrad reads it; one that is kept as fprop reads it (`save_for_backward`) is transposed."""
    if config.recipe.override_linear_precision[_DGRAD] or not is_held_for_fprop(w):
        return w
    return w.read(Uses(data=True, data_t=False, wide=False), config.contract, format_of(config.recipe, "kernel"))


@product(WGRAD)
def wgrad(x: Fp8Tensor, dy: Fp8Tensor, config: Config, onto: jax.Array | None = None) -> jax.Array:
    """x [*B, *C] and dy [*B, *F] -> dw [*C, *F], of the config's `wgrad_dtype`, or f32 plus `onto`."""
    dtype, lead = config.wgrad_dtype if onto is None else onto.dtype, config.lead
    if config.recipe.override_linear_precision[_WGRAD]:
        with jax.default_matmul_precision(config.precision):
            product = dot(x.wide, range(lead), dy.wide, range(lead), dtype, out_spec=explicit_spec(config.weight))
        return product if onto is None else onto + product
    (lhs, lhs_inv), (rhs, rhs_inv) = x.columns, dy.columns
    if not lead:  # A single vector, as inside of `jax.vmap`: its outer product contracts an axis of one entry.
        lhs, rhs, lead = lhs[..., None], rhs[..., None], 1
    options = dict(contract=lead, out_dtype=dtype, out_spec=explicit_spec(config.weight), **_options(_WGRAD, config))
    return gemm(lhs, rhs, lhs_inv, rhs_inv, c=onto, in_place=onto is not None, **options)


# -- of experts: rows of groups, and stacked weights ----------------------------------------------------------


@product(FPROP)
def grouped_fprop(x: Fp8Tensor, w: Fp8Tensor, bias: jax.Array | None, groups: Groups, config: Config) -> jax.Array:
    """x [R, K], w [E, K, *N], bias [E, *N] -> [R, *N], 0 in the rows that pad a group."""
    dtype, high, options = _options_of_grouped(_FPROP, config)
    of_groups, options = (groups.offsets, groups.counts), dict(out_dtype=dtype, **options)
    if high:
        return gemm_grouped(x.wide, w.wide.astype(dtype), *of_groups, bias=bias, k_first=True, **options)
    (lhs, lhs_inv), (rhs, rhs_inv) = x.rows, w.columns
    return gemm_grouped(lhs, rhs, *of_groups, lhs_inv, rhs_inv, bias, **options)


@product(DGRAD)
def grouped_dgrad(dy: Fp8Tensor, w: Fp8Tensor, groups: Groups, config: Config, slot: int = 0) -> jax.Array:
    """dy [R, *N], w [E, K, *N] -> dx [R, K], 0 in the rows that pad a group. Where dy is paired, N are its slots from
    `slot` on."""
    dtype, high, options = _options_of_grouped(_DGRAD, config)
    if dy.paired is not None:
        options = _options_of_paired(options, config) | dict(slot=slot, out_dtype=dtype)
        scales = dy.scale_inv, w.scale_inv
        return gemm_grouped_paired(dy.paired, w.data, groups.offsets, groups.counts, *scales, **options)
    (lhs, lhs_inv), (rhs, rhs_inv) = dy.rows, w.rows
    if high:
        lhs, rhs, lhs_inv, rhs_inv = dy.wide, w.wide.astype(dtype), None, None
    options |= dict(contract=lhs.ndim - 1, out_dtype=dtype)
    return gemm_grouped(lhs, rhs, groups.offsets, groups.counts, lhs_inv, rhs_inv, **options)


@product(WGRAD)
def grouped_wgrad(
    x: Fp8Tensor,
    dy: Fp8Tensor,
    groups: Groups,
    config: Config,
    onto: jax.Array | None = None,
    slot: int | None = None,
) -> jax.Array:
    """x [R, K], dy [R, N] or the slot of [R, A, N], both with zeros in the rows that pad a group -> dw [E, K, N] of the
    weight's type, or f32 plus `onto`."""
    _, high, options = _options_of_grouped(_WGRAD, config)
    of_groups, dtype = (groups.offsets, groups.counts), config.weight.dtype if onto is None else onto.dtype
    onto = dict(c=onto, in_place=onto is not None, out_dtype=dtype)
    if high:
        return gemm_grouped_wide_wgrad(x.wide, dy.wide if slot is None else dy.wide[:, slot], *of_groups, **onto)
    (lhs, lhs_inv), (rhs, rhs_inv) = x.columns, dy.columns
    if dy.paired is not None:
        options = _options_of_paired(options, config) | dict(slot=slot)
        return gemm_grouped_paired_wgrad(lhs, dy.paired, *of_groups, lhs_inv, rhs_inv, **onto, **options)
    return gemm_grouped_wgrad(lhs, rhs, *of_groups, lhs_inv, rhs_inv, slot=slot, **onto, **options)


def _options_of_paired(options, config: Config):
    return dict(dtype=fp8.type_of("grad", config.recipe), fast_accum=options["fast_accum"])


def _options_of_grouped(which: int, config: Config):
    """The type of activations, whether this GEMM reads the unquantized operands, and what the recipe says of it."""
    options, high = _options(which, config), config.recipe.override_linear_precision[which]
    return config.x.dtype, high, {name: a for name, a in options.items() if name != "formats" or not high}


def are_grouped_in_fp8(recipe: Recipe) -> bool:
    """Whether the grouped products of this recipe multiply FP8."""
    return all(_formats(which, recipe) in GROUPED_IN_FP8 for which in (_FPROP, _DGRAD, _WGRAD))
