"""Weights in MXFP4 as checkpoints have them: two E2M1 numbers in a byte, and a scale for each 32 of a row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.hf.files import Checkpoint, Stored, quote

_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # by the four bits
_NO_NUMBER = 255  # the scale


def _numbers_by_scale() -> np.ndarray:
    """The bits in bf16 of each number under each scale, u16[256, 16]."""
    with np.errstate(over="ignore"):  # under the largest scale some are inf
        values = np.ldexp(_E2M1, np.arange(256, dtype=np.int32)[:, None] - 127)
    values[_NO_NUMBER] = np.nan
    return values.astype(jnp.bfloat16).view(np.uint16)


_BY_SCALE = _numbers_by_scale()  # products would do, but XLA may take subnormal ones for 0


class Packed(NamedTuple):
    """A weight in MXFP4."""

    blocks: Any  # u8[E, out, in / 32, 16]
    scales: Any  # u8[E, out, in / 32]

    def dequantize(self, dtype: Any) -> jax.Array:
        """The values [E, in, out]: bf16 has each exactly."""
        numbers = jnp.stack([self.blocks & 15, self.blocks >> 4], -1).reshape(*self.scales.shape, 2 * _BYTES)
        bits = jnp.asarray(_BY_SCALE)[self.scales[..., None], numbers]
        values = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
        return values.reshape(*values.shape[:-2], -1).swapaxes(1, 2).astype(dtype)


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

    def read(self, name: str) -> np.ndarray | Packed:
        """The tensor, copied into memory."""
        if name not in self._packed:
            return self._checkpoint.read(name)
        return Packed(*(self._checkpoint.read(name + end) for end in (_BLOCKS, _SCALES)))
