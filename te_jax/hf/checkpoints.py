"""`load` and `save`: variables of te_jax.models from and to checkpoints of Hugging Face's form."""

import json
import math
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

import te_jax.flax as te_flax
from te_jax.core.check import ARRAY, BOOL, FLOATING, NONE, STRING, Kind, check, integer, show
from te_jax.hf import files
from te_jax.hf.carried import carry
from te_jax.hf.families import FAMILIES
from te_jax.hf.family import Family
from te_jax.hf.filling import as_bits, fill_variables, types_of
from te_jax.hf.fp8_export import FP8Export, Fp8Part, fp8_part
from te_jax.hf.mxfp4 import Unpacked, is_mxfp4
from te_jax.hf.plan import (
    COLLECTIONS,
    SHOWN,
    Conversion,
    check_due,
    check_sizes,
    check_tensors,
    current_names,
    family_of,
    initial_call,
    plan_of,
)
from te_jax.hf.quantization_config import read_scheme
from te_jax.hf.scales import Scaled, Scheme
from te_jax.hf.words import check_words
from te_jax.layers.parameters import is_kernel
from te_jax.models import ModelConfig
from te_jax.models.config import Origin
from te_jax.models.stack import MODEL, VARIABLES, Model
from te_jax.recipe import Recipe
from te_jax.state import fp8 as fp8_state

_FOLDER = Kind("the path of a folder", lambda value: isinstance(value, str | os.PathLike))
_EXPORT = Kind("a te_jax.hf.FP8Export", lambda value: isinstance(value, FP8Export))
_SHARDINGS = Kind("a tree of shardings like the parameters", lambda value: isinstance(value, Mapping))
_SHARDING = Kind("a jax.sharding.Sharding", lambda value: isinstance(value, jax.sharding.Sharding))
_PARAMETER = Kind(
    "an array of float32, bfloat16 or float16",
    ARRAY.is_type,
    lambda a: a.dtype in [jnp.dtype(each) for each in files.DTYPES.values()],
)


