"""Probes of what takes gradients: `te_jax.value_and_grad`, `te_jax.nnx.value_and_grad`, `accumulate_gradients`; and of
logical axes that do not fit."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from probes import Probe
from probes_modules import T, V

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx

P, X = {"w": jnp.ones(3)}, jnp.ones((2, 4))


def loss(params, x):
    return jnp.sum(params["w"]) * jnp.sum(x)


def grad(fun=loss, argnums=0, args=(P, X), **options):
    return lambda: jax.eval_shape(te.value_and_grad(fun, argnums, **options), *args)


def accumulated(microbatches, fun=lambda params, fp8, x: loss(params, x)):
    def run():
        state = te_flax.TrainState.create(apply_fn=None, params=P, tx=optax.sgd(0.1))
        return state.accumulate_gradients(fun, microbatches)

    return run


def model():
    return te_nnx.LayerNorm(4, rngs=nnx.Rngs(0))


def nnx_grad(fun=lambda model, x: jnp.sum(model(x)), args=None, **options):
    return lambda: te_nnx.value_and_grad(fun, **options)(*((model(), X) if args is None else args()))


def axes(cls, *sizes, call=(X,), **fields):
    module = cls(*sizes, **fields)
    return lambda: jax.eval_shape(lambda key: module.init(key, *call), jax.random.key(0))


FIELDS = [  # (class, sizes, field, parameter)
    (te_flax.DenseGeneral, (8,), "kernel_axes", "kernel"),
    (te_flax.DenseGeneral, (8,), "bias_axes", "bias"),
    (te_flax.LayerNormDenseGeneral, (8,), "kernel_axes", "kernel"),
    (te_flax.LayerNormDenseGeneral, (8,), "scale_axes", "scale"),
    (te_flax.LayerNormMLP, (8,), "kernel_axes_1", "wi_kernel"),
    (te_flax.LayerNormMLP, (8,), "kernel_axes_2", "wo_kernel"),
    (te_flax.LayerNormMLP, (8,), "bias_axes_1", "wi_bias"),
    (te_flax.LayerNormMLP, (8,), "ln_bias_axes", "ln_bias"),
    (te_flax.LayerNorm, (), "scale_axes", "scale"),
    (te_flax.MoEBlock, (2, 1, 8), "gate_axes", "gate_kernel"),
    (te_flax.MoEBlock, (2, 1, 8), "kernel_axes_1", "wi_0"),
    (te_flax.MoEBlock, (2, 1, 8), "kernel_axes_2", "wo"),
    (te_flax.LMHead, (8,), "kernel_axes", "kernel"),
    (te_flax.DenseGeneral, (8,), "input_axes", None),
    (te_flax.LayerNormDenseGeneral, (8,), "layernorm_input_axes", None),
    (te_flax.LayerNormDenseGeneral, (8,), "dot_input_axes", None),
    (te_flax.LayerNormMLP, (8,), "layernorm_input_axes", None),
    (te_flax.LayerNormMLP, (8,), "dot_1_input_axes", None),
    (te_flax.LayerNormMLP, (8,), "dot_2_input_axes", None),
    (te_flax.MoEBlock, (2, 1, 8), "layernorm_input_axes", None),
]
SWITCHED_ON = {"bias_axes": dict(use_bias=True), "bias_axes_1": dict(use_bias=True)}
SWITCHED_ON |= {"ln_bias_axes": dict(enable_layernorm=True)}


def of_axes(cls, sizes, field, parameter, names):
    on = SWITCHED_ON.get(field, {})
    but = "inputs have 2 axes" if parameter is None else f"the parameter {parameter} has shape"
    words = rf"{cls.__name__}: {field} is .*, but {but}.*; give a name, or None, for each axis"
    run = axes(cls, *sizes, **on, **{field: names})
    return Probe(f"{cls.__name__} {field} of {len(names)}", run if parameter else in_mesh(run), V, words)


def in_mesh(run):
    """`run` under a mesh, where axes of inputs say something."""

    def under_mesh():
        with jax.set_mesh(jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))):
            return run()

    return under_mesh


LONE, WRONG_PLACE = "has_aux is True, but .* returns float32.*return .loss, aux", "called with 2 arguments by place"

PROBES = [
    Probe("grad", grad()),
    Probe("grad of both", grad(argnums=(0, 1))),
    Probe("grad has_aux", grad(lambda *a: (loss(*a), {"aux": 1.0}), has_aux=True)),
    Probe("grad has_aux, a list", grad(lambda *a: [loss(*a), 1.0], has_aux=True)),
    *(Probe(f"grad argnums={wrong!r}", grad(argnums=wrong), kind, "value_and_grad: argnums is .*; pass an int or a tup")
      for wrong, kind in (("0", T), ("params", T), (("params",), V), ((0, "1"), V), (None, T), (1.5, V), ((), V),
                          ((0, 0), V), (True, T), ({0}, T))),
    *(Probe(f"grad argnums={wrong!r}", grad(argnums=wrong), V, f"value_and_grad: argnums has .*{WRONG_PLACE}")
      for wrong in (2, -3, (0, 7))),
    Probe("grad by name", lambda: te.value_and_grad(loss)(params=P, x=X), V, "argnums has 0.*0 arguments by place"),
    Probe("grad has_aux='yes'", grad(has_aux="yes"), T, "has_aux is 'yes'; pass True or False"),
    Probe("grad has_aux, lone result", grad(has_aux=True), T, f"value_and_grad: {LONE}"),
    Probe("grad has_aux, three", grad(lambda *a: (loss(*a), 1, 2), has_aux=True), T, "has_aux is True, but .* returns"),
    Probe("grad of a pair", grad(lambda *a: (loss(*a), 1)), T, "the loss of .* is .*has_aux=True takes a pair"),
    Probe("grad of an array", grad(lambda params, x: params["w"]), T, r"is float32\[3\]; return a floating scalar"),
    Probe("grad of an int", grad(lambda params, x: 3), T, "the loss of .* is .*3.*; return a floating"),
    Probe("grad of None", grad(lambda params, x: None), T, "the loss of .* is None; return a floating scalar"),
    # microbatches
    Probe("microbatches", accumulated({"x": jnp.ones((2, 4))}, lambda params, fp8, b: loss(params, b["x"]))),
    *(Probe(f"microbatches {name}", accumulated(wrong), V, f"accumulate_gradients: microbatches.*{words}.*pass arrays")
      for name, wrong, words in (
          ("scalar", jnp.float32(1), r"has shape \(\)"), ("number", 3, r"has shape \(\)"), ("none", None, "is None"),
          ("empty tree", {}, "without an array"), ("empty", jnp.ones((0, 2)), r"has shape \(0, 2\)"),
          ("one scalar", {"a": jnp.ones((2, 2)), "b": 1.0}, r"\['b'\] has shape \(\)"),
          ("other counts", {"a": jnp.ones((2, 2)), "b": jnp.ones(3)}, r"\['b'\] has shape \(3,\), micro.*\['a'\]"))),
    Probe("microbatches, loss_fn=3", accumulated(X, 3), T, "accumulate_gradients: loss_fn is 3; pass a function"),
    Probe("microbatches, an array", accumulated(X, lambda params, fp8, x: x), T, r"is float32\[4\]; return a floating"),
    # NNX
    Probe("nnx grad", nnx_grad()),
    Probe("nnx grad of nnx.Dict",
          nnx_grad(lambda d, x: jnp.sum(d.a(x)), lambda: (nnx.Dict(a=model()), X))),
    *(Probe(f"nnx grad of {name}", nnx_grad(args=lambda made=made: (made(), X)), T,
            f"nnx.value_and_grad: argument 0 of .* is .*; pass an nnx.Module.*{words}")
      for name, made, words in (
          ("a dict", lambda: {"a": model()}, "nnx.Dict"), ("a list", lambda: [model()], "nnx.List"),
          ("an array", lambda: X, ""), ("a Linen module", te_flax.LayerNorm, "Flax Linen te_jax.value_and_grad"),
          ("Linen's variables", lambda: {"params": P}, "Flax Linen te_jax.value_and_grad"))),
    Probe("nnx grad, argnums=1", nnx_grad(argnums=1), T, r"argument 1 of .* is float32\[2, 4\]"),
    Probe("nnx grad, argnums=2", nnx_grad(argnums=2), V, f"argnums has 2.*{WRONG_PLACE}"),
    Probe("nnx grad, argnums='0'", nnx_grad(argnums="0"), T, "argnums is '0'; pass an int"),
    Probe("nnx grad, has_aux", nnx_grad(lambda m, x: (jnp.sum(m(x)), 1), has_aux=True)),
    Probe("nnx grad, lone result", nnx_grad(has_aux=True), T, f"nnx.value_and_grad: {LONE}"),
    Probe("nnx grad of a pair", nnx_grad(lambda m, x: (jnp.sum(m(x)), 1)), T, "has_aux=True takes a pair"),
    Probe("nnx grad, wrt={}", nnx_grad(wrt={"a": 1}), T, "wrt is .*; pass a filter of variables, such as nnx.Param"),
    Probe("nnx grad, wrt='params'", nnx_grad(wrt="params"), V, "wrt is 'params', which selects no variable"),
    Probe("nnx grad, no LoRA", nnx_grad(wrt=nnx.LoRAParam), V, "wrt is .*LoRAParam.*selects no variable"),
    Probe("from_linen swapped", lambda: te_nnx.from_linen(model(), {"params": {}}), T,
          "variables is <LayerNorm>; pass collections.*the module of te_jax.nnx comes second"),
    Probe("from_linen of params", lambda: te_nnx.from_linen({"scale": X}, model()), V, "pass collections of variables"),
    Probe("from_linen into Linen", lambda: te_nnx.from_linen({"params": {}}, te_flax.LayerNorm()), T,
          "from_linen: module is <LayerNorm>; pass an nnx.Module"),
    Probe("to_linen of variables", lambda: te_nnx.to_linen({"params": {}}), T, "to_linen: module is .*nnx.Module"),
    Probe("convert_fp8_state swapped", lambda: te_nnx.convert_fp8_state(te.recipe.DelayedScaling(), model()), T,
          "convert_fp8_state: module is DelayedScaling.*pass an nnx.Module"),
    *(of_axes(*field, names) for field in FIELDS for names in (("a",), ("a", "b", None, None, "c"))
      if len(names) > 1 or field[3] not in ("bias", "scale", "ln_bias")),
]  # fmt: skip
