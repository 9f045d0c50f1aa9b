"""Wrong FFI calls of every target: each operand and each result wrong in type, rank and size, one at a time.

As a program, for the GPU: `python tests/support/ffi_calls.py TARGET ...` prints a line of JSON for each target.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.op_case import E4M3, E5M2, Case
from benchmarks.op_cases import CASES

# No kernel takes the bias of the one, nor the type and sizes of the others.
_OF_XLA = (
    "swiglu_grouped",
    *(f"{name}{way}" for name in ("ssd", "ssd_shared", "gated_delta", "gated_delta_shared") for way in ("", "_bwd")),
)
KERNELS = [case for case in CASES if not case.declared.composed and case.name not in _OF_XLA]


def _with_other_operands() -> Iterator[Case]:
    """Calls whose kernel takes what those of `op_cases` leave to XLA, or leave out."""
    by_name = {case.name: case for case in CASES}
    bf16, f32 = jnp.dtype(jnp.bfloat16), jnp.float32
    for name, types in (
        ("gemm_bias_c", (bf16, bf16, None, None)),
        ("gemm_block_square_bias_c", (E5M2, E4M3, f32, None, f32)),
    ):
        case = by_name[name]  # an f32 result's bias is added outside
        yield replace(case, name=f"{name}_bf16", dtypes=(*types, bf16, bf16), attrs=case.attrs | dict(out_dtype=bf16))
    block, grouped = by_name["gemm_block_square_bias_c"], by_name["gemm_grouped_block"]
    cut = {"n...0": 2, "n": 144, "k": 80}  # blocks that are cut at the end of each of several axes
    of_block = dict(dtypes=(E5M2, E4M3, f32, None, f32, bf16, bf16), attrs=block.attrs | dict(out_dtype=bf16))
    ranks = block.ranks | {"n...": 1}
    yield replace(block, name="gemm_block_cut", sizes=block.sizes | cut, ranks=ranks, **of_block)
    sizes, ranks = grouped.sizes | cut | {"k...0": 2}, grouped.ranks | {"n...": 1, "k...": 1}
    yield replace(grouped, name="gemm_grouped_cut", sizes=sizes, ranks=ranks, attrs=grouped.attrs | dict(outer=1))
    ssd, of_x = by_name["ssd"], (bf16, bf16, f32, bf16, bf16, f32)
    sizes = ssd.sizes | dict(p=8, n=8)
    yield replace(ssd, name="ssd_bf16", sizes=sizes, dtypes=(*of_x, bf16, f32, jnp.int32, f32))
    bwd = dict(sizes=sizes, dtypes=(bf16, f32, *of_x, f32, jnp.int32, f32), ones={"D": ("p",)})
    outputs = ("dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias", "dinitial")
    yield replace(by_name["ssd_bwd"], name="ssd_bwd_bf16", outputs=outputs, **bwd)
    delta = by_name["gated_delta"]
    of_delta = dict(sizes=delta.sizes | dict(d=8, e=8), ones={"gate": ("d",)})
    operands = (*[bf16] * 3, f32, f32, jnp.int32, f32)
    yield replace(delta, name="gated_delta_bf16", dtypes=operands, **of_delta)
    yield replace(by_name["gated_delta_bwd"], name="gated_delta_bwd_bf16", dtypes=(bf16, f32, *operands), **of_delta)
    of_delta["ones"] = {}  # a gate for each channel
    yield replace(delta, name="gated_delta_channel", dtypes=operands, **of_delta)
    for ones in ((), ("g",), ("b...0", "g")):
        yield replace(by_name["attention_bias_h_bwd"], name=f"attention_bias{ones}_bwd", ones={"bias": ones})


CALLS = (*KERNELS, *_with_other_operands())
TARGETS = tuple(dict.fromkeys(case.op for case in CALLS))


class Call(NamedTuple):
    """An FFI call: {name: jax.ShapeDtypeStruct} of operands and results, the rest as `jax.ffi.ffi_call` has it."""

    target: str
    operands: dict
    results: dict
    attrs: dict
    options: dict

    def run(self, name: str):
        """Makes the call, to the target `name`, on zeros."""
        make = jax.jit(lambda *args: self.ffi_call(name)(*args, **self.attrs))
        jax.block_until_ready(make(*map(zeros, self.operands.values())))

    def ffi_call(self, name: str, **options):
        return jax.ffi.ffi_call(name, tuple(self.results.values()), **self._layouts(), **options)

    def branch(self, name: str):
        """The call within a larger program, which does nothing but make it."""
        operands = [jnp.zeros(like.shape, like.dtype) for like in self.operands.values()]
        self.ffi_call(name, has_side_effect=True)(*operands, **self.attrs)
        return jnp.int32(0)

    def _layouts(self):
        """Those of the lowering, row-major where the number of axes is another."""
        of = lambda arrays, layouts: [
            layout if len(layout) == len(a.shape) else tuple(range(len(a.shape)))
            for a, layout in zip(arrays.values(), layouts, strict=True)
        ]
        given = {"input_layouts": self.operands, "output_layouts": self.results}
        return {name: of(arrays, self.options[name]) for name, arrays in given.items() if name in self.options}


def zeros(like):
    return _zeros(like.shape, jnp.dtype(like.dtype))


@cache
def _zeros(shape, dtype):
    return jax.device_put(np.zeros(shape, dtype))


def for_cudnn(case: Case) -> tuple[Case, Any]:
    """The case in sizes, and with types, that cuDNN takes, and what makes its operands so."""
    if case.op == "te_attention_fp8_bwd":  # multiples of 128
        case = replace(case, sizes={**case.sizes, "s": 128, "t": 128})
    if not case.op.startswith("te_attention"):
        return case, lambda a: a
    is_wide = lambda a: a is not None and a.ndim >= 4 and a.dtype == jnp.float32
    return case, lambda a: a.astype(jnp.bfloat16) if is_wide(a) else a


def recorded(case: Case) -> Call:
    """The FFI call of the op's CUDA lowering."""
    case, narrow = for_cudnn(case)
    op, found, ffi_call = case.declared, [], jax.ffi.ffi_call

    def record(target, results, *, input_output_aliases=None, **options):
        def call(*operands, **attrs):
            types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
            partials = [f"{name}_partials" for name in op.partials]
            space = ["workspace"] if op.workspace else []
            names = [o.name for o in op.rule.inputs], [*(o.name for o in op.rule.outputs), *space, *partials]
            found.append(Call(target, *(dict(zip(n, t)) for n, t in zip(names, (types, results))), attrs, options))
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        return call

    args = [narrow(a) for a in case.args(np.random.default_rng(0))]
    jax.ffi.ffi_call = record
    try:
        params = op._params(args, case.outputs, case.attrs)
        jax.eval_shape(lambda *given: op._run_cuda(*given, **params), *(a for a in args if a is not None))
    finally:
        jax.ffi.ffi_call = ffi_call
    (call,) = found
    return call


