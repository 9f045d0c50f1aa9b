"""Train a byte-level GPT in FP8 with delayed scaling, and with --compare in bf16 beside it.

    python examples/train_gpt.py --compare

Without a GPU this trains the `tiny` preset in a few minutes. It writes loss.png, results.json and checkpoints
to --out, with --fp8-report what became of the tensors in FP8. See examples/README.md; `--help` lists the options.
"""

import collections
import itertools
import pathlib
import sys
import time

import jax
from gpt import checkpoint, cluster, config, data, flops, health, mesh, nnx_steps, plot, report, steps
from gpt.progress import Progress

from te_jax import recipe as te_recipe

LATE = 3  # steps that a loss is read after its step was issued, so that the device never waits for the host


STATELESS = {
    "current": te_recipe.Float8CurrentScaling,
    "fixed": te_recipe.FixedScaling,
    "block": te_recipe.Float8BlockScaling,
    "mxfp8": te_recipe.MXFP8BlockScaling,
}


def fp8_recipe(args) -> te_recipe.Recipe:
    if args.recipe in STATELESS:
        return STATELESS[args.recipe]()
    return te_recipe.DelayedScaling(
        fp8_format=te_recipe.Format.HYBRID,  # E4M3 forward, E5M2 for gradients
        amax_history_len=args.amax_history_len,
        amax_compute_algo="max",
    )


def held_out_loss(eval_loss, state, batches) -> float:
    losses = [eval_loss(state, windows) for windows in batches]
    return float(sum(losses) / len(losses))


def batches(args, corpus: data.Corpus, devices: jax.sharding.Mesh | None):
    """(step -> its batch, the held-out batches), on `devices`; a process reads its rows alone."""
    feed = mesh.Feed(devices, args.batch_size)

    def batch(step):
        return feed(data.batch(corpus.train, args.batch_size, args.seq_len, args.seed, step, feed.rows))

    held_out = data.held_out_batches(corpus.held_out, args.batch_size, args.seq_len, args.eval_batches)
    return batch, [feed(windows[feed.rows]) for windows in held_out]


def new_progress(args, precision: str, start: int, devices: jax.sharding.Mesh | None) -> Progress:
    tokens = args.batch_size * args.seq_len
    peak = flops.peak(jax.devices()[0].device_kind, precision)
    peak = peak and peak * (devices.size if devices else 1)
    step_flops = tokens * flops.per_token(args.model, args.seq_len)
    return Progress(precision, start, args.steps, tokens, step_flops, peak, shown=cluster.is_first())


def train(args, precision: str, corpus: data.Corpus, out: pathlib.Path, devices: jax.sharding.Mesh | None) -> dict:
    """One run from its start, or from its last checkpoint, to --steps or --stop-at; see `summary`."""
    recipe = fp8_recipe(args) if precision == "fp8" else None
    api = nnx_steps if args.api == "nnx" else steps
    model = api.make_model(args)
    optimizer = steps.make_optimizer(args.lr, args.warmup, args.steps, args.optimizer, args.fp8_params)
    shardings = api.state_shardings(model, optimizer, recipe, devices)
    monitor = health.monitor(args, recipe, shardings)
    state = api.init_state(model, optimizer, recipe, args.seed, shardings)
    parameters = sum(p.size for p in jax.tree.leaves(state.params))

    run = {"key": config.resume_key(args, len(corpus.train)), "losses": [], "held_out": [], "fp8_report": []}
    checkpoints = None if args.no_checkpoint else checkpoint.Checkpoints(out / precision)
    if checkpoints and args.resume and (found := checkpoints.restore(api.saved(state), run["key"])):
        state, run = api.resumed(state, found[0]), run | found[1]
    run["precision"] = precision  # the checkpoint may be of a run in the other one
    start, stop = int(state.step), min(args.steps, args.stop_at or args.steps)
    print(
        f"{precision}: {parameters / 1e6:.1f}M parameters, steps {start} to {stop} of {args.steps}",
        flush=True,
    )

    batch, eval_data = batches(args, corpus, devices)
    train_step, compile_seconds = None, None
    if start < stop:  # else the checkpoint is of a finished run
        began = time.perf_counter()
        train_step = api.compiled_step(model, optimizer, recipe, shardings, state, batch(0))
        compile_seconds = time.perf_counter() - began
        print(f"{precision}: compiled in {compile_seconds:.1f} s", flush=True)
    eval_loss = api.make_eval_loss(model, recipe)
    progress = new_progress(args, precision, start, devices)
    pending = collections.deque()

    def read_losses(left: int):
        while len(pending) > left:
            run["losses"].append(float(pending.popleft()))
            progress.add(run["losses"][-1])

    for step in range(start + 1, stop + 1):
        windows = batch(step - 1)
        if monitor and monitor.due(step):
            read_losses(0)
            run["fp8_report"].append(monitor.look(step, api.saved(state), windows))
            progress.pause()
        state, loss = train_step(state, windows)
        pending.append(loss)
        evaluate = args.eval_every and eval_data and (step % args.eval_every == 0 or step == args.steps)
        save = checkpoints and ((args.checkpoint_every and step % args.checkpoint_every == 0) or step == stop)
        pause = evaluate or save or step == stop
        read_losses(0 if pause else LATE)
        if evaluate:
            run["held_out"].append([step, held_out_loss(eval_loss, state, eval_data)])
            progress.note(f"{precision}: held-out loss {run['held_out'][-1][1]:.4f} at step {step}")
        if save:
            checkpoints.save(api.saved(state), run)
        if pause:
            progress.pause()
    progress.bar.close()
    if checkpoints:
        checkpoints.close()
    if monitor:
        monitor.close()
        report_health(args, run["fp8_report"])
    return {"parameters": parameters, "compile_s": compile_seconds, **summary(run, progress)}


