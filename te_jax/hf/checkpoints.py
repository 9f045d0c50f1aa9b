"""`load` and `save`: parameters of te_jax.models from and to checkpoints of Hugging Face's form."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding

from te_jax._check import BOOL, FLOATING, NONE, check, did_you_mean, integer
from te_jax.hf import files
from te_jax.hf.families import FAMILIES
from te_jax.hf.family import Family
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import check_words
from te_jax.models import ModelConfig
from te_jax.models.stack import Model

_SHOWN = 5  # names in an error
_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


def family_of(name: str) -> Family:
    """Raises ValueError for a family that te_jax has no model of."""
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if name else ""
        raise ValueError(f"te_jax.hf: there is no family {name!r}; {hint or 'there are'} {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def read_config(folder: str | Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json. Raises ValueError for what te_jax has no model of."""
    found = json.loads((Path(folder) / "config.json").read_text())
    config = family_of(found.get("model_type", "")).read(found)
    return replace(config, family=found["model_type"])


# -- what is where ----------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A rule at one layer, or outside of layers (index None)."""

    rule: TensorRule
    index: int | None
    ours: tuple[str, ...]  # paths in the tree of parameters, of a stack where layers are scanned
    theirs: tuple[str, ...]


class _Plan(NamedTuple):
    """All steps of a conversion, and the shapes of parameters by path."""

    family: Family
    steps: tuple[_Step, ...]
    shapes: dict[str, tuple[int, ...]]
    scan: bool

    def expected(self, step: _Step) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors of a step."""
        lead = 1 if step.index is not None and self.scan else 0
        parts = [jax.ShapeDtypeStruct(self.shapes[path][lead:], jnp.float32) for path in step.ours]
        return tuple(a.shape for a in jax.eval_shape(step.rule.form.theirs, *parts))


def _parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    inputs = {"inputs": tokens} if model.config.family == "t5" else {}
    init = lambda tokens, **inputs: nn.meta.unbox(model.init(jax.random.key(0), tokens, **inputs)["params"])
    return {"/".join(path): leaf.shape for path, leaf in flatten_dict(jax.eval_shape(init, tokens, **inputs)).items()}


def _plan_of(model: Model) -> _Plan:
    config = model.config
    family, scan = family_of(config.family), model.scan and not config.pattern
    shapes, steps = _parameter_shapes(model), []
    for rule in family.rules(config):
        if rule.stack is None:
            steps.append(_Step(rule, None, rule.ours, rule.theirs))
            continue
        counts = config.num_decoder_layers if rule.stack.startswith("decoder") else config.num_layers
        for i in range(counts or config.num_layers):
            stack = rule.stack if scan else f"{rule.stack.removesuffix('layers')}layer_{i}"
            ours = tuple(f"{stack}/{path}" for path in rule.ours)
            steps.append(_Step(rule, i, ours, tuple(name.format(i=i) for name in rule.theirs)))
    made = {path for step in steps for path in step.ours}
    if made != shapes.keys():
        odd = sorted(made ^ shapes.keys())
        raise ValueError(f"te_jax.hf: a {family.name} has no tensors for {odd}; the config is none of this family.")
    return _Plan(family, tuple(steps), shapes, scan)


def _check_tensors(plan: _Plan, held: Mapping[str, files.Stored], folder: Path):
    """Raises ValueError, before anything is read, for a tensor that is missing, extra or of another shape or type."""
    due = {name: shape for step in plan.steps for name, shape in zip(step.theirs, plan.expected(step))}
    where, family = f"te_jax.hf: {folder}", plan.family

    def say(what: str, names):
        names = sorted(names)
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(f"{where} {what} a {family.name} of its config.json: {', '.join(names[:_SHOWN])}{more}.")

    if missing := due.keys() - held.keys():
        say("lacks tensors of", missing)
    known = {*due, *family.tied}
    if extra := [name for name in held if name not in known and not name.endswith(family.unread or ("\0",))]:
        say("has tensors that are none of", extra)
    for name, shape in due.items():
        if held[name].shape != shape:
            raise ValueError(
                f"{where} has {name} of shape {list(held[name].shape)}; a {family.name} has {list(shape)}."
            )
        if held[name].dtype not in files.DTYPES:
            raise ValueError(f"{where} has {name} of type {held[name].dtype}; te_jax reads {', '.join(files.DTYPES)}.")


def _renamed(checkpoint: files.Checkpoint, family: Family):
    """The tensors by the names of today, with the family's prefix, which some checkpoints leave out: {name: its name
    in the file}."""
    names = {}
    for name in checkpoint.tensors:
        end = next((end for end in family.older if name.endswith(end[0])), None)
        names[name if end is None else name.removesuffix(end[0]) + end[1]] = name
    if not family.prefix or any(name.startswith(family.prefix) for name in names):
        return names
    return {name if name in family.tied else family.prefix + name: file for name, file in names.items()}


# -- load -------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    scan: bool = True,
    shardings: Mapping[str, Any] | None = None,
    **fields: Any,
) -> tuple[Model, dict[str, Any]]:
    """(model, {"params": ...}) of a checkpoint: config.json and model.safetensors, or files with an index.

    The families are those of `te_jax.hf.FAMILIES`. All names, shapes and types are checked before anything is read.
    Then parameters are filled in place, one layer's part at a time, so that beside the model one layer is in memory.

    dtype:         of parameters; None: as they are stored, bit for bit.
    compute_dtype: of activations; None: that of the embedding.
    scan:          as of the model: layers are stacked.
    shardings:     tree of `jax.sharding.Sharding` like the parameters: where each lies. None: on the default device.
    fields:        other fields of the model, such as remat.

    Raises FileNotFoundError for files that are not there; ValueError, naming the tensor, for one that is missing,
    too many or of another shape or type than the family has, for a copy of a tied embedding that differs from it, and
    for a config.json that te_jax has no model of; TypeError for the field params_dtype.
    """
    check("te_jax.hf.load", "dtype", dtype, NONE | FLOATING)
    check("te_jax.hf.load", "compute_dtype", compute_dtype, NONE | FLOATING)
    check("te_jax.hf.load", "scan", scan, BOOL)
    if "params_dtype" in fields:
        raise TypeError(
            "te_jax.hf.load: params_dtype is no argument; pass dtype for parameters, compute_dtype for activations."
        )
    folder = Path(folder)
    config = read_config(folder)
    family = family_of(config.family)
    plan = _plan_of(family.model(config, scan=scan, **fields))
    with files.Checkpoint(folder) as checkpoint:
        names = _renamed(checkpoint, family)
        held = {name: checkpoint.tensors[file] for name, file in names.items()}
        _check_tensors(plan, held, folder)
        read = lambda name: checkpoint.read(names[name])
        _check_tied(family, config, plan, held, read, folder)
        params = _filled(plan, held, read, dtype, shardings)
    types = dict(params_dtype=params["embedding"].dtype, dtype=compute_dtype or params["embedding"].dtype)
    return family.model(config, scan=scan, **types, **fields), {"params": unflatten_dict(params, sep="/")}


def _check_tied(family: Family, config: ModelConfig, plan: _Plan, held, read, folder: Path):
    """Raises ValueError for a copy of the embedding that is none."""
    due = {name for step in plan.steps for name in step.theirs}
    source = next(step.theirs[0] for step in plan.steps if step.ours == ("embedding",))
    for name in family.tied:
        if name in held and name not in due and not np.array_equal(read(name), read(source)):
            raise ValueError(f"te_jax.hf: {folder} has {name} unlike {source}, but its config.json ties them.")


def _filled(plan: _Plan, held, read, dtype, shardings) -> dict[str, jax.Array]:
    """The parameters by path."""
    flat = {} if shardings is None else flatten_dict(nn.meta.unbox(shardings), sep="/")
    flat = {path.removeprefix("params/"): sharding for path, sharding in flat.items()}
    types = {path: dtype for path in plan.shapes}
    for step in plan.steps:
        stored = {held[name].dtype for name in step.theirs}
        for path in step.ours:
            types[path] = types[path] or _common(stored)
    default = _common({stored.dtype for stored in held.values()} & files.DTYPES.keys())
    params, fill = {}, {}
    for step in plan.steps:
        for path in step.ours:
            if path not in params:
                kind = types[path] or default
                params[path] = jnp.zeros(plan.shapes[path], kind, device=_without_types(flat.get(path)))
        if not step.theirs:
            continue
        stacked = step.index is not None and plan.scan
        if step.rule not in fill:
            places = tuple(params[path].sharding for path in step.ours)
            put = partial(_put_in_place, step.rule.form.ours, stacked)
            fill[step.rule] = jax.jit(put, donate_argnums=0, out_shardings=places)
        before = tuple(params[path] for path in step.ours)
        after = fill[step.rule](before, step.index or 0, *(read(name) for name in step.theirs))
        params |= zip(step.ours, after)
    return {path: jax.device_put(a, flat.get(path)) if flat else a for path, a in params.items()}


def _common(dtypes):
    """The one dtype of these words of the format, or the widest; None without any."""
    return jnp.result_type(*(files.DTYPES[name] for name in dtypes)) if dtypes else None


def _as_bits(a):
    """The bits of an array: moved as floats, a NaN of 16 bits may become another one on its way."""
    return jax.lax.bitcast_convert_type(a, _UNSIGNED[a.dtype.itemsize])


def _put_in_place(form, stacked: bool, before, index, *parts):
    parts = [a.astype(before[0].dtype) for a in parts]
    made = form(*map(_as_bits, parts))
    if stacked:
        each = zip(before, made, strict=True)
        made = [jax.lax.dynamic_update_index_in_dim(_as_bits(old), a, index, 0) for old, a in each]
    return tuple(jax.lax.bitcast_convert_type(a, old.dtype) for a, old in zip(made, before))


def _without_types(sharding):
    """The same places on a mesh of Auto axes: an update in place has no rule for Explicit ones."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    return NamedSharding(
        Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim), sharding.spec
    )


