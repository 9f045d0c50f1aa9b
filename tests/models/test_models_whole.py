"""te_jax.models: scanned and not, losses, decoding, sampling; what configs refuse."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.core import loops
from te_jax.models import (
    GREEDY,
    SIZES,
    CausalLM,
    EncoderDecoder,
    EncoderLM,
    ModelConfig,
    Sampling,
    VisionEncoder,
    generate,
    published,
    read_prompts,
    unscan,
    write_tokens,
)
from te_jax.models.stack import place_of_layer
from te_jax.ops.attention import SequenceDescriptor

V, L, B, S = 37, 2, 2, 7
KEY = jax.random.key(0)
OPTIONS = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=OPTIONS) if jax.default_backend() == "cpu" else jax.jit


def tiny(name, **layer) -> ModelConfig:
    changes = dict(vocab_size=V, num_layers=L, hidden_size=16)
    groups = 2 if SIZES[name].groups else None
    own = dict(mlp_hidden_size=24, num_attention_heads=4, num_gqa_groups=groups, kv_channels=None)
    return published(name, **changes).with_layer(**own | layer)


def made(cls, config, *args, scan=True, **options):
    """The model, and parameters that tell layers apart: noise, around 1 where they scale. Nothing is compiled."""
    model = cls(config, dtype=jnp.float32, scan=scan)
    shapes = nn.unbox(jax.eval_shape(functools.partial(model.init, **options), KEY, *args))
    noise = np.random.default_rng(0)

    def fill(path, leaf):
        return on_device(0.3 * noise.normal(size=leaf.shape) + (path[-1].key == "scale"), leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(fill, shapes)


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(0, V, (B, S)))


def patterned(config) -> ModelConfig:
    return replace(config, pattern=({}, {}))


def in_rounds(params, model, count):
    """Parameters of a model that is not scanned in the form of one that is."""
    params, stacks = dict(params), {}
    for i in range(count):
        path, index = place_of_layer(model.config, i, count, model.scan)
        if index is not None:
            stacks.setdefault(path, []).append(params.pop(f"layer_{i}"))
    made = {path: jax.tree.map(lambda *each: jnp.stack(each), *layers) for path, layers in stacks.items()}
    return params | unflatten_dict(made, sep="/")


def test_scanned_layers_are_the_others(tokens):
    """Logits, the loss of labels, remat; and rounds of a pattern, of which there is one."""
    config = tiny("llama3-8b")
    model, variables = made(CausalLM, config, tokens)
    apart, flat = unscan(model, variables)
    of_round = {"params": in_rounds(flat["params"], CausalLM(patterned(config)), L)}

    def run(variables, flat, tokens):
        rounds = CausalLM(patterned(config), dtype=jnp.float32)
        z = model.apply(variables, tokens)
        loss = lambda m, v: m.apply(v, tokens, tokens)
        remat = CausalLM(config, dtype=jnp.float32, remat=True)
        grads = [
            jax.grad(functools.partial(loss, m))(v) for m, v in ((model, variables), (remat, variables), (apart, flat))
        ]
        return z, apart.apply(flat, tokens), rounds.apply(of_round, tokens), loss(model, variables), grads

    z, *others, loss, (grads, of_remat, of_flat) = jit(run)(variables, flat, tokens)
    for other in others:
        np.testing.assert_allclose(other, z, atol=2.0**-18 * np.abs(z).max())
    picked = np.take_along_axis(np.asarray(z), np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, np.mean(jax.nn.logsumexp(z, -1) - picked), rtol=2.0**-20)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2.0**-16 * np.abs(b).max())
    jax.tree.map(close, of_remat, grads)
    jax.tree.map(close, of_flat, unscan(model, grads)[1])


def test_scanned_rounds_are_the_layers(tokens):
    """Windows and bases of RoPE by layer, one layer before the rounds and one behind them; with a cache and remat."""
    window, base = dict(window_size=(2, 0)), dict(rotary_pos_emb_windows=(1, 100))
    count = 6  # wide; two rounds of a window and another base; a window
    config = replace(tiny("llama3-8b"), num_layers=count, first=(dict(mlp_hidden_size=20),), pattern=(window, base))
    assert [config.fields_of_layer(i).get("window_size") for i in range(-1, count)] == [
        (2, 0),
        None,
        *[(2, 0), None] * 2,
        (2, 0),
    ]
    apart, variables = made(CausalLM, config, tokens, scan=False)
    model = apart.clone(scan=True, remat=True)
    shapes = jax.eval_shape(lambda: nn.unbox(model.init(KEY, tokens)))["params"]
    assert {name for name in shapes if name.startswith("layer")} == {"layer_0", "layers", "layer_5"}
    assert set(shapes["layers"]) == {"layer_0", "layer_1"}
    rounds = {"params": in_rounds(variables["params"], model, count)}
    assert jax.tree.map(jnp.shape, rounds["params"]) == jax.tree.map(jnp.shape, shapes)
    back, parted = unscan(model, rounds)
    assert not back.scan and back.remat
    jax.tree.map(np.testing.assert_array_equal, parted, variables)

    def run(variables, rounds):
        loss = lambda model, v: model.apply(v, tokens, tokens)
        got = [jax.value_and_grad(functools.partial(loss, m))(v) for m, v in ((apart, variables), (model, rounds))]
        words = generate(model, rounds, tokens, 3)
        return got, words, apart.apply(variables, jnp.concatenate([tokens, words], 1))[:, S - 1 : -1]

    (want, got), words, z = jit(run)(variables, rounds)
    np.testing.assert_allclose(got[0], want[0], rtol=2.0**-20)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2.0**-16 * np.abs(b).max())
    jax.tree.map(close, got[1]["params"], in_rounds(want[1]["params"], model, count))
    np.testing.assert_array_equal(words, jnp.argmax(z, -1))


@pytest.mark.parametrize("name, cls", [("llama3-8b", CausalLM), ("t5-v1.1-small", EncoderDecoder)])
def test_unscan(name, cls, tokens):
    """Variables have the names, boxes and shapes that the model without scan makes, and kernels in FP8 their bits."""
    model, inputs = cls(tiny(name)), {} if cls is CausalLM else dict(inputs=tokens)
    apart, _ = unscan(model, {})
    assert apart == model.clone(scan=False) and unscan(apart, {"params": {}}) == (apart, {"params": {}})

    def made_by(model):
        with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=2)):
            return model.init(KEY, tokens, tokens, **inputs)

    def narrowed(model, variables):
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            return te.flax.fp8_params(model, variables, tokens, **inputs)

    def boxed():
        scanned, each = made_by(model), made_by(apart)
        return (unscan(model, scanned)[1], each), (unscan(model, narrowed(model, scanned))[1], narrowed(apart, each))

    (got, want), (got_narrow, want_narrow) = jax.eval_shape(boxed)
    assert set(want) == {"params", "fp8_metas"} and got == want
    assert jax.tree.structure(got_narrow) == jax.tree.structure(want_narrow) and got_narrow == want_narrow
    model, variables = made(cls, tiny(name), tokens, **inputs)
    for recipe in (te.recipe.Float8CurrentScaling(), te.recipe.Float8BlockScaling()):
        with te.autocast(recipe=recipe):
            quantized = jit(lambda m, v: te.flax.fp8_params(m, v, tokens, **inputs), static_argnums=0)
            narrow, want = quantized(model, variables), quantized(apart, unscan(model, variables)[1])
        jax.tree.map(np.testing.assert_array_equal, unscan(model, narrow)[1], want)
    said = r"unscan: model is \{'params': .{200,300}\.\.\.; pass a model of te_jax.models"
    with pytest.raises(TypeError, match=said):
        unscan(variables, model)
    with pytest.raises(TypeError, match="variables is None; pass the variables of the model"):
        unscan(model, None)
    other = model.clone(config=replace(model.config, num_layers=L + 1, num_decoder_layers=None))
    with pytest.raises(ValueError, match=f"is a stack of {L}, but the model has {L + 1} there"):
        unscan(other, variables)


@pytest.mark.parametrize("name, cls", [("gpt2", CausalLM), ("bert-base", EncoderLM)])
def test_packed_rows_and_explicit_meshes(name, cls, tokens):
    """Two texts in a row are what each is by itself, learned positions too. A loss with parameters split by their types
    is one device's."""
    model, variables = made(cls, replace(tiny(name), vocab_size=40, num_layers=1), tokens)
    packed = SequenceDescriptor.from_seqlens_and_offsets(jnp.array([[3, 4]] * B), jnp.array([[0, 3]] * B))

    def run(variables, tokens, packed):
        apart = [model.apply(variables, part) for part in (tokens[:, :3], tokens[:, 3:])]
        return model.apply(variables, tokens, lengths=packed), jnp.concatenate(apart, 1), step(variables, tokens)

    step = jax.value_and_grad(lambda v, tokens: model.apply(v, tokens, tokens))
    z, apart, want = jit(run)(variables, tokens, packed)
    np.testing.assert_allclose(z, apart, atol=2.0**-18 * np.abs(z).max())
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    resource = te.MeshResource(fsdp_resource="fsdp", tp_resource="tp")
    boxed = jax.eval_shape(model.init, KEY, tokens)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        rules = te.sharding.extend_logical_axis_rules(())
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        rows = jax.device_put(tokens, jax.NamedSharding(mesh, P("fsdp")))
        got = jit(step)(jax.device_put(variables, shardings), rows)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2.0**-16 * np.abs(b).max())


