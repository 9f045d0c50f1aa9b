"""Probes of trees that do not fit: parameters that nobody reads, caches, biases of experts, names of axes."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from probes import Probe
from probes_modules import CORE, DENSE, KEY, LATENT, LAYER, MHA, MLP, MOE, NORM_DENSE, REQUIRED, TRANSFORMER, T, V, W, X
from probes_modules import Q as HEADS
from probes_unused import in_silence

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import checkpoint_policies, hf, models
from te_jax.models import generate
from te_jax.ops.router import updated_expert_bias
from te_jax.sharding import with_sharding_constraint_by_logical_axes

MAMBA, DELTA = te_flax.Mamba2, te_flax.GatedDeltaNet
MLA = te_flax.MultiHeadLatentAttention
SIZES = REQUIRED | {
    MAMBA: dict(ssm_num_heads=2, ssm_head_dim=8, ssm_state_size=8),
    DELTA: dict(linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    MLA: LATENT | dict(num_attention_heads=2),
    MOE: dict(num_experts=4, intermediate_dim=8),
}
MODEL = dict(vocab_size=8, hidden_size=16, layer={k: LAYER[k] for k in LAYER if k != "hidden_size"})
TOKENS = jnp.zeros((1, 3), jnp.int32)


def read(cls, fields, now=None, args=(X,)):
    """A call of a module with fields `now` on the variables of one with `fields`, by shapes."""

    def run(*args):
        variables = cls(**SIZES[cls] | fields).init(KEY, *args)
        return cls(**SIZES[cls] | (now or {})).apply(variables, *args)

    return lambda: jax.tree.leaves(jax.eval_shape(run, *args))


def unread(names, cls, fields, now=None, args=(X,)):
    """A warning of these names."""
    words = f"^{cls.__name__}.*: the collection .* has {names}, which the fields of this module have no use for; pass "
    return Probe(f"{cls.__name__} of {fields}", read(cls, fields, now, args), W, words)


def of_models(made, read):
    def run():
        variables = models.CausalLM(models.ModelConfig(num_layers=made, **MODEL), scan=False).init(KEY, TOKENS)
        return models.CausalLM(models.ModelConfig(num_layers=read, **MODEL), scan=False).apply(variables, TOKENS)

    return lambda: jax.eval_shape(run).shape


class Around(te_flax.DenseGeneral):
    """A user's module, with a parameter of its own."""

    @nn.compact
    def __call__(self, inputs):
        return super().__call__(inputs) * self.param("own", nn.initializers.ones, ())


class Before(nn.Module):
    """A part of users' modules with a parameter of its own."""

    @nn.compact
    def __call__(self, inputs):
        return super().__call__(inputs) * self.param("own", nn.initializers.ones, ())


class Mixed(Before, te_flax.DenseGeneral):
    pass


class Shared(nn.Module):
    """Flax's way to give a parameter to another module's tree."""

    @nn.compact
    def __call__(self, inputs):
        base = te_flax.DenseGeneral(16)
        nn.share_scope(self, base)
        return base(base(inputs)) * self.param("own", nn.initializers.ones, ())


class SharedGiven(nn.Module):
    """The same, of a module that was made outside, as adapters are."""

    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, inputs):
        return self.base(inputs) + self.param("own", nn.initializers.ones, ())


class Adapted(nn.Module):
    around: Any = SharedGiven

    @nn.compact
    def __call__(self, inputs):
        return self.around(te_flax.DenseGeneral(8))(inputs)


class Siblings(nn.Module):
    """Two modules with one tree."""

    def setup(self):
        self.dense, self.norm = te_flax.DenseGeneral(8), te_flax.LayerNorm()
        nn.share_scope(self.dense, self.norm)

    def __call__(self, inputs):
        return self.norm(self.dense(inputs))


def nothing_at_names():
    """Names without leaves, as what cuts trees apart leaves them."""
    variables = te_flax.DenseGeneral(8, use_bias=False).init(KEY, jnp.ones(X.shape))
    empty = {"params": {**variables["params"], "bias": None, "norm": {}}}
    return te_flax.DenseGeneral(8, use_bias=False).apply(empty, jnp.ones(X.shape)).shape


def silent(make):
    run = lambda x: make().apply(make().init(KEY, x), x)
    return lambda: in_silence(lambda: jax.eval_shape(run, X).shape)


