"""Layers as in Gemma 4, whole, against plain JAX: a scalar, half of the pairs of a head that turn, shared keys,
inputs of a layer's own."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_reference import data, filled, unboxed

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.flax import KeysValues
from te_jax.models import CausalLM, EncoderDecoder, EncoderLM, ModelConfig, VisionEncoder, families, unscan
from te_jax.models.families import FullAttention, Size
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import ProportionalScaling

pytestmark = pytest.mark.usefixtures("on_host")
H, F, N, G, D, P, B, S, EPS = 24, 40, 4, 2, 8, 12, 2, 6, 1e-6
FIELDS = dict(
    mlp_hidden_size=F,
    num_attention_heads=N,
    num_gqa_groups=G,
    kv_channels=D,
    layernorm_type="rmsnorm",
    mlp_activations=("gelu", "linear"),
    self_attn_mask_type="causal",
    post_norms=True,
    qk_norm_type="rmsnorm",
    qk_norm_before_rope=True,
    v_norm_eps=EPS,
    scale_attn_logits=False,
    enable_rotary_pos_emb=True,
    rotary_pos_emb_group_method="alternate",
    rotary_pos_emb_scaling=ProportionalScaling(share=0.5),
    layer_scalar=True,
    layer_input_size=P,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
# f32 sums of at most 40 terms, seven products behind each other and their gradients.
BOUND = 256 * 2.0**-24


def rms(x, scale=1.0):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * scale


def turned(x):
    """The first D / 4 pairs (i, i + D / 2), as numbers of the complex plane."""
    count = D // 4
    angles = jnp.arange(S)[:, None] * 10_000.0 ** (-2 * jnp.arange(count) / D)
    pairs = jax.lax.complex(x[..., :count], x[..., D // 2 : D // 2 + count]) * jnp.exp(1j * angles)[:, None]
    x = x.at[..., :count].set(pairs.real)
    return x.at[..., D // 2 : D // 2 + count].set(pairs.imag)


def attended(p, x, kept=None, window=None):
    """What attention says of x, and its keys and values [b, s, g, d]. kept: another layer's."""
    h = rms(x, p["query"]["scale"])
    heads = lambda kernel: (h @ kernel).reshape(B, S, -1, D)
    if kept is None:
        k, v = map(heads, jnp.moveaxis(p["kv"]["kernel"], 1, 0))
        kept = turned(rms(k, p["k_norm"]["scale"])), rms(v)
    q = turned(rms(heads(p["query"]["kernel"]), p["q_norm"]["scale"]))
    wide = (jnp.repeat(a, N // G, 2) for a in kept)
    seen = jnp.tri(S, dtype=bool) & (True if window is None else ~jnp.tri(S, k=-window[0] - 1, dtype=bool))
    logits = jnp.where(seen, jnp.einsum("bshd,bthd->bhst", q, next(wide)), -jnp.inf)
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(logits, -1), next(wide))
    return out.reshape(B, S, -1) @ p["out"]["kernel"], kept


def reference(p, x, own, kept=None, window=None):
    said, _ = attended(p["attention"], x, kept, window)
    x = x + rms(said, p["post_attention_norm"]["scale"])
    gate, up = jnp.moveaxis(jnp.tensordot(rms(x, p["mlp"]["scale"]), p["mlp"]["wi_kernel"], 1), -2, 0)
    said = jax.nn.gelu(gate, approximate=True) * up @ p["mlp"]["wo_kernel"]
    x = x + rms(said, p["post_mlp_norm"]["scale"])
    said = jax.nn.gelu(x @ p["layer_input_gate"]["kernel"], approximate=True) * own @ p["layer_input_out"]["kernel"]
    return (x + rms(said, p["post_layer_input_norm"]["scale"])) * p["scalar"]


def differing(params):
    """Norms and scalars near 1, each its own."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten([a + 0.3 * data(*a.shape, seed=i) if a.ndim == 1 else a for i, a in enumerate(leaves)])


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * max(1, np.abs(b).max())), got, want)


def both(run, weights):
    """run(p, x, own) -> ((f32[], output), gradients of all three)."""
    return jax.value_and_grad(lambda *args: (jnp.vdot(y := run(*args), weights), y), (0, 1, 2), has_aux=True)


def test_against_plain_jax():
    """Output and gradients, of the scalar and the layer's own input too; token by token from the cache; NNX has the
    same bits; FP8 is near."""
    x, weights, inputs = data(B, S, H), data(B, S, H, seed=2), data(B, S, P, seed=3)
    module = te_flax.TransformerLayer(H, **FIELDS)
    model = te_nnx.TransformerLayer(H, **FIELDS, rngs=nnx.Rngs(0))
    params = differing(te_nnx.to_linen(model)["params"])
    model = te_nnx.from_linen({"params": params}, model)
    own = lambda p, x, inputs: module.apply({"params": p}, x, layer_input=inputs, deterministic=True)

    def by_token(p):
        given, out = {"params": p}, []
        for i in range(S):
            more = dict(decode=True, deterministic=True, max_decode_length=S, layer_input=inputs[:, i : i + 1])
            y, new = module.apply(given, x[:, i : i + 1], **more, mutable=["cache"])
            given, out = {"params": p, **new}, [*out, y]
        return jnp.concatenate(out, 1)

    run = lambda *args: (both(own, weights)(*args), both(reference, weights)(*args), by_token(args[0]))
    ((_, y), grads), ((_, want), dwant), tokens = jax.jit(run, compiler_options=OPTIONS)(params, x, inputs)
    close((y, grads, tokens), (want, dwant, want))
    of_nnx = nnx.jit(lambda m, x, inputs: m(x, layer_input=inputs, deterministic=True))(model, x, inputs)
    np.testing.assert_array_equal(of_nnx, jax.jit(own)(params, x, inputs))
    with te.autocast(True, te.recipe.Float8CurrentScaling()):
        in_fp8 = jax.jit(own)(params, x, inputs)
    # Operands of 3 bits are off by 2**-4 at most, seven products in a row by less than the sum of these.
    assert 0 < np.abs(in_fp8 - want).max() < 7 * 2.0**-4 * np.abs(want).max()


E, K, EXPERT = 4, 2, 16  # experts, of which a token has so many, of this width


def experts_reference(p, x):
    """All experts of all tokens, of which the chosen ones count, next to the MLP."""
    said, _ = attended(p["attention"], x)
    x = x + rms(said, p["post_attention_norm"]["scale"])
    gate, up = jnp.moveaxis(jnp.tensordot(rms(x, p["mlp"]["scale"]), p["mlp"]["wi_kernel"], 1), -2, 0)
    dense = jax.nn.gelu(gate, approximate=True) * up @ p["mlp"]["wo_kernel"]
    m = p["moe"]
    scores = jax.nn.softmax(rms(x, m["router_scale"]) / H**0.5 @ m["gate_kernel"], -1)
    chosen = jnp.where(scores >= jax.lax.top_k(scores, K)[0][..., -1:], scores, 0)
    weights = chosen / chosen.sum(-1, keepdims=True) * m["expert_scale"]
    gate, up = (jnp.einsum("bsh,ehf->bsef", rms(x, m["scale"]), m[f"wi_{i}"]) for i in (0, 1))
    said = jnp.einsum("bse,bsef,efh->bsh", weights, jax.nn.gelu(gate, approximate=True) * up, m["wo"])
    said = rms(dense, p["post_dense_norm"]["scale"]) + rms(said, p["post_experts_norm"]["scale"])
    return (x + rms(said, p["post_mlp_norm"]["scale"])) * p["scalar"]


def test_experts_next_to_an_mlp():
    """Output and all gradients; NNX has the same bits; FP8 is near."""
    own_moe = dict(num_experts=E, num_experts_per_tok=K, intermediate_dim=EXPERT, router_norm=True, expert_scales=True)
    fields = FIELDS | dict(moe=own_moe, mlp_next_to_experts=True, layer_input_size=None)
    x, weights = data(B, S, H), data(B, S, H, seed=2)
    model = te_nnx.TransformerLayer(H, **fields, rngs=nnx.Rngs(0))
    params = differing(te_nnx.to_linen(model)["params"])
    model = te_nnx.from_linen({"params": params}, model)
    own = lambda p, x, _: model.linen.apply({"params": p}, x, deterministic=True)
    run = lambda *args: (both(own, weights)(*args), both(lambda p, x, _: experts_reference(p, x), weights)(*args))
    ((_, y), grads), ((_, want), dwant) = jax.jit(run, compiler_options=OPTIONS)(params, x, jnp.zeros(()))
    close((y, grads), (want, dwant))
    of_nnx = nnx.jit(lambda m, x: m(x, deterministic=True))(model, x)
    np.testing.assert_array_equal(of_nnx, jax.jit(own)(params, x, None))
    with te.autocast(True, te.recipe.Float8CurrentScaling()):
        in_fp8 = jax.jit(own)(params, x, None)
    assert 0 < np.abs(in_fp8 - want).max() < 7 * 2.0**-4 * np.abs(want).max()
    with pytest.raises(ValueError, match="mlp_next_to_experts is True, but post_norms is False; set both, or neither"):
        te_nnx.TransformerLayer(H, **fields | dict(post_norms=False), rngs=nnx.Rngs(0))


def test_scales_of_experts_whose_weights_come_first():
    """A router's weight multiplies what an expert reads, its own scale what it gives: as if `wo` had it."""
    own = dict(num_experts=E, intermediate_dim=EXPERT, expert_scales=True, num_experts_per_tok=1)
    block = te_flax.MoEBlock(**own, weights_before_experts=True, router_norm=False)
    x = data(B, S, H)
    params = differing(unboxed(block.init(jax.random.key(0), x))["params"])
    scaled = params | dict(wo=params["wo"] * params["expert_scale"][:, None, None])
    scaled["expert_scale"] = jnp.ones(E)
    got, want = (block.apply({"params": p}, x) for p in (params, scaled))
    close(got, want)


SHARED = dict(v_norm_eps=None, kv_sharing="take")


def shared_reference(p, x, inputs, window):
    """The second of two layers attends to the keys and values of the first."""
    _, kept = attended(p[0]["attention"], x)
    return reference(p[1], reference(p[0], x, inputs, None, window), inputs, kept, window)


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_shared_keys(window):
    """Output and all gradients of two layers; from the cache of the first, prompts of two lengths and then tokens."""
    x, weights, inputs = data(B, S, H), data(B, S, H, seed=2), data(B, S, P, seed=3)
    first = te_nnx.TransformerLayer(H, **FIELDS | dict(kv_sharing="give", window_size=window), rngs=nnx.Rngs(0))
    second = te_nnx.TransformerLayer(H, **FIELDS | SHARED | dict(window_size=window), rngs=nnx.Rngs(1))
    params = [differing(te_nnx.to_linen(each)["params"]) for each in (first, second)]
    assert set(params[1]["attention"]) == {"query", "q_norm", "out"}
    layers = first.linen, second.linen

    def own(p, x, inputs, caches=({}, {}), **call):
        run = lambda i, *args, **more: layers[i].apply(
            {"params": p[i], **caches[i]},
            *args,
            layer_input=inputs,
            deterministic=True,
            mutable=["cache"] if call else [],
            **call,
            **more,
        )
        (y, kept), one = run(0, x)
        y, two = run(1, y, keys_values=kept)
        return (y, (one, two)) if call else y

    def by_token(p, x, inputs, lengths):
        """A prompt of 3 slots in which the rows have 3 and 2 tokens, then the others, one at a time."""
        more = dict(decode=True, max_decode_length=S)
        prompt = x[:, :3], inputs[:, :3]
        y, caches = own(p, *prompt, attention_mask=SequenceDescriptor.from_seqlens(lengths), **more)
        assert not caches[1].get("cache")
        out = [y]
        for i in range(S - 3):
            token = (jnp.take_along_axis(a, (lengths + i)[:, None, None], 1) for a in (x, inputs))
            y, caches = own(p, *token, caches, decode=True)
            out.append(y)
        return out

    lengths = jnp.array([3, 2])
    due = lambda *args: shared_reference(*args, window)
    run = lambda *args: (both(own, weights)(*args), both(due, weights)(*args), by_token(*args, lengths))
    ((_, y), grads), ((_, want), dwant), tokens = jax.jit(run, compiler_options=OPTIONS)(params, x, inputs)
    close((y, grads), (want, dwant))
    for row, length in enumerate(lengths):
        close(tokens[0][row, :length], want[row, :length])
        close(jnp.concatenate([each[row] for each in tokens[1:]]), want[row, length : length + S - 3])
    with te.autocast(True, te.recipe.Float8CurrentScaling()):
        in_fp8 = jax.jit(own)(params, x, inputs)
    assert 0 < np.abs(in_fp8 - want).max() < 14 * 2.0**-4 * np.abs(want).max()


def test_nnx_shares_keys():
    """With the bits of Linen, whose second result it returns; when decoding the second layer has no cache."""
    fields = FIELDS | dict(layer_input_size=None)
    first = te_nnx.TransformerLayer(H, **fields | dict(kv_sharing="give"), rngs=nnx.Rngs(0))
    second = te_nnx.TransformerLayer(H, **fields | SHARED, rngs=nnx.Rngs(1))
    x, variables = data(B, S, H), [te_nnx.to_linen(each) for each in (first, second)]

    def run(layers, x, **call):
        y, kept = layers[0](x, deterministic=True, **call)
        return layers[1](y, deterministic=True, keys_values=kept, **call)

    def linen(variables, x):
        y, kept = first.linen.apply(variables[0], x, deterministic=True)
        return second.linen.apply(variables[1], y, deterministic=True, keys_values=kept)

    y = nnx.jit(run)([first, second], x)
    np.testing.assert_array_equal(y, jax.jit(linen)(variables, x))
    more = dict(decode=True, max_decode_length=S)
    parts = [run([first, second], x[:, :4], **more), run([first, second], x[:, 4:], **more)]
    close(jnp.concatenate(parts, 1), y)
    assert isinstance(first.attention.cached_key, nnx.Cache) and not hasattr(second.attention, "cached_key")


WRONG = {
    "keys_as_values is True, of the layer that gives them": (dict(keys_as_values=True), {}),
    "v_norm_eps is 0.5, of the layer that gives them": (dict(v_norm_eps=0.5), {}),
    'but layer_type is "decoder"': (dict(layer_type="decoder"), {}),
    "but relative embedding is on": (dict(enable_relative_embedding=True), {}),
    "kv_sharing is 'lend'; pass None or one of": (dict(kv_sharing="lend"), {}),
    "kv_sharing is 'take', but there are no keys_values; pass the last result": ({}, dict(keys_values=None)),
    "keys_values is 3; pass None or what a module with": ({}, dict(keys_values=3)),
    r"have shapes .2, 6, 2, 8. .* need .2, 6, 4, 8.; pass what a layer with as many heads": (
        dict(num_gqa_groups=4),
        {},
    ),
    r"have shapes .. and .., but .* need .2, 6, 2, 8.": (
        {},
        dict(keys_values=KeysValues(jnp.zeros(()), jnp.zeros(()), None)),
    ),
    "decode is True, but keys_values are of a call without decode": ({}, dict(decode=True)),
    "keys_values are given, but kv_sharing is 'give'; set it 'take'": (dict(kv_sharing="give"), {}),
    "keys_values are given, but kv_sharing is None; set it 'take'": (dict(kv_sharing=None, sublayers="mlp"), {}),
    "layer_input_size is 12, but there is no layer_input; pass an array .2, 6, 12.": ({}, dict(layer_input=None)),
    "layer_input is given, but layer_input_size is None": (dict(layer_input_size=None), {}),
    r"layer_input has shape .2, 6, 12.; pass .2, 6, 8.": (dict(layer_input_size=8), {}),
    r"the parameters hold .'query',., but .* kv_sharing=None": (dict(kv_sharing=None), dict(keys_values=None)),
}


@pytest.mark.parametrize("words", WRONG)
def test_refused(words):
    fields, call = WRONG[words]
    x = data(B, S, H)
    layer = te_flax.TransformerLayer(H, **FIELDS | SHARED)
    held = jax.eval_shape(layer.init, jax.random.key(0), x)
    kept = KeysValues(*[jnp.zeros((B, S, G, D))] * 2, None)
    wrong = layer.clone(**fields)
    call = dict(keys_values=kept, layer_input=data(B, S, P)) | call
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(lambda held: wrong.apply(held, x, deterministic=True, mutable=["cache"], **call), held)


SIZE = Size(H, F, 4, 5, groups=2, head_dim=D, full=FullAttention(12, 1, True), every=2, window=3, vocab=32)
SIZE = replace(SIZE, layers=4, sharing=2, wide=True, inputs=P)


def test_models_share_keys():
    """Loss and all gradients are the same whether layers that take keys are a loop, or one by one and run again."""
    config = families.gemma4(SIZE)
    assert [each.get("kv_sharing") for each in (*config.first, *config.pattern)] == ["give"] * 2 + ["take"] * 2
    model = CausalLM(config, jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (B, S), 0, 32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    variables = {"params": unboxed(filled(shapes, seed=2))}
    apart, each = unscan(model, variables)
    loss = lambda model, variables: model.apply(variables, tokens, jnp.roll(tokens, -1, 1))

    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def run(variables):
        again = apart.clone(remat=True)
        runs = lambda v: loss(model, v), lambda v: loss(again, unscan(model, v)[1])
        return [jax.value_and_grad(each)(variables) for each in runs]

    first, other = run(variables)
    close(other, first)
    assert np.abs(first[1]["params"]["layer_1"]["TransformerLayer_0"]["attention"]["key"]["kernel"]).max() > 1e-3
    assert each["params"]["layer_3"]["TransformerLayer_0"]["mlp"]["wi_kernel"].shape == (H, 2, 2 * F)


WRONG_MODELS = {
    "layer 0 has kv_sharing='give', but is one of a loop over layers; put it into ModelConfig.first": dict(
        first=(), pattern=(dict(kv_sharing="give"),)
    ),
    "layer 2 has kv_sharing='take' and window_size=.4, 0., but no layer before it has 'give', this window": dict(
        pattern=(SHARED | dict(window_size=(4, 0)),)
    ),
    "layer 2 has kv_sharing='take' .* no layer before it has 'give', this window and this RoPE": dict(
        pattern=(SHARED | dict(window_size=(2, 0), rotary_pos_emb_windows=(1, 7.0)),)
    ),
    "layer_input_size is 12 and 8 in layers of one model": dict(pattern=(dict(layer_input_size=8),)),
}


@pytest.mark.parametrize("words", WRONG_MODELS)
def test_refused_models(words):
    model = CausalLM(replace(families.gemma4(SIZE), **WRONG_MODELS[words]))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))