# Operands whose bytes are FP8 of both layouts: of any type of 16 bits.
_PAIRS = {("te_gemm_grouped_paired", "lhs"), ("te_gemm_grouped_paired_wgrad", "rhs")}
# Operands that no handler reads: the call only has to come after them.
_UNREAD = {("te_keep", "kept"), ("te_keep", "after")}
# What a handler may take otherwise than the case has it: operands of another type, axes of another size.
_ANY_FLOAT = {"x", "gamma", "beta"}
ANY_SIZE = {("te_rope", "inv_freq", 0), *((f"te_{t}_bwd", "dgamma_partials", 0) for t in ("norm", "gated_norm")),
             *((t, "segments", 1) for t in TARGETS),
             # Experts, tokens and rows of the buffer are numbers of their own.
             *((f"te_permute{form}", "offsets", 0) for form in ("", "_block", "_fp8", "_fp8_block")),
             ("te_combine", "rows", 0), ("te_combine_bwd", "rows", 0),
             # One scale, or one for each expert.
             *((t, name, 0) for t in TARGETS if t.startswith("te_gemm_grouped") and "wide" not in t
               for name in ("lhs_scale_inv", "rhs_scale_inv")),
             *((f"te_activation_grouped_{way}", "scale", 0) for way in ("fwd", "bwd", "paired_bwd"))}  # fmt: skip


