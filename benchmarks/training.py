"""Cases of whole training steps of a GPT, on one GPU and on all: loss, gradients, AdamW, the next FP8 state.

The GPT has 1.08B parameters: 20 layers (LayerNorm, gelu, biases) of width 2048, 16 heads and an MLP of 8192, learned
positions, a vocabulary of 32768 whose embedding is also the head. Rows have 2048 tokens, 8 of them per GPU; for tensor
parallelism 2, since plain Flax keeps whole activations there; for context parallelism it is one row of 32768. In all
implementations parameters and AdamW's moments are f32, activations, embedding and head bf16; FP8 are the products of
layers. No layer is computed again in the backward pass (no remat); plain Flax keeps most for it, some 70 GB on one GPU.
Rows of "bf16 gradients" have the MeshResource's `gradient_dtype`: gradients cross devices in bf16. Rows of "one gather"
have its `keep_gathered_weights`: weights in FP8 cross once, and stay on each GPU between the passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax
from te_jax import sharding
from te_jax.sharding import with_sharding_constraint_by_logical_axes as placed

from . import flax_layer, gpt, layers, meshes
from .cases import Case
from .timing import Call, compiled

IN_BF16, ONE_GATHER = ", bf16 gradients", ", one gather"
_SETTLE = 5  # steps before those that are measured: by then scales follow their amaxes


@dataclass(frozen=True)
class Gpt:
    """Sizes of a GPT, and the role and number of the GPUs that train it."""

    vocab: int
    stack: layers.Stack
    role: meshes.Role
    gpus: int

    @property
    def name(self):
        layer = self.stack.layer
        sizes = f"{self.stack.depth} layers h{layer.hidden} b{layer.batch} s{layer.seq}"
        return f"gpt, {sizes}, {self.role.name}={self.gpus} step"

    @property
    def tokens(self):
        return self.stack.tokens

    def module(self, impl):
        return _Gpt(self, impl)

    @property
    def flops(self):
        """Of a step on all GPUs, three times those forward: what attention computes again is not counted."""
        stack, layer = self.stack, self.stack.layer
        head = 2 * self.tokens * layer.hidden * self.vocab
        return 3 * (stack.flops(backward=False) + head)


class _Gpt(nn.Module):
    """tokens i32[b, s] -> logits bf16[b, s, vocab]; outside of te_jax's layers or plain Flax's, all is plain JAX."""

    sizes: Gpt
    impl: str

    @nn.compact
    def __call__(self, tokens):
        layer, normal = self.sizes.stack.layer, nn.initializers.normal(0.02)
        shard = (sharding.W_TP_AXES, sharding.W_FSDP_AXES)
        table = nn.with_logical_partitioning(normal, shard)
        embedding = self.param("embedding", table, (self.sizes.vocab, layer.hidden), jnp.float32)
        embedding = placed(embedding.astype(jnp.bfloat16), shard)  # FSDP gathers what is cast, once for both uses
        embedding = placed(embedding, (sharding.W_TP_AXES, None))
        positions = self.param("positions", normal, (layer.seq, layer.hidden), jnp.float32)
        if layer.cut == "cp":
            positions = sharding.reorder_causal_load_balancing(positions, self.sizes.gpus, axis=0)
        plain = self.impl in layers.FLAX_DOTS
        length = sharding.SEQLEN_AXES if plain else sharding.SEQLEN_TP_AXES
        x = placed(embedding[tokens] + positions.astype(jnp.bfloat16), (sharding.BATCH_AXES, length, None))
        stack = self.sizes.stack.module(self.impl)
        norm = flax_layer.norm(llama=False, param_dtype=jnp.float32) if plain else te_flax.LayerNorm()
        logits = jnp.einsum("bsh,vh->bsv", norm(stack(x)), embedding)
        return placed(logits, (sharding.BATCH_AXES, sharding.SEQLEN_CP_AXES, sharding.W_TP_AXES))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits [b, s, vocab], targets i32[b, s] -> the mean, f32[]."""
    logits = logits.astype(jnp.float32)
    # A sum, not a look-up: devices that hold parts of the vocabulary add up theirs.
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), logits, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


class Loop:
    """A compiled step (state, *batch) -> (state, loss) as a function of the batch only: each takes the state that the
    last one left, and its memory."""

    def __init__(self, step: Callable, state: te_flax.TrainState):
        self.step, self.state = step, state

    def __call__(self, *batch):
        self.state, _ = out = self.step(self.state, *batch)
        return out