@pytest.mark.parametrize("model", [EncoderLM, EncoderDecoder, VisionEncoder])
def test_only_a_causal_lm_has_inputs_of_layers(model):
    """The model says so itself, in `init` too, where a layer by itself would take zeros."""
    of_images = model is VisionEncoder
    config = ModelConfig(
        0 if of_images else 8,
        1,
        H,
        dict(num_attention_heads=N, mlp_hidden_size=F, layer_input_size=P),
        **(dict(image_size=4, patch_size=2) if of_images else {}),
    )
    shape, dtype = ((1, 4, 4, 3), jnp.float32) if of_images else ((1, 4), jnp.int32)
    call = dict(inputs=jnp.zeros(shape, dtype)) if model is EncoderDecoder else {}
    with pytest.raises(ValueError, match="layer_input_size is 12 in layer 0, but only a CausalLM has inputs of layers"):
        jax.eval_shape(functools.partial(model(config).init, **call), jax.random.key(0), jnp.zeros(shape, dtype))


def test_adapters_of_a_layers_own_input():
    """Its projections have them with those of the MLP, and merged they are of the kernels."""
    scopes = dict(none=False, qkv_proj=False, mlp=True, exclude_mlp=False)
    x, inputs = data(B, S, H), data(B, S, P, seed=3)
    for scope, adapted in scopes.items():
        module = te_flax.TransformerLayer(H, **FIELDS, low_rank_adaptation_scope=scope)
        made = unboxed(jax.eval_shape(functools.partial(module.init, deterministic=True), jax.random.key(0), x))
        for name in ("layer_input_gate", "layer_input_out"):
            assert ("lora_a_kernel" in made["params"][name]) == adapted
    module = te_flax.TransformerLayer(H, **FIELDS, low_rank_adaptation_scope="all", low_rank_adaptation_dim=4)
    made = unboxed(jax.eval_shape(functools.partial(module.init, deterministic=True), jax.random.key(0), x))
    params = filled(made["params"])
    run = lambda module, p: module.apply({"params": p}, x, layer_input=inputs, deterministic=True)
    plain = te_flax.TransformerLayer(H, **FIELDS)
    merged = te_flax.merge_lora(params)
    assert not any("lora" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(merged))
    got, want = jax.jit(lambda p, q: (run(module, p), run(plain, q)), compiler_options=OPTIONS)(params, merged)
    close(got, want)
