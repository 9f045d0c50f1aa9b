"""What is where: each parameter of a model beside the tensors of a checkpoint that it is made of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from te_jax._check import did_you_mean
from te_jax.flax.moe import BIAS_COLLECTION
from te_jax.hf import files
from te_jax.hf.families import FAMILIES
from te_jax.hf.family import Family
from te_jax.hf.rules import TensorRule
from te_jax.hf.scales import Scheme
from te_jax.models.stack import Model, place_of_layer

COLLECTIONS = ("params", BIAS_COLLECTION)  # of variables that checkpoints hold
SHOWN = 5  # names in an error


def family_of(name: str) -> Family:
    """Raises ValueError for a family that te_jax has no model of."""
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if name else ""
        raise ValueError(f"te_jax.hf: there is no family {name!r}; {hint or 'there are'} {', '.join(FAMILIES)}.")
    return FAMILIES[name]


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

    def expected(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors of a step."""
        lead = 0 if step.index is None else 1
        parts = [jax.ShapeDtypeStruct(self.shapes[path][lead:], jnp.float32) for path in step.ours]
        return tuple(a.shape for a in jax.eval_shape(step.rule.form.theirs, *parts))


def initial_call(model: Model) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Arguments of the model's call, for their shapes alone."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return tokens, {"inputs": tokens} if model.config.family == "t5" else {}


def variable_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of each variable that a checkpoint holds, by path."""

    def init():
        tokens, inputs = initial_call(model)
        return nn.meta.unbox(model.init(jax.random.key(0), tokens, **inputs))

    found = flatten_dict(jax.eval_shape(init))
    return {"/".join(path): leaf.shape for path, leaf in found.items() if path[0] in COLLECTIONS}


def plan_of(model: Model) -> Conversion:
    """Raises ValueError for a model that is none of its family."""
    config = model.config
    family, shapes, steps = family_of(config.family), variable_shapes(model), []
    for rule in family.rules(config):
        if rule.stack is None:
            steps.append(Step(rule, None, tuple(f"{rule.collection}/{path}" for path in rule.ours), rule.theirs))
            continue
        of_decoder = config.num_decoder_layers if rule.stack.startswith("decoder") else None
        count = of_decoder or config.num_layers
        for i in range(count) if rule.layers is None else rule.layers:
            path, index = place_of_layer(config, i, count, model.scan)
            path = f"{rule.collection}/{rule.stack.removesuffix('layers')}{path}"
            ours = tuple(f"{path}/{name}" for name in rule.ours)
            steps.append(Step(rule, index, ours, tuple(name.format(i=i) for name in rule.theirs)))
    made = {path for step in steps for path in step.ours}
    if made != shapes.keys():
        odd = sorted(made ^ shapes.keys())
        raise ValueError(f"te_jax.hf: a {family.name} has no tensors for {odd}; the config is none of this family.")
    return Conversion(family, tuple(steps), shapes)


def check_tensors(
    plan: Conversion, found: Mapping[str, Any], scheme: Scheme | None, held: Mapping[str, files.Stored], folder: Path
) -> None:
    """Raises ValueError, before anything is read, for a tensor that is missing, extra or of another shape or type.

    found: config.json. scheme: how its weights in FP8 are scaled. held: the tensors by the names of today.
    """
    due = {name: shape for step in plan.steps for name, shape in zip(step.theirs, plan.expected(step))}
    where, family = f"te_jax.hf: {folder}", plan.family

    def say(what: str, names):
        names = sorted(names)
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ValueError(f"{where} {what} a {family.name} of its config.json: {', '.join(names[:SHOWN])}{more}.")

    in_fp8 = [name for name in due if name in held and held[name].dtype == files.FP8]
    scales = {} if scheme is None else {scheme.scale_of(name): scheme.scale_shape(due[name]) for name in in_fp8}
    if missing := (due.keys() | scales.keys()) - held.keys():
        say("lacks tensors of", missing)
    of_inputs = [] if scheme is None or scheme.block else [scheme.unread_of(name) for name in in_fp8]
    known = {*due, *family.tied, *scales, *of_inputs}
    spare = lambda name: name.endswith(family.unread or ("\0",)) or name.startswith(family.spare(found) or ("\0",))
    if extra := [name for name in held if name not in known and not spare(name)]:
        say("has tensors that are none of", extra)
    if in_fp8 and scheme is None:
        raise ValueError(f"{where} has {in_fp8[0]} of type {files.FP8}, but its config.json no quantization_config.")
    types = dict.fromkeys(due, tuple(files.DTYPES)) | dict.fromkeys(scales, tuple(files.DTYPES))
    types |= {name: (*files.DTYPES, files.FP8) for name in in_fp8 if len(due[name]) == 2}
    for name, shape in (due | scales).items():
        one = name in scales and shape == ()  # which may be written as [1]
        if held[name].shape != shape and not (one and held[name].shape == (1,)):
            raise ValueError(
                f"{where} has {name} of shape {list(held[name].shape)}; a {family.name} has {list(shape)}."
            )
        if held[name].dtype not in types[name]:
            raise ValueError(f"{where} has {name} of type {held[name].dtype}; te_jax reads {', '.join(types[name])}.")


def renamed(checkpoint: files.Checkpoint, family: Family) -> dict[str, str]:
    """The tensors by the names of today, with the family's prefix, which some checkpoints leave out: {name: its name
    in the file}."""
    names = {}
    for name in checkpoint.tensors:
        end = next((end for end in family.older if name.endswith(end[0])), None)
        names[name if end is None else name.removesuffix(end[0]) + end[1]] = name
    if not family.prefix or any(name.startswith(family.prefix) for name in names):
        return names
    return {name if name in family.tied else family.prefix + name: file for name, file in names.items()}
