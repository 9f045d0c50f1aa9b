"""Quantize to MXFP8, in plain JAX: both layouts from one source, each with E8M0 scales of its blocks of 32."""

import jax.numpy as jnp

from te_jax._op import Op
from te_jax.ops.quantize import fp8_type
from te_jax.ops.quantize_block import in_rows
from te_jax.recipe.mxfp8 import MXFP8BlockScaling, scale_inv_of_amax

BLOCK = MXFP8BlockScaling.block


def _reference(x, *, lead, dtype):
    def law(amax):
        scale_inv = scale_inv_of_amax(amax, float(jnp.finfo(dtype).max))
        return 1.0 / scale_inv.astype(jnp.float32), scale_inv

    x = x.astype(jnp.float32)
    return *in_rows(x, lead, dtype, BLOCK, law), jnp.sum(x, tuple(range(lead + 1)))


quantize_mx = Op(
    "te_quantize_mx",
    "x: m... m n... n -> data?: m... m n... n, data_t?: n... n m... m, scale_inv?: n... n/32 m... m, "
    "scale_inv_t?: m... m/32 n... n, dbias?: n... n",
    combine={"dbias": "sum"},
    ranks={"m...": "lead"},
    dtypes=lambda x, *, dtype, **_: (fp8_type("te_quantize_mx", dtype), dtype, *(jnp.float8_e8m0fnu,) * 2, jnp.float32),
    reference=_reference,
    composed=True,
)
"""x f32|bf16|f16 [*m, m, *n, n] -> results in this order, as chosen by `outputs`:

data, data_t, dbias: as of `te_quantize_block`, with blocks of 1 x 32
scale_inv           float8_e8m0fnu [*n, ceil(n / 32), *m, m]: what each block of 32 of data along n is multiplied by
scale_inv_t         float8_e8m0fnu [*m, ceil(m / 32), *n, n]: of data_t along m

lead: number of axes in *m. dtype: the FP8 type, a jnp.dtype. The law is that of `recipe.MXFP8BlockScaling`.
"""
