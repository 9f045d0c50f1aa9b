"""Where a step's time goes: its kernels, each with the work that the compiled module says it does."""

import collections
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from .kernels import COPIES, Event, times

ROUTING = "router, permute, combine"
SMALL_US = 5.0  # XLA's kernels below this are one class

# Families of work, each by the names of its kernels and of its custom calls; the first that matches. cuBLASLt's kernels
# are called nvjet.
_FAMILIES = [
    ("memset, memcpy", COPIES, None),
    ("attention forward", r"sdpa.*(fprop|fwd)|fmha.*fwd", r"te_attention_.*fwd|__cudnn\$fmha(?!.*Backward)"),
    ("attention backward", r"sdpa|fmha|flash|dot_do_o|convert_dq", r"te_attention_.*bwd|__cudnn\$fmha"),
    ("norm forward", r"te::.*NormFwd", r"te_norm_.*fwd"),
    ("norm backward", r"te::.*NormBwd", r"te_norm_.*bwd"),
    (ROUTING, r"te::.*(te_router|te_group_|te_combine|Gather)", r"te_(router|permute|combine|group$)"),
    ("activation backward", r"te::.*(Gradient|ActivationBwd)", r"te_activation_.*bwd"),
    ("activation forward", r"te::.*Activation", r"te_activation_.*fwd"),
    ("quantize", r"te::.*(Quantize|te_quantize)", r"te_quantize"),
    ("rope", r"te::.*Rope", r"te_rope"),
    ("scale update", r"te::.*Scale", r"te_scale_update"),
    ("grouped GEMM", r"te_gemm_grouped", r"te_gemm_grouped"),
    ("other te_jax", r"\bte::", None),
    ("GEMM", r"(?i:nvjet|gemm|cublas|cutlass|xmma)", None),
]
_HELPERS = re.compile(r"splitk|reduce", re.IGNORECASE)  # of cuBLASLt's: a second kernel for one product
_GEMM_CALL = re.compile(r"te_gemm(?!_grouped)|__cublas\$|__triton_gemm")
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


class Work(NamedTuple):
    """What one instruction of a compiled module has to do."""

    name: str
    family: str
    label: str
    flops: float = 0.0
    bytes: float = 0.0  # operands and results, each once
    fp8: bool = False


# -- the module ----------------------------------------------------------------------------------------------


def works(text: str, tokens: int) -> list[Work]:
    """The work of a scheduled module's entry, in order. tokens: of the step; a GEMM that sums over them is a wgrad."""
    entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    types, found = {}, []
    for line in (entry[1] if entry else "").splitlines():
        parsed = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", line)
        if not parsed:
            continue
        name, result, opcode, rest = parsed.groups()
        types[name] = _arrays(result)
        if opcode in _NO_KERNEL:
            continue
        operands = [types.get(operand, []) for operand in _operands(rest)]
        found.append(_work(name, opcode, operands, types[name], rest, tokens))
    return found


