"""Kernels quantized once: the same bits as quantizing in each pass, by fewer calls; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from quick_init import quick_init
from states import assert_equal, data, state_of

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import Projection, dense, layernorm_dense, layernorm_mlp, quantize_kernel
from te_jax.ops.formats import format_of
from te_jax.recipe import DelayedScaling, FixedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_jax.state import fp8

DELAYED, CURRENT, BLOCK = DelayedScaling(amax_history_len=3), Float8CurrentScaling(), Float8BlockScaling()
WIDTH, K = 24, 4  # features, microbatches
KERNELS = 2 + 1  # of Net: the scanned body's, traced once for all layers, and the head's


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return te_flax.LayerNormMLP(intermediate_dim=40, name="mlp")(x, True, residual=True)[0], None


class Net(nn.Module):
    carried: tuple = ("params", "fp8_metas", "fp8_kernels")

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(self.carried, 0)
        names = {nn.PARTITION_NAME: "layers"}
        layers = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=names)
        return te_flax.DenseGeneral(10, name="head")(layers(name="layers")(x, None)[0])


def calls(jaxpr, name):
    """How often a primitive of that name stands in a jaxpr, or in one within."""
    return sum(name in eqn.primitive.name for eqn in equations(jaxpr))


@pytest.mark.parametrize("recipe", [DELAYED, BLOCK], ids=["delayed", "block"])
def test_microbatches(recipe, rng):
    """Loss, gradients and the FP8 state of 4 microbatches; each kernel is quantized before, none in their loop."""
    x = data(rng, K, 3, 5, WIDTH) * jnp.asarray([1, 5, 2, 1.0])[:, None, None, None]
    state = nn.meta.unbox(state_of(Net(), recipe, x[0]))

    def step(state, x, cached):
        kernels = te_flax.fp8_kernels(Net(), state.variables, x[0]) if cached else {}
        loss = lambda params, fp8, x: jnp.mean(Net().apply({"params": params, **fp8, **kernels}, x) ** 2)
        return state.accumulate_gradients(loss, x)

    with te.autocast(True, recipe):
        both = jax.jit(lambda *args: [step(*args, cached) for cached in (True, False)]).trace(state, x)
        loops = [e.params for e in both.jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == K]
        cached, each = (calls(loop["jaxpr"].jaxpr, "te_quantize") for loop in loops)
        assert cached == each - KERNELS
        cached, each = both.lower().compile()(state, x)
        made = jax.jit(lambda variables: te_flax.fp8_kernels(Net(), variables, x[0]))
        program = made.lower(state.variables).compile().as_text()
    assert_equal(cached, each)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(each[1][0])), "gradients reach the parameters"
    assert "f8e4m3fn" in program and " dot(" not in program and "rsqrt" not in program, "nothing but the quantization"


@pytest.mark.parametrize("recipe", [DELAYED, BLOCK], ids=["delayed", "block"])
def test_inference(recipe, rng):
    """One layout, once for many calls; the FP8 state may move in between."""
    x, model = data(rng, 2, 5, WIDTH), Net()
    variables = nn.meta.unbox(state_of(model, recipe, x).variables)
    with te.autocast(True, recipe):
        kernels = te_flax.fp8_kernels(model, variables, jax.ShapeDtypeStruct(x.shape, x.dtype), gradients=False)
        cached, each = jax.jit(lambda v, k, x: (model.apply({**v, **k}, x), model.apply(v, x)))(variables, kernels, x)
        _, written = jax.eval_shape(lambda: model.apply(variables, x, mutable=True))
    np.testing.assert_array_equal(cached, each)
    assert "fp8_kernels" not in written, "else mutable=True would hand a copy on to the next parameters"
    held = kernels["fp8_kernels"]["head"]["kernel"]
    scales = held.tensor.columns[1].size
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(held.tensor._replace(amax=None))) == 10 * WIDTH + 4 * scales


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(10, name="dense")(nn.BatchNorm(use_running_average=False)(x))


def test_beside_what_a_pass_writes(rng):
    """Statistics that the pass would update do not stand in the way, and only kernels come back."""
    x = data(rng, 3, WIDTH)
    with te.autocast(True, CURRENT):
        variables = quick_init(Normed().init)(jax.random.key(0), x)
        made = te_flax.fp8_kernels(Normed(), variables, x)
    assert jax.tree.map(jnp.shape, nn.meta.unbox(made["fp8_kernels"]["dense"]["kernel"]).tensor.data) == (WIDTH, 10)
    assert made.keys() == {"fp8_kernels"}


def layer_of(kind, recipe, state, quantize):
    """A layer as a function of x and its kernels; `quantize`: None, or whether both layouts are made before."""
    of = lambda i: fp8.DenseMetas(*(fp8.observe(*s, recipe, d) for s, d in zip(state[i], ("fwd", "fwd", "bwd"))))
    metas = [of(i) if recipe.has_state else None for i in range(2)]

    def operand(i, kernel, contract=1):
        if quantize is None:
            return kernel
        meta = metas[i].kernel if recipe.has_state else None
        made = quantize_kernel(kernel, recipe=recipe, contract=contract, meta=meta, gradients=quantize)
        return made.with_wide(kernel)

    def run(x, w0, w1):
        gamma = jnp.ones(x.shape[-1])
        if kind == "dense":
            wide = x.reshape(*x.shape[:-1], 6, -1)
            kernel = w0[:, 0].reshape(6, -1, w0.shape[-1])
            return dense(wide, operand(0, kernel, 2), contract=2, recipe=recipe, metas=metas[0])
        if kind == "mlp":
            kernels = operand(0, w0), operand(1, w1)
            return layernorm_mlp(
                x, gamma, None, *kernels, norm="rmsnorm", recipe=recipe, metas=metas if metas[0] else None
            )
        also = Projection(operand(1, w0), None, metas[1])
        y, _ = layernorm_dense(x, operand(0, w0 * 2), gamma, norm="rmsnorm", also=[also], recipe=recipe, metas=metas[0])
        return y[0] * 3 + y[1]

    return run


@pytest.mark.parametrize(
    "recipe",
    [DELAYED, BLOCK, Float8CurrentScaling(override_linear_precision=(False, True, True))],
    ids=["delayed", "block", "fprop only"],
)
def test_layers(recipe, rng):
    """The same bits of every layer, also where a layout has to be transposed, and where GEMMs are not in FP8."""
    x, w0, w1 = data(rng, 5, 150), data(rng, 150, 1, 140), data(rng, 140, 150)
    state = [[(jnp.full(1, 3.0 + i), jnp.zeros(3)) for i in range(3)]] * 2

    @jax.jit
    def run(x, w0, w1, state):
        def value(x, w0, w1, state, kind, quantize):
            return jnp.mean(layer_of(kind, recipe, state, quantize)(x, w0, w1) ** 2)

        grads = lambda kind, quantize: jax.value_and_grad(value, (0, 1, 2, 3))(x, w0, w1, state, kind, quantize)
        return [[grads(kind, q) for q in (None, True, False)] for kind in ("dense", "mlp", "norm")]

    for each, both, one in run(x, w0, w1, state):
        assert_equal(both, each)
        assert_equal(one, each)


@pytest.mark.parametrize("recipe", [FixedScaling(), MXFP8BlockScaling()], ids=["fixed", "mxfp8"])
def test_dense_under_other_recipes(recipe, rng):
    """Blocks of 1 x 32 differ between the layouts: both have to be made for gradients, and one is refused there."""
    x, w = data(rng, 5, 150), data(rng, 150, 1, 140)

    @jax.jit
    def run(x, w):
        value = lambda x, w, quantize: jnp.mean(layer_of("dense", recipe, None, quantize)(x, w, None) ** 2)
        grads = [jax.value_and_grad(value, (0, 1))(x, w, quantize) for quantize in (None, True)]
        return grads, [value(x, w, False), grads[0][0]]

    (each, both), one = run(x, w)
    assert_equal(both, each)
    assert_equal(*one)
    if format_of(recipe, "kernel").block:
        with pytest.raises(ValueError, match="one layout.*gradients=True"):
            jax.grad(lambda x: jnp.sum(layer_of("dense", recipe, None, False)(x, w, None)))(x)


@pytest.mark.parametrize("gradients", [True, False])
def test_dequantized_mxfp8(gradients, rng):
    """Either layout: each number to 2**-4 of itself (E4M3 has 3 bits behind the first), or to half of E4M3's smallest
    step, 2**-10, times its block's scale, which is at most 2 * amax / 448."""
    w = data(rng, 6, 25, 1, 40)
    made = quantize_kernel(w, recipe=MXFP8BlockScaling(), contract=2, gradients=gradients)
    assert (made.tensor.data is None) == (not gradients) and made.shape == w.shape
    got = jax.jit(lambda q: q.dequantize())(made)
    assert np.all(np.abs(got - w) <= np.maximum(np.abs(w) * 2.0**-4, 2.0**-10 * 2 * np.max(np.abs(w)) / 448))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_meshes(kind, rng, on_host):
    """A sharded copy lies as its kernel does, and gives the same bits."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2)
    loss = lambda x, w, q: jnp.mean(dense(x, w if q is None else q.with_wide(w), recipe=CURRENT) ** 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(data(rng, 4, 6, 32), NamedSharding(mesh, P("fsdp")))
        w = jax.device_put(data(rng, 32, 48), NamedSharding(mesh, P("fsdp", "tp")))
        q = jax.jit(lambda w: quantize_kernel(w, recipe=CURRENT))(w)
        grads = [jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, q) for q in (q, None)]
    assert (q.tensor.data.sharding.spec, q.tensor.data_t.sharding.spec) == (P("fsdp", "tp"), P("tp", "fsdp"))
    assert_equal(*grads)
    assert grads[0][1][1].sharding == grads[1][1][1].sharding


def test_shard_map(rng, on_host):
    """Made inside or outside, of a kernel that all devices have: its gradient is the sum over devices."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
    x, w = data(rng, 4, 6, 32), data(rng, 32, 48)

    def loss(x, w, q, inside):
        def local(x, w, q):
            q = quantize_kernel(w, recipe=CURRENT) if inside else q
            return lax.psum(jnp.sum(dense(x, w if q is None else q.with_wide(w), recipe=CURRENT) ** 2), "dp")

        return jax.shard_map(local, mesh=mesh, in_specs=(P("dp"), P(), P()), out_specs=P())(x, w, q)

    @jax.jit
    def run(x, w):
        grads = jax.value_and_grad(loss, (0, 1))
        return grads(x, w, None, True), grads(x, w, quantize_kernel(w, recipe=CURRENT), False), grads(x, w, None, False)

    inside, outside, want = run(x, w)
    assert_equal(inside, want)
    assert_equal(outside, want)


