"""Training of parameters that live in FP8: their gradients, their masters, and steps that are those of f32."""

import re
from functools import cache, partial
from itertools import product

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from states import assert_equal, data, restored, saved

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import QuantizedKernel, dense, layernorm_mlp, quantize_experts, quantize_kernel
from te_jax.layers.parameters import requantize
from te_jax.ops.formats import format_of
from te_jax.recipe import DelayedScaling, FixedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

CURRENT, BLOCK, MX = Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()
DELAYED = DelayedScaling(amax_history_len=3)
WIDTH, FFN, LAYERS = 24, 160, 2


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        axes = dict(kernel_axes_1=("embed", None, "mlp"), kernel_axes_2=("mlp", "embed"))
        return te_flax.LayerNormMLP(intermediate_dim=FFN, name="mlp", **axes)(x, True, residual=True)[0], None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(("params", "fp8_metas", "fp8_kernels"), 0)
        names = {nn.PARTITION_NAME: "layers"}
        layers = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=LAYERS, metadata_params=names)
        x = layers(name="layers")(x, None)[0].reshape(*x.shape[:-1], 4, -1)
        return te_flax.DenseGeneral((2, 5), axis=(-2, -1), kernel_axes=(None, "embed", None, None), name="head")(x)


NET = Net()
HEAD = te_flax.DenseGeneral(10, kernel_axes=("embed", "mlp"))


def loss_of(model):
    return lambda params, fp8, x: jnp.mean((model.apply({"params": params, **fp8}, x) - 1) ** 2)


def train_step(model):
    @partial(jax.jit, donate_argnums=0, static_argnums=2)
    def step(state, x, recipe):
        with te.autocast(True, recipe):
            loss, grads = te.value_and_grad(loss_of(model), (0, 1))(state.params, state.fp8, x)
            return state.apply_gradients(grads=grads), loss

    return step


STEP = {model: train_step(model) for model in (NET, HEAD)}


@cache
def initial(model, recipe, boxed=False):
    """The variables in f32, and as `fp8_params` makes them."""
    x = jnp.ones((4, WIDTH))

    def init(key):
        wide = model.init(key, x)
        return wide, te_flax.fp8_params(model, wide, x, gradients=recipe is MX)

    with te.autocast(True, recipe):
        made = jax.eval_shape(init, jax.random.key(0)) if boxed else nn.meta.unbox(jax.jit(init)(jax.random.key(0)))
    return made


def state_of(model, variables, tx, masters=None):
    others, params = flax.core.pop(variables, "params")
    copied = partial(jax.tree.map, jnp.copy)  # steps donate
    params, masters = copied(params), None if masters is None else copied(masters["params"])
    return te_flax.TrainState.create(
        apply_fn=model.apply, params=params, tx=tx, collections=copied(others), masters=masters
    )


def both(model, recipe, tx):
    """Training states of parameters in f32 and in FP8."""
    wide, narrow = initial(model, recipe)
    return state_of(model, wide, tx), state_of(model, narrow, te.optim.master_weights(tx), wide)


def masters(state):
    """The parameters in f32."""
    pick = lambda p, master: master if isinstance(p, QuantizedKernel) else p
    is_one = lambda leaf: isinstance(leaf, QuantizedKernel)
    return jax.tree.map(pick, state.params, state.opt_state.master, is_leaf=is_one)


