"""Kernels' gradients added up inside of the wgrad GEMM: the sums of the plain loop, and what may not share an entry."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from states import assert_equal, data, state_of

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import dense
from te_jax.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_jax.sharding import collectives

CURRENT = Float8CurrentScaling()
WIDTH, K = 24, 3  # features, microbatches


class Net(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(("params", "fp8_metas", "fp8_kernels", "wgrads"), 0)
        names = {nn.PARTITION_NAME: "layers"}
        x = te_flax.LayerNormMLP(intermediate_dim=40, name="mlp", use_bias=True, dtype=self.dtype)(x, True)[0]
        layers = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=names)
        return layers(self.dtype, name="layers")(x, None)[0]


class Body(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _):
        return te_flax.LayerNormDenseGeneral(WIDTH, name="dense", dtype=self.dtype)(x)[0], None


def accumulated(state, model, x, fused, cached=False):
    wgrads = te_flax.wgrads(model, state.variables, x[0]) if fused else None
    kernels = te_flax.fp8_kernels(model, state.variables, x[0]) if cached else {}

    def loss(params, fp8, x):
        return jnp.mean(model.apply({"params": params, **fp8, **kernels}, x).astype(jnp.float32) ** 2)

    return state.accumulate_gradients(loss, x, wgrads=wgrads)


def ulp_of(leaf):
    """The last place of the largest element of `leaf`."""
    return np.finfo(np.float32).eps * float(jnp.max(jnp.abs(leaf), initial=0))


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=3),
        Float8BlockScaling(),
        Float8CurrentScaling(override_linear_precision=(False, False, True)),
    ],
    ids=["delayed", "block", "wgrad not in FP8"],
)
def test_sums_of_the_plain_loop(recipe, rng):
    """The same bits in f32: the reference adds what the GEMM would have returned. With quantized kernels too. Some CPUs
    add XLA's own product onto the sum term by term: the K * 15 terms of an element then lose another ulp each."""
    of_xla = recipe.override_linear_precision[2]
    host = jax.devices("cpu")[0] if of_xla else None
    with jax.default_device(host), te.autocast(True, recipe):
        model, x = Net(), data(rng, K, 3, 5, WIDTH) * jnp.asarray([1, 5, 2.0])[:, None, None, None]
        state = state_of(model, recipe, x[0])
        run = jax.jit(lambda *args: [accumulated(*args, fused, fused) for fused in (True, False)], static_argnums=1)
        fused, plain = run(state, model, x)
        assert jax.tree.structure(fused) == jax.tree.structure(plain)
        if of_xla:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=K * 15 * ulp_of(b)), fused, plain)
        else:
            assert_equal(fused, plain)
        assert all(np.any(leaf) for leaf in jax.tree.leaves(fused[1][0]))
        new = jax.eval_shape(lambda state, grads: state.apply_gradients(grads=grads), state, fused[1])
    assert jax.tree.structure(new.params) == jax.tree.structure(state.params)


def test_sums_are_not_rounded(rng):
    """Next to parameters in bf16 the terms stay f32: the mean is rounded once, in half a unit of 2**-8."""
    model, x = Net(jnp.bfloat16), jnp.asarray(data(rng, K, 3, 5, WIDTH), jnp.bfloat16)
    state = state_of(model, CURRENT, x[0])

    def exact(state, x):
        wide = state.replace(params=jax.tree.map(lambda p: p.astype(jnp.float32), state.params))
        return accumulated(wide, model, x, False)[1][0]

    with te.autocast(True, CURRENT):
        run = jax.jit(lambda state, x: (accumulated(state, model, x, True)[1][0], exact(state, x)))
        got, want = (nn.meta.unbox(tree)["mlp"]["wi_kernel"] for tree in run(state, x))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_in_place_on_cuda(rng):
    """The wgrad GEMMs of all kernels write the sum where it lies, with dgrad's there are no others that do."""
    model, x = Net(jnp.bfloat16), jnp.asarray(data(rng, K, 3, 5, WIDTH), jnp.bfloat16)
    state = state_of(model, CURRENT, x[0])
    with te.autocast(True, CURRENT):
        traced = jax.jit(lambda state, x: accumulated(state, model, x, True)).trace(state, x)
    calls = re.findall(r"custom_call @te_gemm\(.*", traced.lower(lowering_platforms=("cuda",)).as_text())
    in_place = [call for call in calls if re.search("output_operand_alias<.*operand_index = 5", call)]
    f32 = [call for call in calls if re.search(r"-> \(tensor<[0-9x]*f32>", call)]
    assert in_place == f32 and len(f32) == 3, "wi, wo, and the scanned layer's"


