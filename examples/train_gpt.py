"""Train a byte-level GPT in FP8 with delayed scaling, and with --compare in bf16 as well.

    python examples/train_gpt.py --compare

Without a GPU this trains the `tiny` preset in a few minutes. A run writes loss.png, results.json and checkpoints
to --out, with --fp8-report what became of the tensors in FP8. See examples/README.md; `--help` lists the options.
"""

import collections
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable

import jax
from gpt import checkpoint, cluster, config, data, flops, health, load, mesh, nnx_steps, plot, report, rundir, steps
from gpt.progress import Progress
from gpt.stopping import Stop, Stopped, listening

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
        fp8_dpa=args.recipe == "attention",
    )


def held_out_loss(eval_loss, state, batches) -> float:
    losses = [eval_loss(state, windows) for windows in batches]
    return float(sum(losses) / len(losses))


def batches(args, corpus: data.Corpus, devices: jax.sharding.Mesh | None):
    """(step -> its batch, the held-out batches), on `devices`; a process reads only its rows."""
    feed = mesh.Feed(devices, args.batch_size, balanced=args.model.ssm is None)

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


class Training:
    """One run from its start, or from its last checkpoint, to --steps or --stop-at."""

    def __init__(self, args, precision: str, corpus: data.Corpus, devices: jax.sharding.Mesh | None, checkpoints):
        """checkpoints: `checkpoint.Checkpoints` to go on from; None to begin anew."""
        self.args, self.precision, self.checkpoints = args, precision, checkpoints
        self.recipe = recipe = fp8_recipe(args) if precision == "fp8" else None
        self.api = api = nnx_steps if args.api == "nnx" else steps
        self.model = model = api.make_model(args)
        optimizer = steps.make_optimizer(args.lr, args.warmup, args.steps, args.optimizer, args.fp8_params)
        shardings = api.state_shardings(model, optimizer, recipe, devices)
        self.monitor = health.monitor(args, recipe, shardings)
        self.state = api.init_state(model, optimizer, recipe, args.seed, shardings)
        self.parameters = sum(p.size for p in jax.tree.leaves(self.state.params))
        key = config.resume_key(args, corpus.sha256)
        self.run = {"key": key, "losses": [], "held_out": [], "fp8_report": [], "load": load.fresh()}
        if checkpoints and (found := checkpoints.restore(api.saved(self.state), self.run["key"])):
            self.state, self.run = api.resumed(self.state, found[0]), self.run | found[1]
        self.run["precision"] = precision  # the checkpoint may be of a run in the other one

        self.start, self.stop = int(self.state.step), last_step(args)
        where = f"steps {self.start} to {self.stop} of {args.steps}"
        print(f"{precision}: {self.parameters / 1e6:.1f}M parameters, {where}", flush=True)
        self.batch, self.eval_data = batches(args, corpus, devices)
        self.train_step, self.compile_seconds = None, None
        if self.start < self.stop:  # else the checkpoint is of a finished run
            began = time.perf_counter()
            self.train_step = api.compiled_step(model, optimizer, recipe, shardings, self.state, self.batch(0))
            self.compile_seconds = time.perf_counter() - began
            print(f"{precision}: compiled in {self.compile_seconds:.1f} s", flush=True)
        self.progress = new_progress(args, precision, self.start, devices)
        self.pending = collections.deque()

    def steps(self, stop: Stop) -> int:
        """Trains to the end, and returns 0; or the signal that ended it before, after a checkpoint if it writes any."""
        args = self.args
        eval_loss = self.api.make_eval_loss(self.model, self.recipe)
        for step in range(self.start + 1, self.stop + 1):
            windows = self.batch(step - 1)
            if self.monitor and self.monitor.due(step):
                self.read_losses(0)
                self.run["fp8_report"].append(self.monitor.look(step, self.api.saved(self.state), windows))
                self.progress.pause()
            self.progress.issues()
            self.state, seen = self.train_step(self.state, windows)
            self.pending.append(seen)
            evaluate = args.eval_every and self.eval_data and (step % args.eval_every == 0 or step == args.steps)
            every = args.checkpoint_every
            save = self.checkpoints and ((every and step % every == 0) or step == self.stop)
            pause = evaluate or save or step == self.stop
            self.read_losses(0 if pause else LATE)
            if signal := step < self.stop and stop.agreed(step, pause):
                self.read_losses(0)
                save = self.checkpoints
            if evaluate:
                found = held_out_loss(eval_loss, self.state, self.eval_data)
                self.run["held_out"].append([step, found])
                self.progress.note(f"{self.precision}: held-out loss {found:.4f} at step {step}")
            if save:
                self.checkpoints.save(self.api.saved(self.state), self.run)
            if signal:
                return signal
            if pause:
                self.progress.pause()
        return 0

    def read_losses(self, left: int) -> None:
        """Waits for the losses of all steps that were issued but the last `left`."""
        while len(self.pending) > left:
            seen = self.pending.popleft()
            loss, loads = seen if self.args.model.experts else (seen, None)
            self.run["losses"].append(float(loss))
            if loads is not None:
                late = len(self.run["losses"]) > self.args.steps - max(1, self.args.steps // 10)
                load.add(self.run["load"], loads, late)
            self.progress.add(self.run["losses"][-1])

    def close(self) -> None:
        self.progress.bar.close()
        if self.monitor:
            self.monitor.close()


def train(
    args, precision: str, corpus: data.Corpus, out: pathlib.Path, devices, begin: Callable[[], None], stop: Stop
) -> dict:
    """What `Training` does; see `summary`. begin: called once all that may fail before the first step is done, before
    anything is written. stop: hears signals from then on. Raises `Stopped` where a signal ended it, or came before."""
    stop.check()
    with contextlib.ExitStack() as held:
        saving = lambda: None if args.no_checkpoint else held.enter_context(checkpoint.opened(out / precision))
        earlier = saving() if args.resume else None
        training = held.enter_context(contextlib.closing(Training(args, precision, corpus, devices, earlier)))
        begin()
        training.checkpoints = earlier or saving()
        signal = training.steps(stop)
    if signal:
        raise Stopped(signal)
    if training.monitor:
        report_health(args, training.run["fp8_report"])
    speed = {"parameters": training.parameters, "compile_s": training.compile_seconds}
    return {**speed, **summary(training.run, training.progress)}


def report_health(args, looks: list[dict]) -> None:
    """Prints and writes what --fp8-report asks for."""
    if not looks:
        print("note: --fp8-report has nothing to say of a run that was finished without it")
        return
    directory = pathlib.Path(args.fp8_report)
    if cluster.is_first():
        health.write(
            directory, args.fp8_report_every, looks, f"FP8 tensors of a byte-level GPT, {config.described(args)}"
        )
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
        "load": load.summary(run["load"]),
        "losses": run["losses"],
    }


