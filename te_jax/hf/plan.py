"""What is where: each parameter of a model, and the tensors of a checkpoint that it is made of."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from te_jax.core.check import did_you_mean, show
from te_jax.flax.moe import BIAS_COLLECTION
from te_jax.hf import files
from te_jax.hf.families import FAMILIES, MISSING
from te_jax.hf.family import Family
from te_jax.hf.mxfp4 import Unpacked
from te_jax.hf.rules import TensorRule
from te_jax.hf.scales import Scheme
from te_jax.models import EncoderDecoder, ModelConfig, VisionEncoder
from te_jax.models.families import Latents
from te_jax.models.stack import Model, place_of_layer

COLLECTIONS = ("params", BIAS_COLLECTION)  # of variables that checkpoints hold
SHOWN = 5  # names in an error
_COUNTED = 1000  # names that are missing; further ones are not looked for
_CHEAP_SIZE, _CHEAP_COUNT = 2**20, 2**10  # what tracing, and naming tensors, takes little time and memory for
# Sizes of a config that are dimensions of tensors, or factors of such.
_SIZES_OF_MODELS = ("vocab_size", "hidden_size", "max_positions", "token_types", "patches", "image_channels")
_SIZES_OF_LAYERS = (
    "num_attention_heads",
    "num_gqa_groups",
    "kv_channels",
    "mlp_hidden_size",
    "layer_input_size",
    *Latents._fields,
)


def family_of(name: str) -> Family:
    """Raises ValueError for a family that te_jax has no model of, saying what is missing where that is known."""
    if name in MISSING:
        raise ValueError(f"te_jax.hf: there is no family {name!r}: its layers have {MISSING[name]}.")
    if not name:
        raise ValueError(
            "te_jax.hf: the family of this ModelConfig is ''; say which checkpoints it is like, as in "
            f"dataclasses.replace(config, family='llama'). There are {', '.join(FAMILIES)}."
        )
    if name not in FAMILIES:
        hint = did_you_mean(name[:100], FAMILIES)
        raise ValueError(f"te_jax.hf: there is no family {show(name)}; {hint or 'there are'} {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def check_sizes(config: ModelConfig, found: Mapping[str, Any], held: Mapping[str, files.Stored], folder: Path) -> None:
    """Raises ValueError for a size that would cost much and that no tensor has: tracing a model, which has to come
    before shapes can be compared, makes tables of some sizes, and experts have names each.

    found: config.json.
    """
    largest = max((size for each in held.values() if 0 not in each.shape for size in each.shape), default=0)

    def compare(name: str, value: Any, cheap: int, most: int, what: str):
        if not isinstance(value, int) or value <= max(cheap, most):
            return
        word = next((word for word, said in found.items() if type(said) is int and said == value), name)
        raise ValueError(f"te_jax.hf: {folder / files.CONFIG} has {word}={value}, but {folder} has {what} {most}.")

    for fields in (config.layer, *config.pattern, *config.first):
        sizes = {name: getattr(config, name) for name in _SIZES_OF_MODELS} | {
            name: fields.get(name) for name in _SIZES_OF_LAYERS
        }
        moe = dict(fields.get("moe") or {})
        sizes |= {
            **(fields.get("ssm") or {}),
            **(fields.get("delta") or {}),
            "intermediate_dim": moe.pop("intermediate_dim", None),
        }
        for name, value in sizes.items():
            compare(name, value, _CHEAP_SIZE, largest, "no tensor with a dimension above")
        for name, value in moe.items():  # each expert has tensors of its own
            compare(name, value, _CHEAP_COUNT, len(held), "no more tensors than")


class Step(NamedTuple):
    """A rule at one layer, or outside of layers."""

    rule: TensorRule
    index: int | None  # along the leading axis of a stack; None: there is none
    ours: tuple[str, ...]  # paths of variables, "params/a/b"
    theirs: tuple[str, ...]


class Conversion(NamedTuple):
    """All steps of a conversion, and the shapes of variables by path."""

    family: Family
    steps: tuple[Step, ...]
    shapes: dict[str, tuple[int, ...]]

    def tensor_shapes(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors of a step."""
        lead = 0 if step.index is None else 1
        ours = [jax.ShapeDtypeStruct(self.shapes[path][lead:], jnp.float32) for path in step.ours]
        return tuple(a.shape for a in jax.eval_shape(step.rule.form.theirs, *ours))


def initial_call(model: Model) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Arguments of the model's call, only for their shapes."""
    if isinstance(model, VisionEncoder):
        c = model.config
        return jnp.zeros((1, c.image_size, c.image_size, c.image_channels), model.dtype), {}
    tokens = jnp.zeros((1, 2), jnp.int32)
    return tokens, {"inputs": tokens} if isinstance(model, EncoderDecoder) else {}


