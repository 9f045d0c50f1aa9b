"""Probes of te_jax.optim, parameters in FP8, low-rank adaptation, quantized kernels and checkpoint policies."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from probes import Probe

import te_jax as te
import te_jax.flax as te_flax
from te_jax import checkpoint_policies, layers, recipe
from te_jax.optim.master import Requantized

CURRENT, BLOCK = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()
MODEL = te_flax.DenseGeneral(8)
LORA = te_flax.DenseGeneral(8, enable_low_rank_adaptation=True, low_rank_adaptation_dim=2)
X = jax.ShapeDtypeStruct((2, 16), jnp.float32)
KEY = jax.random.key(0)
KERNEL = jax.ShapeDtypeStruct((16, 8), jnp.float32)
MASTERS = te.optim.master_weights(optax.adam(1e-3))
STATE = {"x_scale": jnp.ones(1), "x_amax_history": jnp.zeros((1, 4))}


def _shapes(fn, *args):
    """The result's shapes; all that is said is said while tracing."""
    return jax.eval_shape(fn, *args)


def _under(fn, by=CURRENT):
    def call(*args):
        with te.autocast(True, by):
            return fn(*args)

    return call


@cache
def wide(model=MODEL):
    return _shapes(lambda x: _unboxed(model.init(KEY, x))["params"], X)


def _unboxed(tree):
    return nn.meta.unbox(tree)


@cache
def narrow():
    return _shapes(_under(lambda params, x: te_flax.fp8_params(MODEL, {"params": params}, x)["params"]), wide(), X)


@cache
def narrow_metas():
    return {"params": wide(), "fp8_metas": STATE}


def _metas_in(tx):
    return _shapes(tx.init, narrow_metas())


def _update(tx, params, grads, state=None, by=CURRENT, pass_params=True):
    state = _shapes(tx.init, params) if state is None else state
    run = (lambda g, s, p: tx.update(g, s, p)) if pass_params else (lambda g, s, p: tx.update(g, s))
    return _shapes(run if by is None else _under(run, by), grads, state, params)


def _create(params, tx, masters=None):
    make = lambda params, masters: te_flax.TrainState.create(
        apply_fn=MODEL.apply, params=params, tx=tx, masters=masters
    )
    return _shapes(make, params, masters)


def _masked(mask, params=None):
    tx = te.optim.adamw_fp8(1e-3, mask=mask)
    return _update(tx, params or {"w": KERNEL}, params or {"w": KERNEL}, by=None)


def _quantize(kernel=KERNEL, **options):
    return _shapes(lambda k: layers.quantize_kernel(k, **{"recipe": CURRENT, **options}), kernel)


def _requantized_for_an_array():
    kernel = jax.tree.leaves(narrow(), is_leaf=lambda n: isinstance(n, layers.QuantizedKernel))
    (kernel,) = (leaf for leaf in kernel if isinstance(leaf, layers.QuantizedKernel))
    return _shapes(te.optim.apply_updates, wide(), {**wide(), "kernel": Requantized(kernel)})


def _adamw(name, kwargs, outcome=None, words="", **more):
    return Probe(f"adamw_fp8 {name}", lambda: te.optim.adamw_fp8(**{"learning_rate": 1e-3, **kwargs}), outcome, words)


def _policy(name, call, outcome=None, words=""):
    return Probe(f"checkpoint_policies {name}", call, outcome, words)