UNREAD = [
    unread("bias", DENSE, dict(use_bias=True), dict(use_bias=False)),
    unread("lora_a_kernel, lora_b_kernel", DENSE, dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=2)),
    unread("ln_bias, scale", NORM_DENSE, {}, dict(enable_layernorm=False)),
    unread("wi_bias, wo_bias", MLP, dict(use_bias=True)),
    unread("k_norm, q_norm", MHA, dict(qk_norm_type="rmsnorm")),
    unread("_FusedDotProductAttention_0", CORE, dict(softmax_type="learnable"), args=(HEADS,) * 3),
    unread("B_conv_bias, C_conv_bias, x_conv_bias", MAMBA, {}, dict(use_conv_bias=False)),
    unread("shared_experts", MOE, dict(num_shared_experts=1)),
    unread("expert_bias", MOE, dict(use_expert_bias=True)),
    Probe("a model of fewer layers", of_models(2, 1), W, "CausalLM: the collection 'params' has layer_1, which"),
    Probe("a model of as many layers", lambda: in_silence(of_models(2, 2))),
    *(
        Probe(f"{cls.__name__} as it was made", lambda cls=cls: in_silence(read(cls, {})))
        for cls in (DENSE, MHA, TRANSFORMER, MOE, MAMBA, DELTA)
    ),
    Probe("a subclass with a parameter of its own", silent(lambda: Around(8))),
    Probe("a subclass of two, with a parameter of one's own", silent(lambda: Mixed(8))),
    *(
        Probe(f"a shared scope, {name}", silent(make))
        for name, make in {
            "of two calls": Shared,
            "in remat": lambda: nn.remat(Shared)(),
            "in jit": lambda: nn.jit(Shared)(),
            "of a module that is given": Adapted,
            "of a module that is given, in remat": lambda: Adapted(nn.remat(SharedGiven)),
            "of siblings": Siblings,
        }.items()
    ),
    Probe("names without parameters", lambda: in_silence(nothing_at_names)),
]


@cache
def begun(cls):
    """The parameters of a module, and its cache behind some tokens."""
    module, x = cls(**SIZES[cls]), jnp.ones(X.shape)

    def run():
        params = module.init(KEY, x)
        slots = dict(max_decode_length=8)
        return params, module.apply(params, x, decode=True, mutable=["cache"], **slots)[1]["cache"]

    return module, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run))


def decoded(cls, change, **call):
    """One more token, on the cache that `change` makes of it."""

    def run():
        module, (params, cache) = begun(cls)
        step = lambda x: module.apply({**params, "cache": change(cache)}, x, decode=True, mutable=["cache"], **call)
        return jax.eval_shape(step, jnp.ones((X.shape[0], 1, X.shape[2])))

    return run


def without(*names):
    return lambda cache: {name: leaf for name, leaf in cache.items() if name not in names}


def of_index(value):
    return lambda cache: cache | {"cache_index": value}


LACKS = "the 'cache' has .*, but not {}.*; pass the whole 'cache'"
CACHES = [
    *(Probe(f"{cls.__name__}, cache without {name}", decoded(cls, without(name)), V, LACKS.format(name))
      for cls, names in ((MHA, ("cached_key", "cached_value", "cache_index")), (MLA, ("cached_latent", "cache_index")),
                         (MAMBA, ("x_conv_state", "ssm_state", "cache_index")), (DELTA, ("delta_state",)))
      for name in names),
    Probe("Mamba2, attention's cache", decoded(MAMBA, lambda _: begun(MHA)[1][1]), V, LACKS.format("x_conv")),
    Probe("attention, Mamba2's cache", decoded(MHA, lambda _: begun(MAMBA)[1][1], max_decode_length=8), V,
          LACKS.format("cached_key")),
    Probe("cache without padding, as others make it", decoded(MHA, without("cache_padding"))),
    Probe("no cache", decoded(MHA, lambda _: {}, max_decode_length=8)),
    Probe("cache_index of floats", decoded(MHA, of_index(jnp.ones(()))), T, "MultiHeadAttention: cache_index is .*int"),
    Probe("cache_index of rows", decoded(MHA, of_index(jnp.ones(2, int))), V, r"cache_index has shape \(2,\)"),
    Probe("cache_index, an int", decoded(MHA, of_index(3))),
    Probe("cached_key a list", decoded(MHA, lambda cache: cache | {"cached_key": cache["cached_key"].tolist()}), T,
          "MultiHeadAttention: cached_key is .*pass an array"),
    Probe("cached_key of one axis", decoded(MHA, lambda cache: cache | {"cached_key": jnp.ones(3)}), V,
          r"cached_key has shape \(3,\)"),
]  # fmt: skip

