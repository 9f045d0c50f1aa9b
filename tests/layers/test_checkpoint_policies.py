"""What runs again in the backward pass under `jax.checkpoint` with te_jax's policies, by the calls in the jaxpr."""

import dataclasses
import functools
import pathlib
import re
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import checkpoint_policies as policies
from te_jax import recipe
from te_jax.checkpoint_policies import ATTENTION, GEMM, KERNEL, NAMES, QUANTIZED

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
H = 32
LAYER = dict(
    hidden_size=H, mlp_hidden_size=2 * H, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
    layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), enable_rotary_pos_emb=True, dtype=jnp.bfloat16,
)  # fmt: skip
MODULES = {
    "dense": te_flax.DenseGeneral(H, dtype=jnp.bfloat16),
    "mlp": te_flax.LayerNormMLP(2 * H, activations=("silu", "linear"), dtype=jnp.bfloat16),
    "moe": te_flax.MoEBlock(4, 2, 2 * H, dtype=jnp.bfloat16),
    "layer": te_flax.TransformerLayer(**LAYER),
}
X = on_device(np.random.default_rng(0).normal(size=(1, 16, H)), jnp.bfloat16)
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def in_force(name):
    return te.autocast(RECIPES[name] is not None, RECIPES[name] or RECIPES["delayed"])


def loss_of(module):
    """A loss whose gradient reads the module's output."""

    def loss(variables, x):
        y = module.apply(variables, x)
        return jnp.sum(jnp.sin((y[0] if isinstance(y, tuple) else y).astype(jnp.float32)))

    return loss


def case(module, x=X):
    """The loss, and variables that a trace takes."""
    return loss_of(module), jax.eval_shape(lambda: nn.meta.unbox(module.init(jax.random.key(0), x)))


# What a policy may spare, of the names of the primitives.
KINDS = {
    "gemm": r"te_gemm.*|dot_general",
    "attention": r"te_attention.*",
    "quantized": r"te_quantize.*|te_norm.*|te_activation.*",
}


def calls(fn, *args) -> Counter:
    """How often each kind of primitive is in the jaxpr of the gradient of `fn`."""
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(fn, argnums=(0, 1)))(*args).jaxpr)]
    return Counter(kind for kind, pattern in KINDS.items() for name in names if re.fullmatch(pattern, name))