def variable_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of each variable that a checkpoint holds, by path."""

    def init():
        tokens, inputs = initial_call(model)
        return nn.meta.unbox(model.init(jax.random.key(0), tokens, **inputs))

    found = flatten_dict(jax.eval_shape(init))
    return {"/".join(path): leaf.shape for path, leaf in found.items() if path[0] in COLLECTIONS}


def steps_of(model: Model) -> Iterator[Step]:
    """The steps of a conversion, layer by layer, without shapes."""
    config = model.config
    for rule in family_of(config.family).rules(config):
        if rule.stack is None:
            yield Step(rule, None, tuple(f"{rule.collection}/{path}" for path in rule.ours), rule.theirs)
            continue
        of_decoder = config.num_decoder_layers if rule.stack.startswith("decoder") else None
        count = of_decoder or config.num_layers
        for i in range(count) if rule.layers is None else rule.layers:
            path, index = place_of_layer(config, i, count, model.scan)
            path = f"{rule.collection}/{rule.stack.removesuffix('layers')}{path}"
            ours = tuple(f"{path}/{name}" for name in rule.ours)
            yield Step(rule, index, ours, tuple(name.format(i=i) for name in rule.theirs))


def plan_of(model: Model) -> Conversion:
    """Raises ValueError for a model that is none of its family."""
    family, steps, shapes = family_of(model.config.family), tuple(steps_of(model)), variable_shapes(model)
    made = {path for step in steps for path in step.ours}
    if made != shapes.keys():
        odd = sorted(made ^ shapes.keys())
        adapters = any("lora_a_kernel" in path for path in odd)
        way_out = "merge adapters by te_jax.flax.merge_lora" if adapters else "the config is none of this family"
        raise ValueError(f"te_jax.hf: a {family.name} has no tensors for {odd}; {way_out}.")
    return Conversion(family, steps, shapes)


def _say(folder: Path, family: str, what: str, names, more: int = 0) -> NoReturn:
    names = sorted(names)
    hidden = len(names) - SHOWN
    end = f", and {'more than ' if more else ''}{hidden} more" if hidden > 0 else ""
    first = ", ".join(map(files.quote, names[:SHOWN]))
    raise ValueError(f"te_jax.hf: {folder} {what} a {family} of its config.json: {first}{end}.")


def check_due(
    model: Model, found: Mapping[str, Any], scheme: Scheme | None, held: Mapping[str, files.Stored], folder: Path
) -> None:
    """Raises ValueError, before the model is traced, for a tensor that is missing or one too many.

    found: config.json. scheme: how its weights in FP8 are scaled. held: the tensors by the names of today.
    """
    family = family_of(model.config.family)
    in_fp8 = lambda name: scheme is not None and name in held and held[name].dtype == files.FP8
    known = set()

    def missing():
        for name in (name for step in steps_of(model) for name in step.theirs):
            known.add(name)
            yield name
            if in_fp8(name):
                known.update((scheme.scale_of(name), *(() if scheme.block else (scheme.unread_of(name),))))
                yield scheme.scale_of(name)

    if lost := {*islice((name for name in missing() if name not in held), _COUNTED + 1)}:
        _say(folder, family.name, "lacks tensors of", lost, more=len(lost) > _COUNTED)
    is_spare = family.spare(found)
    known.update(family.tied)
    if extra := [n for n in held if n not in known and not n.endswith(family.unread or ("\0",)) and not is_spare(n)]:
        _say(folder, family.name, "has tensors that are none of", extra)


def check_tensors(plan: Conversion, scheme: Scheme | None, held: Mapping[str, files.Stored], folder: Path) -> None:
    """Raises ValueError, before anything is read, for a tensor of another shape or type. Arguments are as of
    `check_due`."""
    due = {name: shape for step in plan.steps for name, shape in zip(step.theirs, plan.tensor_shapes(step))}
    where, family = f"te_jax.hf: {folder}", plan.family
    in_fp8 = [name for name in due if held[name].dtype == files.FP8]
    if in_fp8 and scheme is None:
        raise ValueError(f"{where} has {in_fp8[0]} of type {files.FP8}, but its config.json no quantization_config.")
    scales = {} if scheme is None else {scheme.scale_of(name): scheme.scale_shape(due[name]) for name in in_fp8}
    copies = {name: due[source] for name, source in family.tied.items() if name in held and name not in due}
    types = dict.fromkeys((*due, *scales, *copies), tuple(files.DTYPES))
    types |= {name: (*files.DTYPES, files.FP8) for name in in_fp8 if len(due[name]) == 2}
    for name, shape in (due | scales | copies).items():
        one = name in scales and shape == ()  # which may be written as [1]
        if held[name].shape != shape and not (one and held[name].shape == (1,)):
            raise ValueError(
                f"{where} has {name} of shape {show([*held[name].shape])}; a {family.name} has {list(shape)}."
            )
        if held[name].dtype not in types[name]:
            raise ValueError(f"{where} has {name} of type {held[name].dtype}; te_jax reads {', '.join(types[name])}.")


def current_names(checkpoint: files.Checkpoint | Unpacked, config: ModelConfig, folder: Path) -> dict[str, str]:
    """The tensors by the names of today, with the family's prefix, which some checkpoints leave out: {name: its name
    in the file}. Of a tied tensor a copy may be there instead. Raises ValueError where two tensors have one name of
    today."""
    family = family_of(config.family)
    today = {}
    for name in checkpoint.tensors:
        end = next((end for end in family.older if name.endswith(end[0])), None)
        now = name if end is None else name.removesuffix(end[0]) + end[1]
        today[name] = now.removeprefix(family.old_prefix)
    if family.prefix and not any(name.startswith(family.prefix) for name in today.values()):
        today = {file: name if name in family.tied else family.prefix + name for file, name in today.items()}
    names: dict[str, str] = {}
    for file, name in today.items():
        if names.setdefault(name, file) != file:
            raise ValueError(
                f"te_jax.hf: {folder} has {files.quote(names[name])} and {files.quote(file)}, names of one tensor."
            )
    for copy, source in family.tied.items() if config.tie_embeddings else ():
        if source not in names and copy in names:
            names[source] = names.pop(copy)
    return names
