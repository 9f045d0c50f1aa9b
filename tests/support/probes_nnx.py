"""Probes of the modules of te_jax.nnx: their constructors and calls; fields are those of probes_modules.py."""

import jax.numpy as jnp
import optax
from flax import nnx
from probes import Probe
from probes_modules import LAYER, B, H, S, T, V

import te_jax as te
import te_jax.nnx as te_nnx


def nnx_made(cls, *args, **fields):
    return lambda: nnx.eval_shape(lambda: cls(*args, **fields, rngs=nnx.Rngs(0)))


def nnx_called(cls, *args, call=(), **fields):
    def run():
        module = cls(*args, **fields, rngs=nnx.Rngs(0))
        return module(*(call[0] if call else (jnp.ones((B, S, H)),)), **(call[1] if call else {}))

    return lambda: nnx.eval_shape(run)


def optimized(wrt):
    """A step of an NNX optimizer over what `wrt` says, in FP8."""
    with te.autocast(True, te.recipe.DelayedScaling(amax_history_len=2)):
        model = te_nnx.LayerNorm(H, rngs=nnx.Rngs(0))
        model.fp8 = te_nnx.Fp8State(jnp.ones(1))
        loss, grads = te_nnx.value_and_grad(lambda model: jnp.sum(model(jnp.ones((B, H)))), wrt=wrt)(model)
        nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt).update(model, grads)
    return True


PROBES = [
    Probe("nnx no in_features", nnx_made(te_nnx.DenseGeneral, features=8), T, "DenseGeneral: missing .*'in_features'"),
    Probe("nnx typo", nnx_made(te_nnx.DenseGeneral, H, 8, use_bais=True), T, "DenseGeneral: .*did you mean 'use_bias'"),
    Probe("nnx out_features", nnx_made(te_nnx.Linear, H, out_features=8)),
    Probe("nnx out_feature", nnx_made(te_nnx.Linear, H, out_feature=8), T, "DenseGeneral: .*mean 'out_features'"),
    Probe("nnx DotGeneral(class)", nnx_made(te_nnx.DotGeneral, te.recipe.DelayedScaling), T, "DotGeneral: recipe is"),
    Probe("nnx in_features='16'", nnx_made(te_nnx.DenseGeneral, "16", 8), T, "DenseGeneral: in_features is '16'"),
    Probe("nnx in_features=0", nnx_made(te_nnx.DenseGeneral, 0, 8), V, "DenseGeneral: in_features is 0"),
    Probe("nnx num_features=-1", nnx_made(te_nnx.LayerNorm, -1), V, "LayerNorm: num_features is -1"),
    Probe("nnx dtype", nnx_made(te_nnx.DenseGeneral, H, 8, dtype="bf16"), T, "DenseGeneral: dtype is 'bf16'"),
    Probe("nnx hidden_size='32'", nnx_made(te_nnx.TransformerLayer, hidden_size="32"), T, "hidden_size is '32'"),
    Probe("nnx head_dim=None", nnx_made(te_nnx.MultiHeadAttention, H), V, "head_dim is None"),
    Probe("nnx kv_features", nnx_made(te_nnx.MultiHeadAttention, H, 8, 2, kv_features=1.5), V, "kv_features is 1.5"),
    Probe("nnx features=True", nnx_made(te_nnx.Linear, H, True), T, "DenseGeneral: features is True"),
    Probe("nnx no rngs", lambda: te_nnx.DenseGeneral(H, 8), T, r"DenseGeneral: rngs is None; pass nnx.Rngs\(seed\)"),
    Probe("nnx swiglu", nnx_made(te_nnx.LayerNormMLP, H, 8, activations="swiglu"), V, r"\('silu', 'linear'\)"),
    Probe("nnx epsilon", nnx_made(te_nnx.RMSNorm, H, epsilon=-1), V, "LayerNorm: epsilon is -1"),
    Probe("nnx call typo", nnx_called(te_nnx.LayerNormMLP, H, 8, call=((jnp.ones((B, H)),), dict(determinstic=True))),
          T, "LayerNormMLP: .*did you mean 'deterministic'"),
    Probe("nnx call without inputs", nnx_called(te_nnx.LayerNorm, H, call=((), {})), T, "LayerNorm: missing .*'x'"),
    Probe("nnx call of ints", nnx_called(te_nnx.LayerNorm, H, call=((jnp.ones((B, H), int),), {})), T, "x is int32"),
    Probe("nnx another width", nnx_called(te_nnx.LayerNorm, 8), V, r"scale has shape \(8,\)"),
    Probe("nnx rngs=3", nnx_called(te_nnx.TransformerLayer, **LAYER | dict(hidden_dropout=0.1),
          call=((jnp.ones((B, S, H)),), dict(rngs=3))), T, "TransformerLayer: rngs is 3; pass nnx.Rngs"),
    Probe("nnx wrt=nnx.Variable", lambda: optimized(nnx.Variable), V, "wrt .*FP8 state.*nnx.Param"),
    Probe("nnx module", nnx_called(te_nnx.DenseGeneral, H, 8)),
]  # fmt: skip