def clipped(tx):
    """One program for both states: within another one XLA contracts products and sums as its fusions happen to be."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), tx)
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


ADAMW, ADAMW_FP8 = clipped(optax.adamw(1e-2)), clipped(te.optim.adamw_fp8(1e-2))


@pytest.mark.parametrize(
    "recipe, tx",
    [(CURRENT, ADAMW), (BLOCK, ADAMW_FP8), (MX, ADAMW), (FixedScaling(), ADAMW)],
    ids=["current", "block-adamw_fp8", "mxfp8", "fixed"],
)
def test_is_training_in_f32(recipe, tx, rng):
    """Losses, masters, and FP8 kernels as those that a step of parameters in f32 makes: bit for bit."""
    x = data(rng, 4, 3, 5, WIDTH)
    wide, narrow = both(NET, recipe, tx)
    with te.autocast(True, recipe):
        grad = jax.jit(te.value_and_grad(loss_of(NET), (0, 1)))
        for batch in x:
            want, grads = grad(wide.params, wide.fp8, batch)
            wide = wide.apply_gradients(grads=grads)
            loss, grads = grad(narrow.params, narrow.fp8, batch)
            narrow = narrow.apply_gradients(grads=grads)
            np.testing.assert_array_equal(loss, want)
        assert_equal(masters(narrow), wide.params)
        made = jax.jit(lambda v: te_flax.fp8_params(NET, v, x[0], gradients=recipe is MX))({"params": wide.params})
    assert_equal(narrow.params, made["params"])


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK, FixedScaling(), MX], ids=["current", "block", "fixed", "mxfp8"])
def test_stacks_are_quantized_at_once(recipe, rng):
    """Kernels of experts, and of experts of layers: by one call for all, not by a loop; each as by itself."""
    values = rng.standard_normal((2, 3, 40, 2, 24)) * np.exp2(np.arange(3))[:, None, None, None]
    experts = jnp.asarray(values, jnp.float32)
    alone = jax.jit(lambda a: quantize_kernel(a, recipe=recipe).tensor._replace(amax=None))
    want = [[alone(experts[i, j]) for j in range(3)] for i in range(2)]
    want = jax.tree.map(lambda *a: jnp.stack(a).reshape(2, 3, *a[0].shape), *want[0], *want[1])
    old = QuantizedKernel(want, 1, 2, jnp.dtype(jnp.float32), format_of(recipe, "kernel"))
    fresh = lambda old, array: requantize(old, array, recipe, "it")
    for pick in (lambda a: a), (lambda a: a[0]):
        args = jax.tree.map(pick, (old, experts))
        assert_equal(jax.jit(fresh)(*args), args[0])
        program = str(jax.make_jaxpr(fresh)(*args))
        assert "te_quantize" in program and "scan[" not in program and "while[" not in program
    slots = tuple(experts[0, :, :, a] for a in range(2))
    of_experts = jax.jit(lambda slots: quantize_experts(slots, recipe=recipe).tensor._replace(amax=None))
    assert_equal(of_experts(slots), args[0].tensor)
    # There is no array of both in their own type.
    assert not re.search(r"= (stack|concatenate)\b", str(jax.make_jaxpr(of_experts)(slots)))


PRECISIONS = list(product((False, True), repeat=3))


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK, MX], ids=["current", "block", "mxfp8"])
def test_gradients_at_every_precision(recipe, rng):
    """Those of a kernel that is an array of the dequantized values next to the same FP8: also where GEMMs out of FP8
    read it, and outside of autocast."""
    x, kernel = data(rng, 5, WIDTH), data(rng, WIDTH, 2, 33).at[3].set(0)
    wo, gamma = data(rng, 33, 7), jnp.ones(WIDTH)
    made = partial(quantize_kernel, recipe=recipe, gradients=recipe is MX)
    kernels = jax.jit(lambda *of: tuple(map(made, of)))(kernel, wo)

    def loss(kernels, x, recipe):
        y = jnp.sin(dense(x, kernels[0], recipe=recipe))
        z = layernorm_mlp(x, gamma, None, *kernels, activations=("silu", "linear"), norm="rmsnorm", recipe=recipe)
        return jnp.sum(y**2) + jnp.sum(jnp.cos(z))

    def arrays(kernels, x, recipe):
        beside = lambda wide: tuple(k.with_wide(w) for k, w in zip(kernels, wide))
        values = tuple(k.dequantize() for k in kernels)
        if recipe is None:
            return jax.value_and_grad(loss, (0, 1))(values, x, None)
        return jax.value_and_grad(lambda wide, x: loss(beside(wide), x, recipe), (0, 1))(values, x)

    recipes = [type(recipe)(override_linear_precision=high) for high in PRECISIONS] + [None]
    run = jax.jit(lambda of, kernels, x: [of(kernels, x, r) for r in recipes], static_argnums=0)
    got, want = run(te.value_and_grad(loss, (0, 1)), kernels, x), run(arrays, kernels, x)
    assert_equal(got, want)
    assert all(np.abs(g).min(-1).max() > 0 for _, (grads, _) in got for g in grads)
    assert len({float(value) for value, _ in got}) == 2, "by the precision of fprop"


def test_gradient_of_dequantize(rng):
    """What a loss makes of the dequantized values has a gradient, as that of an array; a plain `jax.grad` has none."""
    kernel = data(rng, 2, WIDTH, 6)  # of two layers
    stack = jax.jit(jax.vmap(partial(quantize_kernel, recipe=CURRENT)))(kernel)
    loss = lambda of, scale: jnp.sum(jnp.sin(of["w"].dequantize()) * scale)
    value, (grad,) = jax.jit(te.value_and_grad(loss, (0,)))({"w": stack}, kernel)
    assert_equal(grad["w"], jnp.cos(jax.jit(lambda q: q.dequantize())(stack)) * kernel)
    with te.autocast(True, CURRENT), pytest.raises(ValueError, match="jax.grad; te_jax.value_and_grad gives"):
        jax.jit(jax.grad(lambda q: jnp.sum(dense(kernel[0].T, q, recipe=CURRENT)), allow_int=True))(
            jax.tree.map(lambda a: a[0], stack)
        )


def test_small_updates_are_kept(rng):
    """Each moves a number by a 2000th of it, which is a 60th of E4M3's least step, and 64 of them are as one of 64."""
    kernel = 1 + jnp.abs(data(rng, WIDTH, 6))
    tx = te.optim.master_weights(optax.sgd(2.0**-11))

    @partial(jax.jit, static_argnums=1)
    def run(kernel, steps):
        q = quantize_kernel(kernel, recipe=CURRENT)
        q, opt_state = {"w": q}, tx.init(te.optim.beside({"w": q}, {"w": kernel}))

        def step(carry, _):
            updates, opt_state = tx.update({"w": jnp.ones_like(kernel)}, carry[1], carry[0])
            return (te.optim.apply_updates(carry[0], updates), opt_state), None

        return lax.scan(step, (q, opt_state), None, steps)[0]

    with te.autocast(True, CURRENT):
        (one, _), (many, state) = run(kernel, 1), run(kernel, 64)
    due = kernel
    for _ in range(64):
        due = due - np.float32(2.0**-11)
    assert_equal(state.master["w"], due)
    assert_equal(many["w"], jax.jit(partial(quantize_kernel, recipe=CURRENT))(due))
    same = np.mean(one["w"].tensor.data == many["w"].tensor.data)
    assert same < 0.9, "FP8 has moved"
    start = jax.jit(partial(quantize_kernel, recipe=CURRENT))(kernel)
    assert np.mean(one["w"].tensor.data == start.tensor.data) > 0.95, "no single update does"


