"""`te_jax.explain_fp8`: against the jaxpr of the call itself, and each reason why a product is not in FP8."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend.core import jaxprs_in_params

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.core.op import ops
from te_jax.core.products import is_explained
from te_jax.layers import dense
from te_jax.layers.explain_fp8 import WIDTH
from te_jax.recipe import (
    DelayedScaling,
    FixedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

L, B, S, H, F = 3, 2, 16, 32, 64
CURRENT = Float8CurrentScaling()


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


X = array(B, S, H)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x, _ = te_flax.LayerNormMLP(intermediate_dim=F, name="mlp")(x)
        return te_flax.DenseGeneral(H, name="out")(x), None


class Net(nn.Module):
    """Products of each kind of module."""

    head: bool

    @nn.compact
    def __call__(self, x, labels):
        x = nn.Dense(H, name="plain")(x)
        x = nn.Dense(H, name="hooked", dot_general_cls=te_flax.DotGeneral)(x)
        axes = dict.fromkeys(("params", "fp8_metas"), 0)
        x, _ = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=L)(name="layers")(x, None)
        return te_flax.LMHead(40, name="lm_head")(x, labels) if self.head else x


ARGS = X, array(B, S, dtype=jnp.int32)


def calls_in_fp8(jaxpr, times=1):
    """How many products with operands in FP8 the ops of a jaxpr make, those of each step of a loop."""
    found, loop = 0, lambda eqn: eqn.params["length"] if eqn.primitive.name == "scan" else 1
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("te_gemm", "te_attention_fp8")):
            types = dict(zip(eqn.params["inputs"], (v.aval.dtype for v in eqn.invars)))
            left = [d for name, d in types.items() if name.startswith(("lhs", "q")) and "inv" not in name]
            right = [d for name, d in types.items() if name.startswith(("rhs", "k")) and "inv" not in name]
            found += times * sum(1 in (a.itemsize, b.itemsize) for a, b in zip(left, right, strict=True))
        elif eqn.primitive.name not in ops:
            found += sum(calls_in_fp8(inner, times * loop(eqn)) for inner in jaxprs_in_params(eqn.params))
    return found


def explained_and_true(module, *args, recipe):
    """What is explained of a Linen module, and how many products in FP8 it and its gradients make."""
    with te.autocast(recipe=recipe):
        variables = jax.eval_shape(module.init, jax.eval_shape(jax.random.key, 0), *args)
        explained = te.explain_fp8(module, *args, variables=variables)

        def grads(params, others, x, *rest):
            loss = lambda params, x: jnp.sum(jax.tree.leaves(module.apply({**others, "params": params}, x, *rest))[0])
            return jax.grad(loss, argnums=(0, 1))(params, x)

        params = variables.pop("params")
        return explained, calls_in_fp8(jax.make_jaxpr(grads)(params, variables, *args).jaxpr)


def in_fp8(explained):
    return sum(p.times for p in explained.products if p.in_fp8)


def at(explained, path, product=None):
    return [p for p in explained.products if p.path == path and product in (None, p.product)]


def the_reason(explained, path=None):
    """Why the one product, or all of a path, are not in FP8."""
    (why,) = {p.why for p in explained.products if path in (None, p.path)}
    return why


def fits(explained):
    lines = str(explained).splitlines()
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    return lines


# -- the truth ------------------------------------------------------------------------------------------------

RECIPES = {
    "delayed": (DelayedScaling(), {("tensor", "tensor")}, "te_gemm"),
    "current": (Float8CurrentScaling(exclude=("lm_head",)), {("tensor", "tensor")}, "te_gemm"),
    "fixed": (FixedScaling(override_linear_precision=(False, True, True)), {("tensor", "tensor")}, "te_gemm"),
    "block": (
        Float8BlockScaling(exclude=("hooked",)),
        {("rows_128", "squares_128"), ("rows_128", "rows_128")},
        "te_gemm_block",
    ),
    "mxfp8": (MXFP8BlockScaling(exclude=("layers/out",)), {("rows_32", "rows_32")}, "te_gemm_mx"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_what_the_jaxpr_has(name):
    recipe, formats, op = RECIPES[name]
    explained, true = explained_and_true(Net(head=name in ("delayed", "current")), *ARGS, recipe=recipe)
    assert in_fp8(explained) == true > 0
    assert explained.recipe == recipe and fits(explained)
    for p in explained.products:
        assert bool(p.why) != p.in_fp8 == bool(p.formats) == ("e4m3" in p.operands[0] + p.operands[-1]), p
        assert not p.in_fp8 or (p.formats in formats and p.op in (op, "te_gemm_sum")), p
    assert "no hook; give Dense dot_general_cls=te_jax.flax.DotGeneral" == the_reason(explained, "plain")
    high = recipe.override_linear_precision
    for product, out in zip(("fprop", "dgrad", "wgrad"), high):
        (made,) = at(explained, "layers/out", product) or [None]
        if "layers/out" in recipe.exclude:
            assert made is None and "'layers/out'" in the_reason(explained, "layers/out")
            continue
        assert (made.times, made.in_fp8) == (L, not out)
        assert made.why == out * f"the recipe's override_linear_precision has True for {product}"
        assert sum(p.times for p in at(explained, "layers/mlp", product)) == 2 * L
    for path in recipe.exclude:
        assert the_reason(explained, path if path != "hooked" else "hooked/DotGeneral_0").endswith(f"has {path!r}")


def test_experts():
    block = te_flax.MoEBlock(num_experts=4, intermediate_dim=F)
    explained, true = explained_and_true(block, X, recipe=CURRENT)
    assert in_fp8(explained) == true == 7, "gated: two weights, each with a gradient"
    first, *_ = at(explained, "", "fprop")
    assert first.operands[1] == f"e4m3[4,2,{F},{H}]" and first.op == "te_gemm_grouped"
    assert {p.why for p in explained.products} == {"", "the router is never in FP8"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bf16 = te.explain_fp8(block, X, recipe=MXFP8BlockScaling(), train=False)
    assert not in_fp8(bf16)
    assert {p.why.partition(",")[0] for p in bf16.products} == {
        "the router is never in FP8",
        "recipe is MXFP8BlockScaling",
    }


def test_attention():
    attend = te_flax.DotProductAttention(head_dim=32, num_attention_heads=2)
    q, recipe = array(B, S, 2, 32), DelayedScaling(fp8_dpa=True)
    explain = lambda train=False, **options: te.explain_fp8(
        attend.clone(**options), q, q, q, recipe=recipe, train=train
    )
    (forward,), (backward,) = (at(explain(True), "", name) for name in ("attention", "attention grad"))
    assert forward.in_fp8 and forward.op == "te_attention_fp8_fwd" and forward.formats == ("tensor",) * 3
    assert not backward.in_fp8 and backward.why.startswith("cuDNN has no FP8 gradients of this call")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "window" in the_reason(explain(window_size=(2, 0)))
    assert the_reason(te.explain_fp8(attend, q, q, q, recipe=CURRENT, train=False)) == "the recipe's fp8_dpa is False"
    wide = te.explain_fp8(attend, *[array(B, S, 2, 32, dtype=jnp.float32)] * 3, train=False)
    assert {p.op for p in wide.products} == {"dot_general"} and the_reason(wide) == "no recipe is in force"


# -- why not --------------------------------------------------------------------------------------------------

TINY = array(4, 8)
LAYER = te_flax.DenseGeneral(16)


PLAIN = "no hook; a product of jax.numpy or jax.lax, where te_jax.{} would be in FP8"


class Plain(nn.Module):
    def __call__(self, x):
        return x @ jnp.swapaxes(x, -1, -2)


@pytest.mark.parametrize(
    "module, x, why",
    [
        (Plain(), TINY, PLAIN.format("flax.DotGeneral")),
        (Plain(), array(2, 4, 8), "it has batch axes, as a product of two activations or of a weight for each example"),
        (te_flax.LMHead(16), TINY, "logits are never in FP8; with labels the head computes its loss, which is"),
        (nn.Conv(16, (3,)), array(2, 4, 8), "te_jax has no conv_general_dilated in FP8"),
        (lambda x: x @ x.T, TINY, PLAIN.format("layers.dense")),
        (lambda x: dense(x, jnp.ones((8, 8))), TINY, "no recipe is in force"),
    ],
    ids=["own", "batch axes", "logits", "convolution", "function", "layer without a recipe"],
)
def test_products_that_no_recipe_reaches(module, x, why):
    assert the_reason(te.explain_fp8(module, x, recipe=CURRENT, train=False)) == why


def test_no_recipe():
    explain = functools.partial(te.explain_fp8, train=False)
    assert the_reason(explain(LAYER, TINY)) == "no recipe is in force"
    with te.autocast(False):
        assert the_reason(explain(LAYER, TINY)) == "te_jax.autocast(False) is in force"
    with te.autocast(recipe=CURRENT):
        assert in_fp8(explain(LAYER, TINY)) == 1
        assert explain(LAYER, TINY, recipe=DelayedScaling()).recipe == DelayedScaling()
    own = nn.Dense(16, dot_general_cls=te_flax.make_dot_general_cls(CURRENT))
    assert in_fp8(explain(own, TINY)) == 1, "a recipe of its own"


def test_low_rank():
    explained = te.explain_fp8(LAYER.clone(enable_low_rank_adaptation=True), TINY, recipe=CURRENT)
    assert in_fp8(explained) == 3
    assert {(p.product, p.why) for p in explained.products if not p.in_fp8} == {
        (name, "the products of low rank are never in FP8") for name in ("lora", "lora grad")
    }


def test_frozen_parameters_have_no_wgrad():
    explain = functools.partial(te.explain_fp8, LAYER, TINY, recipe=CURRENT)
    assert [p.product for p in explain(frozen=("kernel",)).products] == ["fprop", "dgrad"]
    assert explain(frozen=["kernel"]).kept[""] == 8 * 16 + 4, "nothing of x"
    model = nnx.eval_shape(lambda: nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)]))
    products = te.explain_fp8(model, TINY, frozen=("layers/0", "*/1/bias")).products
    assert [len([p for p in products if p.path == path]) for path in ("layers/0", "layers/1")] == [2, 3]
    with pytest.raises(ValueError, match="frozen has 'lm_head', which names no parameter; there are bias.*, kernel"):
        explain(frozen=("lm_head",))


# -- what is kept ---------------------------------------------------------------------------------------------


def test_bytes():
    kept = lambda module, recipe, **others: te.explain_fp8(module, TINY, recipe=recipe, **others).kept
    # The transposes of x and of the kernel in FP8, a scale f32 of each.
    assert kept(LAYER, CURRENT) == {"": 4 * 8 + 8 * 16 + 2 * 4}
    assert kept(LAYER, None) == {"": 2 * 8 * 16}, "the kernel in x's type; x is an argument"
    assert not kept(LAYER, CURRENT, train=False)
    two = nn.Sequential([LAYER, nn.gelu, te_flax.DenseGeneral(16)])
    assert set(kept(two, CURRENT)) == {"", "layers_0", "layers_2"}

    class Again(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(te_flax.DenseGeneral)(16, name="one")(jnp.sin(x))

    explained = te.explain_fp8(Again(), TINY, recipe=CURRENT)
    assert explained.kept.get("one", 0) == 0 and at(explained, "one", "fprop")


# -- NNX, functions, arguments --------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs):
        self.plain = nnx.Linear(8, 8, rngs=rngs)
        self.hooked = nnx.Linear(8, 8, rngs=rngs, dot_general=te_nnx.DotGeneral())
        self.layers = nnx.List([te_nnx.DenseGeneral(8, 16, rngs=rngs)])
        made = nnx.split_rngs(splits=L)(nnx.vmap(lambda rngs: te_nnx.Linear(16, 16, rngs=rngs)))
        self.stack = made(rngs)

    def __call__(self, x):
        x = self.layers[0](self.hooked(nnx.remat(lambda layer, x: layer(x))(self.plain, x)))
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


@pytest.mark.filterwarnings("error::UserWarning")  # of state that is not there, and of gradients without it
@pytest.mark.parametrize("recipe", [DelayedScaling(), CURRENT])
def test_nnx(recipe):
    with te.autocast(recipe=CURRENT):  # without state
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    explained = te.explain_fp8(model, TINY, recipe=recipe)
    assert [(p.path, p.times) for p in explained.products if p.in_fp8] == [
        (path, times) for path, times in (("hooked/dot_general", 1), ("layers/0", 1), ("stack", L)) for _ in range(3)
    ]
    assert the_reason(explained, "plain") == "no hook; give Linear dot_general=te_jax.nnx.DotGeneral()"
    assert explained.modules["layers/0"] == "DenseGeneral" and fits(explained)
    linen = te.explain_fp8(LAYER, array(4, 8, dtype=jnp.float32), recipe=recipe)
    same = lambda explained, path: [(p.product, p.operands, p.op) for p in at(explained, path)]
    assert same(explained, "layers/0") == same(linen, "")
    assert type(model.plain) is nnx.Linear, "the model itself is left as it is"


def test_functions_have_the_names_of_scopes():
    def loss(params, x):
        with jax.named_scope("first"):
            x = dense(x, params["a"], recipe=CURRENT)
        with jax.named_scope("second"):
            return jnp.sum(jnp.tanh(x) @ params["b"])

    explained = te.explain_fp8(loss, dict(a=array(8, 16), b=array(16, 4)), TINY)
    assert [(p.path, p.in_fp8) for p in explained.products] == [("first", True)] * 3 + [("second", False)] * 3
    step = te.explain_fp8(jax.grad(loss), dict(a=array(8, 16), b=array(16, 4)), TINY, train=False)
    assert [(p.product, p.in_fp8) for p in at(step, "first")] == [(n, True) for n in ("fprop", "dgrad", "wgrad")]


def test_arguments():
    x, key = np.ones((4, 8), np.float32), jax.eval_shape(jax.random.key, 0)
    variables = jax.eval_shape(LAYER.init, key, x)
    assert in_fp8(te.explain_fp8(LAYER, x, variables=variables, recipe=DelayedScaling(), train=False)) == 1
    with te.autocast(recipe=CURRENT):
        in_8_bits = jax.eval_shape(lambda key: te_flax.fp8_model_init(LAYER, key, x), key)
        sums = jax.eval_shape(lambda held: te_flax.wgrads(LAYER, held, x), variables)
    for held in (in_8_bits, {**variables, **sums}):
        assert in_fp8(te.explain_fp8(LAYER, x, variables=held, recipe=CURRENT)) == 3
    mlp = te_flax.LayerNormMLP(intermediate_dim=F, intermediate_dropout_rate=0.1)
    assert in_fp8(te.explain_fp8(mlp, X, deterministic=False, recipe=CURRENT, train=False)) == 2, "dropout has a key"
    for error, match, call in (
        (TypeError, "model is <class .*make an instance of it", lambda: te.explain_fp8(te_flax.LayerNormMLP, X)),
        (TypeError, "recipe is .*pass an instance", lambda: te.explain_fp8(LAYER, X, recipe=DelayedScaling)),
        (TypeError, "train is 1; pass True or False", lambda: te.explain_fp8(LAYER, X, train=1)),
        (TypeError, "variables is .*pass None", lambda: te.explain_fp8(jnp.sin, X, variables={})),
        (TypeError, "DenseGeneral: inputs is int32", lambda: te.explain_fp8(LAYER, array(4, 8, dtype=jnp.int32))),
    ):
        with pytest.raises(error, match=match):
            call()
    assert not is_explained(), "not after an error either"


def test_the_table_of_stats_has_the_others():
    explained = te.explain_fp8(Plain(), TINY, recipe=CURRENT, train=False)
    assert te.fp8_stats_table({}, explained).splitlines()[-1].startswith(".: forward not in FP8: no hook; a product")
    with pytest.raises(TypeError, match="fp8_stats_table: explained is 1; pass None or what te_jax.explain_fp8"):
        te.fp8_stats_table({}, 1)
