"""What of a checkpoint is written in FP8: parameters that are, and ones that become so (`FP8Export`)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from te_jax.core.amax import amax
from te_jax.core.check import BOOL, check, one_of
from te_jax.hf.plan import Conversion, Step
from te_jax.hf.quantization_config import write_scheme
from te_jax.hf.rules import OF_LINEARS
from te_jax.hf.scales import INPUTS, Scaled, Scheme, input_scale, scheme_of, tensors_of_kernel
from te_jax.layers.parameters import is_kernel
from te_jax.ops.formats import SQUARES_128, TENSOR, invert, saturate
from te_jax.recipe._base import scale_of_amax

_NARROW = jnp.float8_e4m3fn
_E4M3_MAX = float(jnp.finfo(_NARROW).max)
_LEAST_AMAX = _E4M3_MAX * float(jnp.finfo(jnp.float32).tiny)  # a smaller scale has no inverse that is a normal number


@dataclass(frozen=True)
class FP8Export:
    """How `te_jax.hf.save` writes the weights of linear layers, and of experts, in FP8 (E4M3).

    method:      "fp8": the words and names of DeepSeek-V3 and vLLM; "compressed-tensors": the ones of the package
                 (https://github.com/vllm-project/compressed-tensors, the format "float-quantized").
    weights:     what shares a scale, each f32: "block", 128 x 128 of a weight; "channel", a row, which is an output
                 (only of "compressed-tensors"); "tensor", a weight, which of the method "fp8" vLLM reads, and
                 transformers 5.24 does not, without an error: pass "compressed-tensors" there.
    activations: how a server scales what the weights are multiplied by: "dynamic": as it comes, by 128 channels of a
                 token next to "block", by token next to "channel", by tensor next to "tensor". "static": by the scales
                 that training under `DelayedScaling` ended with (`fp8_metas`), only next to "tensor".
    powers_of_2: scales are rounded to powers of 2. Weights are then the same in bf16 as in f32, and what is read of
                 them is written again with the same bytes.

    A scale is the largest magnitude that it is for, divided by 448, but at least 2**-126; 1 where all are 0. Each
    tensor of the checkpoint has its own: of queries, keys and values, of gate and up, of each expert. Embeddings,
    norms, biases, routers and the head stay as they are. Weights have to be finite.

    Raises TypeError or ValueError, naming the field, for values that none of the methods has.
    """

    method: str = "fp8"
    weights: str = "block"
    activations: str = "dynamic"
    powers_of_2: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(name, "method", self.method, one_of("fp8", "compressed-tensors"))
        check(name, "weights", self.weights, one_of("block", "channel", "tensor"))
        check(name, "activations", self.activations, one_of("dynamic", "static"))
        check(name, "powers_of_2", self.powers_of_2, BOOL)
        if self.weights == "channel" and self.method == "fp8":
            raise ValueError(
                f"{name}: weights is 'channel', but the method 'fp8' has no such scales; pass "
                "method='compressed-tensors'."
            )
        if self.activations == "static" and self.weights != "tensor":
            raise ValueError(
                f"{name}: activations is 'static', but weights is {self.weights!r}; pass weights='tensor', or "
                "activations='dynamic'."
            )

    @property
    def scheme(self) -> Scheme:
        """The scheme that it writes."""
        return Scheme(
            SQUARES_128 if self.weights == "block" else TENSOR,
            by_row=self.weights == "channel",
            compressed=self.method == "compressed-tensors",
        )


class Fp8Part(NamedTuple):
    """The tensors of a checkpoint that are in FP8.

    paths:   of the parameters that they are made of.
    inputs:  the scales of inputs by name; none where they are dynamic.
    powers_of_2: as of FP8Export.
    """

    scheme: Scheme
    paths: frozenset[str]
    inputs: Mapping[str, np.ndarray]
    powers_of_2: bool = False

    def config(self, plan: Conversion) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        is_linear = lambda step: step.rule.form in OF_LINEARS or step.ours == ("params/head",)
        steps = (step for step in plan.steps if is_linear(step) and step.ours[0] not in self.paths)
        unquantized = [name for step in steps for name in step.theirs if name.endswith(".weight")]
        return write_scheme(self.scheme, bool(self.inputs), unquantized)

    def sizes(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
        """The bytes of each tensor that weight `name` becomes."""
        yield name, math.prod(shape)
        yield self.scheme.scale_of(name), 4 * math.prod(self.scheme.scale_shape(shape))
        if self.inputs:
            yield self.scheme.unread_of(name), 4

    def tensors(self, step: Step, parameter: Any, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a step by name, in the order of `sizes`. parameter: its bits. dtype: its dtype."""
        if is_kernel(parameter):
            made: Any = tensors_of_kernel(step.rule.form, parameter)
        else:
            arrays = step.rule.form.theirs(jax.lax.bitcast_convert_type(parameter, dtype))
            made = (quantize_to(self.scheme, self.powers_of_2, a) for a in arrays)
        for name, tensor in zip(step.theirs, made):
            data, scale = (np.asarray(jax.device_get(a), order="C") for a in (tensor.data, tensor.scale_inv))
            yield name, data.view(_NARROW)
            yield self.scheme.scale_of(name), scale.view(np.float32).reshape(self.scheme.written_shape(data.shape))
            if self.inputs:
                given = self.inputs[self.scheme.unread_of(name)]
                yield self.scheme.unread_of(name), given.reshape(self.scheme.written_shape(()))


@partial(jax.jit, static_argnums=(0, 1))
def quantize_to(scheme: Scheme, powers_of_2: bool, a: jax.Array) -> Scaled:
    """A weight [out, in] in FP8, with the values that te_jax.ops.quantize's ops give it, on any device."""
    made = _quantize_once(scheme, powers_of_2, a.astype(jnp.float32))
    # Where the largest number, 448 to 464 by the double of its scale, was rounded down to 224, that fits 448 now.
    return _quantize_once(scheme, powers_of_2, made.dequantize(jnp.float32)) if powers_of_2 else made


def _quantize_once(scheme: Scheme, powers_of_2: bool, a: jax.Array) -> Scaled:
    law = dict(power_2=powers_of_2, epsilon=_LEAST_AMAX)
    if scheme.block:
        made = scheme.format.write(a, 1, _NARROW, **law)
        return Scaled(made["data"], made["block_inv"], scheme.format)
    largest = amax(a, (1,))[:, None] if scheme.by_row else amax(a, (0, 1))
    scale = scale_of_amax(largest, _E4M3_MAX, **law)
    return Scaled(saturate(a * scale, _NARROW), invert(scale), scheme.format)


def fp8_part(plan: Conversion, params: Mapping[str, Any], state: Any, export: FP8Export | None) -> Fp8Part | None:
    """What is to be written in FP8; None where nothing is.

    state: the collection `fp8_metas`, or None.

    Raises ValueError, naming it, for a parameter in FP8 that checkpoints have no form for, or next to `export`, for a
    weight that `export` has no form for or that is not finite, and for inputs without scales.
    """
    kernels = {path: q for path, q in params.items() if is_kernel(q)}
    if export is None:
        scheme = scheme_of(kernels)
        _check_kernels(plan, kernels)
        if scheme is None:
            return None
        part = Fp8Part(scheme, frozenset(kernels), {})
        return part if scheme.block or state is None else part._replace(inputs=_input_scales(plan, part, state))
    if kernels:
        raise ValueError(
            f"te_jax.hf.save: {next(iter(kernels))} is in FP8, and is written so without fp8; leave fp8 out, or "
            "pass the master parameters."
        )
    part = Fp8Part(export.scheme, frozenset(_weights(plan)), {}, export.powers_of_2)
    _check_finite(plan, part, params)
    if export.activations == "dynamic":
        return part
    if state is None:
        raise ValueError(
            "te_jax.hf.save: fp8 has activations='static', but variables have no fp8_metas; pass the variables of a "
            "model that was trained under te_jax.recipe.DelayedScaling, or activations='dynamic'."
        )
    return part._replace(inputs=_input_scales(plan, part, state))


def _weights(plan: Conversion) -> Iterator[str]:
    """The paths of parameters that become weights in FP8."""
    for step in plan.steps:
        odd = [path for path in step.ours if path.rpartition("/")[2] in INPUTS and step.theirs]
        if odd and step.rule.form not in OF_LINEARS:
            raise ValueError(
                f"te_jax.hf.save: {odd[0]} becomes {step.theirs[0]} of a {plan.family.name}, which is no weight of one "
                "linear layer, and has no scales of its own; leave fp8 out."
            )
        yield from odd


def _check_finite(plan: Conversion, part: Fp8Part, params: Mapping[str, Any]):
    rows_are_finite = jax.jit(lambda a: jnp.all(jnp.isfinite(a), range(1, a.ndim)))
    found = {path: np.asarray(rows_are_finite(params[path])) for path in part.paths}
    for step in plan.steps:
        for path in part.paths.intersection(step.ours):
            if not np.all(found[path] if step.index is None else found[path][step.index]):
                raise ValueError(
                    f"te_jax.hf.save: {path} has a NaN or an infinite number, in {' or '.join(step.theirs)}, which has "
                    "no scale in FP8; pass finite weights, or leave fp8 out."
                )


def _check_kernels(plan: Conversion, kernels: Mapping[str, Any]):
    for step in plan.steps:
        for path in kernels.keys() & set(step.ours):
            if step.rule.form not in OF_LINEARS:
                raise ValueError(
                    f"te_jax.hf.save: {path} is in FP8, but the tensors of a {plan.family.name} that it becomes have "
                    "no scales of their own; pass te_jax.flax.dequantize_params of it."
                )


def _input_scales(plan: Conversion, part: Fp8Part, state) -> dict[str, np.ndarray]:
    """The scales of inputs by the names of their tensors."""
    state, made = flatten_dict(state, sep="/"), {}
    for step in plan.steps:
        if step.ours[0] in part.paths:
            names = (part.scheme.unread_of(name) for name in step.theirs)
            made |= zip(names, input_scale(state, step.ours[0], step.index, len(step.theirs)))
    return made
