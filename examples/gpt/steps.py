"""State, optimizer, and the two jitted functions: train step and held-out loss."""

from functools import partial
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe as te_recipe

from . import mesh
from .model import GPT

BIAS = "expert_bias"  # the collection of te_jax's


class TrainState(NamedTuple):
    """All that a step reads and writes. The data position is `step`: batches are a function of it."""

    step: jax.Array  # i32[]
    params: Any  # f32; with --fp8-params kernels in FP8, whose masters are in opt_state
    opt_state: Any
    fp8: dict  # {"fp8_metas": scales and amax histories, f32}; {} in bf16
    rng: jax.Array  # u32[2], constant; folded with the step it gives the step's dropout key
    experts: dict = {}  # {"expert_bias": f32[layers, experts]} with --balance bias


def make_model(args) -> GPT:
    return GPT(
        args.model,
        max_len=args.seq_len,
        dropout=args.dropout,
        remat=args.remat,
        sequence_parallel=args.sequence_parallel,
        cp=args.cp,
        cp_strategy=args.cp_strategy or "DEFAULT",
        fp8_params=args.fp8_params,
        deterministic_gradients=args.deterministic,
    )


def make_optimizer(
    lr: float, warmup: int, steps: int, name: str = "adamw", fp8_params: bool = False
) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay to a tenth, after clipping the global norm at 1.

    name: "adamw" of optax, or "adamw_fp8" of te_jax, whose moments take 3 bytes a parameter instead of 8.
    fp8_params: with a master copy in f32 of each parameter in FP8.

    Only parameters go through it. FP8 scales are no parameters: clipped or decayed they would be wrong.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, steps, end_value=0.1 * lr)
    adamw = te.optim.adamw_fp8 if name == "adamw_fp8" else optax.adamw
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    return te.optim.master_weights(tx) if fp8_params else tx


def decayed(params) -> Any:
    """True for matrices. By name, since a bias of scanned layers has two axes too."""

    def named(path) -> str:  # the arrays of an nnx.State lie below their names
        return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]

    is_matrix = lambda name: name.endswith("kernel") or name in ("wi_0", "wi_1", "wo")  # the latter of experts
    return jax.tree_util.tree_map_with_path(lambda path, _: is_matrix(named(path)), params)


def autocast(recipe: te_recipe.Recipe | None):
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def init_variables(model: GPT, recipe, rng, rows: int = 1) -> dict:
    """{"params": boxes with logical axis names, "fp8_metas": ...}. rows: of the batch that is traced."""
    # The modules that need FP8 state make it, so `init` runs under the same autocast as `apply`.
    with autocast(recipe):
        return model.init(rng, jnp.zeros((rows, model.max_len), jnp.int32))


def initial(model: GPT, optimizer, recipe, rng, rows: int) -> TrainState:
    """The state before the first step, in boxes with logical axis names. rows: see `init_variables`."""
    variables = init_variables(model, recipe, rng, rows)
    fp8, params = flax.core.pop(variables, "params")
    experts = {name: fp8.pop(name) for name in (BIAS,) if name in fp8}
    with_masters = params
    if model.fp8_params and recipe is not None:
        both = isinstance(recipe, te_recipe.MXFP8BlockScaling)  # one layout cannot be made of the other
        with autocast(recipe):
            tokens = jnp.zeros((rows, model.max_len), jnp.int32)
            params = te_flax.fp8_params(model, variables, tokens, gradients=both)["params"]
        with_masters = te.optim.beside(params, with_masters)
    return TrainState(jnp.int32(0), params, optimizer.init(with_masters), fp8, jax.random.fold_in(rng, 1), experts)


def make_init(model: GPT, optimizer, recipe, shardings: TrainState | None = None):
    """jitted key -> TrainState. With `shardings` each device computes only its own part."""
    rows = 1 if shardings is None else shardings.step.mesh.size  # a multiple of what divides a batch
    return jax.jit(lambda rng: nn.meta.unbox(initial(model, optimizer, recipe, rng, rows)), out_shardings=shardings)


def init_state(model: GPT, optimizer, recipe, seed: int, shardings: TrainState | None = None) -> TrainState:
    return make_init(model, optimizer, recipe, shardings)(jax.random.PRNGKey(seed))


def state_shardings(model: GPT, optimizer, recipe, on: Mesh | None) -> TrainState | None:
    """Where each leaf of the state lies on the mesh `on`; None without one. To be called in `mesh.scope(on)`.

    Parameters by their logical axis names, the optimizer's moments as their parameters; the rest, which is small, on
    every device: FP8 scales and histories, step, key.
    """
    if on is None:
        return None
    boxed = jax.eval_shape(lambda: initial(model, optimizer, recipe, jax.random.PRNGKey(0), on.size))
    state = jax.eval_shape(nn.meta.unbox, boxed)
    return jax.tree.map(te.optim.state_sharding, state, mesh.shardings(boxed, on))