def test_a_residual_stays_where_it_is(rng):
    """The backward pass of an f32 model reads it: were the product written over it, XLA would copy it first."""
    x, kernel = data(rng, 16, WIDTH), data(rng, WIDTH, WIDTH)
    grads = jax.jit(jax.grad(lambda x, w: jnp.sum(dense(x, w, residual=x, recipe=CURRENT) ** 2), (0, 1)))
    text = grads.trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @te_gemm(") == 3 and "output_operand_alias" not in text


class Alone(nn.Module):
    """One dense layer, used several times."""

    times: int = 1

    @nn.compact
    def __call__(self, x):
        dense = te_flax.DenseGeneral(WIDTH, use_bias=False, name="dense")
        for _ in range(self.times):
            x = dense(x)
        return x


def test_mesh(rng, on_host):
    """Devices that share the batch add up their terms once, onto one sum."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model, x = Alone(), data(rng, K, 4, 5, WIDTH)
    state = state_of(model, CURRENT, x[0])
    with te.autocast(True, CURRENT), jax.set_mesh(mesh):
        kernel = NamedSharding(mesh, P(None, "tp"))
        state = state.replace(params=jax.tree.map(lambda p: jax.device_put(p, kernel), nn.meta.unbox(state.params)))
        x = jax.device_put(x, NamedSharding(mesh, P(None, "dp")))
        run = jax.jit(lambda state, x: [accumulated(state, model, x, fused) for fused in (True, False)])
        (_, (got, _)), (_, (want, _)) = run(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)  # another order


def test_an_entry_is_for_one_use(rng):
    """NaN rather than a sum that counts the terms before twice; an error where it is known in time."""
    x, entry = data(rng, K, 4, WIDTH), lambda tree: tree["wgrads"]["dense"]["kernel"]
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    one, two = Alone(), Alone(2)
    state = state_of(one, CURRENT, x[0])
    params = nn.meta.unbox(state.params)
    with te.autocast(True, CURRENT):
        _, (grads, _) = jax.jit(lambda state, x: accumulated(state, two, x, True))(state, x)
        assert np.all(np.isnan(nn.meta.unbox(grads)["dense"]["kernel"]))
        wgrads = te_flax.wgrads(one, {"params": params}, x[0])
        loss = lambda wgrads, params, x: jnp.sum(one.apply({"params": params, **wgrads}, x) ** 2)

        def over_devices(wgrads, x):
            local = lambda wgrads, x: jax.lax.psum(loss(wgrads, params, x), "dp")
            return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())(wgrads, x)

        used = jax.jit(jax.grad(over_devices))(wgrads, jnp.asarray(np.asarray(x[0])))
        assert entry(used).uses == 2
        with pytest.raises(ValueError, match="vmap of 3 examples shares an entry of the collection wgrads"):
            jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, None, 0))(w, params, x)))(wgrads)
        with pytest.raises(ValueError, match="differentiated, but not its entry in the collection wgrads"):
            jax.grad(loss, 1)(wgrads, params, x[0])
        with pytest.raises(ValueError, match=r"wgrads entry kernel is float32\[4, 24\], .* needs float32\[24, 24\]"):
            loss(jax.tree.map(lambda a: a[:4] if a.ndim else a, wgrads), params, x[0])


def test_a_loss_that_leaves_the_collection_out(rng):
    """NaN rather than a kernel that stays as it is for good; and wgrads of other parameters are refused."""
    model, x = Alone(), data(rng, K, 4, WIDTH)
    state = state_of(model, CURRENT, x[0])
    loss = lambda params, fp8, x: jnp.sum(model.apply({"params": params}, x) ** 2)
    with te.autocast(True, CURRENT):
        wgrads = te_flax.wgrads(model, state.variables, x[0])
        _, (grads, _) = jax.jit(lambda state, x: state.accumulate_gradients(loss, x, wgrads=wgrads))(state, x)
        assert np.all(np.isnan(nn.meta.unbox(grads)["dense"]["kernel"]))
        with pytest.raises(ValueError, match=r"wgrads has \['dense'\]; pass what te_jax.flax.wgrads returns"):
            state.accumulate_gradients(loss, x, wgrads=wgrads["wgrads"])
        with pytest.raises(ValueError, match="wgrads holds dense/kernel, which the state's params lack"):
            state.replace(params={"other": jnp.ones(2)}).accumulate_gradients(loss, x, wgrads=wgrads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "name, dtype, asked",
    [("f32", jnp.float32, None), ("bf16", jnp.bfloat16, None), ("bf16", jnp.float32, jnp.bfloat16)],
)
def test_gradients_cross_devices_in_the_type_of_what_the_layers_read(name, dtype, asked, kind):
    """Those of f32 parameters in bf16, where the loss casts them first, or the MeshResource asks for it; what else
    crosses is amaxes, as integers, and the gradients of norms."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(kind,))
    place = lambda spec, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    x = place(P("dp"), jax.ShapeDtypeStruct((8, WIDTH), jnp.bfloat16))
    model = te_flax.LayerNormDenseGeneral(WIDTH, dtype=jnp.bfloat16)

    def loss(params, x):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        return jnp.mean(model.apply({"params": params}, x)[0].astype(jnp.float32))

    with te.autocast(True, CURRENT, te.MeshResource(dp_resource="dp", gradient_dtype=asked)):
        variables = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), x.update(sharding=None)))
        params = jax.tree.map(lambda a: place(P(), a), variables["params"])
        _, found = collectives.compiled(jax.jit(jax.grad(loss)), params, x, mesh=mesh)
    assert {c.dtype for c in found if c.bytes >= WIDTH * WIDTH * 2} == {name}


