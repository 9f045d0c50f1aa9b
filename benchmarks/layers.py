"""Cases of whole layers: te_jax in bf16 and FP8, next to plain Flax in bf16 and with Flax's own FP8 dot."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import Literal

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe as te_recipe
from te_jax.core.loops import plain_loops
from te_jax.flax.kernels import KERNEL_COLLECTION
from te_jax.state.fp8 import FP8_COLLECTION

from . import attention, flax_layer, incumbent
from .cases import Case
from .timing import Call, compiled, normal, on_gpu

_SETTLE = 4  # steps; the scales of delayed scaling stand still on repeated data after the second
FAST = (False, False, False)  # fast accumulation in fprop, dgrad and wgrad
WITH_ATTENTION = "te_jax fp8 fast, attention too"  # of transformer layers only
RECIPES = {
    "te_jax bf16": None,
    "te_jax fp8": te_recipe.DelayedScaling(),  # split accumulation in dgrad and wgrad
    "te_jax fp8 fast": te_recipe.DelayedScaling(split_accumulator=FAST),
    "te_jax fp8 current": te_recipe.Float8CurrentScaling(),
    "te_jax fp8 block": te_recipe.Float8BlockScaling(),
    "te_jax fp8 fixed": te_recipe.FixedScaling(),
    WITH_ATTENTION: te_recipe.DelayedScaling(split_accumulator=FAST, fp8_dpa=True),
}
FLAX_DOTS = {"flax bf16": None, "flax fp8 direct": nn.fp8_ops.Fp8DirectDotGeneralOp}
IMPLS = (*(impl for impl in RECIPES if impl != WITH_ATTENTION), *FLAX_DOTS)


class Model:
    """Sizes of what is measured: `name`, `shape` of the input, `weights` that each token is multiplied by."""

    out_shape = property(lambda self: self.shape)
    tokens = property(lambda self: prod(self.shape[:-1]))

    def module(self, impl: str) -> nn.Module | None:
        """None where the implementation lacks a part."""
        if impl in incumbent.RECIPES:
            return self.te(incumbent.modules())
        return self.te() if impl in RECIPES else self.flax(FLAX_DOTS[impl])

    def gemm_flops(self, backward: bool) -> float:
        return 2 * self.tokens * self.weights * (3 if backward else 1)

    def attention_flops(self, backward: bool) -> float:
        return 0.0

    def flops(self, backward: bool) -> float:
        return self.gemm_flops(backward) + self.attention_flops(backward)


@dataclass(frozen=True)
class Layer(Model):
    """Sizes of a transformer layer."""

    name: str
    batch: int
    seq: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    llama: bool = False  # RMSNorm, SwiGLU, RoPE, no biases; else LayerNorm, gelu, biases
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    cut: str = ""  # what cuts the sequence on a mesh: "tp" outside of the GEMMs, "cp" everywhere
    param_dtype: jnp.dtype = jnp.bfloat16

    shape = property(lambda self: (self.batch, self.seq, self.hidden))
    dropout = property(lambda self: self.hidden_dropout or self.attention_dropout)

    def te(self, modules=te_flax) -> nn.Module:
        own = dict(context_parallel_causal_load_balanced=True) if self.cut == "cp" else {}  # no field of the incumbent
        return modules.TransformerLayer(
            hidden_size=self.hidden,
            mlp_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_gqa_groups=self.groups,
            layernorm_type="rmsnorm" if self.llama else "layernorm",
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            mlp_activations=("silu", "linear") if self.llama else ("gelu",),
            use_bias=not self.llama,
            self_attn_mask_type="causal",
            enable_rotary_pos_emb=self.llama,
            rotary_pos_emb_group_method="alternate",
            enable_relative_embedding=False,
            scale_attn_logits=True,
            enable_sequence_parallel=self.cut == "tp",
            dtype=self.param_dtype,
            **own,
        )

    def flax(self, dot) -> nn.Module | None:
        return None if self.attention_dropout else flax_layer.Layer(self, dot)  # jax.nn has no dropout

    @property
    def weights(self):
        of_attention = self.hidden * (2 * self.hidden + 2 * self.groups * self.hidden // self.heads)
        return of_attention + self.hidden * self.ffn * (3 if self.llama else 2)

    def attention_flops(self, backward: bool) -> float:
        return attention.flops(self.batch, self.seq, self.heads, self.hidden // self.heads, backward)


@dataclass(frozen=True)
class Stack(Model):
    """`depth` layers by `nn.scan`: `unroll` of them are compiled, and run `depth` times in all; without `scan`, layers
    that have parameters of their own. remat: each is under `nn.remat` with this policy."""

    name: str
    depth: int
    layer: Layer
    unroll: int = 1
    scan: bool = True
    remat: bool = False
    policy: Callable | None = None

    shape = property(lambda self: self.layer.shape)
    dropout = property(lambda self: self.layer.dropout)
    weights = property(lambda self: self.depth * self.layer.weights)

    def module(self, impl):
        return _Scanned(self, impl) if self.scan else _Apart(self, impl)

    def attention_flops(self, backward):
        return self.depth * self.layer.attention_flops(backward)


class _Step(nn.Module):
    """A layer in the shape that `nn.scan` wants."""

    layer: Layer
    impl: str

    @nn.compact
    def __call__(self, x, deterministic):
        return self.layer.module(self.impl)(x, deterministic=deterministic), None


def _step(stack: Stack):
    if not stack.remat:
        return _Step
    # The flag is a Python bool: the layer asks for it while it is traced.
    return nn.remat(_Step, policy=stack.policy, prevent_cse=not stack.scan, static_argnums=(2,))


class _Scanned(nn.Module):
    stack: Stack
    impl: str

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        stack = self.stack
        of_each = ("params", FP8_COLLECTION, KERNEL_COLLECTION, nn.fp8_ops.OVERWRITE_WITH_GRADIENT)
        layers = nn.scan(
            _step(stack),
            variable_axes=dict.fromkeys(of_each, 0),
            split_rngs={"params": True, "dropout": True},
            length=stack.depth,
            unroll=stack.unroll,
            in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return layers(stack.layer, self.impl, name="layers")(x, deterministic)[0]


class _Apart(nn.Module):
    stack: Stack
    impl: str

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        for i in range(self.stack.depth):
            x, _ = _step(self.stack)(self.stack.layer, self.impl, name=f"layer_{i}")(x, deterministic)
        return x


@dataclass(frozen=True)
class Mlp(Model):
    """Sizes of a LayerNormMLP."""

    rows: int
    hidden: int
    ffn: int
    use_bias: bool

    sizes = property(lambda self: f"{self.hidden}-{self.ffn}-{self.hidden}")
    name = property(lambda self: f"LayerNormMLP {self.rows} tokens {self.sizes}{', biases' * self.use_bias}")
    shape = property(lambda self: (self.rows, self.hidden))
    weights = property(lambda self: 2 * self.hidden * self.ffn)

    def te(self, modules=te_flax):
        return modules.LayerNormMLP(intermediate_dim=self.ffn, use_bias=self.use_bias, dtype=jnp.bfloat16)

    def flax(self, dot):
        return flax_layer.Mlp(self.ffn, use_bias=self.use_bias, dot=dot)


@dataclass(frozen=True)
class Dense(Model):
    """Sizes of a dense layer, named m x n x k."""

    m: int
    n: int
    k: int

    name = property(lambda self: f"dense {self.m}x{self.n}x{self.k}")
    shape = property(lambda self: (self.m, self.k))
    out_shape = property(lambda self: (self.m, self.n))
    weights = property(lambda self: self.n * self.k)

    def te(self, modules=te_flax):
        return modules.DenseGeneral(features=self.n, use_bias=False, dtype=jnp.bfloat16)

    def flax(self, dot):
        return flax_layer.dense(self.n, dot=dot)


def gpt_and_llama(tiny: bool) -> tuple[Layer, Layer]:
    if tiny:
        return Layer("gpt layer", 2, 32, 64, 128, 4, 4), Layer("llama layer", 1, 64, 64, 96, 4, 2, llama=True)
    gpt, llama = (4, 2048, 4096, 16384, 32, 32), (1, 8192, 4096, 14336, 32, 8)
    return Layer("gpt layer", *gpt), Layer("llama layer", *llama, llama=True)


def named(name: str, tiny: bool) -> Layer:
    return next(layer for layer in gpt_and_llama(tiny) if layer.name == name)


def models(tiny: bool) -> list[Model]:
    gpt, llama = gpt_and_llama(tiny)
    mlp = (64, 32, 64) if tiny else (8192, 4096, 16384)
    dense = [(64, 32, 48)] if tiny else [(8192, 4096, 16384), (8192, 16384, 4096)]
    small, depth = (Layer("", 2, 16, 32, 64, 2, 2), 2) if tiny else (Layer("", 8, 512, 1024, 4096, 16, 16), 8)
    return [
        gpt,
        replace(gpt, name="gpt layer, dropout 0.1", hidden_dropout=0.1, attention_dropout=0.1),
        replace(gpt, name="gpt layer, hidden dropout 0.1", hidden_dropout=0.1),
        llama,
        Mlp(*mlp, use_bias=True),
        Mlp(*mlp, use_bias=False),
        *(Dense(*each) for each in dense),
        Stack("small model, 8 layers h1024 b8 s512", depth, small),
    ]


@dataclass
class Trainee:
    """One model by one implementation: parameters, settled FP8 state, compiled passes."""

    model: Model
    impl: str
    module: nn.Module = field(init=False)

    def __post_init__(self):
        self.is_te, self.recipe = self.impl in RECIPES, RECIPES.get(self.impl)
        self.module = self.model.module(self.impl)
        self.options = {}
        if isinstance(self.model, Layer | Stack):
            self.options["deterministic"] = not self.model.dropout
        self.x, self.dy = self._data()
        self.key = jax.random.PRNGKey(3)  # raw: typed keys take a slower path into compiled functions
        self.params, self.fresh = self._init()

    def _data(self):
        return normal(1, self.model.shape), normal(2, self.model.out_shape)

    def scope(self):
        """What a step is traced in."""
        if self.impl in incumbent.RECIPES:
            return incumbent.scope(self.impl)
        return te.autocast(enabled=True, recipe=self.recipe) if self.recipe else contextlib.nullcontext()

    def boxed_init(self, key, x):
        return self.module.init({"params": key, "dropout": key}, x, **self.options)

    def init(self, key, x):
        """Parameters, all of them with normal noise on top, and the FP8 state."""
        variables = nn.unbox(self.boxed_init(key, x))
        leaves, tree = jax.tree.flatten(variables.pop("params"))
        keys = jax.random.split(key, len(leaves))
        noisy = [p + 0.02 * jax.random.normal(k, p.shape, p.dtype) for k, p in zip(keys, leaves)]
        return jax.tree.unflatten(tree, noisy), variables

    def _init(self):
        with self.scope():
            return jax.jit(self.init)(jax.random.key(0), self.x)

    def forward(self, params, state, x, key):
        rngs = {} if self.options.get("deterministic", True) else {"dropout": key}
        y = self.module.apply({"params": params, **state}, x, rngs=rngs, **self.options)
        return y[0] if isinstance(y, tuple) else y

    def step(self, params, state, x, dy, key):
        """y, dparams, the new FP8 state, dx. te_jax's state is received, and layers are looped over, as
        `te_jax.value_and_grad` does it."""
        receive = te.combine_by_max if self.is_te else lambda state: state

        def differentiate(params, state, x, dy):
            y, vjp = jax.vjp(lambda params, state, x: self.forward(params, receive(state), x, key), params, state, x)
            return y, *vjp(dy)

        return (plain_loops(differentiate) if self.is_te else differentiate)(params, state, x, dy)

    def train_inputs(self, state) -> tuple:
        return self.params, state, self.x, self.dy, self.key

    def compile(self, **options) -> Call:
        """The training pass, on fresh FP8 state. options: of `timing.compiled`."""
        with self.scope():
            return compiled(self.step, [self.train_inputs(self.fresh)], **options)

    def compile_for_profiler(self) -> Call:
        """The training pass on settled state. XLA replaces CUDA graphs by single launches while a profiler watches,
        unless told not to."""
        options = {"xla_enable_command_buffers_during_profiling": True} if on_gpu() else {}
        return self.compile(**options)._replace(inputs=[self.train_inputs(self.state)])

    def lower_for_cuda(self) -> jax.stages.Lowered:
        """The training pass, on any machine."""
        with self.scope():
            return jax.jit(self.step).trace(*self.train_inputs(self.fresh)).lower(lowering_platforms=("cuda",))

    def saved_bytes(self) -> int:
        """What autodiff keeps from the forward to the backward pass beyond the pass's own arguments. Of plain JAX, XLA
        keeps less: it computes some of it again."""

        def forward(params, state, x, key):
            return jax.vjp(lambda *args: self.forward(*args, key), params, state, x)[1]

        with self.scope():
            jaxpr = jax.make_jaxpr(forward)(self.params, self.fresh, self.x, self.key).jaxpr
        kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - set(jaxpr.invars)
        return sum(prod(v.aval.shape) * v.aval.dtype.itemsize for v in kept)

    @cached_property
    def train_call(self) -> Call:
        return self.compile()

    @cached_property
    def state(self):
        state = self.fresh
        for _ in range(_SETTLE if jax.tree.leaves(state) else 0):
            state = self.train_call.run(*self.train_inputs(state))[2]
        return state

    def build(self, backward: bool) -> Call:
        state = self.state
        if backward:
            saved = self.saved_bytes() if isinstance(self.model, Layer) else None
            return self.train_call._replace(inputs=[self.train_inputs(state)], saved_bytes=saved)
        with self.scope():
            return compiled(self.forward, [(self.params, state, self.x, self.key)])


@lru_cache(maxsize=1)  # forward and training of one model follow each other; two models need not fit
def trainee(model, impl: str, *place, make: Callable = Trainee) -> Trainee:
    return make(model, impl, *place)


def case(model: Model, impl: str, backward: bool, **more) -> Case:
    """more: fields of the case."""
    defaults = dict(
        build=lambda: trainee(model, impl).build(backward),
        flops=model.flops(backward),
        fp8_flops=model.gemm_flops(backward) if "fp8" in impl else 0.0,
        suite="layers",
        tokens=model.tokens,
    )
    return Case(f"{model.name} {'fwd+bwd' if backward else 'fwd'}", impl, **defaults | more)


def cases(tiny: bool) -> Iterator[Case]:
    for model in models(tiny):
        for impl in IMPLS:
            if model.module(impl) is None:
                continue
            if impl != "te_jax fp8 fast" and not isinstance(model, Stack):  # forward, both recipes are the same
                yield case(model, impl, backward=False)
            yield case(model, impl, backward=True)


def energy_models(tiny: bool) -> list[Model]:
    """The GPT and the Llama layer and the MLP of `models`, and layers and an MLP of other published sizes."""
    gpt, llama = gpt_and_llama(tiny)
    mlps = [model for model in models(tiny) if isinstance(model, Mlp)]
    if tiny:
        return [gpt, llama, *mlps]
    return [
        gpt,
        llama,
        *mlps,
        Layer("llama layer h5120 b2 s4096", 2, 4096, 5120, 13824, 40, 40, llama=True),
        Layer("llama layer h2048 b3 s1536", 3, 1536, 2048, 5632, 32, 4, llama=True),
        Layer("gpt layer h3072 b3 s1000", 3, 1000, 3072, 12288, 24, 24),
        Mlp(6144, 3072, 8192, use_bias=True),
    ]


def energy_cases(tiny: bool) -> Iterator[Case]:
    theirs = tuple(incumbent.RECIPES) if incumbent.installed() else ()
    for model in energy_models(tiny):
        for impl in (*IMPLS, *[WITH_ATTENTION] * isinstance(model, Layer), *theirs):
            if "fixed" not in impl:
                beside = tuple(other for other in ("te_jax bf16", *FLAX_DOTS, *theirs) if other != impl)
                yield case(model, impl, backward=True, suite="energy", beside=beside)


SCALING_IMPLS = ("te_jax bf16", "te_jax fp8")
_SEQ = 1024  # the same for all, so that a token costs the same attention in each
_CALLS = 10  # of steps that take 20 ms and more


def scaling_models(tiny: bool) -> list[Layer]:
    """GPT layers over tokens at one width, then over width at one number of tokens; heads of 128."""
    seq, width, tokens = (16, 256, 64) if tiny else (_SEQ, 4096, 8192)
    counts = [16, 64] if tiny else [1024 << i for i in range(7)]
    widths = [128, 256] if tiny else [1024, 2048, 4096, 8192]
    sizes = [*((count, width) for count in counts), *((tokens, each) for each in widths if each != width)]
    return [
        Layer(f"gpt layer h{h}, {count} tokens", count // seq, seq, h, 4 * h, h // 128, h // 128) for count, h in sizes
    ]


def scaling_cases(tiny: bool) -> Iterator[Case]:
    for model in scaling_models(tiny):
        for impl in SCALING_IMPLS:
            calls = _CALLS if model.flops(True) > 2e13 else None
            yield case(model, impl, backward=True, suite="scaling", calls=calls)
