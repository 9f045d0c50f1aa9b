"""The same bits in every process: nothing that a training step runs is chosen by timing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import QUICK

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling, Float8BlockScaling

_STEPS = """
import hashlib, json
import jax, jax.numpy as jnp, optax
import te_jax as te, te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

big = jax.default_backend() == "gpu"
if big:
    layer = te_flax.TransformerLayer(
        hidden_size=2048, mlp_hidden_size=8192, num_attention_heads=16, hidden_dropout=0.0, attention_dropout=0.0,
        self_attn_mask_type="causal", dtype=jnp.bfloat16, fuse_qkv_params=True,
        deterministic_gradients=True,
    )
else:
    layer = te_flax.LayerNormMLP(intermediate_dim=32, intermediate_dropout_rate=0.0, dtype=jnp.bfloat16)
shape, count = ((4, 1024, 2048), 20) if big else ((2, 8, 16), 2)
x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

def loss_fn(params, fp8):
    y = jax.tree.leaves(layer.apply({"params": params, **fp8}, x, deterministic=True))[0]
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1))

with te.autocast(enabled=True, recipe=DelayedScaling()):
    others = jax.jit(lambda: layer.init(jax.random.key(1), x, deterministic=True))()
    params = others.pop("params")
    state = te_flax.TrainState.create(apply_fn=layer.apply, params=params, tx=optax.adam(1e-3), collections=others)

    @jax.jit
    def step(state):
        loss, grads = te.value_and_grad(loss_fn, (0, 1))(state.params, state.fp8)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(count):
        state, loss = step(state)
        losses.append(loss)
bits = lambda a: hashlib.sha256(jax.device_get(a).tobytes()).hexdigest()
leaves = jax.tree_util.tree_leaves_with_path({"losses": jnp.stack(losses), "state": state.variables})
print(json.dumps({jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves}))
"""


def test_two_processes_train_to_the_same_bits(tmp_path):
    quick = "" if jax.default_backend() == "gpu" else QUICK
    environment = os.environ | {
        "PYTHONPATH": str(Path(te.__file__).parents[1]),  # the te_jax that is tested
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {quick} --xla_gpu_deterministic_ops=true",
    }
    start = lambda: subprocess.Popen(
        [sys.executable, "-c", _STEPS], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    if jax.default_backend() == "gpu":  # one after the other: each takes most of the memory
        texts = [start().communicate(timeout=600)[0] for _ in range(2)]
    else:
        texts = [process.communicate(timeout=600)[0] for process in (start(), start())]
    first, second = (json.loads(text.splitlines()[-1]) for text in texts)
    assert len(first) > 5
    assert not [name for name in first if first[name] != second[name]]


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__)
def test_no_gemm_of_a_layer_is_tuned(recipe):
    """In the layers' lowering for CUDA: the handlers time what has `tune`."""
    layer = te_flax.LayerNormMLP(intermediate_dim=256, intermediate_dropout_rate=0.0)
    x = jnp.ones((2, 128, 128), jnp.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        variables = jax.eval_shape(lambda x: layer.init(jax.random.key(0), x), x)
        step = jax.jit(jax.grad(lambda v, x: jnp.sum(layer.apply(v, x)[0].astype(jnp.float32)), allow_int=True))
        text = step.trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    asked = re.findall(r"custom_call @te_gemm\w*\(.*?\btune = (\w+)", text)
    assert len(asked) == 5
    assert set(asked) == {"false"}