def test_kernel_of_the_caller(rng):
    """Its entry would be another's: it is quantized as ever, or comes in FP8."""
    model, x, tied = te_flax.DenseGeneral(10, use_bias=False), data(rng, 5, WIDTH), data(rng, WIDTH, 10)
    with te.autocast(True, CURRENT):
        with pytest.raises(ValueError, match="no module of DenseGeneral quantizes one of its parameters: none mul"):
            te_flax.fp8_kernels(model, {}, x, kernel=tied)
        quantized = quantize_kernel(tied, recipe=CURRENT).with_wide(tied)
        got, want = jax.jit(lambda: [model.apply({}, x, kernel=k) for k in (quantized, tied)])()
    np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def head():
    """A dense layer, its variables and its collection under current scaling."""
    x, model = jnp.ones((2, WIDTH)), te_flax.DenseGeneral(10, name="head")
    variables = {"params": {"kernel": jnp.ones((WIDTH, 10)), "bias": jnp.zeros(10)}}
    with te.autocast(True, CURRENT):
        return model, x, variables, te_flax.fp8_kernels(model, variables, x)


@pytest.mark.parametrize(
    "change, recipe, text",
    [
        (
            lambda k: k,
            BLOCK,
            r"one scale, .* Float8BlockScaling needs float8_e4m3fn\[24, 10\] with scales of blocks of 128",
        ),
        (lambda k: jax.tree.map(lambda a: a.astype(jnp.bfloat16), k), CURRENT, r"is bfloat16\[24, 10\]"),
        (lambda k: jax.tree.map(lambda a: a[None], k), CURRENT, r"float8_e4m3fn\[1, 24, 10\]"),
        (lambda k: jax.tree.map(lambda a: a[:9] if a.ndim else a, k), CURRENT, r"float8_e4m3fn\[9, 10\]"),
    ],
    ids=["recipe", "cast", "stacked", "shape"],
)
def test_stale_collection(head, change, recipe, text):
    model, x, variables, kernels = head
    with te.autocast(True, recipe), pytest.raises(ValueError, match=f"DenseGeneral.*fp8_kernels entry kernel.*{text}"):
        model.apply({**variables, **change(kernels)}, x)
    with te.autocast(True, recipe), pytest.raises(ValueError, match="te_jax.flax.fp8_kernels"):
        model.apply({**variables, **change(kernels)}, x)


