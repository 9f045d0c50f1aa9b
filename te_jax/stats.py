"""How well tensors fit into FP8, from their FP8 state and from probes, which count elements of the tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.check import NONE, Kind, check, one_of
from te_jax.layers.explain_fp8 import Fp8Explanation
from te_jax.recipe import DelayedScaling, Recipe
from te_jax.state import fp8
from te_jax.state.fp8 import FP8_COLLECTION
from te_jax.state.metas import check_state, direction_at, map_states, states_in
from te_jax.state.misplaced import check_no_stray, warn_of_impossible, with_collection_name


class TensorStats(NamedTuple):
    """Numbers of one tensor, f32[...] over the leading axes of its state (one for each layer of an `nn.scan`, and for
    each expert of a `MoEBlock`).

    NaN stands for a number that is not known. A probe gives amax and scale of the step in which the tensor was
    quantized: the largest |x|, possibly inf or NaN, and the factor before the cast. The state by itself gives the
    newest recorded amax (NaN without one) and the scale that the next step will use.
    """

    amax: Annotated[jax.Array, "largest absolute value, in units of the tensor"]
    scale: Annotated[jax.Array, "what the tensor is multiplied by"]
    headroom: Annotated[jax.Array, "powers of 2 from amax * scale up to the largest FP8 value; below 0 it saturates"]
    saturation: Annotated[jax.Array, "probes: fraction of all elements beyond the largest FP8 value, inf among them"]
    underflow: Annotated[jax.Array, "probes: fraction of the elements that are not 0 which became 0"]
    trend: Annotated[jax.Array, "powers of 2 a step: least-squares slope of log2 over the recorded amaxes; needs two"]
    recorded: Annotated[jax.Array, "amaxes in the history"]


def fp8_probes(collections: Any) -> Any:
    """`collections` with a probe next to the FP8 state of each tensor.

    A probe is a leaf `{tensor}_probe`, f32[..., 4]. Its gradient tells `fp8_stats` how the tensor was quantized.

        probes = te_jax.fp8_probes(state.fp8)
        _, grads = te_jax.value_and_grad(loss_fn, argnums=1)(params, probes)
        stats = te_jax.fp8_stats(grads)

    collections: Variables or FP8 state, a dict or FrozenDict with `fp8_metas`; or that collection itself. Probes in it
                 are set to 0.

    Results, gradients and FP8 state are the same with probes. To count, the layers read each tensor once more: leave
    probes out of steps whose numbers nobody looks at. Several uses of one state, microbatches under
    `te_jax.value_and_grad` and shards inside `shard_map` give the largest of their numbers; elsewhere a sharded array
    is counted as a whole.

    Raises ValueError without `fp8_metas`, as under recipes without state, and for malformed FP8 state.
    """
    collections, unnamed = with_collection_name(collections)
    check_no_stray("fp8_probes", "collections", collections)
    _states_of("fp8_probes", collections)

    def add_probe(path, state):
        scale, history, *_ = state
        return scale, history, jnp.broadcast_to(jnp.zeros_like(scale), (*scale.shape[:-1], 4))

    return unnamed(map_states(add_probe, collections))


def fp8_stats(state_or_grads: Any, recipe: Recipe | None = None) -> dict[str, TensorStats]:
    """How well each tensor fits into FP8, by its path in `fp8_metas`, such as "layers/mlp/x_0".

    state_or_grads: Collections with `fp8_metas` (a dict or FrozenDict) or that collection itself, gradients with
                    respect to them (which are the next state) or a tuple of gradients that holds them, or a training
                    state with an attribute `fp8`.
    recipe:         The recipe whose formats the tensors have. None: the recipe in force, or `DelayedScaling()` outside
                    of autocast.

    `saturation` and `underflow` are known from gradients with respect to `fp8_probes(state)`, else NaN. The tensors
    inside FP8 attention (o, dq, dk, dv, dp) never leave cuDNN: their probes know only the amax.

    The function is pure, and one computation for all tensors. Raises ValueError without `fp8_metas`, as under recipes
    without state, and for several collections `fp8_metas`.
    """
    states = _states_of("fp8_stats", state_or_grads)
    recipe = recipe or fp8.current_recipe() or DelayedScaling()
    fp8.check_recipe("fp8_stats", recipe)
    return _stats(states, recipe)


def _states_of(what: str, tree) -> dict[str, Mapping]:
    """{collection: FP8 state} of `tree`. Raises ValueError, naming `what`, unless there is one state."""
    kind, (tree, _) = type(tree).__name__, with_collection_name(getattr(tree, "fp8", tree))
    holds = lambda node: isinstance(node, Mapping) and bool(states_in(node))
    found = [node for node in jax.tree.leaves(tree, is_leaf=holds) if holds(node)]
    if len(found) == 1:
        states = {name: found[0][name] for name in states_in(found[0])}
        for name, metas in states.items():
            check_state(what, metas, name)
        warn_of_impossible(what, states)
        return states
    if found:
        raise ValueError(f"{what}: this {kind} holds {len(found)} collections {FP8_COLLECTION!r}; pass one of them.")
    raise ValueError(
        f"{what}: this {kind} holds no collection {FP8_COLLECTION!r}; pass the FP8 state of a model under "
        "DelayedScaling. The other recipes keep none; te_jax.explain_fp8 says under each what is in FP8."
    )


@partial(jax.jit, static_argnums=1)
def _stats(states, recipe: Recipe) -> dict[str, TensorStats]:
    out = {}

    def note(path, state):
        fp8_max = recipe.fp8_format.max(direction_at(path))
        out[path.split("/", 1)[1]] = _of_tensor(*state, fp8_max=fp8_max)
        return state

    map_states(note, states)
    return out


def _of_tensor(scale, history, probe=None, *, fp8_max: float) -> TensorStats:
    """scale f32[..., 1], history f32[..., L], probe f32[..., 4] as `fp8.observation` gives it."""
    scale, amaxes = scale[..., 0], history[..., 1:]  # Slot 0 holds no amax between steps.
    recorded = jnp.isfinite(amaxes) & (amaxes > 0)
    count = jnp.sum(recorded, -1, dtype=jnp.float32)
    newest = amaxes[..., -1] if amaxes.shape[-1] else jnp.zeros_like(scale)
    amax = jnp.where(newest == 0, jnp.nan, newest)
    saturation = underflow = jnp.full_like(scale, jnp.nan)
    if probe is not None:
        seen = probe[..., 1] > 0
        amax, scale = jnp.where(seen, probe[..., 0], amax), jnp.where(seen, probe[..., 1], scale)
        # A fraction of inf stands for an unknown one.
        saturation, underflow = (jnp.where(seen & (probe[..., i] <= 1), probe[..., i], jnp.nan) for i in (2, 3))
    headroom = np.log2(fp8_max) - jnp.log2(amax) - jnp.log2(scale)
    return TensorStats(amax, scale, headroom, saturation, underflow, _slope(amaxes, recorded, count), count)


def _slope(amaxes, recorded, count):
    """f32[...]: the least-squares slope of log2(amaxes f32[..., n]) over their indices, of recorded amaxes only."""
    log = jnp.where(recorded, jnp.log2(jnp.where(recorded, amaxes, 1.0)), 0.0)
    mean = lambda values: jnp.sum(jnp.where(recorded, values, 0.0), -1, keepdims=True) / count[..., None]
    places = jnp.broadcast_to(jnp.arange(amaxes.shape[-1], dtype=jnp.float32), amaxes.shape)
    away = jnp.where(recorded, places - mean(places), 0.0)
    slope = jnp.sum(away * (log - mean(log)), -1) / jnp.sum(jnp.square(away), -1)
    return jnp.where(count > 1, slope, jnp.nan)


# -- on the host --------------------------------------------------------------------------------------------------


def _percent(fraction: float) -> str:
    return "<0.01%" if 0 < fraction < 5e-5 else f"{fraction:.2%}"


# How the table finds the worst of several layers, and how it writes it.
_COLUMNS = {
    "amax": (np.max, "{:.3g}".format),
    "scale": (np.min, "{:.3g}".format),
    "headroom": (np.min, "{:+z.2f}".format),
    "saturation": (np.max, _percent),
    "underflow": (np.max, _percent),
    "trend": (np.max, "{:+z.3f}".format),
    "recorded": (np.min, "{:.0f}".format),
}


_EXPLANATION = Kind("what te_jax.explain_fp8 returns", lambda value: isinstance(value, Fp8Explanation))

_STATS = Kind(
    "what te_jax.fp8_stats returns, outside of jax.jit",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(each, TensorStats) for each in value.values())
        and not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(dict(value)))
    ),
)


def fp8_stats_table(stats: Mapping[str, TensorStats], explained: Fp8Explanation | None = None) -> str:
    """The numbers of `fp8_stats` as text, one line for each tensor, below a line for its module; fractions in percent.

    explained: what `te_jax.explain_fp8` says of the model: more lines then name the products that are not in FP8, which
               have no numbers, and say why.

    The column `layers` counts the layers, or experts, of a tensor. Several show the largest amax, saturation, underflow
    and trend, and the least scale, headroom and number of recorded amaxes. "-" stands for a number that is not known,
    an amax of "nan" for a NaN in a probed tensor. Where the model is one layer its tensors have no path: "grad" is the
    gradient of its output.

    Raises TypeError for anything but what `fp8_stats` returns, and inside of `jax.jit`, where no number is known.
    """
    check("fp8_stats_table", "stats", stats, _STATS)
    lines = [["tensor", "layers", *_COLUMNS]]
    for path, tensor in stats.items():
        cells = {name: _cell(getattr(tensor, name), *how) for name, how in _COLUMNS.items()}
        if np.any(np.isnan(tensor.amax) & ~np.isnan(tensor.saturation)):
            cells["amax"] = "nan"
        lines.append([path, str(np.size(tensor.amax)), *cells.values()])
    check("fp8_stats_table", "explained", explained, NONE | _EXPLANATION)
    out = [_aligned_lines(lines)]
    for path in dict.fromkeys(p.path for p in explained.products) if explained else ():
        reasons = explained.reasons(path).items()
        out += [f"{path or '.'}: {', '.join(names)} not in FP8: {why}" for why, names in reasons]
    return "\n".join(out)


def _aligned_lines(lines: list[list[str]]) -> str:
    """Lines of cells as text. First cells are a heading, then paths: a module has a line, and its rows stand below."""
    paths = [line[0].rpartition("/") for line in lines]
    names = [f" {name}" if module else name for module, _, name in paths]
    widths = [max(map(len, column)) for column in zip(*([name, *line[1:]] for name, line in zip(names, lines)))]
    out, above = [], ""
    for (module, _, _), name, line in zip(paths, names, lines):
        if module != above:
            out, above = [*out, module or "."], module
        out.append("  ".join([name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]))
    return "\n".join(out)


def _cell(values: Sequence[float] | jax.Array, worst, form: Callable[[float], str]) -> str:
    values = np.asarray(values)
    known = values[~np.isnan(values)]
    return form(worst(known)) if known.size else "-"


# -- experts -------------------------------------------------------------------------------------------------------

_TOKENS, _DROPPED = "tokens_per_expert", "dropped"  # what a MoEBlock sows
_OF_EXPERTS = "kernel_0", "grad_0", "x_1", "kernel_1"  # its tensors that have a scale for each expert


class ExpertStats(NamedTuple):
    """Numbers of the experts of one `MoEBlock`, f32[..., E], with an axis of layers in front under an `nn.scan`."""

    tokens: Annotated[jax.Array, "pairs of a token and a choice"]
    load: Annotated[jax.Array, "tokens over their mean over the experts; NaN without tokens"]
    dropped: Annotated[jax.Array, "fraction of an expert's tokens beyond its capacity"]
    saturation: Annotated[jax.Array, "probes: the largest of its weights, its activation and the gradient of that"]
    underflow: Annotated[jax.Array, "probes: likewise"]


def expert_stats(sown: Mapping[str, Any], stats: Mapping[str, TensorStats] | None = None) -> dict[str, ExpertStats]:
    """How the tokens of a call spread over experts, by the path of each `MoEBlock`, such as "layers/moe" ("" of one
    that is the model).

        _, sown = model.apply(variables, x, mutable=["losses", "intermediates"])
        print(te_jax.expert_stats_table(te_jax.expert_stats(sown)))

    sown:  What such a call returns next to its result. Several calls of a block are added up.
    stats: The result of `fp8_stats`, for saturation and underflow of each expert; else these are NaN.

    Raises ValueError where nothing was sown.
    """
    found = sown.get("intermediates", {})
    blocks = _blocks_in(found)
    if not blocks:
        raise ValueError(
            f"expert_stats: sown has {sorted(sown)}, and no {_TOKENS} of a MoEBlock in 'intermediates'; pass what "
            "model.apply(..., mutable=['intermediates']) returns, where nn.scan has variable_axes={'intermediates': 0}."
        )
    tensor = lambda path, name: (stats or {}).get(f"{path}/{name}".lstrip("/"))
    return {path: _of_block(block, [tensor(path, name) for name in _OF_EXPERTS]) for path, block in blocks.items()}


def _of_block(block: Mapping, tensors: Sequence[TensorStats | None]) -> ExpertStats:
    """block: what it sowed. tensors: its tensors that have a scale for each expert, None where nothing is known."""
    tokens, dropped = (sum(jnp.asarray(a, jnp.float32) for a in block[name]) for name in (_TOKENS, _DROPPED))
    mean = jnp.mean(tokens, -1, keepdims=True)
    worst = lambda field: _largest_known([getattr(t, field) for t in tensors if t is not None], tokens)
    load, fraction = tokens / jnp.where(mean > 0, mean, jnp.nan), dropped / jnp.maximum(tokens, 1)
    return ExpertStats(tokens, load, fraction, worst("saturation"), worst("underflow"))


def _blocks_in(node: Mapping, path: str = "") -> dict[str, Mapping]:
    """{path: node} of the nodes that hold the counts of a block."""
    found = {path: node} if _TOKENS in node else {}
    for name, child in node.items():
        if isinstance(child, Mapping):
            found |= _blocks_in(child, f"{path}/{name}".lstrip("/"))
    return found


def _largest_known(values: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    """The largest of `values` that is no NaN, NaN where none is; in the shape of `like`."""
    known = [jnp.where(jnp.isnan(a), -1.0, a) for a in values]
    most = jnp.max(jnp.stack([jnp.full_like(like, -1.0), *known]), 0)
    return jnp.where(most < 0, jnp.nan, most)


def expert_heat_map(stats: Mapping[str, ExpertStats], field: str = "load") -> tuple[list[str], np.ndarray]:
    """The names of rows and f32[rows, E] of a field of `ExpertStats`, a row for each block and layer, as
    `matplotlib.pyplot.imshow` takes it; NaN behind the experts of a block that has fewer.

    Raises ValueError for an unknown field.
    """
    check("expert_heat_map", "field", field, one_of(*ExpertStats._fields))
    names, rows = [], []
    for path, block in stats.items():
        values = np.asarray(getattr(block, field), np.float32)
        layers = values.reshape(-1, values.shape[-1])
        names += [path or "."] if values.ndim == 1 else [f"{path}[{i}]" for i in range(len(layers))]
        rows += list(layers)
    width = max(map(len, rows), default=0)
    padded = [np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows]
    return names, np.stack(padded) if rows else np.zeros((0, 0), np.float32)


def expert_stats_table(stats: Mapping[str, ExpertStats]) -> str:
    """The numbers of `expert_stats` as text, one line for each block, below a line for the module that it is part of;
    "." is a block that is the model.

    A line has the numbers of layers and experts, the tokens of a layer, the largest and the least load of an expert,
    how many experts got no token, and in percent the tokens that were dropped and the worst saturation and underflow of
    an expert. "-" stands for a number that is not known.
    """
    lines = [
        ["block", "layers", "experts", "tokens", "max load", "min load", "idle", "dropped", "saturation", "underflow"]
    ]
    for path, block in stats.items():
        tokens, load, dropped, saturation, underflow = (np.asarray(a) for a in block)
        experts = tokens.shape[-1]
        layers, total = tokens.size // experts, tokens.sum()
        cells = [
            *(str(layers), str(experts), f"{total / max(layers, 1):.0f}"),
            *(_cell(load, worst, "{:.3f}".format) for worst in (np.max, np.min)),
            str(np.count_nonzero(tokens == 0)),
            _percent((dropped * tokens).sum() / max(total, 1)),
            *(_cell(a, np.max, _percent) for a in (saturation, underflow)),
        ]
        lines.append([path or ".", *cells])
    return _aligned_lines(lines)
