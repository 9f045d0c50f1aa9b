"""A training loop for small tasks: in FP8, in bf16, or in both from the same seed and on the same batches."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial

import flax
import jax
import numpy as np
import optax
from flax import linen as nn
from gpt.numbers import SEED, number, whole

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe as recipes

RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=16),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned: logits [..., classes] of `model(**batch without "labels")`, against int labels [...].

    batch:    step -> a batch of the training data; the same for the same step.
    held_out: a batch that no step has.
    Labels below 0 count for nothing.
    """

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]
    held_out: Batch
    steps: int
    learning_rate: float = 1e-3


def loss_and_hits(task: Task, params, fp8, batch: Batch):
    """The mean cross entropy of a batch, f32[], and the fraction that the model's first choice gets right."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = task.model.apply({"params": params, **fp8}, **inputs).astype("float32")
    counted = batch["labels"] >= 0
    labels = batch["labels"] * counted
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mean = lambda values: (values * counted).sum() / counted.sum()
    return mean(losses), mean(logits.argmax(-1) == labels)


def train(task: Task, recipe: recipes.Recipe | None, seed: int, steps: int) -> dict[str, float]:
    """Trains and returns the losses of the last tenth of the steps (their mean), held-out loss and hits, ms a step."""
    autocast = partial(te.autocast, recipe is not None, recipe)

    @jax.jit
    def init(key, batch):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return nn.meta.unbox(task.model.init(key, **inputs))

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        with autocast():
            gradients = te.value_and_grad(partial(loss_and_hits, task), (0, 1), has_aux=True)
            (loss, _), grads = gradients(state.params, state.fp8, batch)
        return state.apply_gradients(grads=grads), loss

    with autocast():
        collections, params = flax.core.pop(init(jax.random.key(seed), task.batch(0)), "params")
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(task.learning_rate))
        state = te_flax.TrainState.create(apply_fn=None, params=params, tx=tx, collections=collections)
        losses, times = [], []
        for i in range(steps):
            begin = time.perf_counter()
            state, loss = step(state, task.batch(i))
            losses.append(float(loss))
            times.append(time.perf_counter() - begin)
        held_out, hits = jax.jit(partial(loss_and_hits, task))(state.params, state.fp8, task.held_out)
    last = losses[-max(1, steps // 10) :]
    return {
        "loss": float(np.mean(last)),
        "held_out": float(held_out),
        "hits": float(hits),
        "ms": 1e3 * float(np.median(times)),
    }


def main(make: Callable[[], Task], argv: list[str] | None, description: str) -> int:
    """Runs the program of a task. Returns its exit code: 1 where --check-gap fails or a loss is not finite."""
    p = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    p.add_argument("--compare", action="store_true", help="train in bf16 too, from the same seed on the same batches")
    p.add_argument("--bf16", action="store_true", help="train only in bf16")
    p.add_argument("--recipe", choices=RECIPES, default="delayed", help="scales of FP8 [default: delayed]")
    p.add_argument("--steps", help="[default: the task's]", **whole())
    p.add_argument("--seed", default=0, **SEED)
    help = "exit with 1 where held-out losses differ by more than this, in nats"
    p.add_argument("--check-gap", help=help, **number(least=0))
    args = p.parse_args(argv)
    if args.check_gap is not None and not args.compare:
        p.error("--check-gap needs --compare")
    if args.bf16 and args.compare:
        p.error("--bf16 has no FP8 to compare with: leave out one of the two")
    task = make()
    fp8 = {} if args.bf16 else {f"FP8 ({args.recipe})": RECIPES[args.recipe]}
    runs = {}
    for name, recipe in {**fp8, **({"bf16": None} if args.bf16 or args.compare else {})}.items():
        runs[name] = found = train(task, recipe, args.seed, args.steps or task.steps)
        print(
            f"{task.name}, {name}: loss {found['loss']:.4f}, held out {found['held_out']:.4f}, "
            f"{100 * found['hits']:.1f} % right, {found['ms']:.1f} ms a step",
            flush=True,
        )
    if not all(np.isfinite(run["loss"] + run["held_out"]) for run in runs.values()):
        print("a loss is not finite")
        return 1
    if args.compare:
        a, b = (run["held_out"] for run in runs.values())
        print(f"gap (FP8 - bf16) of the held-out loss: {a - b:+.4f} nats")
        return int(args.check_gap is not None and abs(a - b) > args.check_gap)
    return 0
