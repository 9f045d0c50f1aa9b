"""dot_product_attention, in all combinations that attention_matrix.py makes, against float64 with derived bounds."""

import functools
import itertools
from dataclasses import replace
from functools import partial

import attention_float64
import jax
import numpy as np
import pytest
from attention_matrix import Case, all_pairs, cases, pairs, problem

from te_jax.ops.attention import (
    dot_product_attention,
    dot_product_attention_kv_packed,
    dot_product_attention_packed,
    explain_attention,
)

CASES = cases()
SERVED = 412  # of CASES, by cuDNN on a Hopper GPU: at least
_CPU = jax.devices("cpu")[0]
all_cases = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def _quick():
    """Options under which a CPU program, which runs once, compiles quickest."""
    quick = {"xla_backend_optimization_level": 0}
    quicker = quick | {"xla_cpu_use_fusion_emitters": False}  # in less than half the time; gone in jax 0.12
    try:
        with jax.default_device(_CPU):
            jax.jit(lambda x: x, compiler_options=quicker)(0)
    except jax.errors.JaxRuntimeError:
        return quick
    return quicker


_ATTEND = {
    "none": dot_product_attention,
    "kv": dot_product_attention_kv_packed,
    "kv_interleaved": partial(dot_product_attention_kv_packed, interleaved=True),
    "qkv": dot_product_attention_packed,
    "qkv_interleaved": partial(dot_product_attention_packed, interleaved=True),
}


def _step(operands, dout, extra, arrays, options, joined):
    """out, lse and the gradients of operands and extra."""
    attend = partial(_ATTEND[joined], return_lse=True)
    call = lambda operands, extra: attend(*operands, **extra, **arrays, **dict(options))
    out, vjp, lse = jax.vjp(call, operands, extra, has_aux=True)
    return (out, lse), *vjp(dout)


def _axis(joined):
    return -2 if joined.endswith("interleaved") else -3


def _operands(problem, joined):
    q, k, v, dout = problem.operands
    apart, together = {"none": ((q, k, v), ()), "kv": ((q,), (k, v)), "qkv": ((), (q, k, v))}[joined.partition("_")[0]]
    return (*apart, *([np.stack(together, _axis(joined))] if together else [])), dout


def _named(got, joined="none"):
    (out, *lse), grads, extra = jax.tree.map(np.asarray, got)
    if joined != "none":
        *apart, last = grads
        grads = (*apart, *np.moveaxis(last, _axis(joined), 0))
    named = dict(out=out, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))
    if lse:
        named["lse"] = np.where(lse[0] == -np.inf, 0, lse[0])
    return named | {{"bias": "dbias", "softmax_offset": "doffset"}[name]: x for name, x in extra.items()}


def _arguments(case, problem, implementation):
    """Of `_step`: the arrays, and what is static."""
    options = problem.options | {"implementation": implementation}
    arrays = *_operands(problem, case.joined), problem.differentiated, problem.arrays
    return arrays, (tuple(options.items()), case.joined)


def _results(case, problem, got):
    """{name: array}, of the right types, of what `_step` gave."""
    got = _named(got, case.joined)
    types = {
        "lse": np.empty(0, np.float32),
        "dbias": problem.differentiated.get("bias"),
        "doffset": problem.differentiated.get("softmax_offset"),
    }
    for name, x in got.items():
        assert x.dtype == types.get(name, problem.operands[0]).dtype, name
    return got


def _check(got, want):
    wrong = {name: wrong for name in got if (wrong := want[name].misses(got[name]))}
    assert not wrong, "\n".join(f"{name} {text}" for name, text in wrong.items())


def _choice(case, problem):
    *operands, _ = problem.operands
    arrays = {**problem.differentiated, **problem.arrays}
    return explain_attention(*operands, platform="cuda", **arrays, **problem.options)


# ---- the design ----------------------------------------------------------------------------------


def test_every_pair_of_values_is_in_a_case():
    assert len(CASES) == len(set(map(str, CASES))) >= 400
    rows = lambda case: case.rows.partition("_")[0]
    covered = set().union(*(pairs({**vars(case), "rows": rows(case)}) for case in CASES))
    assert all_pairs() <= covered


def test_how_many_cases_cudnn_serves():
    served = 0
    for case in CASES:
        choice = _choice(case, problem(case, gpu=True, numbers=False))
        served += choice.implementation == "cudnn"
        assert choice.implementation == "cudnn" or choice.refused["cudnn"].strip(), case
    assert served >= SERVED, f"{served} of {len(CASES)}"


# ---- on a CPU ------------------------------------------------------------------------------------

TOGETHER = 10  # cases, or a few more, of one program, which takes less time than one of each


def _same_program(case):
    return replace(case, rows=case.rows.partition("_")[0])


