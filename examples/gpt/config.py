"""Presets and the command line."""

import argparse
import dataclasses
import importlib.util

from .numbers import SEED, number, whole


@dataclasses.dataclass(frozen=True)
class Experts:
    """What stands instead of each layer's MLP: `count` of them, of which a token goes to `top_k`."""

    count: int
    top_k: int = 2
    balance: str = "loss"  # keeps their loads even: a term of the loss, or a "bias" of the choice
    bias_rate: float = 0.0  # by which it moves in a step


@dataclasses.dataclass(frozen=True)
class Ssm:
    """What mixes tokens instead of attention, with a state: its channels are twice the hidden ones, in heads."""

    head_dim: int = 64
    state: int = 128  # for each channel; of the gated delta rule also the channels of keys
    attention_every: int | None = None  # of so many layers the second one has attention; None: none has
    kind: str = "mamba2"  # or "gated-delta", whose heads of keys serve two heads of values, as in Qwen3-Next


MIXERS = {
    "attention": None,
    "mamba2": Ssm(),
    "hybrid": Ssm(attention_every=4),
    "gated-delta": Ssm(state=64, kind="gated-delta"),
    "gated-delta-hybrid": Ssm(state=64, attention_every=4, kind="gated-delta"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the transformer; everything that decides the parameter tree."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    gqa_groups: int | None = None  # None: as many as heads
    norm: str = "layernorm"
    activations: tuple[str, ...] = ("gelu",)
    use_bias: bool = True
    rope: bool = False  # False: learned positions, which take many more steps to be of use
    tie_embeddings: bool = True
    experts: Experts | None = None  # None: one MLP for all tokens
    ssm: Ssm | None = None  # None: attention in all layers

    @classmethod
    def of(cls, key: dict) -> "Model":
        """The model of a checkpoint, from its `resume_key`; an early one has neither `experts` nor `ssm`."""
        fields = {f.name: key[f.name] for f in dataclasses.fields(cls) if f.name in key}
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        parts = {name: kind(**fields[name]) for name, kind in (("experts", Experts), ("ssm", Ssm)) if fields.get(name)}
        return cls(**fields | parts)

    @property
    def ssm_heads(self) -> int:
        """The heads of Mamba-2, or of values of the gated delta rule, where the model has them."""
        return 2 * self.hidden // self.ssm.head_dim

    @property
    def layers_with_attention(self) -> int:
        if self.ssm is None:
            return self.layers
        every = self.ssm.attention_every
        return 0 if every is None else (self.layers + every - 2) // every


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model with a training recipe that suits it."""

    model: Model
    lr: float  # the peak of the schedule
    batch_size: int = 16  # sequences per step
    seq_len: int = 1024  # bytes per sequence
    steps: int = 1000
    warmup: int = 100  # steps
    eval_every: int = 200  # steps
    eval_batches: int = 8
    amax_history_len: int = 1024


TINY = Model(layers=2, hidden=128, ffn=512, heads=4)
SMALL = Model(layers=18, hidden=768, ffn=3072, heads=12, rope=True)  # 128M: a vocabulary of 256 costs nothing
MEDIUM = Model(layers=28, hidden=1024, ffn=4096, heads=16, rope=True)  # 353M
LLAMA_8B_WIDTHS = Model(
    layers=2,
    hidden=4096,
    ffn=14336,
    heads=32,
    gqa_groups=8,
    norm="rmsnorm",
    activations=("silu", "linear"),
    use_bias=False,
    rope=True,
    tie_embeddings=False,
)
# As Mixtral is made: 973M parameters, of which a token meets 294M.
MOE_SMALL = Model(
    layers=16,
    hidden=1024,
    ffn=2304,
    heads=16,
    norm="rmsnorm",
    activations=("silu", "linear"),
    use_bias=False,
    rope=True,
    experts=Experts(8),
)

PRESETS = {
    "tiny": Preset(
        TINY, lr=3e-3, seq_len=128, steps=300, warmup=100, eval_every=100, eval_batches=4, amax_history_len=64
    ),
    "moe-tiny": Preset(
        dataclasses.replace(MOE_SMALL, layers=2, hidden=128, ffn=256, heads=4),
        lr=3e-3,
        seq_len=128,
        steps=300,
        warmup=100,
        eval_every=100,
        eval_batches=4,
        amax_history_len=64,
    ),
    "moe-small": Preset(MOE_SMALL, lr=3e-4, warmup=200),
    "small": Preset(SMALL, lr=6e-4, warmup=200),
    "medium": Preset(MEDIUM, lr=3e-4, warmup=200),
    "8b-layer": Preset(
        LLAMA_8B_WIDTHS,
        lr=1e-4,
        batch_size=1,
        seq_len=8192,
        steps=50,
        warmup=10,
        eval_every=0,
        eval_batches=0,
    ),
}

BIAS_TRAVEL = 4.0  # the most that a bias of experts can move in a run

MESH_AXES = ("dp", "fsdp", "ep", "cp", "tp")  # the devices of the last ones are the closest

PRESET_FIELDS = [f.name for f in dataclasses.fields(Preset) if f.name != "model"]


def mesh_sizes(text: str) -> dict[str, int]:
    """ "dp=2,tp=4" -> {"dp": 2, "tp": 4}."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in MESH_AXES:
            raise argparse.ArgumentTypeError(f"{axis!r} is no axis of it; use {', '.join(MESH_AXES)}")
        if axis in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part.strip()!r}: give each axis once, with a size of 1 or more: dp=2")
        sizes[axis] = int(size)
    return sizes


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        allow_abbrev=False,  # `rundir.command` tells options by their whole names.
        description="Train a byte-level GPT in FP8, and with --compare in bf16 as well.",
    )
    for add_some in (_add_training, _add_run, _add_report, _add_step, _add_devices, _add_overrides):
        add_some(p)
    return p