# Policy: what then runs as often as without `jax.checkpoint`, the rest more often.
SPARED = {
    "nothing": (None, ()),
    "te_gemms_saveable": (policies.te_gemms_saveable, ("gemm",)),
    "dots and te_gemms": (policies.dots_and_te_gemms_with_no_batch_dims, ("gemm",)),
    "gemms, attention": (policies.save(GEMM, ATTENTION), ("gemm", "attention")),
    "attention": (policies.save(ATTENTION), ("attention",)),
    "all": (policies.save(*NAMES), ("gemm", "attention", "quantized")),
    "by name": (jax.checkpoint_policies.save_only_these_names(*NAMES), ("gemm", "attention", "quantized")),
    "offload": (policies.offload(GEMM, save=(ATTENTION,)), ("gemm", "attention")),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_what_runs_again(module, name):
    with in_force(name):
        loss, variables = case(MODULES[module])
        plain = calls(loss, variables, X)
        for policy, spared in SPARED.values() if module == "layer" else list(SPARED.values())[:6]:
            again = calls(jax.checkpoint(loss, policy=policy), variables, X)
            for kind in plain:
                if kind == "quantized" and name == "bf16":  # nothing is: norms run again
                    continue
                assert (again[kind] == plain[kind]) == (kind in spared), (policy, kind, plain, again)
        if name != "bf16":  # what these policies are for
            assert calls(jax.checkpoint(loss, policy=DOTS), variables, X)["gemm"] > plain["gemm"]


def test_the_counts_of_a_dense_layer():
    """One GEMM, and x and kernel quantized, each with a pass for its amax, is what `jax.checkpoint` adds."""
    with in_force("current"):
        loss, variables = case(MODULES["dense"])
        count = lambda policy: calls(jax.checkpoint(loss, policy=policy), variables, X)
        plain = {"gemm": 3, "quantized": 6}
        assert calls(loss, variables, X) == plain
        assert count(DOTS) == {"gemm": 4, "quantized": 10}
        assert count(policies.dots_and_te_gemms_with_no_batch_dims) == {"gemm": 3, "quantized": 10}
        assert count(policies.save(GEMM, QUANTIZED)) == {"gemm": 3, "quantized": 8}
        assert count(policies.save(GEMM, QUANTIZED, KERNEL)) == plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_on_a_mesh(name, kind):
    with jax.set_mesh(jax.make_mesh((2,), ("dp",), axis_types=(kind,))), in_force(name):
        x = jax.device_put(jnp.ones((2, 128, H), jnp.bfloat16), PartitionSpec("dp"))
        loss, variables = case(MODULES["layer"], x)
        plain = calls(loss, variables, x)
        assert calls(jax.checkpoint(loss, policy=policies.save(*NAMES)), variables, x) == plain
        gemms = calls(jax.checkpoint(loss, policy=policies.te_gemms_saveable), variables, x)
        assert gemms["gemm"] == plain["gemm"] and gemms["attention"] > plain["attention"]


class Stack(nn.Module):
    """Two layers under nn.scan, each under nn.remat."""

    policy: object = None
    remat: bool = True
    fields: dict = dataclasses.field(default_factory=lambda: LAYER)

    @nn.compact
    def __call__(self, x):
        body = lambda module, x, _: (module(x), None)
        body = nn.remat(body, policy=self.policy, prevent_cse=False) if self.remat else body
        axes = {"params": 0, "fp8_metas": 0}
        scan = nn.scan(
            body, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params={nn.PARTITION_NAME: None}
        )
        return scan(te_flax.TransformerLayer(**self.fields), x, None)[0]


def test_lifted_layers_give_the_same():
    """Under nn.scan and nn.remat: what runs again, and gradients bit for bit, also of what waited on the host."""
    ways = {
        "plain": Stack(remat=False),
        "all": Stack(policies.save(*NAMES)),
        "offload": Stack(policies.offload(GEMM, QUANTIZED, save=(ATTENTION, KERNEL))),
    }
    with in_force("delayed"):
        variables = nn.meta.unbox(quick_init(ways["plain"].init)(jax.random.key(0), X))
        counts, grads, texts = {}, {}, {}
        for way, module in ways.items():
            loss = loss_of(module)
            counts[way] = calls(loss, variables, X)
            traced = jax.jit(jax.grad(loss)).trace(variables, X)
            grads[way], texts[way] = traced.lower().compile()(variables, X), str(traced.jaxpr)
    assert counts["all"] == counts["offload"] == counts["plain"]
    jax.tree.map(np.testing.assert_array_equal, *(grads[way] for way in ("all", "plain")))
    jax.tree.map(np.testing.assert_array_equal, *(grads[way] for way in ("offload", "plain")))
    moved = [line.split("=")[0] for line in texts["offload"].splitlines() if "device_put" in line]
    assert len(moved) == 14 and not any("[]" in to for to in moved)  # 3 outputs and 4 x in FP8 go and come; no scale


def test_each_tensor_is_saved_once(capsys):
    """A GEMM's output has two names and may come of a dot that another policy saves; kernels that the caller quantized
    are his."""
    module = te_flax.LayerNormMLP(2 * H, dtype=jnp.bfloat16, ffn1_ckpt_name="mine")

    def saved(name, policy, more=None, module=module):
        with in_force(name):
            loss, variables = case(module)
            variables = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), variables)
            kernels = te_flax.fp8_kernels(module, variables, X) if more else {}
            layer = jax.checkpoint(lambda variables, x: loss({**variables, **kernels}, x), policy=policy)
            jax.ad_checkpoint.print_saved_residuals(layer, variables, X)
        lines = capsys.readouterr().out.splitlines()
        return Counter(line.split()[0] for line in lines if not re.search(r"from (the argument|a constant)|\[\]", line))

    both = jax.checkpoint_policies.save_from_both_policies(
        policies.dots_and_te_gemms_with_no_batch_dims, jax.checkpoint_policies.save_only_these_names("mine", "ffn2")
    )
    z, y = "bf16[1,16,1,64]", "bf16[1,16,32]"
    assert saved("bf16", both) == {z: 1, y: 1}
    got = saved("current", policies.save(*NAMES))
    assert got == {
        **{z: 1, y: 1, "f8_e4m3fn[32,1,16]": 1, "f8_e4m3fn[64,1,16]": 1},  # GEMMs, x of wgrad
        **{"f8_e4m3fn[32,1,64]": 1, "f8_e4m3fn[64,32]": 1, "f32[1,16]": 2},  # kernels, mean and rstd
    }
    attention = te_flax.MultiHeadAttention(16, 2, num_gqa_groups=1, dtype=jnp.bfloat16)  # query and kv of one norm
    assert saved("delayed", policies.save(QUANTIZED), module=attention)["f8_e4m3fn[32,1,16]"] == 2  # out's x too
    kernels = {"f8_e4m3fn[32,1,64]": 0, "f8_e4m3fn[64,32]": 0}
    assert saved("current", policies.save(*NAMES), "kernels") == +Counter(got | kernels)