BIASES, COUNTS = {"expert_bias": {"moe": {"expert_bias": jnp.zeros(4)}}}, jnp.ones(4)


def moved(collections=BIASES, grads=None, rate=1e-3):
    given = {"expert_bias": {"moe": {"expert_bias": COUNTS}}} if grads is None else grads
    return lambda: te_flax.update_expert_bias(collections, given, rate)


def of_router(fields):
    return lambda: jax.eval_shape(te_flax.MoEBlock(**SIZES[MOE] | fields).init, KEY, X)


EXPERTS = [
    Probe("biases", moved()),
    Probe("rate an array", moved(rate=jnp.float32(1e-3))),
    Probe("rate -1", moved(rate=-1), V, "te_jax.ops.router: rate is -1; pass a number at least 0"),
    Probe("rate '1'", moved(rate="1"), T, "rate is '1'"),
    Probe("rate [3]", moved(rate=jnp.ones(3)), V, r"rate is float32\[3\]; .*a scalar array"),
    Probe("counts a list", lambda: updated_expert_bias(COUNTS, [1.0] * 4, 1e-3), T, "te_jax.ops.router: counts is"),
    Probe("biases None", moved(None), T, "update_expert_bias: collections is None; pass a dict"),
    Probe("counts of others", moved(grads={"expert_bias": {"x": COUNTS}}), V, "update_expert_bias: the biases are .*x"),
    Probe("counts of more", moved(grads={"expert_bias": {"moe": {"expert_bias": jnp.ones(5)}}}), V, r"grads has .*5,"),
    Probe("scores first of sigmoids", of_router(dict(use_pre_softmax=True, score_function="sigmoid")), W,
          "MoEBlock: use_pre_softmax is True, but score_function is 'sigmoid'"),
    Probe("groups without a choice", of_router(dict(num_groups=2)), W, "num_groups is 2, but group_topk is None"),
    Probe("a loss of rows without a loss", of_router(dict(per_sequence_loss=True)), W, "but aux_loss_coeff is 0"),
    Probe("groups", lambda: in_silence(of_router(dict(num_groups=2, group_topk=1, num_experts_per_tok=1)))),
]  # fmt: skip


def made(cls, fields, *args):
    return lambda: jax.eval_shape(lambda x: cls(**SIZES[cls] | fields).init(KEY, x, *args), X)


def numbers():
    with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=2)):
        return te.fp8_stats(te_flax.DenseGeneral(8).init(KEY, jnp.ones(X.shape)))


def dropped(rngs, **call):
    def run():
        layer = te_nnx.TransformerLayer(**LAYER | dict(hidden_dropout=0.5), rngs=nnx.Rngs(params=0))
        return layer(jnp.ones(X.shape), rngs=rngs and nnx.Rngs(**rngs), **call)

    return lambda: nnx.eval_shape(run).shape


def assigned(value):
    def run():
        layer = te_nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        layer.kernel = value()
        return layer(jnp.ones((2, 16)))

    return lambda: nnx.eval_shape(run).shape


def head(labels=None, **call):
    return lambda: jax.eval_shape(lambda key: te_flax.LMHead(8).init(key, jnp.ones((2, 4)), labels, **call), KEY)


def text(**options):
    model = models.CausalLM(models.ModelConfig(num_layers=1, **MODEL), scan=False)
    return lambda: jax.eval_shape(lambda: generate(model, model.init(KEY, TOKENS), TOKENS, 2, **options)).shape