def test_restored_run(rng, tmp_path):
    """Bytes of the state; through orbax, and on, bit for bit. Without `masters` it starts from dequantized values."""
    x = data(rng, 4, 6, WIDTH)
    _, narrow = initial(HEAD, CURRENT)
    state = state_of(HEAD, narrow, te.optim.master_weights(optax.adamw(1e-2)))
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size(state.params["kernel"]) == WIDTH * 10 + 4
    assert size(state.opt_state.master) == 4 * WIDTH * 10
    assert_equal(state.opt_state.master["kernel"], narrow["params"]["kernel"].dequantize())
    for batch in x[:2]:
        state, _ = STEP[HEAD](state, batch, CURRENT)
    saved(tmp_path / "state", state)
    again = restored(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_equal(again, state)
    for batch in x[2:]:
        state, want = STEP[HEAD](state, batch, CURRENT)
        again, loss = STEP[HEAD](again, batch, CURRENT)
        np.testing.assert_array_equal(loss, want)
    assert_equal(again, state)


def test_microbatches(rng):
    """`accumulate_gradients`, also inside of GEMMs (`wgrads`), and optax.MultiSteps, as with parameters in f32."""
    x = data(rng, 4, 6, WIDTH)
    tx = optax.MultiSteps(optax.adam(1e-2), 2)
    wide, narrow = both(HEAD, CURRENT, tx)

    @partial(jax.jit, static_argnames="sums")
    def accumulate(state, x, sums=False):
        wgrads = te_flax.wgrads(HEAD, state.variables, x[0]) if sums else None
        return state.accumulate_gradients(loss_of(HEAD), x, wgrads)

    with te.autocast(True, CURRENT):
        assert_equal(accumulate(narrow, x), accumulate(wide, x))
        assert_equal(accumulate(narrow, x, sums=True), accumulate(wide, x, sums=True))
    for i, batch in enumerate(x):
        wide, _ = STEP[HEAD](wide, batch, CURRENT)
        before = jax.tree.map(jnp.copy, narrow.params)
        narrow, _ = STEP[HEAD](narrow, batch, CURRENT)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)  # of Adam in two programs
        jax.tree.map(close, masters(narrow), wide.params)
        moved = np.mean(before["kernel"].tensor.data_t != narrow.params["kernel"].tensor.data_t)
        assert (moved > 0) == (i % 2 == 1)


