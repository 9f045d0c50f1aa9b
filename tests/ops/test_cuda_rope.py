"""On the GPU: RoPE against a rotation in float64, at odd and large sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rope_oracle

from te_jax.ops.rope import Llama3Scaling, rope

pytestmark = pytest.mark.gpu
SIZES = [  # and the channels that turn, from accesses of one element to 16 bytes
    ((1, 1, 1, 1, 2), 2),
    ((2, 199, 3, 3, 10), 10),
    ((2, 199, 3, 3, 10), 6),
    ((3, 33, 1, 5, 128), 128),
    ((1, 33, 3, 2, 128), 32),
    ((2, 33, 2, 3, 96), 24),
    ((1, 7, 3, 2, 80), 20),
    ((1, 8192, 3, 32, 128), 128),
    ((2, 7, 2, 1, 4096), 4096),
    ((1, 5, 1, 1, 16384), 1024),  # the table is of what turns
]


@pytest.mark.parametrize(("shape", "rotary_dim"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rope(shape, rotary_dim, dtype, method, rng):
    """Both directions, where all slots but the last are turned."""
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    positions, turned = jnp.asarray(rng.integers(0, 131072, shape[:2])), max(1, shape[2] - 1)
    options = dict(windows=(1, 500000.0), group_method=method, turned=turned, rotary_dim=rotary_dim)
    options["scaling"] = Llama3Scaling() if rotary_dim < shape[-1] else None

    @jax.jit
    def both(x):
        y, vjp = jax.vjp(lambda x: rope(x, positions, **options), x)
        return y, *vjp(x)

    for got, sign in zip(both(x), (1, -1), strict=True):
        want, bound = rope_oracle.rotate(x, positions, **options, sign=sign)
        assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()