where = r"te_jax\.optim\.adamw_fp8: "
ARGUMENTS = [
    _adamw("learning_rate text", dict(learning_rate="1e-3"), TypeError, where + "learning_rate is '1e-3'; pass a num"),
    _adamw("learning_rate None", dict(learning_rate=None), TypeError, where + "learning_rate is None; pass a number"),
    _adamw("learning_rate bool", dict(learning_rate=True), TypeError, where + "learning_rate is True; pass a number"),
    _adamw("learning_rate negative", dict(learning_rate=-1e-3), ValueError, where + "learning_rate is -0.001; pass"),
    _adamw("learning_rate nan", dict(learning_rate=float("nan")), ValueError, where + "learning_rate is nan; pass"),
    _adamw("learning_rate of axes", dict(learning_rate=jnp.ones(3)), ValueError, where + "learning_rate is .*scalar"),
    _adamw("learning_rate schedule", dict(learning_rate=optax.linear_schedule(0.0, 1e-3, 10))),
    _adamw("learning_rate array", dict(learning_rate=jnp.float32(1e-3))),
    _adamw("learning_rate numpy", dict(learning_rate=np.float32(1e-3))),
    _adamw("b1 above 1", dict(b1=1.5), ValueError, where + "b1 is 1.5; pass a number at least 0 and below 1"),
    _adamw("b1 one", dict(b1=1.0), ValueError, where + "b1 is 1.0; pass a number at least 0 and below 1"),
    _adamw("b1 negative", dict(b1=-0.1), ValueError, where + "b1 is -0.1; pass a number at least 0"),
    _adamw("b1 text", dict(b1="0.9"), TypeError, where + "b1 is '0.9'; pass a number"),
    _adamw("b1 schedule", dict(b1=lambda count: 0.9), TypeError, where + "b1 is .*; pass a number"),
    _adamw("b1 numpy above 1", dict(b1=np.float32(1.5)), ValueError, where + "b1 is .*1.5.*; pass a number"),
    _adamw("b2 one", dict(b2=1), ValueError, where + "b2 is 1; pass a number"),
    _adamw("b2 percent", dict(b2=99.9), ValueError, where + "b2 is 99.9; pass a number"),
    _adamw("b2 too small for b1", dict(b1=0.9, b2=0.5), ValueError, where + "b2 is 0.5, .* b1 is 0.9.*; pass b2 above"),
    _adamw("b1 and b2 in turn", dict(b1=0.999, b2=0.9), ValueError, where + "b2 is 0.9, .*0.999.*; pass b2 above"),
    _adamw("moments that clip", dict(b1=0.5, b2=0.9999), UserWarning, where + "b1 is 0.5 and b2 .*; pass .*optax.ad"),
    _adamw("b1 zero", dict(b1=0.0)),
    _adamw("b2 of language models", dict(b2=0.95)),
    _adamw("eps negative", dict(eps=-1e-8), ValueError, where + "eps is -1e-08; pass a number at least 0"),
    _adamw("eps text", dict(eps="1e-8"), TypeError, where + "eps is '1e-8'; pass a number"),
    _adamw("eps zero", dict(eps=0.0), UserWarning, where + "eps is 0.0 and eps_root .* NaN; pass eps=1e-8"),
    _adamw("eps zero next to eps_root", dict(eps=0.0, eps_root=1e-8)),
    _adamw("eps_root negative", dict(eps_root=-1e-8), ValueError, where + "eps_root is -1e-08; pass a number"),
    _adamw("weight_decay negative", dict(weight_decay=-0.1), ValueError, where + "weight_decay is -0.1; pass a number"),
    _adamw("weight_decay text", dict(weight_decay="0.1"), TypeError, where + "weight_decay is '0.1'; pass a number"),
    _adamw("weight_decay None", dict(weight_decay=None), TypeError, where + "weight_decay is None; pass a number"),
    _adamw("nesterov text", dict(nesterov="no"), TypeError, where + "nesterov is 'no'; pass True or False"),
    _adamw("nesterov int", dict(nesterov=1), TypeError, where + "nesterov is 1; pass True or False"),
    Probe("scale_by_adam_fp8 b1", lambda: te.optim.scale_by_adam_fp8(1.5), ValueError, "scale_by_adam_fp8: b1 is 1.5;"),
    Probe("inject_hyperparams", lambda: _update(
        optax.inject_hyperparams(te.optim.adamw_fp8)(1e-3, weight_decay=0.1), {"w": KERNEL}, {"w": KERNEL}, by=None)),
    Probe("mask text", lambda: _masked("kernel"), TypeError, where + "mask has 'kernel'; pass .* True and False"),
    Probe("mask tree of text", lambda: _masked({"w": "yes"}), TypeError, where + r"mask has 'yes' at \['w'\]; pass"),
    Probe("mask function of text", lambda: _masked(lambda p: {"w": "no"}), TypeError, where + r"mask .*\['w'\]; pass"),
    Probe("mask function", lambda: _masked(lambda p: {"w": False})),
    Probe("mask tree", lambda: _masked({"w": True})),
]  # fmt: skip

