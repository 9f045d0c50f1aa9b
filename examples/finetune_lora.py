"""Fine-tune a checkpoint of Hugging Face's form in FP8: adapters with frozen weights, or all weights.

    python examples/finetune_lora.py --hf Llama-3.1-8B --data my.txt --compare
    python examples/finetune_lora.py --hf Llama-3.1-8B --fp8-params --join     # frozen weights of a byte each
    python examples/finetune_lora.py --hf Llama-3.2-1B --full                  # all weights, f32 masters

Low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685) comes from te_jax's own modules. Without --hf it
writes a small Llama of random weights first, which shows that all of it runs, and teaches nothing of precision.
See examples/README.md; `--help` lists the options.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import pop
from flax.linen import meta
from flax.traverse_util import flatten_dict
from gpt import data
from gpt.config import need
from gpt.numbers import SEED, number, whole
from tasks.loop import RECIPES

import te_jax as te
import te_jax.flax as te_flax
from te_jax import hf, models
from te_jax.models import families
from te_jax.recipe import Recipe

LINES = 1000  # that a tokenizer reads at once; it takes several such pieces in parallel
TOKENIZER = "tokenizer.json"
ADAPTERS, MODEL = "adapters.safetensors", "model"  # what is written


# -- checkpoint and text ----------------------------------------------------------------------------------------


def stand_in(folder: pathlib.Path) -> pathlib.Path:
    """The folder, with a small Llama of random weights, whose tokens are bytes; written if it has no checkpoint."""
    if not (folder / "config.json").is_file():
        size = families.Size(hidden=128, ffn=256, heads=4, groups=2, layers=2, vocab=256)
        model = models.CausalLM(families.llama3(size), params_dtype=jnp.bfloat16)
        init = lambda key: meta.unbox(model.init(key, jnp.zeros((1, 2), jnp.int32)))
        hf.save(folder, model, jax.jit(init)(jax.random.key(0)))
    return folder


def config_of(folder: pathlib.Path) -> models.ModelConfig:
    """Raises ValueError for a model that is not causal."""
    config = hf.read_config(folder)
    family = hf.FAMILIES[config.family]
    if family.model is not models.CausalLM:
        raise ValueError(f"{folder} is a {family.architecture}: give a causal language model")
    return config


def words_of(text: np.ndarray, folder: pathlib.Path, vocabulary: int) -> np.ndarray:
    """The tokens i32[n] of a text u8[bytes], by the folder's tokenizer.json; its bytes where there is none.

    Raises ValueError for tokens that the model does not have.
    """
    file = folder / TOKENIZER
    if file.is_file():
        need("tokenizers")
        import tokenizers

        lines = text.tobytes().decode(errors="replace").splitlines(keepends=True)
        pieces = ["".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES)]
        encoded = tokenizers.Tokenizer.from_file(str(file)).encode_batch(pieces, add_special_tokens=False)
        tokens = np.concatenate([np.array(piece.ids, np.int32) for piece in encoded])
    else:
        tokens = text.astype(np.int32)
    if tokens.size and tokens.max() >= vocabulary:
        raise ValueError(
            f"{folder} has a vocabulary of {vocabulary}, the text has token {tokens.max()}: give the model's "
            "tokenizer.json"
        )
    return tokens


def corpus_of(files: list[str] | None, folder: pathlib.Path, vocabulary: int, length: int) -> data.Corpus:
    """The text in tokens, its end held out."""
    found = data.load(files)
    if not (folder / TOKENIZER).is_file():
        print(f"warning: {folder} has no {TOKENIZER}: tokens are bytes, which only a model of bytes knows")
    train, held_out = (words_of(part, folder, vocabulary) for part in (found.train, found.held_out))
    corpus = found._replace(train=train, held_out=held_out)
    data.check_length(corpus, length)
    return corpus


# -- model ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A model, what of its parameters is trained, and what stays as it is ({} with --full)."""

    model: models.CausalLM
    state: te_flax.TrainState
    frozen: dict


def load(args: argparse.Namespace, folder: pathlib.Path, **options):
    """(model, parameters, other collections) of the checkpoint, such as the bias of experts; activations are bf16."""
    model, variables = hf.load(folder, compute_dtype=jnp.bfloat16, remat=args.remat, **options)
    return model, variables.pop("params"), variables


def adapted(model: models.CausalLM, args: argparse.Namespace) -> models.CausalLM:
    """The model with adapters, of which those to be made are f32, whatever the type of its weights."""
    scope = "exclude_mlp" if model.config.layer.get("moe") else "all"  # experts take none
    fields = dict(low_rank_adaptation_scope=scope, low_rank_adaptation_dim=args.rank)
    config = model.config.with_layer(**fields, low_rank_adaptation_alpha=args.alpha)
    return model.clone(config=config, params_dtype=jnp.float32)


def optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 10), args.steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))


def prepare(args: argparse.Namespace, folder: pathlib.Path, recipe: Recipe | None) -> Tuning:
    """The beginning of a run. Call it under the run's autocast."""
    in_fp8 = recipe if args.fp8_params else None  # each layer as it is read: the model in bf16 is never in memory
    base, weights, loaded = load(args, folder, dtype=jnp.float32 if args.full else jnp.bfloat16, fp8=in_fp8)
    tokens, model = jnp.zeros((1, args.seq_len), jnp.int32), base if args.full else adapted(base, args)

    @jax.jit
    def fresh(key):  # the adapters and the state of FP8; other parameters are dead code
        others, params = pop(meta.unbox(model.init(key, tokens, tokens)), "params")
        return others, {} if args.full else te_flax.split_lora(params)[0]

    collections, lora = fresh(jax.random.key(args.seed))
    collections |= loaded
    trained, frozen = (weights, {}) if args.full else (lora, weights)
    options = dict(apply_fn=None, tx=optimizer(args), collections=collections)
    return Tuning(model, te_flax.TrainState.create(params=trained, **options), frozen)


# -- training ---------------------------------------------------------------------------------------------------


def loss_fn(model: models.CausalLM, params, fp8, frozen, windows):
    """The mean loss of tokens i32[b, s + 1] that follow each other, f32[]."""
    variables = {"params": te_flax.join_lora(params, frozen), **fp8}
    return model.apply(variables, windows[:, :-1], windows[:, 1:])


