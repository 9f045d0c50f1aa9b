"""The CUDA lowering of every op against what its C++ handler declares: operands, results, attributes, layouts."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ffi_calls import CALLS, for_cudnn

from benchmarks.op_case import E4M3, E5M2
from benchmarks.op_cases import CASES
from te_jax.core import extension
from te_jax.core.op import ops
from te_jax.ops import attention
from te_jax.ops.quantize.transpose import transpose_held

CSRC = Path(__file__).parents[2] / "csrc"
MLIR_TYPE = {"int64_t": "i64", "double": "f64", "bool": "i1"}


def declared_handlers():
    """name -> (number of operands, number of results, {attribute: type}): the TE_HANDLER lines in csrc/, which name the
    attributes, and the parameters of their launchers in csrc/*/*.h."""
    launchers = {}
    for path in CSRC.glob("*/*.h"):
        for name, parameters in re.findall(r"^Status (Launch\w+)\((.*?)\);$", path.read_text(), re.S | re.M):
            types = [parameter.split()[0] for parameter in parameters.split(",")]
            launchers[name] = [kind for kind in types if kind not in ("Stage", "cudaStream_t")]
    handlers = {}
    for path in CSRC.glob("*/*.cc"):
        for match in re.finditer(r"^TE_HANDLER(?:_INIT)?\((.*?)\);$", path.read_text(), re.S | re.M):
            text = match[1]
            name, launcher = (part.strip() for part in text.split(",")[:2])
            types, names = launchers[launcher], re.findall(r'"(\w+)"', text)
            attributes = [kind for kind in types if kind not in ("Arg", "Ret", "Rets")]
            results = len(ops[name].rule.outputs) if "Rets" in types else types.count("Ret")
            handlers[name] = (types.count("Arg"), results, dict(zip(names, attributes, strict=True)))
    return handlers


def cuda_calls(case, rng):
    """The custom calls in the op's CUDA lowering, made here without any CUDA."""
    case, narrow = for_cudnn(case)
    args = [narrow(a) for a in case.args(rng)]
    given = [a for a in args if a is not None]

    def fn(*given):
        given = iter(given)
        return case(*(None if a is None else next(given) for a in args))

    text = jax.jit(fn).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if "custom_call @te_" in line]


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_lowering_matches_the_handler(case, rng):
    (call,) = cuda_calls(case, rng)
    assert f"@{case.op}(" in call
    operands, results, attrs = declared_handlers()[case.op]
    got_operands, got_results = call.rsplit(" : ", 1)[1].split(" -> ")
    assert got_operands.count("tensor<") == operands
    assert got_results.count("tensor<") == results
    config = re.search(r"mhlo\.backend_config = \{(.*?)\}", call)[1]
    got = dict(re.findall(r"(\w+) = (.+?)(?:, |$)", config))
    assert got.keys() == attrs.keys()
    for name, value in got.items():
        kind = "i1" if value in ("true", "false") else value.rsplit(" : ", 1)[1]
        assert kind == MLIR_TYPE[attrs[name]], name
    layouts = re.findall(r"dense<(.*?)> : tensor<\d+xindex>", call)
    shapes = re.findall(r"tensor<([^<>]*)>", got_operands + got_results)
    assert len(layouts) == operands + results
    for layout, shape in zip(layouts, shapes, strict=True):
        assert layout.strip("[]") == ", ".join(map(str, reversed(range(shape.count("x")))))  # row-major


def test_every_handler_has_an_op():
    assert declared_handlers().keys() == {case.op for case in CALLS}


@pytest.mark.parametrize("case", [case for case in CASES if case.declared.composed], ids=str)
def test_a_composed_op_calls_the_kernels_of_others(case, rng, monkeypatch):
    """A GEMM kernel for each FP8 term of a sum, added by its epilogue; other products, and MXFP8 ones, are XLA's."""
    monkeypatch.setattr(extension, "has_cuda_device", lambda: False)  # a GPU here may be too old for MXFP8
    calls, terms = cuda_calls(case, rng), sum(d == E5M2 for d in case.dtypes)
    kernels = ["te_gemm"] * terms if case.op in ("te_gemm_sum", "te_gemm_into") else []
    assert [re.search(r"@(\w+)", call)[1] for call in calls] == kernels


def test_a_weight_is_transposed_as_it_lies():
    """Else XLA transposes the stack of layers that it is an entry of."""
    text = jax.jit(lambda x: transpose_held(x, 1)).trace(jnp.ones((8, 16), E4M3)).lower(lowering_platforms=("cuda",))
    assert re.search(r"@LayoutConstraint\(.*result_layouts = \[dense<\[1, 0\]>", text.as_text())


def test_attention_op_is_exact_where_cudnn_is_not_used():
    """f32 attention has no cuDNN kernel: the op's CUDA lowering is then its reference."""
    q = jnp.ones((1, 8, 2, 16))
    attrs = dict(left=-1, right=0, bottom_right=False, seq_major=False, interleaved=False, scale=0.25, dropout_rate=0.0)
    call = lambda q: attention.attention_fwd(q, q, q, *(None,) * 5, outputs=("out", "lse"), **attrs)
    text = jax.jit(call).trace(q)
    assert "custom_call @te_attention" not in text.lower(lowering_platforms=("cuda",)).as_text()
