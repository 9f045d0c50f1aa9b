"""examples/models.py: each block against the published architecture in plain Flax, with copied weights."""

import functools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import flax_reference as ref
import jax
import jax.numpy as jnp
import model_references as published
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn

import te_jax.flax as te_flax
import te_jax.models as te_models

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import models  # noqa: E402

# The programs run once: not worth LLVM's optimizations.
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
jit = functools.partial(jax.jit, compiler_options=_OPTIONS)

H, F, N, D, B = 32, 48, 4, 8, 2
SIZE = models.Size(H, F, N, layers=1)
KEY = jax.random.key(0)

# f32 against f32: sums of up to 150 terms in another order, through at most nine layers. The largest relative error of
# a result was 2e-6, so 1e-5 leaves room for other machines' sums and none for another architecture.
BOUND = 1e-5


# -- published weights as te_jax has them; linear, so gradients go the same way --------------------------------


def _norm(p) -> dict:
    return {"scale": p["scale"]} | ({"ln_bias": p["bias"]} if "bias" in p else {})


def _side_by_side(*parts) -> dict:
    """Dense layers as one: kernel [in, n, out], bias [n, out]."""
    return {name: jnp.stack([p[name] for p in parts], axis=-2) for name in parts[0]}


def _mlp(wi, wo) -> dict:
    wi = _side_by_side(*wi)
    return {f"{layer}_{name}": leaf for layer, p in (("wi", wi), ("wo", wo)) for name, leaf in p.items()}


def from_gpt2(p, size) -> dict:
    qkv = {name: leaf.reshape(*leaf.shape[:-1], 3, H) for name, leaf in p["c_attn"].items()}
    return {
        "attention": {"qkv": _norm(p["ln_1"]) | qkv, "out": p["attn_c_proj"]},
        "mlp": _norm(p["ln_2"]) | _mlp([p["c_fc"]], p["mlp_c_proj"]),
    }


def from_bert(p, size) -> dict:
    return {
        "attention": {"qkv": _side_by_side(p["query"], p["key"], p["value"]), "out": p["attention_output"]},
        "mlp": _norm(p["attention_norm"]) | _mlp([p["intermediate"]], p["output"]),
        "output_layernorm": _norm(p["output_norm"]),
    }


def from_t5(p, size) -> dict:
    own, wi = p["SelfAttention"], [p["wi_0"], p["wi_1"]] if size.gated else [p["wi"]]
    own = {"qkv": _norm(p["norm_1"]) | _side_by_side(own["q"], own["k"], own["v"]), "out": own["o"]}
    rest = {
        "relpos_bias": {"rel_embedding": p["relative_attention_bias"]["embedding"].T},
        "mlp": _norm(p["norm_3"]) | _mlp(wi, p["wo"]),
    }
    if "EncDecAttention" not in p:
        return rest | {"attention": own}
    cross = p["EncDecAttention"]
    query = _norm(p["norm_2"]) | cross["q"]
    cross = {"query": query, "kv": _side_by_side(cross["k"], cross["v"]), "out": cross["o"]}
    return rest | {"self_attention": own, "encoder_decoder_attention": cross}


def _attention_of_llama(p) -> dict:
    query = _norm(p["input_layernorm"]) | p["q_proj"]
    return {"query": query, "kv": _side_by_side(p["k_proj"], p["v_proj"]), "out": p["o_proj"]}


def from_llama3(p, size) -> dict:
    return {
        "attention": _attention_of_llama(p),
        "mlp": _norm(p["post_attention_layernorm"]) | _mlp([p["gate_proj"], p["up_proj"]], p["down_proj"]),
    }


def from_falcon(p, size) -> dict:
    joined = p["query_key_value"]["kernel"].reshape(H, size.groups, -1, D)  # queries, key, value of each group
    flat = lambda kernel: {"kernel": kernel.reshape(H, -1)}
    query, kv = flat(joined[:, :, :-2]), _side_by_side(flat(joined[:, :, -2]), flat(joined[:, :, -1]))
    norms = [p["input_layernorm"]] if size.one_norm else [p["ln_attn"], p["ln_mlp"]]
    return {
        "attention": {"query": _norm(norms[0]) | query, "kv": kv, "out": p["dense"]},
        "mlp": (_norm(norms[1]) if norms[1:] else {}) | _mlp([p["dense_h_to_4h"]], p["dense_4h_to_h"]),
    }


def _experts(norm, p, **more) -> dict:
    kernels = {"gate_kernel": p["gate"]["kernel"]}
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return {"moe": _norm(norm) | kernels | {ours: p[theirs] for ours, theirs in names.items()} | more}


