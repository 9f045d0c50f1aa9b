"""LayerNorm and RMSNorm straight to FP8 with a scale for each block of 128, in both layouts."""

import jax.numpy as jnp

from te_jax._op import Op
from te_jax.ops.norm import norm_fwd, statistics_workspace
from te_jax.ops.quantize import fp8_type
from te_jax.ops.quantize_block import on_hopper, rows_reference


def _reference(x, gamma, beta, *, dtype, power_2, epsilon, **attrs):
    y, _, _, mean, rstd, _ = norm_fwd.reference(x, gamma, beta, None, dtype=dtype, **attrs)
    return *rows_reference(y, y.ndim - 2, dtype, power_2, epsilon)[:4], mean, rstd


norm_block_fwd = Op(
    "te_norm_block_fwd",
    "x: m... m h, gamma: h, beta?: h -> data?: m... m h, data_t?: h m... m, scale_inv?: h/128 m... m, "
    "scale_inv_t?: m... m/128 h, mean?: m... m, rstd: m... m",
    replicated="h",
    dtypes=lambda x, gamma, beta, *, dtype, **_: (fp8_type("te_norm_block_fwd", dtype), dtype, *(jnp.float32,) * 4),
    workspace=statistics_workspace,
    reference=_reference,
    cuda=on_hopper("te_norm_block_fwd"),
)
"""te_quantize_block, in blocks of 1 x 128, of what te_norm_fwd makes of x f32|bf16|f16 [*m, m, h] in x's type, which is
not written: data, data_t, scale_inv and scale_inv_t of y [*m, m, h], as chosen by `outputs`, and the statistics.

gamma, beta, mean, rstd, eps, rms and zero_centered as in te_norm_fwd; dtype, power_2, epsilon and RuntimeError of
te_quantize_block.
"""