ADAM = te.optim.adamw_fp8(1e-3)
W = {"w": KERNEL}
STEPS = [
    Probe("adamw_fp8 ints", lambda: _shapes(ADAM.init, {"n": jax.ShapeDtypeStruct((3,), jnp.int32)}), TypeError,
          where + r"parameter \['n'\] is int32; mask it out"),
    Probe("adamw_fp8 complex", lambda: _shapes(ADAM.init, {"n": jax.ShapeDtypeStruct((3,), jnp.complex64)}), TypeError,
          where + r"parameter \['n'\] is complex64"),
    Probe("adamw_fp8 FP8 parameters", lambda: _shapes(ADAM.init, narrow()), ValueError,
          where + r"parameter \['kernel'\] lives in FP8; put te_jax.optim.master_weights around"),
    Probe("adamw_fp8 FP8 array", lambda: _shapes(ADAM.init, {"w": jax.ShapeDtypeStruct((8,), jnp.float8_e4m3fn)}),
          ValueError, where + r"parameter \['w'\] is float8_e4m3fn, .*; .*master_weights"),
    Probe("adamw_fp8 FP8 state", lambda: _metas_in(ADAM), ValueError, where + ".*fp8_metas.*; .*fp8_masked"),
    Probe("adamw_fp8 FP8 state, masked", lambda: _metas_in(te_flax.fp8_masked(ADAM))),
    Probe("adamw_fp8 other state", lambda: _update(te.optim.scale_by_adam_fp8(), W, W, optax.adam(1e-3).init({})),
          TypeError, "fp8: state is .*; pass what init returned"),
    Probe("adamw_fp8 other tree", lambda: _update(ADAM, W, {"v": KERNEL}, _shapes(ADAM.init, W)), ValueError,
          where + "updates .* another tree.*; init"),
    Probe("adamw_fp8 other shape", lambda: _update(ADAM, W, {"w": X}, _shapes(ADAM.init, W)), ValueError,
          where + r"the gradient of \['w'\] has shape \(2, 16\).*\(16, 8\)"),
    Probe("adamw_fp8 int gradients", lambda: _update(ADAM, W, {"w": jax.ShapeDtypeStruct((16, 8), jnp.int32)}),
          TypeError, where + r"the gradient of \['w'\] is int32; .*floating"),
    Probe("adamw_fp8 gradients of no dtype", lambda: te.optim.scale_by_adam_fp8().update(
        {"w": np.zeros((2, 8), jax.dtypes.float0)}, te.optim.scale_by_adam_fp8().init({"w": jnp.ones((2, 8))})),
        TypeError, r"the gradient of \['w'\] is void; pass a floating"),
    Probe("adamw_fp8 step", lambda: _update(ADAM, W, W)),
    Probe("adamw_fp8 bf16", lambda: _update(ADAM, *[{"w": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)}] * 2)),
    Probe("adamw_fp8 in MultiSteps", lambda: _update(optax.MultiSteps(ADAM, 2), W, W)),
    Probe("adamw_fp8 masked", lambda: _update(optax.masked(ADAM, {"w": False}), W, W)),
    Probe("adamw_fp8 scalar and empty", lambda: _shapes(ADAM.init, {"s": jax.ShapeDtypeStruct((), jnp.float32)})),
    Probe("state_sharding spec", lambda: te.optim.state_sharding(KERNEL, PartitionSpec("dp")), TypeError,
          r"state_sharding: sharding is .*; pass .*NamedSharding\(mesh, .*"),
    Probe("state_sharding leaf", lambda: te.optim.state_sharding(3, _sharding()), TypeError,
          "state_sharding: leaf is 3; pass an array"),
    Probe("state_sharding", lambda: te.optim.state_sharding(KERNEL, _sharding())),
]  # fmt: skip


def _sharding():
    return NamedSharding(jax.make_mesh((1,), ("dp",)), PartitionSpec("dp"))