def next_byte_loss(model, batch) -> jax.Array:
    """Mean cross-entropy in nats of each byte given those before it.

    model: tokens int[b, s] -> logits f32[b, s, 256]
    batch: windows u8[b, s + 1]; or (tokens, targets), u8[b, s] each, both in the order that the model's `cp` says.
    """
    batch = jax.tree.map(lambda x: x.astype(jnp.int32), batch)
    tokens, targets = batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


def step_loss(model: GPT, state: TrainState, batch):
    """(params, fp8, experts) -> (what the step that starts from `state` is to make small, what it says of itself).

    The first is the mean loss of the bytes, with experts plus the terms that keep their loads even. The second is the
    former; with experts (that, the tokens of each expert i32[layers, experts]).
    """
    rngs = {"dropout": jax.random.fold_in(state.rng, state.step)} if model.dropout else {}

    def loss(params, fp8, experts):
        apply = partial(model.apply, {"params": params, **fp8, **experts}, rngs=rngs)
        if model.config.experts is None:
            mean = next_byte_loss(apply, batch)
            return mean, mean
        sown = {}

        def logits_of(tokens):
            logits, found = apply(tokens, train=True, mutable=["losses", "intermediates"])
            sown.update(found)
            return logits

        mean = next_byte_loss(logits_of, batch)
        terms = jax.tree.leaves(sown.get("losses", {}))
        return mean + sum(map(jnp.sum, terms)), (mean, loads_in(sown["intermediates"]))

    return loss


def loads_in(intermediates) -> jax.Array:
    """i32[layers, experts]: the tokens of each expert, as the layers have sown them."""
    found = flax.traverse_util.flatten_dict(intermediates)
    place = lambda path: [int(part.removeprefix("layer_")) for part in path if part.startswith("layer_")]
    sown = sorted((place(path), path, value[0]) for path, value in found.items() if path[-1] == "tokens_per_expert")
    scanned = [loads for _, path, loads in sown if "layers" in path]  # of each layer of a round, [rounds, experts]
    rounds = [jnp.stack(scanned, 1).reshape(-1, scanned[0].shape[-1])] if scanned else []
    return jnp.concatenate([*rounds, *(loads[None] for _, path, loads in sown if "layers" not in path)])


def make_train_step(model: GPT, optimizer, recipe, shardings: TrainState | None = None):
    """jitted (state, batch) -> (state, loss), with experts (state, (loss, their tokens)); the old state's memory is
    reused for the new. For `batch` see `next_byte_loss`.

    shardings: of the state, before and after the step.
    """

    def train_step(state: TrainState, batch) -> tuple[TrainState, jax.Array]:
        with autocast(recipe):
            # To jax's own, parameters in FP8 are constants.
            value_and_grad = te.value_and_grad if model.fp8_params else jax.value_and_grad
            of_all = value_and_grad(step_loss(model, state, batch), argnums=(0, 1, 2), has_aux=True)
            (_, seen), (grads, fp8, counts) = of_all(state.params, state.fp8, state.experts)
            # The "gradient" of the FP8 state is its next value: amaxes recorded, scales following. For the bias of
            # experts it is how many tokens each got.
            fp8 = te.update_fp8_metas(fp8, previous=state.fp8)
            experts = state.experts
            if experts:
                experts = te_flax.update_expert_bias(experts, counts, model.config.experts.bias_rate)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = te.optim.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, fp8, state.rng, experts), seen

    after = None if shardings is None else (shardings, shardings.step)
    return jax.jit(train_step, donate_argnums=0, out_shardings=after)


def compiled_step(model: GPT, optimizer, recipe, shardings, state: TrainState, batch):
    """`make_train_step`, compiled for such a state and batch."""
    return make_train_step(model, optimizer, recipe, shardings).lower(state, batch).compile()


def make_fp8_stats(model: GPT, recipe, shardings: TrainState | None = None):
    """(state, batch) -> `te_jax.fp8_stats` of the step that starts from `state`; on a mesh, on every device."""

    def stats(state: TrainState, batch):
        with autocast(recipe):
            new_fp8 = jax.grad(step_loss(model, state, batch), argnums=1, has_aux=True)
            return te.fp8_stats(new_fp8(state.params, te.fp8_probes(state.fp8), state.experts)[0])

    run = jax.jit(stats, out_shardings=None if shardings is None else shardings.step)
    return lambda state, batch: run(state._replace(opt_state=()), batch)


def make_eval_loss(model: GPT, recipe):
    """(state, batch) -> loss, in the precision of training and without dropout."""
    model = model.clone(dropout=0.0)

    @jax.jit
    def eval_loss(params, others, batch):
        with autocast(recipe):
            return next_byte_loss(partial(model.apply, {"params": params, **others}), batch)

    return lambda state, batch: eval_loss(state.params, {**state.fp8, **state.experts}, batch)


def saved(state: TrainState) -> TrainState:
    """What a checkpoint holds of a state."""
    return state


def resumed(fresh: TrainState, saved: TrainState) -> TrainState:
    """The state of a checkpoint; `fresh` is one of the same run."""
    return saved