def last_step(args) -> int:
    return min(args.steps, args.stop_at or args.steps)


class CutShort(Exception):
    """Training began, and something ended it."""


def run(args, out: pathlib.Path) -> int:
    """All that is asked for, on all devices; the exit code. Raises what stops it."""
    with contextlib.ExitStack() as held, cluster.only_first_prints():
        precisions = ("fp8", "bf16") if args.compare else (args.precision,)
        with cluster.all_or_none():
            devices = mesh.make(args)
            mesh.check(args)
            if args.resume:
                rundir.check_resumable(out, precisions)
            health.check(args)
            corpus = data.load(args.data)
            data.check_length(corpus, args.seq_len)
            key = config.resume_key(args, corpus.sha256)
            path = args.against and pathlib.Path(args.against)
            earlier = report.read(path, key, precisions, last_step(args)) if path else {}
            if cluster.is_first():
                held.enter_context(rundir.locked(out))
        kind = jax.devices()[0].device_kind + (f", mesh {mesh.described(args.mesh)}" if devices else "")
        print(f"device: {kind}; preset: {config.described(args)}; text: {corpus.source}", flush=True)
        begun, stop, hearing = [], Stop(), contextlib.ExitStack()

        def begin() -> None:
            if not begun:  # What is written from now on, also after the last step, is written to its end.
                hearing.enter_context(listening(stop))
            if not (begun or args.resume) and cluster.is_first():
                rundir.keep_earlier(out)
            cluster.wait_for_all(f"{out} is free, {len(begun)}")
            begun.append(True)

        try:
            with mesh.scope(devices, args.sequence_parallel), hearing:
                runs = {
                    precision: train(args, precision, corpus, out, devices, begin, stop) for precision in precisions
                }
            return reported(args, out, key, corpus, kind, runs, earlier)
        except OSError as error:
            if not begun:
                raise
            raise CutShort(error) from error


