"""The folders of tests/hf_fixtures, and what is in a folder."""

import pathlib

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "hf_fixtures"


def tensors(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder; those in FP8 the package cannot read."""
    from safetensors.numpy import load_file

    return {name: a for path in sorted(folder.glob("*.safetensors")) for name, a in load_file(path).items()}
