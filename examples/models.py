"""Blocks of GPT-2, BERT, T5, Llama 3, Falcon, Mixtral, Qwen 3 and DeepSeek-V3: each is a
`te_jax.flax.TransformerLayer` by its arguments only.

    python examples/models.py                           # one of each: its parameters, and a step at a tiny size
    python examples/models.py llama3-70b mixtral-8x7b --fp8

`tests/models/test_models.py` compares each block with the published architecture in plain Flax, and shows how published
weights are named here. Weights start as the layer draws them, which is not how the papers do.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.models import SIZES, ModelConfig, families
from te_jax.models.families import Latents, Size, exact_gelu  # noqa: F401  (exact_gelu: BERT's and Falcon's)
from te_jax.ops.attention import SequenceDescriptor


def _block(family: Callable[[Size], ModelConfig], size: Size | str, fields: dict, **own) -> te_flax.TransformerLayer:
    """The last layer of a model of the family. `fields` are the caller's and win."""
    config = family(SIZES[size] if isinstance(size, str) else size)
    return te_flax.TransformerLayer(**config.fields_of_layer(-1) | own | fields)


def gpt2_block(size: Size | str = "gpt2", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.gpt2`; the others are of the functions of their names."""
    return _block(families.gpt2, size, fields)


def bert_block(size: Size | str = "bert-base", **fields) -> te_flax.TransformerLayer:
    """Pass attention_mask, a `SequenceDescriptor` of lengths or an array that is True at padding."""
    return _block(families.bert, size, fields)


def t5_encoder_block(size: Size | str = "t5-base", **fields) -> te_flax.TransformerLayer:
    """With a table of relative biases of its own; pass blocks that share one a `te_flax.RelativePositionBiases` as
    relative_embedding. attention_mask as of `bert_block`."""
    return _block(families.t5, size, fields)


def t5_decoder_block(size: Size | str = "t5-base", **fields) -> te_flax.TransformerLayer:
    """As `t5_encoder_block`, with relative positions of only the past; cross-attention to `encoded` has none."""
    return _block(families.t5, size, fields, layer_type="decoder", self_attn_mask_type="causal")


def llama3_block(size: Size | str = "llama3-8b", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.llama3`."""
    return _block(families.llama3, size, fields)


def mixtral_block(size: Size | str = "mixtral-8x7b", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.mixtral`."""
    return _block(families.mixtral, size, fields)


def qwen3_block(size: Size | str = "qwen3-30b-a3b", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.qwen3`."""
    return _block(families.qwen3, size, fields)


def deepseek_v3_block(size: Size | str = "deepseek-v3", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.deepseek_v3`, with experts. The first three have moe=None and
    mlp_hidden_size=18432."""
    return _block(families.deepseek_v3, size, fields)


def falcon_block(size: Size | str = "falcon-7b", **fields) -> te_flax.TransformerLayer:
    """A block of `te_jax.models.families.falcon`."""
    return _block(families.falcon, size, fields)


SHOWN = ("gpt2", "bert-base", "t5-base", "t5-v1.1-base", "llama3-8b", "falcon-7b", "falcon-40b", "mixtral-8x7b")
SHOWN += ("qwen3-30b-a3b", "deepseek-v3")

FAMILIES: dict[str, tuple[Callable, ...]] = {  # the beginning of a size's name -> the blocks of the model
    "gpt2": (gpt2_block,),
    "bert": (bert_block,),
    "t5": (t5_encoder_block, t5_decoder_block),
    "llama3": (llama3_block,),
    "falcon": (falcon_block,),
    "mixtral": (mixtral_block,),
    "qwen3": (qwen3_block,),
    "deepseek-v3": (deepseek_v3_block,),
}
KNOWN = [name for name in SIZES if name.startswith(tuple(FAMILIES))]


def tiny(size: Size) -> Size:
    """The same shape of model, 64 wide."""
    groups = size.groups and max(1, 4 * size.groups // size.heads)
    latents = size.latents and Latents(32, 32, 16, 16, 16)
    more = dict(groups=groups, head_dim=size.head_dim and 32, experts=min(size.experts, 16), latents=latents)
    return dataclasses.replace(size, hidden=64, ffn=128, heads=4, **more)


def arguments(block: te_flax.TransformerLayer, batch: int, length: int) -> dict:
    """Random input of the block; rows of encoders without a causal mask are padded on the right."""
    draw = lambda key, length: jax.random.normal(jax.random.key(key), (batch, length, block.hidden_size), jnp.bfloat16)
    args = {"inputs": draw(0, length)}
    if block.layer_type == "decoder":
        args["encoded"] = draw(1, length // 2)
    if block.self_attn_mask_type == "padding":
        args["attention_mask"] = SequenceDescriptor.from_seqlens(length - jnp.arange(batch))
    return args


def parameter_count(block: te_flax.TransformerLayer) -> int:
    """The number of one block's parameters, only by shapes."""
    args = arguments(block, 1, 2) | {"deterministic": True}
    shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), **args))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def forward_and_backward(block: te_flax.TransformerLayer) -> tuple[float, float]:
    """(mean square of the output, norm of its gradient by the parameters), in bf16 with f32 parameters."""
    args = arguments(block, 2, 16) | {"deterministic": True}
    state, params = flax.core.pop(jax.jit(lambda key: block.init(key, **args))(jax.random.key(1)), "params")

    def loss(params, state):
        y = block.apply({"params": params, **state}, **args)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    # The gradient of `state` is the next FP8 state (see quickstart.py); one step does not need it.
    value, (grads, _) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, state)
    return float(value), math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(grads)))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Blocks of published models, made of te_jax.flax.TransformerLayer.")
    p.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(KNOWN)} [default: one of each]")
    p.add_argument("--fp8", action="store_true", help="run the tiny blocks in FP8 with delayed scaling")
    args = p.parse_args(argv)
    for name in args.models:
        if name not in KNOWN:
            p.error(f"there is no model {name}: give some of {', '.join(KNOWN)}")
    for name in args.models or SHOWN:
        size = SIZES[name]
        for block in next(blocks for family, blocks in FAMILIES.items() if name.startswith(family)):
            count = parameter_count(block(size))
            with te.fp8_autocast(enabled=args.fp8, fp8_recipe=recipe.DelayedScaling(amax_history_len=16)):
                value, slope = forward_and_backward(block(tiny(size)))
            print(
                f"{name:17} {block.__name__:16} {size.layers - size.dense:2} blocks of {count:14,} parameters; tiny, "
                f"{'fp8' if args.fp8 else 'bf16'}: loss {value:.4f}, gradient {slope:.4f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