where = r"te_jax\.optim\.master_weights: "
FP8_MASTERS = [
    Probe("master_weights of a function", lambda: te.optim.master_weights(optax.adamw), TypeError,
          where + "inner is <function adamw.*; pass an optax.GradientTransformation.*call it"),
    Probe("master_weights of None", lambda: te.optim.master_weights(None), TypeError, where + "inner is None; pass"),
    Probe("master_weights of a number", lambda: te.optim.master_weights(1e-3), TypeError, where + "inner is 0.0"),
    Probe("master_weights without FP8", lambda: _shapes(MASTERS.init, wide()), UserWarning,
          where + "params holds no kernel in FP8.*; make them by te_jax.flax.fp8_params, or leave"),
    Probe("master_weights twice", lambda: _shapes(te.optim.master_weights(MASTERS).init, narrow()), UserWarning,
          where + "params holds no kernel in FP8.* around once"),
    Probe("master_weights with FP8 state", lambda: _shapes(MASTERS.init, {"params": narrow(), "fp8_metas": STATE}),
          ValueError, where + ".*fp8_metas.*fp8_masked"),
    Probe("master_weights init", lambda: _shapes(MASTERS.init, narrow())),
    Probe("master_weights of MultiSteps", lambda: _shapes(
        te.optim.master_weights(optax.MultiSteps(optax.adam(1e-3), 2)).init, narrow())),
    Probe("master_weights of adamw_fp8", lambda: _shapes(te.optim.master_weights(ADAM).init, narrow())),
    Probe("master_weights no params", lambda: _update(MASTERS, narrow(), wide(), pass_params=False), ValueError,
          where + "update got no params; pass them"),
    Probe("master_weights no autocast", lambda: _update(MASTERS, narrow(), wide(), by=None), ValueError,
          where + "there is no recipe in force.*; call update .* under the autocast"),
    Probe("master_weights other recipe", lambda: _update(MASTERS, narrow(), wide(), by=BLOCK), ValueError,
          where + ".*one scale.*scales of blocks"),
    Probe("master_weights other state", lambda: _update(MASTERS, narrow(), wide(), optax.EmptyState()), TypeError,
          where + "state is EmptyState.*; pass what init returned"),
    Probe("master_weights other shape", lambda: _update(MASTERS, narrow(), {**wide(), "kernel": X}), ValueError,
          where + r"the gradient of \['kernel'\] is .*\[2, 16\].*\[16, 8\].*te_jax.value_and_grad"),
    Probe("master_weights FP8 gradient", lambda: _update(MASTERS, narrow(), narrow()), TypeError,
          where + r"the gradient of \['kernel'\] is QuantizedKernel.*te_jax.value_and_grad"),
    Probe("master_weights step", lambda: _update(MASTERS, narrow(), wide())),
    Probe("apply_updates of a plain optimizer", lambda: _shapes(te.optim.apply_updates, narrow(), wide()), TypeError,
          r"te_jax\.optim\.apply_updates: .*; put te_jax.optim.master_weights around"),
    Probe("apply_updates of an array", _requantized_for_an_array, TypeError,
          r"te_jax\.optim\.apply_updates: .*\['kernel'\].*; pass the params that"),
    Probe("optax.apply_updates", lambda: _shapes(
        lambda p, u: optax.apply_updates(p, u), narrow(), _update(MASTERS, narrow(), wide())[0]),
        ValueError, "Requantized"),
    Probe("apply_updates", lambda: _shapes(te.optim.apply_updates, wide(), wide())),
    Probe("beside other shape", lambda: _shapes(te.optim.beside, narrow(), {**wide(), "kernel": X}), ValueError,
          r"te_jax\.optim\.beside: .*\(2, 16\) for a kernel of \(16, 8\); pass"),
    Probe("beside ints", lambda: _shapes(te.optim.beside, narrow(), {
        **wide(), "kernel": jax.ShapeDtypeStruct((16, 8), jnp.int32)}), TypeError,
        r"te_jax\.optim\.beside: arrays holds int32.*; pass the param"),
    Probe("beside FP8", lambda: _shapes(te.optim.beside, narrow(), narrow()), TypeError,
          r"te_jax\.optim\.beside: arrays holds a QuantizedKernel.*; pass the param"),
    Probe("beside without FP8", lambda: _shapes(te.optim.beside, wide(), wide()), ValueError,
          r"te_jax\.optim\.beside: params holds no kernel in FP8.*; "),
    Probe("beside", lambda: _shapes(te.optim.beside, narrow(), wide())),
    Probe("TrainState FP8, adam", lambda: _create(narrow(), optax.adam(1e-3)), ValueError,
          "TrainState.create: .*put te_jax.optim.master_weights around"),
    Probe("TrainState FP8, adamw_fp8", lambda: _create(narrow(), ADAM), ValueError,
          "put te_jax.optim.master_weights around"),
    Probe("TrainState masters, no wrapper", lambda: _create(narrow(), optax.adam(1e-3), wide()), ValueError,
          "TrainState.create: .*put te_jax.optim.master_weights around"),
    Probe("TrainState masters, no FP8", lambda: _create(wide(), optax.adam(1e-3), wide()), ValueError,
          "beside: params holds no kernel in FP8, so masters"),
    Probe("TrainState wrapper, no FP8", lambda: _create(wide(), MASTERS), UserWarning,
          where + "params holds no kernel in FP8"),
    Probe("TrainState MultiSteps around", lambda: _create(narrow(), optax.MultiSteps(MASTERS, 2)), ValueError,
          "TrainState.create: .*MultiSteps included"),
    Probe("TrainState apply_if_finite around", lambda: _create(narrow(), optax.apply_if_finite(MASTERS, 2)), ValueError,
          "TrainState.create: .*no masters of them outside of its ApplyIfFiniteState; put te_jax.optim.master_weights"),
    Probe("TrainState chain around", lambda: _create(narrow(), optax.chain(MASTERS, optax.scale(0.5))), ValueError,
          "TrainState.create: tx has a transformation behind master_weights.*put te_jax.optim.master_weights around"),
    Probe("TrainState clip before", lambda: _create(narrow(), optax.chain(optax.clip_by_global_norm(1.0), MASTERS))),
    Probe("TrainState", lambda: _create(narrow(), MASTERS, wide())),
]  # fmt: skip


