"""Forward mode and second order: what plain JAX gives outside of FP8, a ValueError in FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec
from layer_cases import data, reference_norm

import te_jax as te
import te_jax.flax as te_flax
from benchmarks import op_cases
from te_jax import layers, recipe
from te_jax.core.derivatives import custom_vjp
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.gemm import gemm
from te_jax.ops.rope import rope
from te_jax.ops.router import RouterOptions

# The programs run once: not worth LLVM's optimizations.
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
jit = functools.partial(jax.jit, compiler_options=_OPTIONS)
B, S, H, F, E, V = 2, 5, 8, 12, 3, 11


# -- the equation of tangents ----------------------------------------------------------------------------------


@custom_vjp(2)
def _product(x, pair, factor):
    """Of floats, with a result of integers, and an operand whose gradient is left out."""
    return factor * jnp.sin(x) * pair["y"], (jnp.argmax(x), None)


def _product_fwd(x, pair, factor):
    out = _product(*jax.tree.map(lambda leaf: leaf.value, (x, pair)), factor)
    return out, (x.value, pair["y"].value, [jnp.zeros(of.perturbed) for of in (x, pair["y"])])


def _product_bwd(factor, kept, cotangents):
    x, y, perturbed = kept
    g = cotangents[0]
    dx = factor * jnp.cos(x) * y * g if perturbed[0].size else None
    dy = jnp.sum(factor * jnp.sin(x) * g) if perturbed[1].size else None
    return dx, {"y": dy, "unused": None}


_product.defvjp(_product_fwd, _product_bwd, symbolic_zeros=True)

_POINT = jnp.linspace(0.1, 1.2, 4)
_DIRECTION = jnp.array([1.0, -2.0, 0.5, 3.0])
_TRANSFORMS = {
    "jvp": lambda f: jax.jvp(f, (_POINT, 0.7), (_DIRECTION, 2.0)),
    "jvp of one argument": lambda f: jax.jvp(lambda x: f(x, 0.7), (_POINT,), (_DIRECTION,)),
    "linearize": lambda f: jax.linearize(f, _POINT, 0.7)[1](_DIRECTION, 2.0),
    "grad": lambda f: jax.grad(lambda *a: f(*a).sum(), (0, 1))(_POINT, 0.7),
    "grad of grad": lambda f: jax.grad(lambda y: jax.grad(lambda y: (f(_POINT, y) ** 3).sum())(y) ** 2)(0.7),
    "hessian": lambda f: jax.hessian(lambda *a: (f(*a) ** 2).sum(), (0, 1))(_POINT, 0.7),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(lambda x: (f(x, x[0]) ** 2).sum()))(_POINT),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(lambda x: (f(x, x[0]) ** 2).sum()))(_POINT),
    "jacfwd thrice": lambda f: jax.jacfwd(jax.jacfwd(jax.jacfwd(lambda y: f(_POINT, y).sum())))(0.7),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f, (None, 0)), (_POINT, _POINT), (_DIRECTION, _DIRECTION)),
    "vmap of jvp": lambda f: jax.vmap(lambda y: jax.jvp(f, (_POINT, y), (_DIRECTION, y)))(_POINT),
    "grad of vmap": lambda f: jax.grad(lambda *a: (jax.vmap(f, (None, 0), -1)(*a) ** 2).sum(), (0, 1))(_POINT, _POINT),
    "grad of two vmaps": lambda f: jax.grad(
        lambda x, y: (jax.vmap(jax.vmap(f, (None, 0)), (0, None))(x[None] + jnp.ones((3, 1)), y) ** 2).sum(), (0, 1)
    )(_POINT, _POINT),
    "hessian of remat": lambda f: jax.hessian(lambda x: (jax.checkpoint(f)(x, x[1]) ** 2).sum())(_POINT),
    "hessian of scan": lambda f: jax.hessian(
        lambda x: jax.lax.scan(lambda c, _: (f(c, c[1]), c[0]), x, None, 3)[0].sum()
    )(_POINT),
    "jvp of cond": lambda f: jax.jvp(
        lambda x: jax.lax.cond(x[0] > 0, lambda: f(x, 0.7), lambda: x), (_POINT,), (_DIRECTION,)
    ),
}


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_own_backward_pass_serves_all_modes(name):
    ours = lambda x, y: _product(x, {"y": y, "unused": jnp.ones(2)}, 3)[0]
    got, want = (jit(lambda f=f: _TRANSFORMS[name](f))() for f in (ours, lambda x, y: 3 * jnp.sin(x) * y))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


# -- layers outside of FP8 -------------------------------------------------------------------------------------


def _mm(x, w):
    return jnp.tensordot(x, w, 1, precision="highest")


def _softmax_attention(q, k, v, hidden, bias=0.0, sink=None):
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    logits = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * q.shape[-1] ** -0.5 + bias
    logits = jnp.where(hidden, -1e30, logits)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    total = total if sink is None else jnp.logaddexp(total, sink[:, None, None])
    probs = jnp.where(hidden, 0, jnp.exp(logits - total))
    return jnp.einsum("bhst,bthd->bshd", probs, v, precision="highest")


def _plain_mlp(x, gamma, wi, wo):
    z = _mm(reference_norm(x, gamma, None, "rmsnorm", False), wi)
    return x + _mm(jax.nn.silu(z[..., 0, :]) * z[..., 1, :], wo)


def _plain_projections(x, gamma, beta, kernel, other, bias):
    normed = reference_norm(x, gamma, beta, "layernorm", True)
    return _mm(normed, kernel) + bias, _mm(normed, other), normed, x


def _projections(x, gamma, beta, kernel, other, bias):
    also = (layers.Projection(other, None, None),)
    options = dict(zero_centered_gamma=True, also=also, return_layernorm_output=True, return_input=True)
    (y, z), ln_out, x = layers.layernorm_dense(x, kernel, gamma, beta, bias, **options)
    return y, z, ln_out, x


_ROUTER = RouterOptions(topk=2)
_MOE = layers.MoEOptions(router=_ROUTER, activations=("silu", "linear"))


def _plain_moe(x, gate, first, second, wo):
    logits = _mm(x, gate)
    top, experts = jax.lax.top_k(logits, 2)
    weights = jax.nn.softmax(top, -1)
    of_expert = jnp.sum(jax.nn.one_hot(experts, E) * weights[..., None], -2)
    a = jax.nn.silu(jnp.einsum("th,ehf->tef", x, first)) * jnp.einsum("th,ehf->tef", x, second)
    return jnp.einsum("tef,efh,te->th", a, wo, of_expert)


_LABELS = jnp.arange(B * S) % V
_LENGTHS = jnp.array([S, 2])
_CAUSAL = jnp.arange(S) > jnp.arange(S)[:, None]
_PADDING = (jnp.arange(S) >= _LENGTHS[:, None])[:, None, None] | (jnp.arange(S) >= _LENGTHS[:, None])[:, None, :, None]


def _plain_rope(x):
    angles = jnp.arange(S)[:, None] * 10_000.0 ** (-jnp.arange(0, 4, 2) / 4)
    (a, b), cos, sin = (x[..., :2], x[..., 2:]), jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _nll(x, kernel):
    return -jnp.take_along_axis(jax.nn.log_softmax(_mm(x, kernel)), _LABELS[:, None], 1)[:, 0]


# {name: (the layer, the same in plain JAX, shapes of what both take)}
LAYERS = {
    "layernorm": (
        layers.layernorm,
        lambda *args: reference_norm(*args, "layernorm", False),
        [(B, S, H), (H,), (H,)],
    ),
    "projections of a norm": (_projections, _plain_projections, [(B, S, H), (H,), (H,), (H, 6), (H, 4), (6,)]),
    "layernorm_mlp": (
        lambda x, gamma, wi, wo: layers.layernorm_mlp(
            x, gamma, None, wi, wo, activations=("silu", "linear"), norm="rmsnorm", residual=True
        ),
        _plain_mlp,
        [(B, S, H), (H,), (H, 2, F), (F, H)],
    ),
    "gemm": (
        lambda x, w, bias, c: gemm(x, w, bias=bias, c=c),
        lambda x, w, bias, c: _mm(x, w.T) + bias + c,
        [(S, H), (F, H), (F,), (S, F)],
    ),
    "causal attention with a sink": (
        lambda q, k, v, sink: dot_product_attention(
            q, k, v, attn_mask_type="causal", softmax_type="learnable", softmax_offset=sink
        ),
        lambda q, k, v, sink: _softmax_attention(q, k, v, _CAUSAL, sink=sink),
        [(B, S, 4, 8), (B, S, 2, 8), (B, S, 2, 8), (4,)],
    ),
    "attention with lengths and a bias": (
        lambda q, k, v, bias: dot_product_attention(
            q, k, v, bias=bias, attn_mask_type="padding", sequence_descriptor=SequenceDescriptor.from_seqlens(_LENGTHS)
        ),
        lambda q, k, v, bias: _softmax_attention(q, k, v, _PADDING, bias),
        [(B, S, 2, 8), (B, S, 2, 8), (B, S, 2, 8), (1, 2, S, S)],
    ),
    "rope": (lambda x: rope(x, group_method="alternate"), _plain_rope, [(B, S, 2, 4)]),
    "moe": (
        lambda x, gate, first, second, wo: layers.moe(x, gate, (first, second), wo, options=_MOE)[0],
        _plain_moe,
        [(7, H), (H, E), (E, H, 4), (E, H, 4), (E, 4, H)],
    ),
    "mean cross entropy": (
        lambda x, kernel: layers.linear_cross_entropy(x, kernel, _LABELS),
        lambda x, kernel: jnp.mean(_nll(x, kernel)),
        [(B * S, H), (H, V)],
    ),
    "cross entropies of tokens": (
        lambda x, kernel: layers.linear_cross_entropy(x, kernel, _LABELS, reduction="none", chunk_tokens=4),
        _nll,
        [(B * S, H), (H, V)],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_as_plain_jax(name):
    """jvp, linearize, a Hessian times a vector by jvp of grad, and by grad of grad."""
    ours, plain, shapes = LAYERS[name]
    rng = np.random.default_rng(0)
    point, direction = data(rng, *shapes), data(rng, *shapes)

    def loss(f, *args):
        outs = jax.tree.leaves(f(*args))
        return sum(jnp.sum(jnp.sin(out) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) for out in outs)

    def derivatives(f):
        every = tuple(range(len(point)))
        gradient = jax.grad(functools.partial(loss, f), every)
        dot = lambda *args: sum(map(jnp.vdot, gradient(*args), direction))
        found = {"jvp": jax.jvp(f, point, direction), "jvp of grad": jax.jvp(gradient, point, direction)[1]}
        if name != "moe":  # as long to compile as all the others
            found["linearize"] = jax.linearize(f, *point)[1](*direction)
            found["grad of grad"] = jax.grad(dot, every)(*point)
        return found

    point, direction = tuple(point), tuple(direction)
    got, want = jit(lambda: (derivatives(ours), derivatives(plain)))()

    def near(got, want):
        # f32 sums of some 100 terms in another order, and through a few layers' second derivatives: some hundred
        # roundings of 2**-24, relative to the largest number.
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-16 * max(1.0, float(jnp.max(jnp.abs(want)))))

    jax.tree.map(near, got, want)


# -- ops -------------------------------------------------------------------------------------------------------


def _is_float(a):
    return a is not None and jnp.issubdtype(a.dtype, jnp.floating)


def _function_of_floats(case):
    """(the floating results of a case by its floating operands, these)."""
    args = case.args(np.random.default_rng(0))

    def run(*moving):
        given = iter(moving)
        outs = case(*(next(given) if _is_float(a) else a for a in args))
        return [out for out in outs if _is_float(out)]

    return run, [a for a in args if _is_float(a)]


def test_every_op_has_tangents_or_refuses_fp8():
    """Of all ops: second tangents, mapped and inside of shard_map, are traced; those in FP8 have none."""
    in_fp8 = lambda a: a.dtype.itemsize == 1
    for case in op_cases.CASES:
        run, args = _function_of_floats(case.small())
        if not args:
            continue
        first = lambda *x, run=run: jax.jvp(run, x, x)[1]
        if any(map(in_fp8, [*args, *jax.eval_shape(run, *args)])):
            with pytest.raises(ValueError, match="first order"):
                jax.jit(first).lower(*args)
            continue
        second = lambda *x, first=first: jax.jvp(first, x, x)[1]
        shard = lambda *x, second=second: jax.vmap(second)(*(jax.lax.pcast(a, "d", to="varying")[None] for a in x))
        mesh = jax.make_mesh((1,), ("d",))
        jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("d")), *args)


# -- FP8 -------------------------------------------------------------------------------------------------------

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "fixed": recipe.FixedScaling(),
}
MODULES = {
    "dense": te_flax.DenseGeneral(32),
    "mlp": te_flax.LayerNormMLP(intermediate_dim=32),
    "attention": te_flax.MultiHeadAttention(head_dim=16, num_attention_heads=2),
    "experts": te_flax.MoEBlock(num_experts=2, num_experts_per_tok=1, intermediate_dim=32),
}
_CALLS = [(module, "delayed") for module in MODULES] + [("dense", name) for name in RECIPES if name != "delayed"]


@pytest.mark.parametrize("module, name", _CALLS)
@pytest.mark.filterwarnings("ignore:.*MXFP8.*")
def test_fp8_is_of_first_order(module, name):
    x = jnp.ones((2, 64, 32))
    with te.autocast(True, RECIPES[name]):
        init = lambda: nn.meta.unbox(MODULES[module].init(jax.random.key(0), x))
        variables = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(init))
        f = lambda x, v: jnp.sum(jax.tree.leaves(MODULES[module].apply(v, x))[0] ** 2)
        gradient = lambda x, v: jax.grad(f)(x, v)
        square = lambda x, v: jnp.sum(gradient(x, v) ** 2)
        modes = {
            "jvp": lambda x, v: jax.jvp(lambda x: f(x, v), (x,), (x,)),
            "jvp by all variables": lambda x, v: jax.jvp(lambda v: f(x, v), (v,), (v,)),
            "linearize": lambda x, v: jax.linearize(lambda x: f(x, v), x)[1](x),
            "grad of grad": jax.grad(square),
            "grad of grad by all variables": jax.grad(square, 1),
            "jvp of grad": lambda x, v: jax.jvp(lambda x: gradient(x, v), (x,), (x,)),
        }
        for call in modes.values():
            with pytest.raises(ValueError, match=r"te_.*: gradients in FP8 are of first order; .* leave FP8 off"):
                jax.jit(call).lower(x, variables)
        jax.eval_shape(gradient, x, variables)