def test_gradients_added_up_in_bf16(on_host, rng):
    """As those of f32, but for seven roundings, of the sums of four devices and of their three additions, each of at
    most half a unit in the last place of a number as large as the largest gradient; of the weight's type."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
    x, kernel = rng.standard_normal((8, 32)).astype(np.float32), rng.standard_normal((32, 16)).astype(np.float32)

    def run(asked, over):
        with te.autocast(True, CURRENT, te.MeshResource(dp_resource="dp", gradient_dtype=asked) if over else None):
            loss = lambda kernel, x: jnp.sum(dense(x, kernel, recipe=CURRENT) ** 2)
            return jax.jit(jax.grad(loss))(kernel, x)

    alone = run(None, False)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("dp")))
        in_f32, in_bf16 = run(None, True), run(jnp.bfloat16, True)
    assert in_bf16.dtype == jnp.float32
    np.testing.assert_allclose(in_f32, alone, rtol=1e-5, atol=1e-4)
    terms = np.abs(np.asarray(in_f32)).max()
    np.testing.assert_allclose(in_bf16, in_f32, rtol=0, atol=7 * 2.0**-9 * terms)
    assert not np.array_equal(in_bf16, in_f32)


def test_sums_of_a_shard_map_stay():
    """They are the caller's, in the type of what autodiff adds up: to round what enters them would save nothing."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
    x, kernel = jnp.ones((8, 32)) / 3, jnp.ones((32, 16)) / 7

    def run(asked):
        with jax.set_mesh(mesh), te.autocast(True, CURRENT, te.MeshResource(dp_resource="dp", gradient_dtype=asked)):
            inside = jax.shard_map(
                lambda x, kernel: dense(x, kernel, recipe=CURRENT), in_specs=(P("dp"), P()), out_specs=P("dp")
            )
            return jax.jit(jax.grad(lambda kernel: jnp.sum(inside(x, kernel) ** 2)))(kernel)

    np.testing.assert_array_equal(run(jnp.bfloat16), run(None))


def test_one_resource_for_all_names_of_a_dtype():
    resources = {te.MeshResource(gradient_dtype=name) for name in ("bfloat16", jnp.bfloat16, jnp.dtype(jnp.bfloat16))}
    assert len(resources) == 1