def _collection(fn, model=MODEL, variables=None, by=CURRENT, **options):
    """`fn` of te_jax.flax on a model, whose variables are {"params": ...} unless they are given."""
    run = lambda v, x: fn(model, v, x, **options)
    variables = {"params": wide()} if variables is None else variables
    return _shapes(run if by is None else _under(run, by), variables, X)


PARAMS, KERNELS = te_flax.fp8_params, te_flax.fp8_kernels
PARAMETERS = [
    Probe("fp8_params class", lambda: _collection(PARAMS, te_flax.DenseGeneral), TypeError,
          r"te_jax\.flax\.fp8_params: model is .*DenseGeneral.*; pass a Linen module.*"),
    Probe("fp8_params function", lambda: _collection(PARAMS, MODEL.apply), TypeError,
          r"te_jax\.flax\.fp8_params: model is .*; pass a Linen module"),
    Probe("fp8_params of params", lambda: _collection(PARAMS, variables=wide()), ValueError,
          r"""te_jax\.flax\.fp8_params: variables has \['bias', 'kernel'\].*; pass \{"params": params"""),
    Probe("fp8_params of an array", lambda: _collection(PARAMS, variables=KERNEL), TypeError,
          r"te_jax\.flax\.fp8_params: variables is .*; pass \{"),
    Probe("fp8_params gradients", lambda: _collection(PARAMS, gradients="no"), TypeError,
          r"te_jax\.flax\.fp8_params: gradients is 'no'; pass True or False"),
    Probe("fp8_params no autocast", lambda: _collection(PARAMS, by=None), ValueError,
          r"te_jax\.flax\.fp8_params: there is no recipe in force; call it under"),
    Probe("fp8_params twice", lambda: _collection(PARAMS, variables={"params": narrow()}), ValueError,
          r"te_jax\.flax\.fp8_params: .*all are in FP8 already"),
    Probe("fp8_params", lambda: _collection(PARAMS)),
    Probe("fp8_kernels of params", lambda: _collection(KERNELS, variables=wide()), ValueError,
          r"te_jax\.flax\.fp8_kernels: variables has \['bias', 'kernel'\].*; pass \{"),
    Probe("fp8_kernels gradients", lambda: _collection(KERNELS, gradients=0), TypeError,
          r"te_jax\.flax\.fp8_kernels: gradients is 0; pass True or False"),
    Probe("fp8_kernels no autocast", lambda: _collection(KERNELS, by=None), ValueError,
          r"te_jax\.flax\.fp8_kernels: there is no recipe in force; call it under"),
    Probe("fp8_kernels", lambda: _collection(KERNELS, gradients=False)),
    Probe("wgrads of params", lambda: _collection(te_flax.wgrads, variables=wide()), ValueError,
          r"te_jax\.flax\.wgrads: variables has \['bias', 'kernel'\].*; pass \{"),
    Probe("wgrads class", lambda: _collection(te_flax.wgrads, te_flax.DenseGeneral), TypeError,
          r"te_jax\.flax\.wgrads: model is .*; pass a Linen module"),
    Probe("wgrads", lambda: _collection(te_flax.wgrads)),
    Probe("fp8_model_init class", lambda: _shapes(_under(
        lambda x: te_flax.fp8_model_init(te_flax.DenseGeneral, KEY, x)), X), TypeError,
        r"te_jax\.flax\.fp8_model_init: model is .*; pass a Linen module"),
    Probe("fp8_model_init gradients", lambda: _shapes(_under(
        lambda x: te_flax.fp8_model_init(MODEL, KEY, x, gradients=None)), X), TypeError,
        r"te_jax\.flax\.fp8_model_init: gradients is None; pass True or False"),
    Probe("fp8_model_init no autocast", lambda: _shapes(lambda x: te_flax.fp8_model_init(MODEL, KEY, x), X), ValueError,
          r"te_jax\.flax\.fp8_model_init: there is no recipe in force; call it under"),
    Probe("fp8_model_init", lambda: _shapes(_under(lambda x: te_flax.fp8_model_init(MODEL, KEY, x)), X)),
    Probe("dequantize_params text", lambda: te_flax.dequantize_params("params"), TypeError,
          r"te_jax\.flax\.dequantize_params: params has 'params'; pass a tree of arrays"),
    Probe("dequantize_params", lambda: _shapes(te_flax.dequantize_params, narrow())),
    Probe("quantize_kernel contract text", lambda: _quantize(contract="1"), TypeError,
          r"quantize_kernel: contract is '1'; pass a positive int"),
    Probe("quantize_kernel contract bool", lambda: _quantize(contract=True), TypeError,
          r"quantize_kernel: contract is True; pass a positive int"),
    Probe("quantize_kernel contract 3", lambda: _quantize(contract=3), ValueError,
          r"quantize_kernel: contract is 3, but kernel has 2 axes; use fewer"),
    Probe("quantize_kernel recipe class", lambda: _quantize(recipe=recipe.Float8CurrentScaling), TypeError,
          r"quantize_kernel: recipe is .*; pass an instance"),
    Probe("quantize_kernel no recipe", lambda: _quantize(recipe=None), TypeError,
          "quantize_kernel: recipe is None; pass"),
    Probe("quantize_kernel gradients", lambda: _quantize(gradients="no"), TypeError,
          r"quantize_kernel: gradients is 'no'; pass True or False"),
    Probe("quantize_kernel list", lambda: layers.quantize_kernel([[1.0]], recipe=CURRENT), TypeError,
          r"quantize_kernel: kernel is .*; pass an array"),
    Probe("quantize_kernel twice", lambda: _quantize(_quantize()), TypeError,
          r"quantize_kernel: kernel is .*; pass an array"),
    Probe("quantize_kernel ints", lambda: _quantize(jax.ShapeDtypeStruct((16, 8), jnp.int32)), TypeError,
          r"quantize_kernel: kernel is int32.*; pass an array"),
    Probe("quantize_kernel no meta", lambda: _quantize(recipe=recipe.DelayedScaling()), ValueError,
          r"quantize_kernel: meta is None.*; pass one"),
    Probe("quantize_kernel", _quantize),
]  # fmt: skip


