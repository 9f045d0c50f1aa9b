"""`transformer_engine.jax.version_utils`: what te_jax has no use for is not supported."""

from te_jax.compat._absent import GetAttr, absent

__getattr__: GetAttr = absent("transformer_engine.jax.version_utils")

TRITON_EXTENSION_MIN_JAX_VERSION = "0.8.0"


def is_triton_extension_supported() -> bool:
    """False: te_jax has no Triton kernels."""
    return False


def is_collective_stream_supported() -> bool:
    """False: te_jax leaves collectives to XLA."""
    return False