@pytest.mark.parametrize("cls", [CausalLM, VisionEncoder])
def test_a_loop_over_layers_has_one_type(cls):
    """On Explicit axes attention gives tokens that context parallelism cuts; the first layer gets them so, too."""
    sizes = dict(vocab_size=V) if cls is CausalLM else dict(vocab_size=0, image_size=4, patch_size=1)
    model = cls(ModelConfig(num_layers=L, hidden_size=16, layer=dict(num_attention_heads=2), **sizes))
    of_rows = (B, 16) if cls is CausalLM else (B, 4, 4, 3)
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(cp_resource="cp")):
        whole = jnp.zeros(of_rows, jnp.int32 if cls is CausalLM else jnp.float32)
        out = jax.eval_shape(lambda x: model.init_with_output(KEY, x)[0], jax.device_put(whole, P()))
    assert out.sharding.spec[1] == "cp"


def test_experts(tokens):
    """Each layer's losses and loads are sown next to the loss of the labels; its bias of the choice is its own."""
    moe = dict(num_experts=4, num_experts_per_tok=2, aux_loss_coeff=0.1, z_loss_coeff=0.01, use_expert_bias=True)
    config = tiny("mixtral-8x7b", moe=moe)
    model, variables = made(CausalLM, config, tokens)
    _, flat = unscan(model, variables)

    def run(model, variables, tokens):
        def loss(variables):
            y, sown = model.apply(variables, tokens, tokens, deterministic=False, mutable=["losses", "intermediates"])
            return y + sum(map(jnp.sum, jax.tree.leaves(sown["losses"]))), (y, sown)

        return jax.value_and_grad(loss, has_aux=True)(variables)

    def both(variables, flat, tokens):
        plain = model.apply(variables, tokens, tokens)
        return run(model.clone(remat=True), variables, tokens), run(model.clone(scan=False), flat, tokens), plain

    ((total, (y, sown)), grads), ((of_apart, (_, sown_apart)), grads_apart), plain = jit(both)(variables, flat, tokens)
    of_layers = sown["losses"]["layers"]["TransformerLayer_0"]["moe"]
    assert {name: term.shape for name, term in of_layers.items()} == {"balancing_loss": (L,), "z_loss": (L,)}
    (counts,) = sown["intermediates"]["layers"]["TransformerLayer_0"]["moe"]["tokens_per_expert"]
    assert counts.shape == (L, 4) and np.all(np.sum(counts, 1) == 2 * B * S)
    np.testing.assert_array_equal(grads["expert_bias"]["layers"]["TransformerLayer_0"]["moe"]["expert_bias"], counts)
    np.testing.assert_allclose(y, plain, rtol=2.0**-20)
    np.testing.assert_allclose(total, y + sum(np.sum(term) for term in of_layers.values()), rtol=2.0**-20)
    # As above: sums in another order.
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2.0**-16 * np.abs(b).max())
    close(of_apart, total)
    jax.tree.map(close, grads_apart, unscan(model, grads)[1])
    jax.tree.map(close, sown_apart["losses"], unscan(model, sown)[1]["losses"])