def _wrong(call: Call, name: str, like) -> Iterator[tuple[str, tuple, Any]]:
    """(what is wrong, shape, dtype) of one buffer."""
    shape, dtype, target = tuple(like.shape), jnp.dtype(like.dtype), call.target
    if (target, name) in _UNREAD:
        return
    if like.size == 0 and shape == (0,):
        yield "there", (3, 5, 7), jnp.float32
        return
    if name.endswith("_partials") or f"{name}_partials" in call.results:
        yield "absent", (0,), jnp.uint8
    yield "type", shape, jnp.int8
    is_gemm = target.startswith("te_gemm")
    any_half = name in _ANY_FLOAT or (target, name) in _PAIRS or (is_gemm and name == "out")
    if not any_half and dtype != jnp.float16:
        yield "width", shape, jnp.float16
    yield "rank", (1, *shape), dtype
    if name == "workspace" and (is_gemm or "attention" in target):  # what a plan needs, and a plan may need little
        return
    for axis in (0, 1, len(shape) - 1) if "bias" in name and len(shape) == 4 else {0, len(shape) - 1} if shape else ():
        if (target, name, axis) not in ANY_SIZE:
            yield f"size{axis}", (*shape[:axis], shape[axis] // 2 or 2, *shape[axis + 1 :]), dtype


def wrong_calls(target: str) -> Iterator[tuple[str, Call]]:
    """(what is wrong, the call). A buffer that an earlier case of the target has is not taken again, but for a bias of
    another shape."""
    seen = set()
    for case in (case for case in CALLS if case.op == target):
        call = recorded(case)
        for kind in ("operands", "results"):
            for name, like in getattr(call, kind).items():
                buffer = (kind, name, like.size > 0, like.shape if "bias" in name else None)
                if buffer in seen:
                    continue
                seen.add(buffer)
                for what, shape, dtype in _wrong(call, name, like):
                    changed = getattr(call, kind) | {name: jax.ShapeDtypeStruct(shape, dtype)}
                    yield f"{case}: {name} {what}", call._replace(**{kind: changed})


def outcome(call: Call, name: str) -> str:
    """ "" if the call succeeds, else its error."""
    try:
        call.run(name)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def outcomes(calls: list[Call], name: str) -> list[str]:
    """`outcome` of each, of one program that makes the call whose number it is given: one for each takes four times as
    long. Not for a GPU, where an execution initializes the handlers of all calls."""
    program = jax.jit(lambda i: jax.lax.switch(i, [partial(call.branch, name) for call in calls]))

    def say(i):
        try:
            jax.block_until_ready(program(i))
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    return [say(i) for i in range(len(calls))]


def refused(error: str, target: str) -> bool:
    """Whether the handler said what is wrong, with its name."""
    return "INVALID_ARGUMENT" in error and f"{target}: " in error


def survey(target: str, name: str, outcomes=lambda calls, name: [outcome(call, name) for call in calls]) -> dict:
    """Makes all wrong calls of a target, as `name`, and one right call before and after them."""
    case = next(case for case in CALLS if case.op == target)
    whats, wrong = zip(*wrong_calls(target))
    first, *errors, last = outcomes([recorded(case), *wrong, recorded(case)], name)
    said = [f"{what}: {e[:200] or 'success'}" for what, e in zip(whats, errors, strict=True) if not refused(e, target)]
    return {"target": target, "calls": len(wrong), "accepted": said, "right": [first, last]}


if __name__ == "__main__":
    from te_jax.core import extension

    extension.require_for_lowering()
    for each in sys.argv[1:]:
        print(json.dumps(survey(each, each)), flush=True)