def _joined(lora, base):
    return _shapes(te_flax.join_lora, lora, base)


def _split():
    return te_flax.split_lora(wide(LORA))


ADAPTERS = [
    Probe("split_lora without", lambda: te_flax.split_lora(wide()), ValueError,
          "split_lora: no parameter is of low-rank adaptation; set enable_low_rank_adaptation"),
    Probe("split_lora text", lambda: te_flax.split_lora("params"), TypeError,
          "split_lora: params is of the type str; pass a mapping"),
    Probe("split_lora None", lambda: te_flax.split_lora(None), TypeError,
          "split_lora: params is of the type NoneType; pass a mapping"),
    Probe("split_lora", _split),
    Probe("join_lora same twice", lambda: _joined(_split()[0], wide(LORA)), ValueError,
          "join_lora: lora and base both have .*lora_a_kernel.*; pass the two trees of split_lora"),
    Probe("join_lora base twice", lambda: _joined(wide(), wide()), ValueError, "join_lora: lora and base both have"),
    Probe("join_lora leaf and tree", lambda: _joined({"a": {"lora_a_kernel": KERNEL}}, {"a": KERNEL}), ValueError,
          "join_lora: base has a parameter a, .*lora has a/lora_a_kernel below it; pass"),
    Probe("join_lora tree and leaf", lambda: _joined({"a": KERNEL}, {"a": {"kernel": KERNEL}}), ValueError,
          "join_lora: lora has a parameter a, .*base has a/kernel below it; pass"),
    Probe("join_lora pair", lambda: te_flax.join_lora(_split(), {}), TypeError,
          "join_lora: lora is of the type tuple; pass a mapping"),
    Probe("join_lora base None", lambda: te_flax.join_lora({}, None), TypeError,
          "join_lora: base is of the type NoneType; pass"),
    Probe("join_lora", lambda: _joined(*_split())),
    Probe("lora_mask without", lambda: te_flax.lora_mask(wide()), ValueError,
          "lora_mask: no parameter is of low-rank adaptation; set enable_low_rank_adaptation"),
    Probe("lora_mask", lambda: te_flax.lora_mask(wide(LORA))),
    Probe("lora_mask in partition", lambda: _update(optax.partition(
        {True: optax.adamw(1e-4), False: optax.set_to_zero()}, te_flax.lora_mask), wide(LORA), wide(LORA))),
]  # fmt: skip

