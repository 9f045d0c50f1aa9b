"""Probes of te_jax.models: whole models, their configs and generation."""

import dataclasses

import jax
import jax.numpy as jnp
from probes import Probe
from probes_modules import KEY, T, V, W
from probes_unused import in_silence

from te_jax.models import (
    GREEDY,
    CausalLM,
    EncoderDecoder,
    EncoderLM,
    ModelConfig,
    VisionEncoder,
    read_prompts,
    unscan,
    write_tokens,
)

TOKENS, IMAGES, LENGTHS = jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 8, 8, 3)), jnp.array([4, 4])
LAYER = dict(mlp_hidden_size=8, num_attention_heads=2, self_attn_mask_type="padding")
CONFIG = ModelConfig(vocab_size=32, num_layers=1, hidden_size=8, layer=LAYER)
PIXELS = dataclasses.replace(CONFIG, vocab_size=0, image_size=8, patch_size=4)
TEXT = CONFIG.with_layer(self_attn_mask_type="causal")


def called(cls, config, *args, **call):
    return lambda: jax.eval_shape(lambda: cls(config).init_with_output(KEY, *args, **call)[0]).shape is not None


def unsaid(config):
    """The config of layers that do not say what tokens see."""
    return dataclasses.replace(config, layer={k: v for k, v in LAYER.items() if k != "self_attn_mask_type"})


CAUSAL = "config.layer has no self_attn_mask_type, so that no token sees those behind it.*; pass 'no_mask'"
CALLS = [
    Probe("encoder of causal layers", called(EncoderLM, unsaid(CONFIG), TOKENS), W, f"EncoderLM: {CAUSAL}"),
    Probe("images, causal layers", called(VisionEncoder, unsaid(PIXELS), IMAGES), W, f"VisionEncoder: {CAUSAL}"),
    Probe("causal encoder", called(EncoderDecoder, unsaid(CONFIG), TOKENS, inputs=TOKENS), W, f"Decoder: {CAUSAL}"),
    Probe("encoder", lambda: in_silence(called(EncoderLM, CONFIG, TOKENS))),
    Probe("encoder that is causal", lambda: in_silence(called(EncoderLM, TEXT, TOKENS))),
    Probe("images", lambda: in_silence(called(VisionEncoder, PIXELS, IMAGES))),
    Probe("encoder and decoder", lambda: in_silence(called(EncoderDecoder, CONFIG, TOKENS, inputs=TOKENS))),
    Probe("tokens a list", called(EncoderDecoder, CONFIG, [[0]], inputs=TOKENS), T, "Decoder: tokens is .*integer"),
    Probe("types of floats", called(EncoderLM, dataclasses.replace(CONFIG, token_types=2), TOKENS,
          token_types=jnp.zeros((2, 4))), T, "EncoderLM: token_types is float32.*pass None or an integer array"),
    Probe("types of fewer tokens", called(EncoderLM, dataclasses.replace(CONFIG, token_types=2), TOKENS,
          token_types=TOKENS[:, 1:]), V, r"EncoderLM: token_types has the shape \(2, 3\); pass \(2, 4\)"),
    Probe("positions of floats", called(CausalLM, dataclasses.replace(TEXT, max_positions=8), TOKENS,
          positions=jnp.zeros((2, 4))), T, "CausalLM: positions is float32"),
    Probe("positions of fewer", called(CausalLM, dataclasses.replace(TEXT, max_positions=8), TOKENS,
          positions=TOKENS[:, 1:]), V, r"CausalLM: positions has the shape \(2, 3\); pass \(2, 4\)"),
    Probe("positions of rows", called(CausalLM, dataclasses.replace(TEXT, max_positions=8), TOKENS,
          positions=jnp.arange(4))),
    Probe("patches beyond the image", lambda: dataclasses.replace(PIXELS, patch_size=16), V,
          "ModelConfig: patch_size is 16, but image_size 8"),
]  # fmt: skip


def made():
    return CausalLM(TEXT), jax.eval_shape(CausalLM(TEXT).init, KEY, TOKENS)


def read(model=None, prompts=TOKENS, lengths=LENGTHS, slots=8):
    def run():
        whole = CausalLM(TEXT)
        return read_prompts(model or whole, whole.init(KEY, TOKENS), prompts, lengths, slots)

    return lambda: jax.eval_shape(run)[0].shape


def write(**other):
    def run():
        model = CausalLM(TEXT)
        variables, lengths = model.init(KEY, TOKENS), LENGTHS
        state = read_prompts(model, variables, TOKENS, lengths, 8)
        given = dict(state=state, lengths=lengths, key=None, count=2, choose=GREEDY.choose) | other
        return write_tokens(model, variables, **given)[0]

    return lambda: jax.eval_shape(run).shape


READS, WRITES = "te_jax.models.read_prompts: ", "te_jax.models.write_tokens: "
GENERATION = [
    Probe("read", read()),
    Probe("read by no model", read("gpt2"), T, f"{READS}model is 'gpt2'; pass a Linen module that decodes"),
    Probe("read without lengths", read(lengths=None), T, f"{READS}lengths is None; pass an integer array"),
    Probe("read one length", read(lengths=jnp.array([4])), V, rf"{READS}lengths has the shape \(1,\); pass \(2,\)"),
    Probe("read into '8' slots", read(slots="8"), T, f"{READS}slots is '8'; pass a positive int"),
    Probe("write", write()),
    Probe("write nothing", write(count=0)),
    Probe("write from None", write(state=None), T, f"{WRITES}state is None; pass the pair .logits, cache. of read_pr"),
    Probe("write from logits", write(state=jnp.ones((2, 32))), T, f"{WRITES}state is float32"),
    Probe("write by GREEDY", write(choose=GREEDY), T, rf"{WRITES}choose is Sampling.*GREEDY.choose"),
    Probe("write one length", write(lengths=jnp.array([4])), V, rf"{WRITES}lengths has the shape \(1,\); pass \(2,\)"),
    Probe("write -1 tokens", write(count=-1), V, f"{WRITES}count is -1"),
    Probe("unscan of no stack", lambda: unscan(made()[0], {"params": {"head": TOKENS}}), V,
          "unscan: variables have no stack of `layers`"),
    Probe("unscan", lambda: jax.eval_shape(lambda variables: unscan(made()[0], variables)[1], made()[1])),
]  # fmt: skip

PROBES = [*CALLS, *GENERATION]