def with_latents(name="deepseek-v3") -> ModelConfig:
    """A dense layer and one with experts, on latent attention."""
    narrow = dict(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    moe = dict(published(name).layer["moe"]) | dict(num_experts=16)
    return replace(tiny(name, **narrow, moe=moe), first=(), pattern=(dict(moe=None), {}))


def test_latent_attention_turns_by_positions(tokens):
    config = replace(with_latents().with_layer(moe=None), pattern=(), first=(), num_layers=1)
    model, variables = made(CausalLM, config, tokens)

    def run(variables, tokens):
        in_order = jnp.broadcast_to(jnp.arange(S), tokens.shape)
        return [model.apply(variables, tokens, positions=p) for p in (None, in_order, 3 * in_order)]

    z, same, other = jit(run)(variables, tokens)
    np.testing.assert_allclose(same, z, atol=2.0**-18 * np.abs(z).max())
    assert np.abs(other - z).max() > 2.0**-8 * np.abs(z).max()


@pytest.mark.parametrize("name", ["mistral-7b", "deepseek-v3"])
def test_greedy_words_are_those_without_a_cache(name, tokens):
    """One pass over whole texts says each of their words. Of prompts of two lengths, with RoPE, a window, latents and
    experts; test_hf.py has others, of one length."""
    config = tiny(name, **({"window_size": (3, 0)} if name == "mistral-7b" else {}))
    config = with_latents(name) if name == "deepseek-v3" else config
    model, variables = made(CausalLM, config, tokens)
    lengths, count = jnp.array([S, 4]), 6

    def run(variables, tokens):
        words = generate(model, variables, tokens, count, lengths=lengths)
        rows, behind = jnp.arange(B)[:, None], lengths[:, None] + jnp.arange(count)
        text = jnp.pad(tokens, ((0, 0), (0, count))).at[rows, behind].set(words)
        return words, model.apply(variables, text)[rows, behind - 1]

    got, z = jit(run)(variables, tokens)
    first, second = -jnp.sort(-z, -1)[..., 0], -jnp.sort(-z, -1)[..., 1]
    assert jnp.min(first - second) > 1e-4, "no ties"
    np.testing.assert_array_equal(got, jnp.argmax(z, -1))


@pytest.mark.parametrize("name", ["mistral-7b", "deepseek-v3"])
def test_scanned_layers_write_one_token_into_the_cache(name, tokens, monkeypatch):
    """Bits are those of a scan, which has a second cache; the loop has none, and takes the first as it is donated."""
    config = with_latents(name).with_layer(moe=None) if name == "deepseek-v3" else tiny(name)
    model, variables = made(CausalLM, replace(config, first=(), pattern=()), tokens)
    lengths, rest = jnp.array([S, 4]), dict(count=3, choose=GREEDY.choose)
    state = jit(lambda variables: read_prompts(model, variables, tokens, lengths, 1024))(variables)
    one = max(leaf.nbytes for leaf in jax.tree.leaves(state[1]))
    found = []
    for least in (2**62, 2**10):
        monkeypatch.setattr(loops, "_FILL_BYTES", least)
        write = lambda variables, state: write_tokens(model, variables, state, lengths, None, **rest)
        compiled = jit(write, donate_argnums=1).lower(variables, state).compile()
        found.append((compiled.memory_analysis(), compiled(variables, jax.tree.map(jnp.copy, state))))
    (of_scan, want), (of_loop, got) = found
    assert of_scan.temp_size_in_bytes - of_loop.temp_size_in_bytes > one
    assert of_loop.alias_size_in_bytes > one
    jax.tree.map(np.testing.assert_array_equal, got, want)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(fsdp_resource="fsdp", tp_resource="tp")):
        placed = jax.device_put(variables, jax.NamedSharding(mesh, P()))
        rows = jax.device_put(tokens, jax.NamedSharding(mesh, P("fsdp")))
        on_mesh = jax.make_jaxpr(lambda variables, tokens: generate(model, variables, tokens, 3))(placed, rows)
    assert str(on_mesh).count("name=_write") == 2, "keys and values, or what stands for them"