def read_config(folder: str | Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json.

    Raises FileNotFoundError where there is none, ValueError, naming the file, for one that is no JSON, and ValueError
    or TypeError, naming the word, for what te_jax has no model of.
    """
    check("te_jax.hf.read_config", "folder", folder, _FOLDER)
    return _config_of(Path(folder))[0]


def _config_of(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """config.json as te_jax and as the file says it."""
    path = folder / files.CONFIG
    found = files.read_json(path)
    check(f"te_jax.hf: {path}", "model_type", found.get("model_type"), STRING)
    _check_is_one_model(path, found)
    config = family_of(found["model_type"]).read(found)
    try:
        origin = Origin(str(folder.absolute()), json.dumps(found))
    except RecursionError:
        raise ValueError(f"te_jax.hf: {path} has too many values in each other.") from None
    return replace(config, origin=origin), found


def _check_is_one_model(path: Path, found: Mapping[str, Any]):
    """Raises ValueError for a config.json of several models, such as one of images and one of texts."""
    name, text = found["model_type"], found.get("text_config")
    if name in FAMILIES or not isinstance(text, Mapping) or not isinstance(of_text := text.get("model_type"), str):
        return
    family_of(of_text)
    raise ValueError(
        f"te_jax.hf: {path} is of several models, a {show(name)}; te_jax reads one: write a folder of its text_config, "
        f"a {of_text}, and of the tensors of that."
    )


# -- load -------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    scan: bool = True,
    shardings: Mapping[str, Any] | None = None,
    fp8: Recipe | None = None,
    fp8_gradients: bool = False,
    **fields: Any,
) -> tuple[Model, dict[str, Any]]:
    """The model and the variables {"params": ...} of a checkpoint in a folder.

    The folder has config.json and model.safetensors, or files with an index. One from the Hub, "org/name", is fetched
    by `huggingface_hub.snapshot_download("org/name")`, which returns the folder. For a DeepSeek-V3 the variables have
    the collection `expert_bias` too, in f32.

    The families are in `te_jax.hf.FAMILIES`. All names, shapes and types are checked before anything is read. Then
    parameters are filled in place, one layer's part at a time, so that next to the model one layer is in memory.

    Checkpoints may have weights in FP8 (`quantization_config` with the quant_method "fp8", or "compressed-tensors" of
    the format "float-quantized"), with scales of blocks of 128 x 128, of output channels or one each. Such weights are
    dequantized: weight * scale in f32, rounded to the parameter's dtype. Scales of inputs are not read. Weights in
    MXFP4 (the quant_method "mxfp4", as gpt-oss) become bf16, which has their values.

    dtype:         of parameters; None: as they are stored, bit for bit, and bf16 of what is stored in FP8 or MXFP4.
    compute_dtype: of activations; None: the embedding's.
    scan:          as of the model: layers are stacked.
    shardings:     tree of `jax.sharding.Sharding` like the parameters, or like all variables: where each lies. None:
                   on the default device.
    fp8:           a recipe: what its layers multiply becomes a QuantizedKernel, as by `te_jax.flax.fp8_params` under
                   it, each when its layer comes. Under `Float8BlockScaling` weights that are stored in blocks of 128
                   x 128 keep their bits and scales. `shardings` has the sharding of the array in such a place. State
                   that the recipe has is not made: `init` of the model does.
    fp8_gradients: `gradients` of `te_jax.flax.fp8_params`.
    fields:        other fields of the model, such as remat.

    What te_jax does not use of config.json, and the folder, are kept in `model.config.origin`, by which `save` writes
    them again.

    A base model's tensors may have no prefix ("model.", "transformer."); a head that is not tied has to be there, too.
    A tied embedding may stand under the head's name.

    A T5's head is the embedding unless the files have another one, whatever its config.json says, as in transformers.

    Raises FileNotFoundError for files that are not there; ValueError, naming the file, for one that can not be read,
    for an index that leads out of the folder, and for sizes in config.json that no tensor has; ValueError, naming the
    tensor, for one that is missing, too many or of another shape or type than the family has, scales among them, and
    for a copy of a tied tensor that differs from it; ValueError, naming the word, for a config.json that te_jax has no
    model of; ValueError for shardings of parameters that the model has not, and for fp8_gradients without fp8;
    TypeError for the field params_dtype, for an fp8 that is no recipe, and for shardings that are none.
    """
    name = "te_jax.hf.load"
    check(name, "folder", folder, _FOLDER)
    for argument, value in (("dtype", dtype), ("compute_dtype", compute_dtype)):
        check(name, argument, value, NONE | FLOATING)
    for argument, value in (("scan", scan), ("fp8_gradients", fp8_gradients)):
        check(name, argument, value, BOOL)
    if fp8 is not None:
        fp8_state.check_recipe(name, fp8, "fp8")
    elif fp8_gradients:
        raise ValueError(f"{name}: fp8_gradients is True, but fp8 is None, and nothing in FP8; pass a recipe too.")
    if "params_dtype" in fields:
        raise TypeError(
            f"{name}: params_dtype is no argument; pass dtype for parameters, compute_dtype for activations."
        )
    folder = Path(folder)
    config, found = _config_of(folder)
    scheme, family = read_scheme(found, folder), family_of(config.family)
    with files.Checkpoint(folder) as opened:
        checkpoint = Unpacked(opened, folder) if is_mxfp4(found) else opened
        check_sizes(config, found, checkpoint.tensors, folder)
        names = current_names(checkpoint, config, folder)
        held = {name: checkpoint.tensors[file] for name, file in names.items()}
        read = lambda name: checkpoint.read(names[name])
        model = family.model(_config_by_files(config, family, found, held, read), scan=scan, **fields)
        check_due(model, found, scheme, held, folder)
        plan = plan_of(model)
        check_tensors(plan, scheme, held, folder)
        _check_tied(plan, held, read, folder)
        types = types_of(plan, held, dtype)
        forms = {path: jax.ShapeDtypeStruct(shape, types[path]) for path, shape in plan.shapes.items()}
        forms = forms if fp8 is None else _forms_in_fp8(model, forms, fp8, fp8_gradients)
        read_scaled = lambda name: _read_scaled(read, held, scheme, name)
        made = fill_variables(plan, forms, read_scaled, _shardings_by_path(shardings, forms), fp8, fp8_gradients)
    embedded = made["params/embedding"].dtype
    model = model.clone(params_dtype=embedded, dtype=compute_dtype or embedded)
    return model, unflatten_dict(made, sep="/")


def _shardings_by_path(shardings, paths: Container[str]) -> dict[str, Any]:
    """By the paths of variables. Raises ValueError for parameters that the model has not: of layers that it stacks or
    does not, say. Other collections next to `params` are read past, as of FP8 state."""
    check("te_jax.hf.load", "shardings", shardings, NONE | _SHARDINGS)
    flat = {} if shardings is None else flatten_dict(nn.meta.unbox(shardings), sep="/")
    for path, sharding in flat.items():
        check("te_jax.hf.load", f"shardings, at {path},", sharding, NONE | _SHARDING)
    known = tuple(f"{name}/" for name in COLLECTIONS)
    of_all = any(path.startswith("params/") for path in flat)
    whole = {path if of_all or path.startswith(known) else f"params/{path}": a for path, a in flat.items()}
    if strange := [path for path in whole if path.startswith(known) and path not in paths]:
        raise ValueError(
            f"te_jax.hf.load: shardings has {strange[0]}, and the model no such parameter; pass a tree like its own. "
            "Layers are stacked in `layers`, or with scan=False are layer_0, layer_1, ..."
        )
    return whole


def _config_by_files(config: ModelConfig, family: Family, found, held, read) -> ModelConfig:
    """`config` with what only the tensors say: whether the head is the embedding, what there is, what was left out."""
    config = family.by_files(config, held)
    if family.ties_by_files and _has_a_head(family, held, read):
        config = replace(config, tie_embeddings=False)
    if any(map(family.spare(found), held)):
        config = replace(config, origin=config.origin.with_words(**family.without_spare))
    return config


def _read_scaled(read, held, scheme: Scheme | None, name: str):
    """The tensor, `Scaled` if it is in FP8."""
    if held[name].dtype != files.FP8:
        return read(name)
    scale = read(scheme.scale_of(name)).astype(np.float32)  # some have scales of 16 bits
    return Scaled(read(name), scale.reshape(scheme.scale_shape(held[name].shape)), scheme.format)


def _forms_in_fp8(model: Model, forms, recipe: Recipe, gradients: bool) -> dict[str, Any]:
    """`forms` with a QuantizedKernel of forms instead of each parameter that is to be in FP8."""

    def quantized(variables):
        with fp8_state.autocast(True, recipe):
            tokens, inputs = initial_call(model)
            others = nn.meta.unbox(model.init(jax.random.key(0), tokens, **inputs))
            return te_flax.fp8_params(model, others | variables, tokens, gradients=gradients, **inputs)

    made = flatten_dict(jax.eval_shape(quantized, unflatten_dict(forms, sep="/")), sep="/")
    return {path: made[path] for path in forms}


def _has_a_head(family: Family, held, read) -> bool:
    """Whether the head in the files, if there is one, is no copy of the embedding."""
    head = "lm_head.weight"
    of = [held[name] for name in (head, family.tied[head]) if name in held and held[name].dtype in files.DTYPES]
    return len(of) == 2 and of[0].shape == of[1].shape and not _same_bits(read(head), read(family.tied[head]))


def _check_tied(plan: Conversion, held, read, folder: Path):
    """Raises ValueError for a copy that is none."""
    due = {name for step in plan.steps for name in step.theirs}
    for name, source in plan.family.tied.items():
        if name in held and name not in due and not _same_bits(read(name), read(source)):
            raise ValueError(f"te_jax.hf: {folder} has {name} unlike {source}, but its config.json ties them.")


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two tensors have the same bits, or, of two types, the same once they are widened. A NaN is as any other
    one: what a type makes of a narrower one's is its own."""
    bits = lambda each: each.view(f"u{each.itemsize}")
    if a.dtype == b.dtype and np.array_equal(bits(a), bits(b)):
        return True
    a, b = (each.astype(np.float32) for each in (a, b))
    return bool(np.all((bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))))


