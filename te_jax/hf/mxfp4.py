"""Weights in MXFP4 as checkpoints have them: two E2M1 numbers in a byte, and a scale for each 32 of a row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from te_jax.hf.files import Checkpoint, Stored, quote

_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # by the four bits


def is_mxfp4(found: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its checkpoint has such weights."""
    said = found.get("quantization_config")
    return isinstance(said, Mapping) and said.get("quant_method") == "mxfp4"


class Unpacked:
    """The tensors of a checkpoint, where `NAME_blocks` u8[E, out, in / 32, 16] and `NAME_scales` u8[E, out, in / 32]
    are one tensor NAME, bf16 [E, in, out]: number times 2**(scale - 127), which bf16 has exactly
    (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). Of two numbers in a byte
    the lower bits are the first.

    Raises ValueError, naming it, for a tensor of other shapes or types.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path):
        self._checkpoint = checkpoint
        self.tensors: dict[str, Stored] = dict(checkpoint.tensors)
        self._packed: set[str] = set()
        for name in [name for name in checkpoint.tensors if name.endswith(_BLOCKS)]:
            whole = name.removesuffix(_BLOCKS)
            blocks, scales = self.tensors.pop(name), self.tensors.pop(whole + _SCALES, None)
            experts, out, count, size = blocks.shape if len(blocks.shape) == 4 else (0, 0, 0, 0)
            if blocks.dtype != "U8" or size != _BYTES or whole in self.tensors:
                raise ValueError(
                    f"te_jax.hf: {folder} has {quote(name)} of type {blocks.dtype} and shape {[*blocks.shape]}; in "
                    f"MXFP4 it is U8 [experts, out, in / 32, {_BYTES}], and the only form of {quote(whole)}."
                )
            if scales is None or (scales.dtype, scales.shape) != ("U8", blocks.shape[:-1]):
                was = "no" if scales is None else f"{scales.dtype} {[*scales.shape]} for"
                raise ValueError(
                    f"te_jax.hf: {folder} has {was} {quote(whole + _SCALES)}; in MXFP4 it is U8 {[*blocks.shape[:-1]]}."
                )
            self._packed.add(whole)
            self.tensors[whole] = Stored(blocks.path, (experts, 2 * _BYTES * count, out), "BF16")

    def read(self, name: str) -> np.ndarray:
        """The tensor, copied into memory."""
        if name not in self._packed:
            return self._checkpoint.read(name)
        blocks, scales = (self._checkpoint.read(name + end) for end in (_BLOCKS, _SCALES))
        made = np.empty(self.tensors[name].shape, jnp.bfloat16)
        for expert, (bits, scale) in enumerate(zip(blocks, scales)):  # one at a time: f32 of all would take much memory
            numbers = _E2M1[np.stack([bits & 15, bits >> 4], -1)].reshape(*scale.shape, 2 * _BYTES)
            values = np.ldexp(numbers, scale.astype(np.int32)[..., None] - 127)
            made[expert] = values.reshape(len(bits), -1).T
        return made