def _add(group, name: str, help: str, **options) -> None:
    group.add_argument(name, help=help, **options)


def _add_training(p: argparse.ArgumentParser) -> None:
    """What is trained, on what."""
    _add(p, "--preset", "model size [default: medium on a GPU, tiny without]", choices=PRESETS)
    _add(p, "--precision", "of the GEMMs [default: fp8]", choices=("fp8", "bf16"), default="fp8")
    _add(p, "--recipe", "scales of FP8 tensors: from past steps, with attention in FP8 too or without, from their own "
        "amax, fixed, of blocks [default: delayed]",
        choices=("delayed", "attention", "current", "fixed", "block", "mxfp8"), default="delayed")  # fmt: skip
    _add(p, "--mixer", "of tokens: attention, Mamba-2, the gated delta rule, or a hybrid, with attention in every "
        "fourth layer [default: attention]", choices=MIXERS, default="attention")  # fmt: skip
    _add(p, "--api", "Flax modules of the model: Linen, or NNX, which trains on one device, without dropout "
        "[default: linen]", choices=("linen", "nnx"), default="linen")  # fmt: skip
    _add(p, "--optimizer", "AdamW, or te_jax's with moments of 3 bytes a parameter instead of 8 [default: adamw]",
        choices=("adamw", "adamw_fp8"), default="adamw")  # fmt: skip
    _add(p, "--fp8-params", "kernels are parameters in FP8, with masters in f32 in the optimizer (Linen)",
        action="store_true")  # fmt: skip
    _add(p, "--compare", "train in both, from one seed and on the same batches", action="store_true")
    _add(p, "--data", "your own text [default: Python's library source]", nargs="+", metavar="FILE")
    _add(
        p,
        "--out",
        "checkpoints, loss.png and results.json go here [default: runs/gpt]",
        default="runs/gpt",
        metavar="DIR",
    )
    _add(p, "--seed", "of parameters, batches and dropout [default: 0]", default=0, **SEED)