def tune(args: argparse.Namespace, corpus: data.Corpus, folder: pathlib.Path, recipe: Recipe | None):
    """(the tuned model, {before, after: held-out losses; loss: mean of the last tenth of the steps; ms: of a step;
    memory: text})."""
    autocast = partial(te.autocast, recipe is not None, recipe)
    with autocast():
        tuning = prepare(args, folder, recipe)
    loss_of = partial(loss_fn, tuning.model)

    @partial(jax.jit, donate_argnums=0)
    def step(state, frozen, windows):
        with autocast():
            loss, grads = te.value_and_grad(loss_of, (0, 1))(state.params, state.fp8, frozen, windows)
            return state.apply_gradients(grads=grads), loss

    @jax.jit
    def evaluate(params, fp8, frozen, windows):
        with autocast():
            return loss_of(params, fp8, frozen, windows)

    def held_out(state):
        batches = data.held_out_batches(corpus.held_out, args.batch_size, args.seq_len, args.eval_batches)
        return float(np.mean([evaluate(state.params, state.fp8, tuning.frozen, windows) for windows in batches]))

    state, losses, times = tuning.state, [], []
    found = {"before": held_out(state)}
    for i in range(args.steps):
        windows = data.batch(corpus.train, args.batch_size, args.seq_len, args.seed, i)
        began = time.perf_counter()
        state, loss = step(state, tuning.frozen, windows)
        losses.append(float(loss))
        times.append(time.perf_counter() - began)
    found |= {"after": held_out(state), "loss": float(np.mean(losses[-max(1, args.steps // 10) :]))}
    return dataclasses.replace(tuning, state=state), found | {"ms": 1e3 * float(np.median(times)), "memory": peak()}


def peak() -> str:
    """The most memory that the program took on its first device so far, as text; "" where the device does not tell."""
    taken = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return f", at most {taken / 1e9:.1f} GB" if taken else ""


# -- what is saved ----------------------------------------------------------------------------------------------


def save_adapters(file: pathlib.Path, args: argparse.Namespace, tuning: Tuning) -> None:
    """Only the adapters, f32, by their paths in the tree of parameters; the metadata say what makes the model."""
    from safetensors.numpy import save_file

    layer = tuning.model.config.layer
    said = {"base": str(args.hf), "rank": str(args.rank), "scope": layer["low_rank_adaptation_scope"]}
    said |= {} if args.alpha is None else {"alpha": str(args.alpha)}
    flat = flatten_dict(tuning.state.params, sep="/")
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({path: np.ascontiguousarray(a) for path, a in flat.items()}, file, metadata=said)


def save_model(to: pathlib.Path, args: argparse.Namespace, folder: pathlib.Path, tuning: Tuning) -> None:
    """A checkpoint of the tuned weights in bf16, with the tokenizer of the one that was tuned."""
    dtype, params = jnp.bfloat16, tuning.state.params
    if args.full:
        model, weights = tuning.model, jax.tree.map(lambda a: a.astype(dtype), params)
        others = {name: tuning.state.fp8[name] for name in tuning.state.fp8 if name == "expert_bias"}
    else:  # onto the weights as they are in the checkpoint, with --fp8-params too
        model, weights, others = load(args, folder, dtype=dtype)
        weights = te_flax.merge_lora(te_flax.join_lora(params, weights), alpha=args.alpha)
    hf.save(to, model, {"params": weights, **others})


def save(out: pathlib.Path, args: argparse.Namespace, folder: pathlib.Path, tuning: Tuning) -> None:
    if not args.full:
        save_adapters(out / ADAPTERS, args, tuning)
        print(f"wrote {out / ADAPTERS}")
    if args.full or args.join:
        save_model(out / MODEL, args, folder, tuning)
        print(f"wrote {out / MODEL}")


# -- the program ------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = p.add_argument
    add("--hf", help="the checkpoint [default: a small Llama of random weights, which is written first]", metavar="DIR")
    add("--data", help="text files [default: the source of Python's library]", nargs="+", metavar="FILE")
    add("--out", help="what is written [default: runs/finetune]", default="runs/finetune", metavar="DIR")
    add("--full", help="train all weights, in f32, instead of adapters", action="store_true")
    add("--fp8-params", help="frozen weights are in FP8, not in bf16 (of the FP8 run)", action="store_true")
    add("--join", help="write a checkpoint of weights and adapters, too", action="store_true")
    add("--rank", help="of adapters [default: 16]", default=16, **whole(most=100_000))
    add("--alpha", help="adapters count alpha / rank times [default: once]", **number(above=0))
    add("--compare", help="train in bf16 too, from the same adapters on the same batches", action="store_true")
    add("--bf16", help="train only in bf16", action="store_true")
    add("--recipe", help="scales of FP8 [default: current]", choices=RECIPES, default="current")
    add("--steps", help="[default: 200]", default=200, **whole())
    add("--batch-size", help="texts of a step [default: 8]", default=8, **whole())
    add("--seq-len", help="tokens of a text [default: 512; without --hf 64]", **whole())
    add("--eval-batches", help="of held-out text, before and after [default: 8]", default=8, **whole())
    add(
        "--lr", help="peak learning rate [default: 2e-4; --full 2e-5; without --hf 1e-2]", **number(above=0, below=1000)
    )
    add("--remat", help="layers keep only their inputs for the backward pass: less memory", action="store_true")
    add("--seed", help="of adapters and batches [default: 0]", default=0, **SEED)
    add("--check-gap", help="exit with 1 where held-out losses differ by more, in nats", **number(least=0))
    args = p.parse_args(argv)
    if args.full and (args.fp8_params or args.join):
        p.error("--full has no frozen weights and no adapters: leave out --fp8-params and --join")
    if args.bf16 and (args.compare or args.fp8_params):
        p.error("--bf16 has no FP8: leave out --compare and --fp8-params")
    if args.check_gap is not None and not args.compare:
        p.error("--check-gap needs --compare")
    args.seq_len = args.seq_len or (512 if args.hf else 64)
    if args.lr is None:
        args.lr = 1e-2 if not args.hf else 2e-5 if args.full else 2e-4
    return args


def run(args: argparse.Namespace) -> int:
    """All that is asked for; the exit code."""
    need("safetensors")
    out = pathlib.Path(args.out)
    for there in (out / ADAPTERS, out / MODEL):
        if there.exists():
            raise ValueError(f"there is {there}: give another --out")
    if not args.hf:
        args.hf = str(stand_in(out / "random_llama"))
        print(f"the checkpoint is {args.hf}, a small Llama of random weights: give a trained one with --hf")
    folder = pathlib.Path(args.hf)
    corpus = corpus_of(args.data, folder, config_of(folder).vocab_size, args.seq_len)
    print(f"{corpus.source}; {len(corpus.train):,} tokens to train on", flush=True)
    fp8 = {} if args.bf16 else {f"FP8 ({args.recipe})": RECIPES[args.recipe]}
    runs = {}
    for name, recipe in {**fp8, **({"bf16": None} if args.bf16 or args.compare else {})}.items():
        tuning, runs[name] = tune(args, corpus, folder, recipe)
        print(
            "{name}: held out {before:.4f} -> {after:.4f}, loss {loss:.4f}, {ms:.1f} ms a step{memory}".format(
                name=name, **runs[name]
            ),
            flush=True,
        )
        if len(runs) == 1:  # the run in FP8, where there are both
            save(out, args, folder, tuning)
        del tuning
    if not all(np.isfinite(found["after"] + found["loss"]) for found in runs.values()):
        print("a loss is not finite")
        return 1
    if args.compare:
        gap = runs.pop(next(iter(runs)))["after"] - runs["bf16"]["after"]
        print(f"gap (FP8 - bf16) of the held-out loss: {gap:+.4f} nats")
        return int(args.check_gap is not None and abs(gap) > args.check_gap)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except (OSError, ValueError) as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