def test_refusals(head, rng):
    model, x, variables, kernels = head
    with pytest.raises(ValueError, match="fp8_kernels: there is no recipe in force"):
        te_flax.fp8_kernels(model, variables, x)
    with te.autocast(True, CURRENT):
        with pytest.raises(ValueError, match="is differentiated, but it is a constant"):
            jax.grad(lambda k: jnp.sum(model.apply({**variables, **k}, x)))(kernels)
        net = Net(carried=("params",))
        with pytest.raises(ValueError, match="variable_axes={'fp8_kernels': 0}"):
            te_flax.fp8_kernels(net, state_of(net, CURRENT, x).variables, x)
    stateless = lambda **options: quantize_kernel(jnp.ones((4, 4)), **{"recipe": CURRENT, **options})
    for options, text in (
        (dict(contract=3), "contract is 3"),
        (dict(recipe=BLOCK, contract=2), "contract is 2"),
        (dict(recipe=DELAYED), "meta is None under DelayedScaling"),
        (dict(meta=fp8.TensorMeta(jnp.ones(()), jnp.ones(()))), "meta is given under Float8CurrentScaling"),
    ):
        with pytest.raises(ValueError, match=text):
            stateless(**options)
    with pytest.raises(TypeError, match="kernel is int32"):
        quantize_kernel(jnp.ones((4, 4), int), recipe=CURRENT)