def _add_run(p: argparse.ArgumentParser) -> None:
    """Where a run begins and ends, what it saves, and what it is compared with."""
    _add(p, "--resume", "continue from the last checkpoint in --out", action="store_true")
    _add(p, "--checkpoint-every", "steps; 0: only at the end (or after Ctrl-C and SIGTERM) [default: a tenth of "
        "--steps, at least 10]", metavar="N", **whole(0))  # fmt: skip
    _add(p, "--no-checkpoint", "save none (one holds 12 bytes a parameter)", action="store_true")
    _add(p, "--stop-at", "save and leave here, to --resume later", metavar="STEP", **whole())
    _add(p, "--check-gap", "exit 1 if the mean gap (FP8 - bf16) over the last tenth of the steps exceeds X nats "
        "(needs --compare)", metavar="X", **number(least=0))  # fmt: skip
    _add(p, "--against", "results.json of an earlier run, as on another --mesh: how far the losses are from its own",
        metavar="FILE")  # fmt: skip
    _add(p, "--check-against", "exit 1 if their means over 20 steps differ by more than X nats (needs --against)",
        metavar="X", **number(least=0))  # fmt: skip


def _add_report(p: argparse.ArgumentParser) -> None:
    """What is told of the FP8 tensors."""
    _add(p, "--fp8-report", "how well the FP8 tensors of each layer fit, over the steps: a table, fp8_report.json and "
        "fp8_report.png in DIR [default: in --out]", nargs="?", const="", metavar="DIR")  # fmt: skip
    _add(p, "--fp8-report-every", "steps from one look to the next, each of which repeats the passes of a step "
        "[default: a fiftieth of --steps]", metavar="N", **whole())  # fmt: skip
    _add(p, "--tensorboard", "the numbers of --fp8-report as scalars for TensorBoard, too (needs tensorboardX)",
        metavar="DIR")  # fmt: skip


def _add_step(p: argparse.ArgumentParser) -> None:
    """How a step computes."""
    _add(p, "--deterministic", "the same bits in every run on GPUs of one model: attention's gradients and XLA's own "
        "choices too, for 1.4 %% of the time with the preset medium", action="store_true")  # fmt: skip
    _add(p, "--remat", "recompute each layer in the backward pass", action="store_true")
    _add(p, "--dropout", "rate on the residual branches [default: 0]", default=0.0, **number(least=0, below=1))


def _add_devices(p: argparse.ArgumentParser) -> None:
    many = p.add_argument_group("several devices")
    divided = "dp the batch, fsdp the batch, parameters and optimizer, ep the batch and experts, cp the sequence, "
    divided += "tp heads and widths"
    _add(many, "--mesh", f"how many devices split what: {divided} [default: one device]", type=mesh_sizes,
        metavar="dp=2,fsdp=2,tp=2")  # fmt: skip
    _add(many, "--sequence-parallel", "tp divides the sequence too, outside of the GEMMs", action="store_true")
    _add(many, "--cp", "N devices divide the sequence: cp=N of --mesh [default: 1]", metavar="N", **whole())
    _add(many, "--cp-strategy", "keys and values are collected, or go around [default: all_gather]",
        choices=("all_gather", "ring"))  # fmt: skip
    _add(many, "--devices", "of each process; only on a CPU, which has 1 else", metavar="N", **whole(most=1024))
    _add(many, "--coordinator", "address of process 0; auto: from Slurm or Open MPI", metavar="HOST:PORT")
    _add(many, "--processes", "started in all, each with its --process-id", metavar="N", **whole())
    _add(many, "--process-id", "0 to N - 1; process 0 prints and writes", metavar="I", **whole(0))