TABLE = "fp8_stats_table: stats is .*; pass what te_jax.fp8_stats returns, outside of jax.jit"
OTHERS = [
    Probe("mask 'causal'", made(MAMBA, {}, "causal"), T, "Mamba2: mask is 'causal'; pass None or a Seq"),
    Probe("steps below the floor", made(DELTA, dict(time_step_floor=1.0)), V, "time_step_floor is 1.0, above .*max="),
    Probe("table of state", lambda: te.fp8_stats_table({"fp8_metas": {}}), T, TABLE),
    Probe("table in jit", lambda: jax.jit(lambda s: te.fp8_stats_table(s) and 1)(numbers()), T, TABLE),
    Probe("table", lambda: te.fp8_stats_table(numbers())),
    Probe("explain a number", lambda: te.explain_fp8(lambda x: 3, X, recipe=te.recipe.Float8CurrentScaling())),
    Probe("save('GEMM')", lambda: checkpoint_policies.save("GEMM"), W, "names has 'GEMM'.*constant .*is 'te_gemm'"),
    Probe("save('ffn1')", lambda: in_silence(lambda: checkpoint_policies.save("ffn1"))),
    Probe("reduction of logits", head(reduction="sum"), W, "LMHead: reduction is 'sum', but labels is None"),
    Probe("reduction 'avg' of logits", head(reduction="avg"), V, "LMHead: reduction is 'avg'; pass one of 'mean'"),
    Probe("generate greedily by a key", text(key=KEY), W, "generate: key is given, but Sampling.temperature=0.*no tok"),
    Probe("generate", lambda: in_silence(text())),
    Probe("nnx: no keys for dropout", dropped(None), V, "TransformerLayer: dropout needs a key; pass rngs=nnx.Rngs"),
    Probe("nnx: other keys", dropped(dict(params=1)), V, r"needs a key, but rngs has only the streams \(params\)"),
    Probe("nnx: keys of a call", dropped(dict(dropout=1))),
    Probe("nnx: keys of all", dropped(dict(default=1))),
    Probe("nnx: deterministic", dropped(None, deterministic=True)),
    Probe("nnx: kernel an array", assigned(lambda: jnp.ones((16, 8))), T, r"kernel is float32\[16, 8\]; .*Param.array"),
    Probe("nnx: kernel a variable", assigned(lambda: nnx.Param(jnp.ones((16, 8))))),
    Probe("state of lists", lambda: of_lists(), T, r"DenseGeneral: fp8_metas leaf x_scale is \[1.0\]; pass an array"),
    Probe("hf: no family", lambda: hf.save("", *of_no_family()), V, "family of this ModelConfig is ''.*family='llama'"),
    Probe("autocast of no recipe", lambda: te.autocast(recipe=te.recipe.Recipe()), T, "autocast: recipe is .*pass te_"),
    Probe("apply_updates of None", lambda: te.optim.apply_updates({"w": COUNTS}, None), V,
          "apply_updates: updates are of another tree"),
    Probe("apply_updates with a None in it", lambda: te.optim.apply_updates(*[{"w": COUNTS, "b": None}] * 2)),
]  # fmt: skip


def of_no_family():
    model = models.CausalLM(models.ModelConfig(num_layers=1, **MODEL))
    return model, jax.eval_shape(model.init, KEY, TOKENS)


def of_lists():
    with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=2)):
        variables = te_flax.DenseGeneral(8).init(KEY, np.ones(X.shape, np.float32))
        metas = jax.tree.map(lambda leaf: leaf.tolist(), variables["fp8_metas"])
        return te_flax.DenseGeneral(8).apply({**variables, "fp8_metas": metas}, jnp.ones(X.shape))


def under_rules(axes, *rules):
    """An array that is constrained by logical axes."""

    def run():
        with jax.set_mesh(jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))), nn.logical_axis_rules(rules):
            return jax.eval_shape(lambda x: with_sharding_constraint_by_logical_axes(x, axes), X).shape

    return run


MEANT = "'nvte_bach' is none of te_jax's: did you mean 'nvte_batch'"
AXES = [
    Probe(
        "kernel_axes misspelt", made(DENSE, dict(kernel_axes=("nvte_w_fspd", None))), V, "did you mean 'nvte_w_fsdp'"
    ),
    Probe(
        "input_axes misspelt", made(DENSE, dict(input_axes=("nvte_bach", None, None))), V, f"input_axes is .*{MEANT}"
    ),
    Probe("axes misspelt", under_rules(("nvte_bach", None, None), ("b", "dp")), V, f"axes is .*{MEANT}"),
    Probe("axes of a rule", under_rules(("nvte_bach", None, None), ("nvte_bach", "dp"))),
    Probe("axes of others", under_rules(("batch", None, None), ("b", "dp"))),
    Probe("axes a string", under_rules("batch", ("b", "dp")), T, "axes is 'batch'; pass None or a tuple of logical"),
    Probe(
        "constraint of a list", lambda: with_sharding_constraint_by_logical_axes([1.0], None), T, r"x is \[1.0\]; pass"
    ),
]

PROBES = [*AXES, *UNREAD, *CACHES, *EXPERTS, *OTHERS]