# -- save -------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    model: Model,
    variables: Mapping[str, Any],
    *,
    max_file_bytes: int = 5 * 10**9,
    fp8: FP8Export | None = None,
) -> None:
    """Writes a checkpoint that `load`, and Hugging Face's transformers, read: config.json and safetensors.

    Where `load` read the model (`ModelConfig.origin`), the config.json has all words of the one that was read. Words
    that te_jax reads are the model's where it was changed, and the weights' dtype, architectures and
    quantization_config describe what is written. The files of its tokenizer and of generation are copied from the
    folder that was read, but not over files that are there: files whose names begin with tokenizer, tokenization,
    vocab, merges, special_tokens, added_tokens, spiece, sentencepiece, tekken or chat_template, or end in .model or
    .tiktoken, generation_config.json, and what additional_chat_templates has. Where that folder is gone, a warning says
    so.

    variables: {"params": ...}, boxed or not, and `expert_bias` where the model has that; each tensor in its variable's
               dtype, bit for bit. Parameters in FP8 (`te_jax.flax.fp8_params`) stay in FP8, bit for bit: with scales of
               blocks of 128 x 128 as DeepSeek-V3 has them, with one scale as inference servers read them. The latter
               have the scales of inputs too where variables have the state of `DelayedScaling`, `fp8_metas`.
    max_file_bytes: larger checkpoints become several files with an index.
    fp8:       how weights of linear layers become FP8; None: none does. `variables` have `fp8_metas` where it has
               static activations.

    Raises ValueError for a model of no family (`ModelConfig.family`), for parameters of other names or shapes than the
    model has, for a parameter that the family has none of and that is not 0, for one in FP8 that is no weight of a
    linear layer or that has scales of another form, or next to `fp8`, for inputs that `fp8_metas` lacks or has never
    seen, naming it, for a weight that `fp8` has no form for or that is not finite, for what config.json has no word
    for, and, naming the file, for one that can not be written; FileExistsError where the folder has a checkpoint;
    TypeError for what is no model of te_jax.models, and for parameters that are no arrays.
    """
    name = "te_jax.hf.save"
    check(name, "folder", folder, _FOLDER)
    check(name, "model", model, MODEL)
    check(name, "variables", variables, VARIABLES)
    check(name, "max_file_bytes", max_file_bytes, integer(1))
    check(name, "fp8", fp8, NONE | _EXPORT)
    folder, plan = Path(folder), plan_of(model)
    held = nn.meta.unbox({name: variables[name] for name in COLLECTIONS if name in variables})
    params = flatten_dict(held, sep="/")
    _check_parameters(plan, params)
    part = fp8_part(plan, params, variables.get("fp8_metas"), fp8)
    dtype = params["params/embedding"].dtype.name
    named = plan.family.architecture
    architecture = dict(
        model_type=plan.family.name,
        architectures=[named if isinstance(named, str) else named(model.config)],
        torch_dtype=dtype,
        dtype=dtype,
    )
    written = plan.family.write(model.config) | architecture
    for word in ("quantization_config", "auto_map"):  # of the files that it was read from: their types, their code
        written.pop(word, None)
    check_words(plan.family.name, model.config, plan.family.read(written))
    if part is not None:
        written["quantization_config"] = part.config(plan)
    for there in (folder / files.ONE, folder / files.INDEX):
        if there.exists():
            raise FileExistsError(f"te_jax.hf.save: there is {there}; give another folder.")
    files.write(folder, dict(_sizes(plan, params, part)), _tensors(plan, params, part), max_file_bytes)
    files.write_json(folder / files.CONFIG, written)
    carry(model.config.origin, folder)