def from_mixtral(p, size) -> dict:
    norms = {f"{name}_norm": _norm(p[f"{name}_norm"]) for name in "qk" if f"{name}_norm" in p}
    return {"attention": _attention_of_llama(p) | norms} | _experts(p["post_attention_layernorm"], p["mlp"])


def from_deepseek_v3(p, size) -> dict:
    attention = {
        "q_down": _norm(p["input_layernorm"]) | p["q_a_proj"],
        "q_up": _norm(p["q_a_layernorm"]) | p["q_b_proj"],
        "kv_down": p["kv_a_proj_with_mqa"],
        "kv_up": _norm(p["kv_a_layernorm"]) | p["kv_b_proj"],
        "out": p["o_proj"],
    }
    shared = _mlp([p["shared_gate_proj"], p["shared_up_proj"]], p["shared_down_proj"])
    return {"attention": attention} | _experts(p["post_attention_layernorm"], p["mlp"], shared_experts=shared)


# -- the blocks ------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    block: Callable
    size: models.Size
    reference: nn.Module
    convert: Callable
    length: int = 9
    memory: int = 0  # length of the encoder's output, for a decoder
    padded: bool = False
    state: dict = {}  # variables of ours next to the parameters


def t5(block, gated=False, **more):
    """With heads of another width than H / N, and sequences that reach into the bucket of the largest distances."""
    size = models.Size(H, F, N, layers=1, head_dim=12, gated=gated)
    return Case(block, size, published.T5(F, N, 12, gated), from_t5, 150, padded=True, **more)


def falcon(groups, one_norm):
    size = models.Size(H, F, N, layers=1, groups=groups, one_norm=one_norm)
    return Case(models.falcon_block, size, published.Falcon(F, N, groups, one_norm), from_falcon)


def mixtral(block, **fields):
    experts = dict(experts=5, topk=2)
    size = models.Size(H, F, N, layers=1, groups=2, head_dim=12, **experts)
    return Case(block, size, published.Mixtral(F, N, 2, 12, **experts, **fields), from_mixtral)


def deepseek_v3():
    bias = np.random.default_rng(4).normal(size=16) * 0.1
    size = models.Size(H, F, N, layers=1, experts=16, topk=8, latents=models.Latents(24, 20, 8, 8, 12))
    reference = published.DeepSeekV3(F, N, (24, 20), (8, 8, 12), 16, tuple(bias))
    state = {"expert_bias": {"moe": {"expert_bias": jnp.asarray(bias, jnp.float32)}}}
    return Case(models.deepseek_v3_block, size, reference, from_deepseek_v3, state=state)


CASES = {
    "gpt2": Case(models.gpt2_block, SIZE, published.GPT2(F, N), from_gpt2),
    "bert": Case(models.bert_block, SIZE, published.Bert(F, N), from_bert, padded=True),
    "t5 encoder": t5(models.t5_encoder_block),
    "t5 1.1 encoder": t5(models.t5_encoder_block, gated=True),
    "t5 decoder": t5(models.t5_decoder_block, memory=20),
    "t5 1.1 decoder": t5(models.t5_decoder_block, gated=True, memory=20),
    "llama3": Case(
        models.llama3_block, models.Size(H, F, N, layers=1, groups=2), published.Llama3(F, N, 2), from_llama3
    ),
    "falcon 7b": falcon(groups=1, one_norm=True),
    "falcon 40b": falcon(groups=2, one_norm=False),
    "mixtral": mixtral(models.mixtral_block),
    "qwen3": mixtral(models.qwen3_block, epsilon=1e-6, qk_norm=True),
    "deepseek-v3": deepseek_v3(),
}