# -- save -------------------------------------------------------------------------------------------------------


def save(folder: str | Path, model: Model, variables: Mapping[str, Any], *, max_file_bytes: int = 5 * 10**9) -> None:
    """Writes a checkpoint that `load`, and Hugging Face's transformers, read: config.json and safetensors.

    variables: {"params": ...}, boxed or not; each tensor in its parameter's dtype, bit for bit.
    max_file_bytes: larger checkpoints become several files with an index.

    Raises ValueError for a model of no family (`ModelConfig.family`), for parameters of other names or shapes than the
    model has, for a parameter that the family has none of and that is not 0, and, naming it, for what config.json has
    no word for; FileExistsError where the folder has a checkpoint.
    """
    check("te_jax.hf.save", "max_file_bytes", max_file_bytes, integer(1))
    folder, plan = Path(folder), _plan_of(model)
    params = flatten_dict(nn.meta.unbox(variables["params"]), sep="/")
    _check_parameters(plan, params)
    dtype = params["embedding"].dtype.name
    architecture = dict(
        model_type=plan.family.name, architectures=[plan.family.architecture], torch_dtype=dtype, dtype=dtype
    )
    written = plan.family.write(model.config) | architecture
    check_words(plan.family.name, model.config, plan.family.read(written))
    for there in (folder / files.ONE, folder / files.INDEX):
        if there.exists():
            raise FileExistsError(f"te_jax.hf.save: there is {there}; give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for step in plan.steps:
        for name, shape in zip(step.theirs, plan.expected(step)):
            sizes[name] = math.prod(shape) * params[step.ours[0]].dtype.itemsize
    files.write(folder, sizes, _tensors(plan, params), max_file_bytes)
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def _check_parameters(plan: _Plan, params: Mapping[str, jax.Array]):
    family = plan.family.name
    if odd := sorted(params.keys() ^ plan.shapes.keys()):
        raise ValueError(f"te_jax.hf.save: the model, a {family}, and the parameters do not both have {odd[:_SHOWN]}.")
    for path, shape in plan.shapes.items():
        if params[path].shape != shape:
            raise ValueError(
                f"te_jax.hf.save: {path} has shape {params[path].shape}; the model, a {family}, has {shape}."
            )
    for path in {path for step in plan.steps if not step.theirs for path in step.ours}:
        if bool(jnp.any(params[path] != 0)):
            raise ValueError(f"te_jax.hf.save: {path} is not 0, but a {family} has no such tensor; set it 0.")


def _tensors(plan: _Plan, params) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the order of the plan, each layer's when its turn comes."""
    for step in plan.steps:
        take = (lambda a, i=step.index: a[i]) if step.index is not None and plan.scan else (lambda a: a)
        parts = [take(_as_bits(params[path])) for path in step.ours]
        for name, a in zip(step.theirs, step.rule.form.theirs(*parts)):
            yield name, np.ascontiguousarray(jax.device_get(a)).view(params[step.ours[0]].dtype)
