"""The kernels of the gated delta rule, which are off where no one asks for them."""

import contextlib
from collections.abc import Iterator

from te_jax.ops.delta import kernels


@contextlib.contextmanager
def delta_kernels() -> Iterator[None]:
    """Within it calls that are lowered for a GPU take them."""
    kernels.use()
    try:
        yield
    finally:
        kernels.use(False)