def inputs(case) -> dict[str, jax.Array]:
    """The arrays to differentiate by. The second row is small: there the epsilon of a first norm counts."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(B, case.length, H)) * np.array([1, 0.02])[:, None, None]
    return {"x": jnp.asarray(x, jnp.float32)} | (
        {"encoded": on_device(rng.normal(size=(B, case.memory, H)), jnp.float32)} if case.memory else {}
    )


def padding(case) -> jax.Array | None:
    """bool[b, 1, 1, t], True at the last four keys of the first row."""
    length = case.memory or case.length
    return (jnp.arange(length) >= jnp.array([length - 4, length])[:, None])[:, None, None] if case.padded else None


def weights(case):
    """Kernels that keep the size of what they multiply, norms near 1, small biases."""
    rng = np.random.default_rng(2)

    def draw(path, leaf):
        spread = {"kernel": leaf.shape[0] ** -0.5, "embedding": 1.0, "scale": 0.2, "bias": 0.02}
        spread = spread.get(path[-1].key, leaf.shape[-2:][0] ** -0.5)  # the others are kernels of experts
        return on_device(rng.normal(size=leaf.shape) * spread + (path[-1].key == "scale"), jnp.float32)

    args = reference_args(case, inputs(case))
    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(case.reference.init, KEY, *args)["params"])


def reference_args(case, arrays):
    encoded = [arrays["encoded"]] if case.memory else []
    return [arrays["x"], *([padding(case)] if case.padded else []), *encoded]


def reference(case, params, arrays):
    return case.reference.apply({"params": params}, *reference_args(case, arrays))


def ours(case, params, arrays, **fields):
    masks = {"encoder_decoder_mask" if case.memory else "attention_mask": padding(case)}
    encoded = {"encoded": arrays["encoded"]} if case.memory else {}
    block = case.block(case.size, **fields)
    return block.apply({"params": params, **case.state}, arrays["x"], **encoded, **masks, deterministic=True)


@pytest.mark.parametrize("name", CASES)
def test_block(name):
    """Outputs, and gradients by inputs and all parameters."""
    case = CASES[name]
    params, arrays = weights(case), inputs(case)
    dy = on_device(np.random.default_rng(3).normal(size=arrays["x"].shape), jnp.float32)

    @functools.partial(jit, static_argnums=0)
    def run(function, params, arrays):
        y, vjp = jax.vjp(functools.partial(function, case), params, arrays)
        return y, vjp(dy)

    want, (dparams, darrays) = run(reference, params, arrays)
    got = run(ours, case.convert(params, case.size), arrays)
    want = want, (case.convert(dparams, case.size), darrays)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = jax.tree.map(ref.relative_error, got, want)
    assert max(jax.tree.leaves(errors)) < BOUND, errors


ROPE = [dict(rotary_pos_emb_group_method="consecutive"), dict(rotary_pos_emb_windows=(1, 20_000))]
OTHERS = {
    "gpt2": [
        dict(mlp_activations=(models.exact_gelu,)),
        dict(layernorm_epsilon=1e-6),
        dict(self_attn_mask_type="no_mask"),
    ],
    "bert": [
        dict(mlp_activations=("gelu",)),
        dict(layernorm_epsilon=1e-6),
        dict(apply_residual_connection_post_layernorm=False),
    ],
    "t5 encoder": [dict(scale_attn_logits=True), dict(layernorm_epsilon=1e-5), dict(self_attn_mask_type="causal")],
    "t5 1.1 encoder": [dict(mlp_activations=("silu", "linear")), dict(mlp_activations=(models.exact_gelu, "linear"))],
    "t5 decoder": [dict(self_attn_mask_type="no_mask"), dict(mlp_activations=("gelu",))],
    "llama3": [dict(mlp_activations=("gelu", "linear")), dict(layernorm_epsilon=1e-6), *ROPE],
    "falcon 40b": [
        dict(mlp_activations=("gelu",)),
        dict(layernorm_epsilon=1e-6),
        *ROPE,
        dict(parallel_attention_mlp=False),
    ],
    "mixtral": [dict(rotary_pos_emb_windows=(1, 500_000)), dict(moe=dict(num_experts=5, num_experts_per_tok=3))],
    "qwen3": [dict(qk_norm_before_rope=False), dict(layernorm_epsilon=1e-5)],
    "deepseek-v3": [dict(mscale=1.0), dict(rotary_pos_emb_scaling=None)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_bound_tells_other_blocks(name):
    """The comparison sees each of these fields: the two forms of gelu differ by 1e-4 of the output."""
    case = CASES[name]
    params, arrays = weights(case), inputs(case)
    want = jit(functools.partial(reference, case))(params, arrays)
    params = case.convert(params, case.size)
    for fields in OTHERS[name]:
        got = jit(functools.partial(ours, case, **fields))(params, arrays)
        assert ref.relative_error(got, want) > 4 * BOUND, fields


def test_t5_blocks_share_one_table():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = te_flax.RelativePositionBiases(32, 128, N, name="table")
            for i in range(2):
                block = models.t5_encoder_block(SIZE, relative_embedding=table, name=f"block_{i}")
                x = block(x, deterministic=True)
            return x

    @jit
    def one_by_one(params, x):
        for i in range(2):
            own = params[f"block_{i}"] | {"relpos_bias": params["table"]}
            x = models.t5_encoder_block(SIZE).apply({"params": own}, x, deterministic=True)
        return x

    x = inputs(CASES["bert"])["x"]
    params = ref.unboxed(ref.filled(jax.eval_shape(Stack().init, KEY, x)["params"]))
    assert set(params) == {"table", "block_0", "block_1"} and set(params["block_0"]) == {"attention", "mlp"}
    got = jit(Stack().apply)({"params": params}, x)
    assert ref.relative_error(got, one_by_one(params, x)) < BOUND


# -- sizes and the program -------------------------------------------------------------------------------------

TOTALS = {  # of the published models, and what they have besides blocks: embeddings, final norms, heads
    "gpt2": (124_439_808, (50257 + 1024) * 768 + 2 * 768),
    "gpt2-xl": (1_557_611_200, (50257 + 1024) * 1600 + 2 * 1600),
    "bert-base": (109_482_240, (30522 + 512 + 2) * 768 + 2 * 768 + 768 * 769),
    "bert-large": (335_141_888, (30522 + 512 + 2) * 1024 + 2 * 1024 + 1024 * 1025),
    # Here each block is counted with a table of relative biases, which the model has once in each stack.
    "t5-small": (60_506_624, 32128 * 512 + 2 * 512 - 2 * 5 * 32 * 8),
    "t5-3b": (2_851_598_336, 32128 * 1024 + 2 * 1024 - 2 * 23 * 32 * 32),
    "t5-v1.1-small": (76_961_152, 2 * 32128 * 512 + 2 * 512 - 2 * 7 * 32 * 6),
    "llama3-8b": (8_030_261_248, 2 * 128256 * 4096 + 4096),
    "llama3-70b": (70_553_706_496, 2 * 128256 * 8192 + 8192),
    "falcon-7b": (7_217_189_760, 2 * 65024 * 4544 + 2 * 4544),
    "falcon-40b": (41_303_293_952, 65024 * 8192 + 2 * 8192),
    "mixtral-8x7b": (46_702_792_704, 2 * 32000 * 4096 + 4096),
    "qwen3-30b-a3b": (30_532_122_624, 2 * 151936 * 2048 + 2048),
}


@pytest.mark.parametrize("name", TOTALS)
def test_published_sizes(name):
    blocks = next(blocks for family, blocks in models.FAMILIES.items() if name.startswith(family))
    counts = [models.parameter_count(block(name)) for block in blocks]
    total, rest = TOTALS[name]
    assert models.SIZES[name].layers * sum(counts) + rest == total


def test_published_size_of_deepseek_v3():
    """Whose first three blocks differ; a block's bias of the choice is no parameter here."""
    config = te_models.published("deepseek-v3")
    layers = [config.fields_of_layer(index) for index in range(config.num_layers)]
    dense, experts = (models.parameter_count(te_flax.TransformerLayer(**layers[i])) for i in (0, -1))
    assert layers == [layers[0]] * 3 + [layers[-1]] * 58
    assert 3 * dense + 58 * (experts + 256) + 2 * 129280 * 7168 + 7168 == 671_026_419_200


