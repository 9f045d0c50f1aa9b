"""`linear_cross_entropy`: its arguments, and how devices split it. What is computed stands in cross_entropy.py."""

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from te_jax.core.arrays import as_jax
from te_jax.core.check import (
    BOOL,
    FLOATING,
    INTEGERS,
    NONE,
    RATE,
    STRING,
    Kind,
    check,
    integer,
    number,
    one_of,
    warn_once,
)
from te_jax.core.placement import mesh_axes
from te_jax.core.types import align, on_explicit_mesh, splittable_axes, varying_axes
from te_jax.layers._specs import dense_spec
from te_jax.layers.linear import check_recipe_and_metas
from te_jax.layers.loss.cross_entropy import HeadOperands, LossOptions, Plan, cross_entropy
from te_jax.layers.loss.head_gemms import Head
from te_jax.layers.weight import check_is_array
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import check_spec, spec_of
from te_jax.sharding.resource import stage_axes
from te_jax.state import fp8

_MESH_AXES = Kind(
    "None, the name of a mesh axis, or a tuple of names",
    lambda axes: axes is None or isinstance(axes, str) or (isinstance(axes, tuple) and all(map(STRING.is_type, axes))),
)
IGNORE_INDEX = NONE | replace(integer(-(2**31), 2**31 - 1), text="an int of 32 bits")  # as labels are compared
REDUCTION = one_of("mean", "sum", "none")
_HEAD_ARGUMENTS = {
    "label_smoothing": RATE,
    "z_loss": number(least=0),
    "logit_softcap": NONE | number(above=0),
    "ignore_index": IGNORE_INDEX,
    "reduction": REDUCTION,
    "words_first": BOOL,
    "chunk_tokens": NONE | integer(1),
    "accumulate_dtype": NONE | FLOATING,
    "vocab_axis": _MESH_AXES,
}


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    words_first: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_spec: PartitionSpec | None = None,
    chunk_tokens: int | None = None,
    accumulate_dtype: Any = None,
    name: str = "te_jax.layers.linear_cross_entropy",
) -> jax.Array:
    """The cross entropy of labels under logits x . kernel, which are in memory for a few thousand tokens at a time.

    With lse = log(sum_v exp(z_v)) of a token's logits z in f32, its loss is

        lse - (1 - label_smoothing) z_label - label_smoothing / V sum_v z_v + z_loss lse**2

    x:          f32, bf16 or f16 [*B, H].
    kernel:     f32, bf16 or f16 [H, V], or [V, H] (an embedding) with words_first. Quantized from its own type; without
                a recipe cast to x's.
    labels:     integers [*B]. A label that is neither in the vocabulary nor ignore_index makes its loss and gradients
                NaN.
    label_smoothing: the share of the target that is spread over the vocabulary (https://arxiv.org/abs/1512.00567).
    z_loss:     the factor of lse**2, which keeps the logits from drifting (https://arxiv.org/abs/2204.02311).
    logit_softcap: c: logits become c tanh(z / c) (https://arxiv.org/abs/2408.00118).
    ignore_index: the label of tokens whose loss and gradient are 0; None: there is none.
    reduction:  "mean" over the tokens that are not ignored (0 if all are), "sum", or "none": f32 [*B].
    recipe:     None for products in x's type (f32 logits either way), else a recipe, and then `metas`.
                A recipe that scales by the amax of this step has one for each chunk of x and of the logits' gradient.
    metas:      `fp8.DenseMetas`, as of `dense`. The gradient of the logits is scaled as the gradient of the sum of
                losses.
    vocab_axis: the mesh axis or axes that split the vocabulary of `kernel`: inside `jax.shard_map`, where kernel is the
                device's own part, and on a mesh of Auto axes.
    token_spec: on a mesh of Auto axes, how devices split `labels`. With this or vocab_axis each device computes its own
                tokens and part of the vocabulary, and sums of exponentials cross. Without, XLA partitions the loop
                over chunks, which is right, but adds the kernel's gradient up over devices in each chunk. On Explicit
                axes the types of x and kernel say all of this.
    chunk_tokens: tokens of a chunk, of each device. None: as many as make 1 GiB of f32 logits, in FP8 half of that; at
                least 1024.
    accumulate_dtype: dtype in which chunks add up the gradient of the kernel. None: bf16 for a bf16 kernel, which each
                chunk rounds once, else f32. f32 takes 4 H V more bytes then.
    name:       what errors call this function.

    Returns f32[] or f32 [*B]. Inside `jax.shard_map` "mean" and "sum" are of the device's own tokens. They compute
    their gradients in the forward pass, in three products; "none" computes the logits twice, in four products.

    Differentiable by x, kernel and metas. Raises ValueError for sizes and axes, TypeError for types that do not match.
    """
    x, kernel, labels = as_jax(x, kernel, labels)
    given = dict(locals())
    for argument, kind in _HEAD_ARGUMENTS.items():
        check(name, argument, given[argument], kind)
    words_first = bool(words_first)
    _check_head_arrays(name, x, kernel, labels, words_first)
    check_spec(name, "token_spec", token_spec, labels.ndim, free=False)
    check_recipe_and_metas(name, recipe, metas)
    softcap = None if logit_softcap is None else float(logit_softcap)
    loss = LossOptions(float(label_smoothing), float(z_loss), softcap, ignore_index)
    of_kernel = jnp.bfloat16 if kernel.dtype == jnp.bfloat16 else jnp.float32
    dtype = of_kernel if accumulate_dtype is None else accumulate_dtype
    split = _find_split(name, x, kernel, words_first, vocab_axis, token_spec)
    options = (loss, recipe, words_first, chunk_tokens, jnp.dtype(dtype))
    run = lambda x, kernel, labels, metas: _run_on_device(x, kernel, labels, metas, options, reduction, split)
    labels, metas = labels.astype(jnp.int32), metas or fp8.STATELESS
    if not split.shards:
        return run(x, kernel, labels, metas)
    return _run_on_shards(run, x, kernel, labels, metas, words_first, reduction, split)