def _programs():
    """Lists of cases: those of like shapes, which share what was traced and lowered, and all fills of one program."""
    order = lambda case: [str(getattr(case, name)) for name in ("path", "lengths", "batch", "heads", "dims")]
    chunk = []
    for _, same in itertools.groupby(sorted(CASES, key=lambda c: (order(c), str(_same_program(c)))), _same_program):
        chunk += same
        if len(chunk) >= TOGETHER:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _types(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), np.result_type(x)) for x in leaves)


def _on_cpu(cases, problems):
    """What `_step` gives for each of the cases. Those that differ in numbers only share a function of the program,
    which then runs as often as the most of them need."""
    alike = {}
    for case, given in zip(cases, problems):
        arrays, static = _arguments(case, given, None if case.path == "auto" else case.path)
        alike.setdefault((static, _types(arrays)), []).append((case, arrays))
    statics = [static for static, _ in alike]
    run = jax.jit(
        lambda each: [_step(*arrays, *static) for arrays, static in zip(each, statics, strict=True)],
        compiler_options=_quick(),
    )
    got = {}
    for turn in range(max(map(len, alike.values()))):
        turns = [members[min(turn, len(members) - 1)] for members in alike.values()]
        with jax.default_device(_CPU):
            results = jax.device_get(run([arrays for _, arrays in turns]))
        got |= {case: result for (case, _), result in zip(turns, results)}
    return [got[case] for case in cases]


@pytest.mark.parametrize("together", [pytest.param(each, id=str(i)) for i, each in enumerate(_programs())])
def test_on_cpu(together: list[Case]):
    """Plain JAX, whether as the reference of the cuDNN ops or as the implementation "xla"."""
    problems, wrong = [problem(case) for case in together], []
    for case, given, got in zip(together, problems, _on_cpu(together, problems)):
        want = attention_float64.attend(*given.operands, **given.oracle)
        try:
            _check(_results(case, given, got), want)
        except AssertionError as error:
            wrong.append(f"{case}\n{error}")
    assert not wrong, "\n".join(wrong)


# ---- on a GPU ------------------------------------------------------------------------------------

_gpu_step = partial(jax.jit, static_argnums=(4, 5))(_step)


def _peer_options(case: Case, given) -> dict | None:
    """The keywords of jax.nn.dot_product_attention for this case; None: it has none."""
    (left, right), square = given.options["window_size"] or (-1, -1), case.lengths in ("even", "odd", "two")
    right = 0 if "causal" in case.mask_type else right
    shifted = case.mask_type.endswith("bottom_right") and not (square and case.rows == "none")
    is_band = right == 0 or (left < 0 and right < 0)  # its windows end at the query
    lengths = case.rows == "none" or case.rows.startswith("lengths")
    plain = case.softmax == "vanilla" and case.bias_type == "post_scale_bias" and "st" not in (case.bias, case.mask)
    if shifted or not (is_band and lengths and plain):
        return None
    options = dict(scale=given.oracle["scale"], is_causal=right == 0)
    if left >= 0:
        options["local_window_size"] = (left, 0)
    if "mask" in given.arrays:
        options["mask"] = ~given.arrays["mask"]
    if case.rows != "none":
        lengths = given.arrays["sequence_descriptor"].seqlens
        options |= dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths))
    return options


def _peer(case: Case, given) -> dict[str, np.ndarray]:
    """out and gradients of jax.nn's cuDNN attention; {} where it does not take the case."""
    options = _peer_options(case, given)
    if options is None:
        return {}
    *operands, dout = given.operands
    extra = {name: x.astype(dout.dtype) for name, x in given.differentiated.items()}

    @jax.jit
    def step(operands, extra):
        call = lambda x, extra: jax.nn.dot_product_attention(*x, **extra, **options, implementation="cudnn")
        out, vjp = jax.vjp(call, operands, extra)
        return (out,), *vjp(dout)

    try:
        return _named(step(tuple(operands), extra))
    except (NotImplementedError, TypeError, ValueError, RuntimeError):
        return {}


@pytest.mark.gpu
@all_cases
def test_on_gpu(case: Case):
    """cuDNN, where it serves the case; and no worse than jax.nn's, where that does."""
    given = problem(case, gpu=True)
    choice = _choice(case, given)
    if choice.implementation != "cudnn":
        pytest.skip(f"cuDNN does not serve it: {choice.refused['cudnn']}")
    want = attention_float64.attend(*given.operands, **given.oracle)
    arrays, static = _arguments(case, given, "cudnn")
    got = _results(case, given, _gpu_step(*arrays, *static))
    _check(got, want)
    for name, theirs in _peer(case, given).items():
        ours, theirs = (np.linalg.norm(np.asarray(x, np.float64) - want[name].value) for x in (got[name], theirs))
        # a twentieth of the bound: as much as sums in another order may differ where both are nearly exact
        assert not ours > 1.2 * theirs + want[name].norm / 20, (name, ours, theirs)