def reported(args, out: pathlib.Path, key: dict, corpus: data.Corpus, kind: str, runs: dict, earlier: dict) -> int:
    """Writes and prints what the runs came to; the exit code."""
    gap = report.gap(runs["fp8"]["losses"], runs["bf16"]["losses"]) if args.compare else None
    distances = {name: report.distance(runs[name]["losses"], curve) for name, curve in earlier.items()}
    settings = {name: value for name, value in {**vars(args), **key}.items() if name not in ("model", "given")}
    if cluster.is_first():
        report.write(out / "results.json", settings, corpus.source, runs, gap, distances)
        model = f"{config.described(args)}, {kind}"
        plot.save(out / "loss.png", plot.curves(runs, args.recipe, args.mixer), f"byte-level GPT, {model}")
        if args.model.experts and load.save(out / load.PNG, runs, f"loads of experts, {model}"):
            print(f"wrote {out / load.PNG}")
    print(*report.lines(runs, gap, distances), f"wrote {out / 'loss.png'} and {out / 'results.json'}", sep="\n")
    print(*whats_next(args, out), sep="\n")
    if args.check_gap is not None and not report.within(gap, args.check_gap):
        print(f"train_gpt: the mean gap exceeds {args.check_gap}", file=sys.stderr)
        return 1
    limit = args.check_against
    if limit is not None and not all(found["largest_of_means"] <= limit for found in distances.values()):
        print(f"train_gpt: the losses are further than {limit} from the losses of {args.against}", file=sys.stderr)
        return 1
    return 0


def whats_next(args, out: pathlib.Path) -> list[str]:
    """What there is to do with a run that came to its end, or to --stop-at: commands, each with what it does."""
    if args.no_checkpoint:
        return []
    first = "bf16" if args.precision == "bf16" and not args.compare else "fp8"
    written = ["--checkpoint", str(out / first), "--prompt", "def main("]
    lines = [f"to continue a text with it: {rundir.command([], *written, program='generate.py')}"]
    if last_step(args) < args.steps:
        lines.append(f"to go on to step {args.steps}: {rundir.command(args.given, '--resume', without='--stop-at')}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 where a check failed or something cut training short; 2 where it could not begin; 130 after
    Ctrl-C, 143 after SIGTERM."""
    args = config.parser().parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    out = pathlib.Path(args.out)
    try:
        config.need("tqdm", "matplotlib")
        cluster.start(args)
        args = config.complete(args, default_preset="medium" if jax.default_backend() == "gpu" else "tiny")
        return run(args, out)
    except (CutShort, Stopped, KeyboardInterrupt) as error:
        code = {CutShort: 1, KeyboardInterrupt: 130}.get(type(error)) or 128 + error.number
        what = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else error
        again = rundir.command(args.given, "--resume")
        print(f"train_gpt: {what}; {rundir.way_on(out, not args.no_checkpoint, again)}", file=sys.stderr)
        return code
    except FloatingPointError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    cluster.leave(main)