def _check_head_arrays(name: str, x, kernel, labels, words_first: bool):
    check_is_array(name, kernel)
    for what, a, kind in (("x", x, FLOAT), ("kernel", kernel, FLOAT), ("labels", labels, INTEGERS)):
        check(name, what, a, kind)
    form = "[V, H]" if words_first else "[H, V]"
    shapes = f"pass x [*B, H], kernel {form} with a vocabulary of at least one entry, and labels [*B]"
    if x.ndim < 1 or kernel.ndim != 2 or x.shape[-1:] != kernel.shape[words_first:][:1] or 0 in kernel.shape:
        raise ValueError(f"{name}: x has the shape {x.shape}, kernel {kernel.shape}; {shapes}.")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"{name}: labels has the shape {labels.shape}, but x {x.shape}; {shapes}.")


# -- one device -----------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """How devices split a call."""

    tokens: tuple[tuple[str, ...], ...] = ()  # the mesh axes of each axis of labels
    vocab: tuple[str, ...] = ()
    shards: frozenset[str] = frozenset()  # the mesh axes that a `jax.shard_map` here makes manual

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(name for names in self.tokens for name in names)


def _run_on_device(x, kernel, labels, metas, options: tuple, reduction: str, split: _Split):
    """The result for one device's tokens and its part of the vocabulary; sums are over the devices of split.tokens."""
    loss, recipe, words_first, chunk, dtype = options
    shape, x, labels = labels.shape, x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    of_call = stage_axes(), jax.config.jax_default_matmul_precision
    head = Head(recipe, words_first, jax.typeof(x), jax.typeof(kernel), *of_call)
    plan = Plan(loss, head, chunk, dtype, split.vocab, reduction != "none")
    counted = jnp.sum(loss.counts(labels).astype(jnp.float32))
    out = cross_entropy(HeadOperands(*align(x, kernel), metas), align(labels, x)[0], plan)
    if reduction == "none":
        return out.reshape(shape)
    if split.token_axes:
        out, counted = (lax.psum(a, split.token_axes) for a in (out, counted))
    return out / jnp.maximum(counted, 1) if reduction == "mean" else out


# -- several devices ------------------------------------------------------------------------------------------


