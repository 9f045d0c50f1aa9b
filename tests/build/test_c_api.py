"""The C interface without a GPU: its header, as C and as Python reads it, and where an installation has it. What wrong
calls end as is in test_ffi_checks.py, results in test_cuda_c_api.py."""

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess

import pytest
from c_calls import CASES, INCLUDE, ONE_VALUE, OPS
from ffi_calls import recorded

import te_jax
from te_jax import c_api
from te_jax.core.op import ops


def test_fields_have_the_names_of_jax():
    """Operands, results and attributes as the op's FFI call has them, in this order."""
    header = c_api.Header(str(INCLUDE))
    assert tuple(header.ops) == OPS
    cases = {case.op: case for case in CASES}
    assert cases.keys() == {f"te_{op}" for op in OPS}
    for op, struct in header.ops.items():
        rule, attrs = ops[f"te_{op}"].rule, recorded(cases[f"te_{op}"]).attrs
        names = [name for name, _ in struct._fields_]
        assert names[-2:] == ["workspace", "workspace_bytes"]
        arrays = [o.name for o in (*rule.inputs, *rule.outputs)]
        assert names[: len(arrays)] == arrays
        assert {*names[len(arrays) : -2]} == attrs.keys() - ONE_VALUE


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_structs_are_those_of_c(tmp_path):
    header = c_api.Header(str(INCLUDE))
    structs = {"te_jax_array": header.array} | {f"te_jax_{op}_args": struct for op, struct in header.ops.items()}
    places = [
        f'printf("%zu\\n", offsetof({name}, {field}));' for name, of in structs.items() for field, _ in of._fields_
    ]
    places += [f'printf("%zu\\n", sizeof({name}));' for name in structs]
    places += [f'printf("%d\\n", TE_JAX_{name});' for name in header.types]
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "te_jax.h"', "int main(void) {", *places, "}"]
    (tmp_path / "places.c").write_text("\n".join(lines))
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *strict, f"-I{INCLUDE}", "places.c", "-o", "places"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "places"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [getattr(of, field).offset for of in structs.values() for field, _ in of._fields_]
    wanted += [c_api.ctypes.sizeof(of) for of in structs.values()]
    assert [*map(int, said)] == [*wanted, *header.types.values()]


def test_numbers_of_activations_are_those_of_jax():
    text = (INCLUDE / "te_jax.h").read_text()
    kinds = re.findall(r"TE_JAX_(\w+) = (\d)", text[text.index("TE_JAX_GELU") : text.index("activation_fwd_args")])
    assert [(name.lower(), int(number)) for name, number in kinds] == [
        (name, number) for number, name in enumerate(te_jax.ops.quantize.activation._KINDS)
    ]


WHERE = {
    te_jax.get_include: "include/te_jax.h",
    te_jax.get_library: "libte_jax.so",
    te_jax.get_cmake_dir: "cmake/te_jax-config.cmake",
}


@pytest.mark.parametrize("function", WHERE, ids=lambda function: function.__name__)
def test_paths_are_those_beside_the_extension(function, tmp_path, monkeypatch):
    spec = importlib.machinery.ModuleSpec("te_jax._cuda", None, origin=str(tmp_path / "_cuda.abi3.so"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(RuntimeError, match="installed without its CUDA extension.*TE_JAX_BUILD_CUDA=1"):
        function()
    path = tmp_path / WHERE[function]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert function() in (str(path), str(path.parent))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="installed without its CUDA extension"):
        function()