def test_delayed_scaling(rng):
    """Losses and gradients are those of arrays of the same values. The kernel's state stays, that of x and the gradient
    moves."""
    x = data(rng, 6, WIDTH)
    _, narrow = initial(HEAD, DELAYED)
    state = state_of(HEAD, narrow, te.optim.master_weights(optax.sgd(1e-2)))
    wide = te_flax.dequantize_params(narrow["params"])
    metas = narrow["fp8_metas"]
    right = {"fp8_metas": metas | {"kernel_scale": 1 / narrow["params"]["kernel"].tensor.scale_inv[None]}}
    with te.autocast(True, DELAYED):
        want, (grads, new) = jax.jit(te.value_and_grad(loss_of(HEAD), (0, 1)))(wide, right, x)
    after, loss = STEP[HEAD](state, x, DELAYED)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    moved = lambda leaf: (wide["kernel"] - leaf) / 1e-2
    np.testing.assert_allclose(moved(after.opt_state.master["kernel"]), grads["kernel"], rtol=1e-4, atol=1e-4)
    for name, leaf in after.fp8["fp8_metas"].items():
        np.testing.assert_array_equal(leaf, metas[name] if "kernel" in name else new["fp8_metas"][name])


def test_boxes():
    """Gradients, masters and moments are boxed with the names of the kernels, in the order of their axes."""
    _, narrow = initial(NET, CURRENT, boxed=True)
    tx = te.optim.master_weights(optax.adam(1e-2))
    x = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
    create = lambda params: te_flax.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)
    state = jax.eval_shape(create, narrow["params"])
    after = jax.eval_shape(lambda state, x: STEP[NET](state, x, CURRENT)[0], state, x)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    specs = nn.get_partition_spec(after)
    held = jax.tree.structure(jax.eval_shape(nn.meta.unbox, after))
    assert jax.tree.structure(specs, is_leaf=lambda node: isinstance(node, P)) == held
    assert specs.params["layers"]["mlp"]["wi_kernel"].tensor.data_t == P("layers", None, "mlp", "embed")
    for tree in (specs.opt_state.master, specs.opt_state.inner[0].mu):
        assert tree["layers"]["mlp"]["wi_kernel"] == P("layers", "embed", None, "mlp")
        assert tree["head"]["kernel"] == P(None, "embed", None, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_meshes(kind, rng, on_host):
    """A step on four devices is that of one; masters lie as their kernels do."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2)
    model = te_flax.DenseGeneral(16)
    x = data(rng, 8, WIDTH)
    state, _ = both(model, CURRENT, optax.sgd(1.0))[::-1]
    step = train_step(model)
    want, _ = step(jax.tree.map(jnp.copy, state), x, CURRENT)
    spec = lambda a: {(WIDTH, 16): P("fsdp", "tp"), (16, WIDTH): P("tp", "fsdp")}.get(a.shape, P())
    put = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, spec(a))), state)
    with jax.set_mesh(mesh):
        got, _ = step(put, jax.device_put(x, NamedSharding(mesh, P("fsdp"))), CURRENT)
    master, data_t = got.opt_state.master["kernel"], got.params["kernel"].tensor.data_t
    assert (master.sharding.spec, data_t.sharding.spec) == (P("fsdp", "tp"), P("tp", "fsdp"))
    np.testing.assert_allclose(master, want.opt_state.master["kernel"], rtol=1e-5, atol=1e-6)  # sums in another order
    assert np.abs(master - state.opt_state.master["kernel"]).max() > 1e-2
    values = lambda state: np.asarray(jax.device_get(state.params["kernel"].tensor.data_t), np.float32)
    assert np.mean(values(got) != values(want)) < 0.02, "but at the middle between two FP8 numbers"


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_memory(remat):
    """Neither the gradient's slots nor dequantized kernels are in memory: the passes of scanned layers take less than
    an array of f32 more than those of parameters in f32 do (XLA's CPU multiplies FP8 as f16, 2 bytes)."""
    x, loss = jnp.ones((1, WIDTH)), loss_of(NET)
    wide, narrow = initial(NET, CURRENT)
    numbers = wide["params"]["layers"]["mlp"]["wi_kernel"].size * 2
    grad = te.value_and_grad(jax.checkpoint(loss) if remat else loss)
    with te.autocast(True, CURRENT):
        compiled = [jax.jit(grad).lower(v["params"], {}, x).compile() for v in (wide, narrow)]
    of_wide, of_narrow = (c.memory_analysis() for c in compiled)
    assert of_narrow.argument_size_in_bytes < of_wide.argument_size_in_bytes - 2.9 * numbers
    assert of_narrow.output_size_in_bytes == of_wide.output_size_in_bytes
    assert of_narrow.temp_size_in_bytes < of_wide.temp_size_in_bytes + 3 * numbers


def test_refusals(rng):
    wide, narrow = initial(HEAD, CURRENT)
    params, tx = narrow["params"], te.optim.master_weights(optax.adamw(1e-2))
    grads, opt_state = jax.tree.map(jnp.ones_like, wide["params"]), jax.jit(tx.init)(params)
    for bare in (optax.adamw(1e-2), optax.MultiSteps(tx, 2)):
        with pytest.raises(ValueError, match="TrainState.create.*put te_jax.optim.master_weights around"):
            state_of(HEAD, narrow, bare)
    state = state_of(HEAD, wide, optax.adamw(1e-2)).replace(params=params)
    with (
        te.autocast(True, CURRENT),
        pytest.raises(ValueError, match="apply_gradients.*put te_jax.optim.master_weights"),
    ):
        state.apply_gradients(grads=grads)
    with pytest.raises(ValueError, match="master_weights: there is no recipe in force"):
        tx.update(grads, opt_state, params)
    with te.autocast(True, BLOCK), pytest.raises(ValueError, match="master_weights.*one scale.*scales of blocks"):
        tx.update(grads, opt_state, params)
    with te.autocast(True, CURRENT):
        with pytest.raises(ValueError, match="master_weights: update got no params"):
            tx.update(grads, opt_state)
        updates, _ = jax.jit(tx.update)(grads, opt_state, params)
        with pytest.raises(ValueError, match="Requantized"):
            optax.apply_updates(params, updates)
    with pytest.raises(TypeError, match="apply_updates.*put te_jax.optim.master_weights"):
        te.optim.apply_updates(params, grads)
    with pytest.raises(ValueError, match=r"beside: arrays holds \(24, 11\) for a kernel of \(24, 10\)"):
        te.optim.beside(params, wide["params"] | {"kernel": jnp.ones((WIDTH, 11))})
    with pytest.warns(UserWarning, match="params holds no kernel in FP8, so there are no masters"):
        plain = state_of(HEAD, wide, tx)  # nothing in FP8: no recipe is needed
    want = state_of(HEAD, wide, optax.adamw(1e-2))
    step = jax.jit(lambda state: state.apply_gradients(grads=grads).params)
    assert_equal(step(plain), step(want))