LLAMA = LAYER | dict(hidden_size=4096, mlp_hidden_size=14336, num_attention_heads=32, num_gqa_groups=8, use_bias=False)


def kept(policy, remat: bool, variables, x) -> tuple[int, int]:
    """MB on the device and on the host that a Llama layer of 8192 tokens keeps for its backward pass, under the recipe
    in force."""
    module = Stack(policy, remat, LLAMA)
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(module.apply, *args)[1])(variables, x).jaxpr
    residuals = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - set(jaxpr.invars)
    sums = Counter()
    for v in residuals:
        sums["host" in str(v.aval)] += prod(v.aval.shape) * v.aval.dtype.itemsize
    return tuple(round(sums[on_host] / 2e6) for on_host in (False, True))  # of two layers


@pytest.mark.parametrize(("name", "column"), [("delayed", 1), ("bf16", 2)])
def test_table_of_the_page(name, column):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "howto" / "recomputation.md").read_text()
    rows = re.search(r"\| policy \| MB in FP8 .*?\n\|[-|]*\n(.*?)\n\n", page, re.S)[1].splitlines()
    x = jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16)
    with in_force(name):  # no policy changes the variables
        variables = jax.eval_shape(lambda x: nn.meta.unbox(Stack(fields=LLAMA).init(jax.random.key(0), x)), x)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        text = re.search("`(.*?)`", cells[0])[1] if "`" in cells[0] else "None"
        remat = cells[0] != "no `jax.checkpoint`"
        policy = eval(text if remat else "None", vars(policies) | {"jax": jax})
        said = [int(number) for number in re.findall(r"\d+", cells[column])]
        with in_force(name):
            found = kept(policy, remat, variables, x)
        assert [*said, 0][:2] == list(found), row
    assert len(rows) == 10


@pytest.mark.parametrize(("name", "count"), [("delayed", 12), ("current", 8), ("block", 8)])
def test_names_of_users(name, count):
    """Of two GEMMs each of x and kernel: values and scale, and under delayed scaling the amax."""
    module = te_flax.LayerNormMLP(2 * H, quantization_checkpoint_name="quantized", dtype=jnp.bfloat16)
    with in_force(name):
        loss, variables = case(module)
        jaxpr = jax.make_jaxpr(jax.grad(loss))(variables, X).jaxpr
    named = [eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name"]
    assert named.count("quantized") == count
    assert {GEMM, QUANTIZED, KERNEL, "ffn1", "ffn2"} <= set(named)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: policies.save(), ValueError, r"save: names is empty, .*; pass some of te_gemm, "),
        (lambda: policies.save("te_gemms"), ValueError, r"save: names has 'te_gemms', .* \(did you mean 'te_gemm'\?\)"),
        (lambda: policies.offload("te_quantised"), ValueError, "offload: names has 'te_quantised'.*'te_quantized'"),
        (lambda: policies.save(1), TypeError, "save: names has 1; pass strings"),
        (lambda: policies.save([GEMM]), TypeError, r"save: names has \['te_gemm'\]; pass strings"),
        (lambda: policies.offload(GEMM, save=ATTENTION), TypeError, r"save is 'te_attention'; pass a tuple.*\('te_att"),
        (lambda: policies.offload(GEMM, save=(GEMM,)), ValueError, "'te_gemm' is in names, but .* leave it out of one"),
        (lambda: policies.offload("te_statistics"), ValueError, "STATISTICS always stay"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=r"te_jax.checkpoint_policies\..*" + text):
        call()


def test_functions_of_attention_are_named():
    """Without a module, and by the XLA way, where only the output is saved."""
    from te_jax.ops.attention import dot_product_attention

    q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    for way in ("xla", None):
        attend = functools.partial(dot_product_attention, implementation=way)
        names = [
            e.params["name"] for e in equations(jax.make_jaxpr(attend)(q, q, q).jaxpr) if e.primitive.name == "name"
        ]
        assert ATTENTION in names