def report_health(args, looks: list[dict]) -> None:
    """Prints and writes what --fp8-report asks for."""
    if not looks:
        print("note: --fp8-report has nothing to say of a run that was finished without it")
        return
    directory = pathlib.Path(args.fp8_report)
    if cluster.is_first():
        health.write(directory, args.fp8_report_every, looks, f"FP8 tensors of a byte-level GPT, {args.preset}")
    print(f"FP8 tensors at step {looks[-1]['step']}, the worst of their layers:", health.table(looks[-1]), sep="\n")
    print(f"wrote {directory / health.PNG} and {directory / health.JSON}")


def summary(run: dict, progress: Progress) -> dict:
    """A run as results.json has it. `losses`: one per step; `held_out`: [[step, loss], ...]. Figures of speed
    are the median step's, and None where no step was timed."""
    seconds = progress.step_seconds()
    return {
        "model_tflop_per_step": progress.flops / 1e12,
        "step_ms": seconds and seconds * 1e3,
        "tokens_per_s": progress.tokens_per_second(),
        "mfu": progress.utilisation(),
        "held_out": run["held_out"],
        "losses": run["losses"],
    }


def keep_earlier(out: pathlib.Path) -> None:
    """A new run must not overwrite the checkpoints of another: they move to `earlier-N` beside it."""
    names = ("fp8", "bf16", "results.json", "loss.png", *health.FILES)
    found = [out / name for name in names if (out / name).exists()]
    if not found:
        return
    earlier = next(p for n in itertools.count(1) if not (p := out / f"earlier-{n}").exists())
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    print(f"note: {out} held a run; it is in {earlier} now (--resume would have continued it)")


def run(args, out: pathlib.Path) -> int:
    """All that is asked for, on all devices; the exit code. Raises what stops it."""
    devices = mesh.make(args)
    mesh.check(args)
    if not args.resume and cluster.is_first():
        keep_earlier(out)
    cluster.wait_for_all("earlier runs are out of the way")
    corpus = data.load(args.data)
    data.check_length(corpus, args.seq_len)
    precisions = ("fp8", "bf16") if args.compare else (args.precision,)
    key, stop = config.resume_key(args, len(corpus.train)), min(args.steps, args.stop_at or args.steps)
    earlier = report.read(pathlib.Path(args.against), key, precisions, stop) if args.against else {}
    kind = jax.devices()[0].device_kind + (f", mesh {mesh.described(args.mesh)}" if devices else "")
    print(f"device: {kind}; preset: {args.preset}; text: {corpus.source}", flush=True)
    with mesh.scope(devices, args.sequence_parallel):
        runs = {precision: train(args, precision, corpus, out, devices) for precision in precisions}

    gap = report.gap(runs["fp8"]["losses"], runs["bf16"]["losses"]) if args.compare else None
    distances = {name: report.distance(runs[name]["losses"], curve) for name, curve in earlier.items()}
    settings = {**vars(args), **key}
    settings.pop("model")
    if cluster.is_first():
        report.write(out / "results.json", settings, corpus.source, runs, gap, distances)
        plot.save(out / "loss.png", runs, gap, f"byte-level GPT, {args.preset}, {kind}")
    print(*report.lines(runs, gap, distances), f"wrote {out / 'loss.png'} and {out / 'results.json'}", sep="\n")
    if args.check_gap is not None and not report.within(gap, args.check_gap):
        print(f"train_gpt: the mean gap exceeds {args.check_gap}", file=sys.stderr)
        return 1
    limit = args.check_against
    if limit is not None and not all(found["largest_of_means"] <= limit for found in distances.values()):
        print(f"train_gpt: the losses are further than {limit} from those of {args.against}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    args = config.parser().parse_args(argv)
    try:
        cluster.start(args)
        args = config.complete(args, default_preset="medium" if jax.default_backend() == "gpu" else "tiny")
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        with cluster.only_first_prints():
            return run(args, out)
    except (OSError, ValueError, FloatingPointError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