@pytest.mark.parametrize(
    ("arguments", "blocks"),
    [
        (
            ["t5-v1.1-small"],
            [
                ("t5-v1.1-small", "t5_encoder_block", "8", "2,360,512", "bf16"),
                ("t5-v1.1-small", "t5_decoder_block", "8", "3,147,456", "bf16"),
            ],
        ),
        (["--fp8", "falcon-7b"], [("falcon-7b", "falcon_block", "32", "207,070,080", "fp8")]),
        (["--fp8", "deepseek-v3"], [("deepseek-v3", "deepseek_v3_block", "58", "11,507,286,016", "fp8")]),
    ],
    ids=["bf16", "fp8", "experts"],
)
def test_program(arguments, blocks, capsys):
    assert models.main(arguments) == 0
    line = re.compile(r"(\S+) +(\w+) +(\d+) blocks of +([\d,]+) parameters; tiny, (\w+): loss (\S+), gradient (\S+)")
    found = [line.fullmatch(text).groups() for text in capsys.readouterr().out.splitlines()]
    assert [row[:5] for row in found] == blocks
    assert all(0.3 < float(value) < 10 and 0.1 < float(slope) < 10 for *_, value, slope in found)


def test_program_without_such_a_model(capsys):
    with pytest.raises(SystemExit) as left:
        models.main(["gpt5"])
    assert left.value.code == 2 and "there is no model gpt5: give some of gpt2, " in capsys.readouterr().err