class Trainee(meshes.Trainee):
    """A Gpt by one implementation. Its x are tokens, its dy the tokens behind them."""

    def __init__(self, model: Gpt, impl: str):
        self.optimizer = gpt.steps.make_optimizer(lr=1e-4, warmup=10, steps=10_000)
        self.in_bf16, self.one_gather = impl.endswith(IN_BF16), impl.endswith(ONE_GATHER)
        super().__init__(model, impl.removesuffix(IN_BF16).removesuffix(ONE_GATHER), model.role, model.gpus)

    @property
    def resource(self):
        asked = dict(gradient_dtype=jnp.bfloat16 if self.in_bf16 else None, keep_gathered_weights=self.one_gather)
        return replace(super().resource, **asked)

    def _data(self):
        layer = self.model.stack.layer
        windows = jax.random.randint(jax.random.key(1), (layer.batch, layer.seq + 1), 0, self.model.vocab)
        return windows[:, :-1], windows[:, 1:]

    def _like_x(self):
        """Tokens are few: all of them are where the GPUs hold parts of the vocabulary."""
        return self._on_mesh() if self.role is meshes.TP else self._on_mesh(*self.role.x)

    def _create(self, params, fp8):
        return te_flax.TrainState.create(apply_fn=self.module.apply, params=params, tx=self.optimizer, collections=fp8)

    @cached_property
    def state_shardings(self) -> te_flax.TrainState:
        """Moments lie as their parameters do; step and FP8 state, which are small, on every device."""
        of_params, _ = self.shardings
        state = jax.eval_shape(self._create, self.params, self.fresh)
        everywhere = lambda _: self._on_mesh()
        moments = optax.tree.map_params(
            self.optimizer, lambda _, like: like, state.opt_state, of_params, transform_non_params=everywhere
        )
        return jax.tree.map(everywhere, state).replace(params=of_params, opt_state=moments)

    def train_step(self, state: te_flax.TrainState, tokens, targets):
        def loss(params, fp8):
            return cross_entropy(self.forward(params, fp8, tokens, self.key), targets)

        value_and_grad = te.value_and_grad if self.is_te else jax.value_and_grad
        value, grads = value_and_grad(loss, argnums=(0, 1))(state.params, state.fp8)
        state = state.apply_gradients(grads=grads)
        return jax.lax.with_sharding_constraint((state, value), (self.state_shardings, self._on_mesh()))

    def training(self) -> Call:
        """Steps on the same batch, each from where the last one ended. To be called once: it uses the parameters up."""
        with self.scope():
            create = jax.jit(self._create, out_shardings=self.state_shardings, donate_argnums=0)
            state = create(self.params, self.fresh)
            call = compiled(self.train_step, [(state, self.x, self.dy)], donate=(0,))
        call = call._replace(run=Loop(call.run, state), inputs=[(self.x, self.dy)])
        jax.block_until_ready(call.issue(_SETTLE))
        return call


def models(tiny: bool, count: int) -> Iterator[Gpt]:
    """For the rows in each, see the module."""
    vocab, *sizes = (256, 128, 256, 8, 8) if tiny else (32768, 2048, 8192, 16, 16)
    rows, rows_of_tp, seq, long, depth = (1, 1, 32, 64, 2) if tiny else (8, 2, 2048, 32768, 20)
    for role, gpus, cut in meshes.places(count):
        per_gpu = rows_of_tp if role is meshes.TP else rows
        batch, length = (1, long) if role is meshes.CP else (gpus * per_gpu, seq)
        layer = layers.Layer("", batch, length, *sizes, cut=cut, param_dtype=jnp.float32)
        yield Gpt(vocab, layers.Stack("", depth, layer), role, gpus)


def figures(model: Gpt, fp8: bool, device_kind: str, ms: float) -> dict:
    """Tokens/s, and MFU: the model's FLOPs (a causal mask counts half, nothing counts twice) over the dense peak of as
    many GPUs in bf16, for FP8 too, so that both compare; and for FP8 over FP8's. No MFU where the peak is not known."""
    tokens = model.tokens / (ms * 1e-3)
    found = {"tokens_per_s": tokens, "tokens_per_s_per_gpu": tokens / model.gpus}
    for key, precision in (("mfu", "bf16"), *([("mfu_fp8", "fp8")] if fp8 else [])):
        if peak := gpt.flops.peak(device_kind, precision):
            found[key] = model.flops / (ms * 1e-3) / (model.gpus * peak)
    return found


def _asked(model: Gpt, impl: str) -> Iterator[str]:
    """Behind the name of `impl`, what rows ask of the MeshResource."""
    yield ""
    if "fp8" in impl and model.role in (meshes.DP, meshes.FSDP):
        yield IN_BF16
    if "fp8" in impl and model.role is meshes.FSDP and model.gpus > 1:
        yield ONE_GATHER


def cases(tiny: bool) -> Iterator[Case]:
    """Rates are those of one GPU."""
    kind = jax.devices()[0].device_kind
    placed_models = ((model, model.role, model.gpus) for model in models(tiny, jax.device_count()))
    rows = ((row, more) for row in meshes.trainees(placed_models) for more in _asked(row[0], row[-1]))
    for (model, _, gpus, impl), more in rows:
        fp8, impl = "fp8" in impl, impl + more
        yield Case(
            model.name,
            impl,
            build=partial(lambda *made: Trainee(*made).training(), model, impl),
            flops=model.flops / gpus,
            fp8_flops=model.stack.gemm_flops(backward=True) / gpus if fp8 else 0.0,
            suite="training",
            tokens=model.tokens,
            calls=10,
            figures=partial(figures, model, fp8, kind),
        )
