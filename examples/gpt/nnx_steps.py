"""The GPT of `te_jax.nnx` modules, its state, and its train step and held-out loss: what model.py and steps.py have in
Linen. With the same weights both give the same losses, bit for bit.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import te_jax.nnx as te_nnx

from . import steps
from .config import Model
from .model import VOCAB, embedded, layer_fields, logits_of


class GPT(nnx.Module):
    """tokens int[b, s] -> logits f32[b, s, 256]. max_len: of learned positions; the others as in `model.GPT`."""

    def __init__(
        self,
        config: Model,
        *,
        max_len: int,
        remat: bool = False,
        deterministic_gradients: bool = False,
        rngs: nnx.Rngs,
    ):
        table = lambda rows: nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (rows, config.hidden), jnp.float32))
        self.remat = remat
        self.embedding = table(VOCAB)
        self.positions = nnx.data(None) if config.rope else table(max_len)
        self.head = nnx.data(None) if config.tie_embeddings else table(VOCAB)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs):
            return te_nnx.TransformerLayer(**layer_fields(config, 0.0, deterministic_gradients), rngs=rngs)

        # One layer, whose parameters and FP8 state have a leading layer axis.
        self.layers = stacked(rngs)
        self.final_norm = te_nnx.LayerNorm(config.hidden, layernorm_type=config.norm, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = embedded(tokens, self.embedding[...])
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, layer):
            call = te_nnx.TransformerLayer.__call__
            return (nnx.remat(call, prevent_cse=False) if self.remat else call)(layer, x)

        x = self.final_norm(through(x.astype(jnp.bfloat16), self.layers))
        return logits_of(x, (self.embedding if self.head is None else self.head)[...])


class Training(nnx.Module):
    """All that a step reads and writes."""

    def __init__(self, model: GPT, tx: optax.GradientTransformation):
        self.model = model
        self.optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @property
    def step(self) -> jax.Array:
        return self.optimizer.step[...]

    @property
    def params(self) -> nnx.State:
        return nnx.state(self.model, nnx.Param)


def make_model(args):
    """A function of `rngs` to the model."""
    fields = dict(max_len=args.seq_len, remat=args.remat, deterministic_gradients=args.deterministic)
    return partial(GPT, args.model, **fields)


def state_shardings(model, optimizer, recipe, on) -> None:
    """As `steps.state_shardings`, for one device."""


def init_state(model, optimizer, recipe, seed: int, shardings=None) -> Training:
    @nnx.jit
    def init():
        # The modules that need FP8 state make it when they are made.
        with steps.autocast(recipe):
            return Training(model(rngs=nnx.Rngs(seed)), optimizer)

    return init()


def compiled_step(model, optimizer, recipe, shardings, state: Training, batch):
    """(state, batch) -> (state, loss), compiled; the state is changed in place, its memory is reused."""

    @partial(nnx.jit, donate_argnums=0)
    def train_step(state, batch):
        with steps.autocast(recipe):
            # This also moves the FP8 state of the model: amaxes recorded, scales following.
            loss, grads = te_nnx.value_and_grad(steps.next_byte_loss)(state.model, batch)
        state.optimizer.update(state.model, grads)
        return loss

    compiled = train_step.lower(state, batch).compile()
    return lambda state, batch: (state, compiled(state, batch))


def make_eval_loss(model, recipe):
    """(state, batch) -> loss, in the precision of training."""

    @nnx.jit
    def eval_loss(model, batch):
        with steps.autocast(recipe):
            return steps.next_byte_loss(model, batch)

    return lambda state, batch: eval_loss(state.model, batch)


def saved(state: Training) -> steps.TrainState:
    """What a checkpoint holds of a state: parameters and FP8 state as in `model.GPT`, which generate.py reads."""
    fp8 = {name: _as_scanned(tree) for name, tree in te_nnx.to_linen(state.model).items()}
    moments = jax.tree.leaves(nnx.state(state.optimizer))
    return steps.TrainState(state.step, fp8.pop("params"), moments, fp8, jax.random.PRNGKey(0))


def resumed(fresh: Training, saved: steps.TrainState) -> Training:
    """`fresh` with the state of a checkpoint."""
    te_nnx.from_linen(
        {name: _as_stacked(tree) for name, tree in {"params": saved.params, **saved.fp8}.items()}, fresh.model
    )
    optimizer = nnx.state(fresh.optimizer)
    nnx.update(fresh.optimizer, jax.tree.unflatten(jax.tree.structure(optimizer), saved.opt_state))
    return fresh


def _as_scanned(tree: dict) -> dict:
    """Where `nn.scan` of `model.Block` has the layer: below the block."""
    return {**tree, "layers": {"TransformerLayer_0": tree["layers"]}}


def _as_stacked(tree: dict) -> dict:
    return {**tree, "layers": tree["layers"]["TransformerLayer_0"]}
