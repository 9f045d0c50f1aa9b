"""The process of one tree for `trees.py`. It asks of te_jax what older versions have, too.

For each line of JSON that it reads, {"model", "recipe", "calls"}, it prints one: the digests of a step's results, where
`calls` is 0, else the time of a step in ms.
"""

import hashlib
import json
import sys
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax

# batch, sequence, hidden size, MLP's size, heads
SIZES = (2, 32, 64, 128, 4) if "--tiny" in sys.argv else (4, 2048, 4096, 16384, 32)
RECIPES = {
    "bf16": None,
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "fixed": te.recipe.FixedScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
_SETTLE = 3  # steps: the scales of delayed scaling stand still then
_STATE = "fp8_metas"


def _draw(name: str, shape, dtype, scale: float = 0.5):
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:6], 16)
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def _module(model: str):
    *_, hidden, ffn, heads = SIZES
    if model == "moe":
        return te_flax.MoEBlock(intermediate_dim=ffn // 4, enable_layernorm=True, dtype=jnp.bfloat16)
    of_llama = dict(layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), enable_rotary_pos_emb=True)
    return te_flax.TransformerLayer(
        hidden_size=hidden,
        mlp_hidden_size=ffn,
        num_attention_heads=heads,
        num_gqa_groups=heads // 4 if model == "llama" else heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        use_bias=model == "gpt",
        dtype=jnp.bfloat16,
        **(of_llama if model == "llama" else {}),
    )


def _value(path, leaf):
    """Drawn by name, as init's numbers might differ between versions."""
    name = jax.tree_util.keystr(path)
    if _STATE in name:
        return jnp.full(leaf.shape, float(name.endswith("_scale']")), leaf.dtype)
    return _draw(name, leaf.shape, leaf.dtype, 0.03) + jnp.asarray("scale" in name, leaf.dtype)


@cache
def build(model: str, recipe_name: str):
    """A compiled step, (variables, x, dy) -> (the loss, the gradients of the first two), and its arguments."""
    module, recipe = _module(model), RECIPES[recipe_name]
    x, dy = (_draw(name, SIZES[:3], jnp.bfloat16) for name in ("x", "dy"))

    def init(key, x):
        with te.autocast(recipe is not None, recipe):
            return module.init(key, x)

    @jax.jit
    def step(variables, x, dy):
        loss = lambda variables, x: jnp.sum(module.apply(variables, x, deterministic=True).astype(jnp.float32) * dy)
        with te.autocast(recipe is not None, recipe):
            return te.value_and_grad(loss, argnums=(0, 1))(variables, x)

    boxes = jax.eval_shape(init, jax.random.key(0), x)
    variables = jax.tree.map_with_path(_value, nn.meta.unbox(boxes))
    for _ in range(_SETTLE):
        _, (grads, _) = step(variables, x, dy)
        variables = {**variables, **{name: grads[name] for name in variables if name == _STATE}}
    return step, (variables, x, dy)


def digests(tree) -> dict[str, str]:
    of = lambda a: hashlib.sha256(np.ascontiguousarray(np.asarray(a)).view(np.uint8)).hexdigest()
    return {jax.tree_util.keystr(path): of(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def answer(model: str, recipe: str, calls: int) -> dict:
    step, arguments = build(model, recipe)
    if not calls:
        return digests(step(*arguments))
    began = time.perf_counter()
    for _ in range(calls):
        out = step(*arguments)
    jax.block_until_ready(out)
    return {"ms": (time.perf_counter() - began) / calls * 1e3}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