def test_encoder_decoder(tokens):
    """Its loss, and greedy words with a cache, where the inputs have padding: what pads is not read."""
    config = tiny("t5-v1.1-small")
    model, variables = made(EncoderDecoder, config, tokens, inputs=tokens)
    lengths, start = jnp.array([S, 3]), jnp.zeros((B, 1), int)

    def run(variables, tokens, inputs):
        encoded = model.apply(variables, inputs=inputs, input_lengths=lengths)
        context = dict(encoded=encoded, input_lengths=lengths)
        words = generate(model, variables, start, S, **context)
        z = model.apply(variables, jnp.concatenate([start, words], 1)[:, :-1], inputs=inputs, input_lengths=lengths)
        loss = model.apply(variables, tokens, words, inputs=inputs, input_lengths=lengths, reduction="none")
        return words, z, loss

    run = jit(run)
    words, z, loss = run(variables, tokens, tokens)
    np.testing.assert_array_equal(jnp.argmax(z, -1), words)
    assert loss.shape == (B, S) and jnp.all(loss > 0)
    for a, b in zip(run(variables, tokens, tokens.at[1, 3:].set(V)), (words, z, loss)):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="both given, or neither"):
        model.apply(variables, tokens)
    with pytest.raises(ValueError, match="at is given without tokens"):
        model.apply(variables, inputs=tokens, at=lengths)
    for more in (dict(max_positions=S), dict(embedding_norm=True)):
        with pytest.raises(ValueError, match="config.*, which an EncoderDecoder does not read"):
            EncoderDecoder(replace(config, **more)).apply(variables, tokens, inputs=tokens)