def _find_split(name: str, x, kernel, words_first: bool, vocab_axis, token_spec) -> _Split:
    explicit, vocab = on_explicit_mesh(jax.typeof(x)), mesh_axes(vocab_axis)
    mesh = jax.typeof(x).sharding.mesh if explicit else jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    _check_mesh_axes(name, kinds, vocab, token_spec)
    given = vocab or token_spec is not None
    if explicit:
        if given:
            raise ValueError(
                f"{name}: vocab_axis or token_spec is given, but on Explicit mesh axes the types of x and kernel say "
                "how devices split them; leave both out, and reshard x or kernel instead."
            )
        *tokens, vocab = map(mesh_axes, dense_spec(jax.typeof(x), jax.typeof(kernel.T if words_first else kernel), 1))
        return _Split(tuple(tokens), vocab, splittable_axes(mesh))
    if any(kinds[axis] == AxisType.Manual for axis in vocab):
        _check_manual(name, kernel, vocab, token_spec)
        return _Split(vocab=vocab)
    if not given:
        return _Split()
    auto = frozenset(axis for axis, kind in kinds.items() if kind == AxisType.Auto)
    spec = (*(token_spec or ()), *[None] * x.ndim)[: x.ndim - 1]
    tokens = tuple(_dividing_axes(name, mesh, mesh_axes(entry), "tokens", size) for entry, size in zip(spec, x.shape))
    vocab = _dividing_axes(name, mesh, vocab, "entries of the vocabulary", kernel.shape[0 if words_first else 1])
    return _Split(tokens, vocab, auto)


def _check_mesh_axes(name: str, kinds: dict, vocab: tuple[str, ...], token_spec):
    """Raises ValueError for mesh axes that are not there, and for one that splits tokens and the vocabulary."""
    tokens = [axis for entry in token_spec or () for axis in mesh_axes(entry)]
    for what, axes in (("vocab_axis", vocab), ("token_spec", tokens)):
        for axis in set(axes) - kinds.keys():
            have = f"the mesh in force has {tuple(kinds)}" if kinds else "no mesh is in force (`jax.set_mesh`)"
            raise ValueError(
                f"{name}: {what} names the mesh axis {axis!r}, but {have}; name one that is there, or None."
            )
    if both := set(vocab) & set(tokens):
        raise ValueError(
            f"{name}: vocab_axis and token_spec both name {sorted(both)}; leave them out of token_spec where the axis "
            "serves tensor parallelism, else out of vocab_axis."
        )


def _check_manual(name: str, kernel, vocab: tuple[str, ...], token_spec):
    """Raises ValueError unless `kernel` differs along `vocab`, as inside `jax.shard_map(check_vma=True)`."""
    if token_spec is not None:
        raise ValueError(f"{name}: token_spec is given inside jax.shard_map; leave it out: x is the device's own part.")
    if any(axis not in varying_axes(lax.axis_index(axis)) for axis in vocab):
        raise ValueError(f"{name}: vocab_axis needs jax.shard_map(check_vma=True), here over {vocab}; leave it True.")
    if missing := set(vocab) - varying_axes(kernel):
        raise ValueError(
            f"{name}: vocab_axis is {vocab}, but kernel is the same along {sorted(missing)}; pass its part of the "
            "vocabulary (in_specs), or leave vocab_axis out."
        )


def _dividing_axes(name: str, mesh, axes: tuple[str, ...], what: str, size: int) -> tuple[str, ...]:
    """As many of the mesh axes, from the left, as divide `size`. Warns of others."""
    kept = axes
    while size % prod(mesh.shape[axis] for axis in kept):
        kept = kept[:-1]
    if kept != axes:
        devices = prod(mesh.shape[axis] for axis in axes)
        text = f"{size} {what}, which the {devices} devices of mesh axes {axes} do not divide, are not split over all"
        warn_once(name, f"{text} of them; pad them to a multiple of {devices}.")
    return kept


def _run_on_shards(run, x, kernel, labels, metas, words_first: bool, reduction: str, split: _Split):
    """`run` on each device's own tokens and part of the vocabulary."""
    tokens = spec_of(split.tokens)
    of_x = spec_of((*split.tokens, ()))
    of_kernel = spec_of((split.vocab, ()) if words_first else ((), split.vocab))
    if on_explicit_mesh(jax.typeof(x)):
        x, kernel, labels = (
            jax.sharding.reshard(a, spec) for a, spec in ((x, of_x), (kernel, of_kernel), (labels, tokens))
        )
    result = tokens if reduction == "none" else PartitionSpec()
    specs = (of_x, of_kernel, tokens, PartitionSpec())
    return jax.shard_map(run, in_specs=specs, out_specs=result, axis_names=split.shards)(x, kernel, labels, metas)