def _check_parameters(plan: Conversion, params: Mapping[str, Any]):
    family = plan.family.name
    if odd := sorted(params.keys() ^ plan.shapes.keys()):
        raise ValueError(f"te_jax.hf.save: the model, a {family}, and the variables do not both have {odd[:SHOWN]}.")
    for path, shape in plan.shapes.items():
        if not is_kernel(params[path]):
            check("te_jax.hf.save", path, params[path], _PARAMETER)
        if params[path].shape != shape:
            raise ValueError(
                f"te_jax.hf.save: {path} has shape {params[path].shape}; the model, a {family}, has {shape}."
            )
    for path in {path for step in plan.steps if not step.theirs for path in step.ours}:
        if bool(jnp.any(params[path] != 0)):
            raise ValueError(f"te_jax.hf.save: {path} is not 0, but a {family} has no such tensor; set it 0.")


def _sizes(plan: Conversion, params, part: Fp8Part | None) -> Iterator[tuple[str, int]]:
    """The bytes of each tensor, in the order of `_tensors`."""
    for step in plan.steps:
        first = step.ours[0]
        for name, shape in zip(step.theirs, plan.tensor_shapes(step)):
            if part is not None and first in part.paths:
                yield from part.sizes(name, shape)
            else:
                yield name, math.prod(shape) * params[first].dtype.itemsize


def _tensors(plan: Conversion, params, part: Fp8Part | None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the order of the plan, each layer's when its turn comes."""
    for step in plan.steps:
        of_layer = lambda a, i=step.index: as_bits(a) if i is None else as_bits(a)[i]
        of_step = [params[path] for path in step.ours]
        bits, dtype = jax.tree.map(of_layer, of_step), of_step[0].dtype
        if part is not None and step.ours[0] in part.paths:
            yield from part.tensors(step, *bits, dtype)
            continue
        for name, a in zip(step.theirs, step.rule.form.theirs(*bits)):
            yield name, np.asarray(jax.device_get(a), order="C").view(dtype)