def test_encoder(tokens):
    """Padding is not read; the loss is that of the logits, their bias included; hidden states have no head."""
    model, variables = made(EncoderLM, tiny("bert-base"), tokens)
    lengths = jnp.array([S, 3])
    labels = jnp.where(jnp.arange(S) < lengths[:, None], tokens, -100)

    def run(variables, tokens):
        z, hidden = (model.apply(variables, tokens, lengths=lengths, hidden=h) for h in (False, True))
        return z, hidden, model.apply(variables, tokens, labels, lengths=lengths)

    run = jit(run)
    z, hidden, loss = run(variables, tokens)
    assert hidden.shape == (B, S, 16)
    np.testing.assert_array_equal(run(variables, tokens.at[1, 3:].set(V))[2], loss)
    each = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, jnp.sum(jnp.where(labels >= 0, each, 0)) / jnp.sum(lengths), rtol=2.0**-18)
    plain = replace(model.config, layer={"num_attention_heads": 2, "mlp_hidden_size": 16})  # gelu is the default
    of_hidden = jax.eval_shape(functools.partial(model.clone(config=plain).init, hidden=True), KEY, tokens)["params"]
    assert variables["params"]["head_bias"].shape == nn.unbox(of_hidden["head_bias"]).shape == (V,)
    with pytest.raises(TypeError, match="EncoderLM: hidden is 'no'; pass True or False"):
        model.apply(variables, tokens, hidden="no")
    with pytest.raises(ValueError, match="EncoderLM: token_types are given, but config.token_types is 0"):
        model.clone(config=replace(plain, token_types=0)).apply(variables, tokens, token_types=tokens)


def test_sampling(rng):
    """Shares of 4000 draws: sigma is at most 0.008. Words as likely as the last of top_k stay."""
    shares = np.array([0.5, 0.2, 0.2, 0.1])
    logits = jnp.log(jnp.asarray([shares, shares[::-1]]))
    keys = jax.random.split(KEY, 4000)

    def drawn(**fields):
        words = np.asarray(jax.vmap(Sampling(**fields).choose, (0, None))(keys, logits))
        return np.stack([np.mean(words == i, 0) for i in range(4)], 1)

    for fields, want in (
        ({}, shares),
        (dict(top_k=1), [1, 0, 0, 0]),
        (dict(top_k=2), np.array([5, 2, 2, 0]) / 9),
        (dict(top_p=0.5), [1, 0, 0, 0]),
        (dict(top_p=0.51), np.array([5, 2, 2, 0]) / 9),
        (dict(temperature=0.5), shares**2 / np.sum(shares**2)),
        (dict(temperature=0), [1, 0, 0, 0]),
        (dict(temperature=1e-300), [1, 0, 0, 0]),
        (dict(temperature=1e300), np.full(4, 0.25)),
    ):
        np.testing.assert_allclose(drawn(**fields), [want, want[::-1]], atol=0.04)
    for fields, error in ((dict(temperature=-1), ValueError), (dict(top_p=0), ValueError), (dict(topk=1), TypeError)):
        with pytest.raises(error):
            Sampling(**fields)