def _add_overrides(p: argparse.ArgumentParser) -> None:
    override = p.add_argument_group("overrides of the preset")
    _add(override, "--layers", "of the transformer", **whole(most=10_000))
    _add(override, "--moe", "N experts instead of each MLP, all of its width", metavar="N", **whole(most=10_000))
    _add(override, "--top-k", "experts of a token [default: the preset's, or 2]", metavar="K", **whole())
    _add(override, "--balance", "the loads of experts are kept even by a term of the loss, or by a bias of the choice "
        "that moves a little in each step [default: loss]", choices=("loss", "bias"))  # fmt: skip
    _add(override, "--batch-size", "sequences per step", **whole())
    _add(override, "--seq-len", "bytes per sequence", **whole())
    _add(override, "--steps", "to train for; the schedule ends there", **whole())
    _add(override, "--lr", "peak learning rate", **number(above=0, below=1000))
    _add(override, "--warmup", "steps of linear warm-up", **whole(0))
    _add(override, "--eval-every", "held-out loss every N steps; 0: never", metavar="N", **whole(0))
    _add(override, "--eval-batches", "held-out batches", metavar="N", **whole(0))
    _add(override, "--amax-history-len", "steps that an FP8 scale looks back", metavar="N", **whole())


def parse(argv: list[str] | None, default_preset: str) -> argparse.Namespace:
    """The arguments, complete. Exits with a message (argparse) on a value that makes no sense."""
    return complete(parser().parse_args(argv), default_preset)