save, offload = checkpoint_policies.save, checkpoint_policies.offload
POLICIES = [
    _policy("no names", save, ValueError, r"policies\.save: names is empty, .*; pass some of te_gemm"),
    _policy("typo", lambda: save("te_gemms"), ValueError, r"save: names has 'te_gemms'.*did you mean 'te_gemm'"),
    _policy("number", lambda: save(1), TypeError, r"policies\.save: names has 1; pass strings"),
    _policy("list", lambda: save(["te_gemm"]), TypeError, r"policies\.save: names has \['te_gemm'\]; pass strings"),
    _policy("offload typo", lambda: offload("te_atention"), ValueError, r"offload: names has 'te_atention'.*did you"),
    _policy("offload save text", lambda: offload("a", save="b"), TypeError, r"offload: save is 'b'; pass a tuple"),
    _policy("offload save typo", lambda: offload("a", save=("te_b",)), ValueError, r"offload: save has 'te_b'.*pass"),
    _policy("offload both", lambda: offload("a", save=("a",)), ValueError, r"'a' is in names, but .*; leave it out"),
    _policy("offload statistics", lambda: offload("te_statistics"), ValueError, "STATISTICS always stay on the device"),
    _policy("offload none", offload, ValueError, r"policies\.offload: names is empty, .*; pass some of te_gemm"),
    _policy("names of users", lambda: save("ffn1", "te_gemm")),
    _policy("offload", lambda: offload("ffn1", save=("te_gemm",))),
    _policy("with jax's", lambda: jax.checkpoint_policies.save_from_both_policies(
        save("te_gemm"), jax.checkpoint_policies.dots_saveable)),
]  # fmt: skip

PROBES = [*ARGUMENTS, *STEPS, *FP8_MASTERS, *PARAMETERS, *ADAPTERS, *POLICIES]