def test_a_text_ends(tokens):
    model, variables = made(CausalLM, tiny("llama3-8b"), tokens)
    run = jit(lambda v, t, stop: generate(model, v, t, 5, stop_at=stop))
    free = run(variables, tokens, -1)
    stopped = run(variables, tokens, free[0, 2])
    np.testing.assert_array_equal(stopped[0], [*free[0, :3], free[0, 2], free[0, 2]])
    np.testing.assert_array_equal(jit(lambda v, t: generate(model, v, t, 1))(variables, tokens), free[:, :1])
    with pytest.raises(ValueError, match="key is None"):
        generate(model, variables, tokens, 5, sampling=Sampling())
    learned = CausalLM(tiny("gpt2"))
    with pytest.raises(ValueError, match="there are 1024 learned positions"):
        generate(learned, variables, tokens, 1020)


def test_fp8_and_mesh(tokens, on_host):
    """A step of a scanned model on a mesh, FP8 state of layers and head included, is that of one device."""
    recipe = te.recipe.DelayedScaling(amax_history_len=2)
    config = tiny("llama3-8b", num_gqa_groups=4).with_layer()
    config = ModelConfig(**vars(config) | dict(vocab_size=40))
    model = CausalLM(config, dtype=jnp.float32)
    tokens = jnp.tile(tokens, (4, 1))[:, :4]

    def step(variables, tokens):
        with te.autocast(recipe=recipe):
            return te.value_and_grad(lambda v: model.apply(v, tokens, tokens))(variables)

    with te.autocast(recipe=recipe):
        boxed = jit(model.init)(KEY, tokens, tokens)
    assert set(boxed["fp8_metas"]) == {"layers", "lm_head"}
    variables = nn.unbox(boxed)
    want = jit(step)(variables, tokens)
    resource = te.MeshResource(dp_resource="dp", tp_resource="tp")
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        rules = te.sharding.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            assert shardings["params"]["embedding"].spec == P("tp", None)
            got = jit(step)(
                jax.device_put(variables, shardings), jax.device_put(tokens, jax.NamedSharding(mesh, P("dp")))
            )
    # An ulp before a cast to FP8 may move a value to its neighbour, 2**-4 of it away; amaxes are those of f32.
    np.testing.assert_allclose(got[0], want[0], rtol=2.0**-10)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
        assert np.linalg.norm(a - b) <= 2.0**-5 * np.linalg.norm(b)


def test_configs():
    for name, size in SIZES.items():
        config = published(name)
        assert config.num_layers == size.layers and hash(config) == hash(published(name))
    for fields, error, words in (
        (dict(vocab_size=0), ValueError, "vocab_size is 0"),
        (dict(layers=3), TypeError, "unexpected keyword argument 'layers'"),
        (dict(layer=dict(hidden_size=3)), ValueError, "layer has hidden_size"),
        (dict(layer=3), TypeError, "layer is 3"),
        (dict(first=({}, {})), ValueError, "first has 2 entries, but num_layers is 1"),
        (dict(first=({}, {}), num_layers=2, num_decoder_layers=1), ValueError, "2 entries, but num_decoder_layers is"),
    ):
        with pytest.raises(error, match=words):
            ModelConfig(**dict(vocab_size=8, num_layers=1, hidden_size=8) | fields)
    with pytest.raises(ValueError, match="no model 'llama-3-8b'.*did you mean 'llama3-8b'"):
        published("llama-3-8b")