def _operands(rest: str) -> list[str]:
    listed = re.split(r"\)(?:,|$)", rest, maxsplit=1)[0]
    return re.findall(r"%([\w.-]+)", listed) or [word.split()[-1] for word in listed.split(", ") if word.split()]


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(type, shape) of each array in "(bf16[8,8]{1,0}, u8[4]{0})"."""
    found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text)
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in found]


def _bytes(array) -> int:
    dtype, shape = array
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) // 8 if bits else 1)


def _work(name, opcode, operands, results, rest, tokens) -> Work:
    target = re.search(r'custom_call_target="([^"]+)"', rest)
    target = target[1] if target else ""
    if opcode == "custom-call":
        results = [array for array in results if array[0] != "u8"]  # u8 is workspace
    moved = sum(map(_bytes, [*(array for arrays in operands for array in arrays), *results]))
    if _GEMM_CALL.search(target) or "gemm_fusion" in name:
        return _gemm(name, operands, results, rest, tokens, moved)
    family = next((name for name, _, call in _FAMILIES if call and re.match(call, target)), "XLA")
    large = max((array for arrays in operands for array in arrays), key=_bytes, default=("", ()))
    label = f"{target or opcode} {large[0]}[{','.join(map(str, large[1]))}]"
    return Work(name, family, label, bytes=moved)


def _gemm(name, operands, results, rest, tokens, moved) -> Work:
    arrays = [array for arrays in operands[:2] for array in arrays] + results[:1]
    if len(arrays) != 3:
        return Work(name, "GEMM", name, bytes=moved)
    (lhs, rhs, out) = (math.prod(shape) for _, shape in arrays)
    k = math.isqrt(lhs * rhs // out) if out else 0
    is_sound = bool(k) and k * k * out == lhs * rhs
    m, n = (lhs // k, rhs // k) if is_sound else (0, 0)
    backward = any(array[0].startswith("f8e5m2") for array in arrays[:2]) or "transpose(" in rest
    role = "fprop" if not backward else "wgrad" if k == tokens else "dgrad"
    fp8 = arrays[0][0].startswith("f8")
    return Work(name, f"GEMM {role}", f"GEMM {role} {m}x{n}x{k}", 2.0 * m * n * k, moved, fp8)


# -- the kernels ---------------------------------------------------------------------------------------------


def family(kernel: str) -> str:
    return next((name for name, pattern, _ in _FAMILIES if re.search(pattern, kernel)), "XLA")


def per_step(events: Sequence[Event], steps: int) -> list[list[Event]]:
    """The kernels of each step, all lists in one order: by name and turn, as in the first step.

    Raises ValueError where the steps do not hold the same kernels.
    """
    events = sorted(events, key=lambda event: event.start)
    count, rest = divmod(len(events), steps)
    if rest or not count:
        raise ValueError(f"trace: {len(events)} kernels in {steps} steps; each step must have the same number.")
    keyed = []
    for step in range(steps):
        turns, own = collections.Counter(), {}
        for event in events[step * count : (step + 1) * count]:
            own[event.name, turns[event.name]] = event
            turns[event.name] += 1
        keyed.append(own)
    if any(own.keys() != keyed[0].keys() for own in keyed):
        raise ValueError(f"trace: the {steps} steps do not hold the same kernels; record fewer of them.")
    return [[own[key] for key in keyed[0]] for own in keyed]


def match(kernels: Sequence[Event], found: Sequence[Work]) -> list[Work | None]:
    """The work of each kernel of a step.

    XLA names its kernels after its instructions, and launches one for all that are alike. Other kernels take their
    family's instructions in order, where there are as many of both.
    """
    plain = lambda name: re.sub(r"[.-]", "_", name)
    by_name = {plain(work.name): work for work in found}
    matched = [by_name.get(plain(kernel.name)) for kernel in kernels]
    families = [family(kernel.name) for kernel in kernels]
    for kind in set(families) - {"XLA", "memset, memcpy"}:
        main = [i for i, kernel in enumerate(kernels) if families[i] == kind and not _HELPERS.search(kernel.name)]
        own = [work for work in found if work.family.startswith(kind)]
        if len(own) == len(main):
            for place, work in zip(main, own):
                matched[place] = work
    return matched


def account(events: Sequence[Event], steps: int, found: Sequence[Work], brief: int, settled: int) -> dict:
    """Kernels and classes of a step: `ms` is the mean over the first `brief` steps, `sustained_ms` over the last
    `settled`; also the step's span, its kernels' sum, and its idle time."""
    each = per_step(events, steps)
    mean = lambda place, chosen: sum(s[place].end - s[place].start for s in chosen) / len(chosen) / 1e6
    kernels = []
    for place, work in enumerate(match(each[0], found)):
        name, ms = each[0][place].name, mean(place, each[:brief])
        work = work or Work(name, "XLA", "")
        kind = family(name) if work.family == "XLA" else work.family
        if kind == "XLA":
            kind = f"XLA, {'under' if ms * 1e3 < SMALL_US else 'from'} {SMALL_US:g} us"
        kernel = {"kernel": name, "class": kind, "ms": ms, "sustained_ms": mean(place, each[-settled:])}
        kernels.append(kernel | {key: getattr(work, key) for key in ("label", "flops", "bytes", "fp8")})
    phases = {"brief": each[:brief], "sustained": each[-settled:]}
    phases = {name: times([event for step in steps for event in step], len(steps)) for name, steps in phases.items()}
    return {"kernels": kernels, "classes": _classes(kernels, found), **phases}


def _classes(kernels, found) -> list[dict]:
    groups = collections.defaultdict(list)
    for kernel in kernels:
        groups[kernel["class"]].append(kernel)
    classes = []
    for name, group in groups.items():
        total = {key: sum(kernel[key] for kernel in group) for key in ("ms", "sustained_ms", "flops", "bytes")}
        # Of te_jax's calls and the GEMMs the module knows all; of XLA's kernels, those that were found in it.
        own = [work for work in found if work.family == name]
        if own:
            total |= {"flops": sum(work.flops for work in own), "bytes": sum(work.bytes for work in own)}
        elif not all(kernel["bytes"] for kernel in group):  # with one of unknown work there is no rate
            total |= {"flops": 0.0, "bytes": 0.0}
        classes.append({"class": name, "count": len(group), **total, "fp8": any(work.fp8 for work in own)})
    return sorted(classes, key=lambda each: -each["ms"])


def rate(row: dict, ceilings: dict, key: str = "ms", kind: str = "brief") -> tuple[str, float | None]:
    """The rate of a kernel or class as text, and its fraction of the ceiling; "" and None where its work is unknown."""
    amount, unit, ceiling = row["bytes"], "TB/s", "copy"
    if row["flops"]:
        amount, unit, ceiling = row["flops"], "TFLOP/s", "fp8" if row["fp8"] else "bf16"
    if not amount or not row[key]:
        return "", None
    value = amount / row[key] / 1e9
    return f"{value:.{2 if unit == 'TB/s' else 0}f} {unit}", value / ceilings[ceiling][kind]