def complete(args: argparse.Namespace, default_preset: str) -> argparse.Namespace:
    """`args`, with the preset filled in where nothing was given; `args.model` is a `Model`. Exits as `parse` does."""
    p = parser()
    args.preset = args.preset or default_preset
    preset = PRESETS[args.preset]
    for field in PRESET_FIELDS:
        if getattr(args, field) is None:
            setattr(args, field, getattr(preset, field))
    experts = _experts(p, args, preset.model.experts)
    layers = args.layers or preset.model.layers
    args.model = dataclasses.replace(preset.model, layers=layers, experts=experts, ssm=MIXERS[args.mixer])
    args.warmup = min(args.warmup, args.steps // 2)  # a short run still reaches its peak

    if args.checkpoint_every is None:
        args.checkpoint_every = max(10, args.steps // 10)
    if args.check_gap is not None and not args.compare:
        p.error("--check-gap needs --compare: a gap is between two runs")
    if args.check_against is not None and args.against is None:
        p.error("--check-against needs --against: the curve of an earlier run")
    if args.no_checkpoint and (args.resume or args.stop_at is not None):
        p.error("--no-checkpoint contradicts --resume and --stop-at: both need checkpoints")
    in_mesh = (args.mesh or {}).get("cp")
    if None not in (args.cp, in_mesh) and args.cp != in_mesh:
        p.error(f"--cp is {args.cp}, but --mesh has cp={in_mesh}: give one of the two")
    args.cp = args.cp or in_mesh or 1
    if args.cp > 1:
        args.mesh = {**(args.mesh or {}), "cp": args.cp}
    if args.cp_strategy and args.cp == 1:
        p.error(f"--cp-strategy is {args.cp_strategy}, but nothing divides the sequence: give --cp 2 or more")
    if args.api == "nnx" and (args.mesh is not None or args.dropout > 0):
        p.error("--api nnx has neither --mesh nor --dropout: leave them out, or give --api linen")
    if args.fp8_params and (args.api == "nnx" or (args.precision == "bf16" and not args.compare)):
        p.error("--fp8-params is for --api linen and --precision fp8: leave it out, or give these")
    if (args.mesh or {}).get("ep", 1) > 1 and args.model.experts is None:
        p.error(
            f"ep={args.mesh['ep']} of --mesh divides experts, and the model has none: give --moe N, or leave ep out"
        )
    if args.sequence_parallel and args.mesh is None:
        p.error("--sequence-parallel needs --mesh with tp=2 or more")
    _check_mixer(p, args)
    _complete_report(p, args)
    return args


def _experts(p: argparse.ArgumentParser, args: argparse.Namespace, preset: Experts | None) -> Experts | None:
    given = {"count": args.moe, "top_k": args.top_k, "balance": args.balance}
    given = {name: value for name, value in given.items() if value is not None}
    if preset is None and not given:
        return None
    if preset is None and args.moe is None:
        p.error("--top-k and --balance are of experts: give --moe N, or a preset that has them")
    experts = dataclasses.replace(preset or Experts(0), **given)
    if not 1 <= experts.top_k <= experts.count:
        p.error(f"--top-k is {experts.top_k} of {experts.count} experts (--moe): give 1 to {experts.count}")
    if args.api == "nnx":
        p.error("--api nnx is for models without experts here: leave one of the two out")
    if args.mesh is not None and args.mesh.get("ep", 1) == 1:
        p.error("--mesh has no ep, which divides experts: give ep=2 or more")
    # A score is between 0 and 1. DeepSeek-V3 moves the bias by 0.001 in many more steps than are trained here.
    return dataclasses.replace(experts, bias_rate=BIAS_TRAVEL / args.steps if experts.balance == "bias" else 0.0)


def _check_mixer(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.model.ssm is None:
        return
    if args.api == "nnx":
        p.error(f"--api nnx is for --mixer attention here, not {args.mixer}: leave one of the two out")
    if args.model.layers_with_attention:
        return
    if args.model.ssm.attention_every:
        told = f"--layers is {args.layers}, give 2 or more"
        p.error(f"--mixer {args.mixer} has attention in the second layer of four: {told}")
    for flag, given in (("--recipe attention", args.recipe == "attention"), ("--cp-strategy", args.cp_strategy)):
        if given:
            p.error(f"{flag} is for attention, which --mixer {args.mixer} has not: leave one of the two out")


def _complete_report(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.fp8_report is None:
        for flag, value in (("--fp8-report-every", args.fp8_report_every), ("--tensorboard", args.tensorboard)):
            if value is not None:
                p.error(f"{flag} needs --fp8-report")
        return
    if args.precision != "fp8" and not args.compare:
        p.error(f"--fp8-report is of an FP8 run, but --precision is {args.precision}: leave one of them out")
    if args.recipe not in ("delayed", "attention"):
        p.error(f"--fp8-report needs --recipe delayed or attention: {args.recipe} scaling keeps no state")
    if args.fp8_report_every is None:
        args.fp8_report_every = max(1, args.steps // 50)
    args.fp8_report = args.fp8_report or args.out


def described(args: argparse.Namespace) -> str:
    """The preset, and the mixer where it is another than the preset's: for titles."""
    return args.preset + ("" if args.model.ssm is None else f", {args.mixer}")


def resume_key(args: argparse.Namespace, text_sha256: str) -> dict:
    """What must be equal for a resumed run to be the same run; JSON types."""
    fields = ("seed", "batch_size", "seq_len", "steps", "lr", "warmup", "optimizer", "recipe", "amax_history_len",
              "dropout", "api", "fp8_params")  # fmt: skip
    model = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(args.model).items()}
    return {**{f: getattr(args, f) for f in fields}, **model, "text_sha256": text_sha256}


TEXT = "text_sha256"


def differing(there: dict, here: dict) -> list[str]:
    """In words, what of the `resume_key` `here` is other in an earlier run's, `there`."""
    known = [name for name in here if name != TEXT or TEXT in there]
    return [f"{k} {there.get(k)} there, {here[k]} now" for k in known if there.get(k) != here[k]]


def check_same(where: str, there: dict, here: dict, way_out: str) -> None:
    """ValueError where `differing` finds something; a note where an earlier run `where` does not tell its text."""
    if found := differing(there, here):
        raise ValueError(f"{where} is of another run ({'; '.join(found)}): {way_out}")
    if TEXT not in there:
        print(f"note: {where} does not tell the hash of its text; that it is the same one is not checked")


def need(*packages: str) -> None:
    """ValueError where one of `packages`, which te_jax itself can do without, is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")
