"""The rules of the sources: what a file imports, how long files and functions are, that a name has one home."""

import ast
import collections
import io
import itertools
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import op_table
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"te_jax": ".py", "csrc": ".cu .cuh .cc .h", "benchmarks": ".py", "tests": ".py", "examples": ".py"}
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the source tree")

# Names that stand in two modules of te_jax, and why.
SHARED_NAMES = {
    "an NNX module has the name of its Linen module": {
        "DenseGeneral",
        "DiTBlock",
        "DotGeneral",
        "DotProductAttention",
        "GatedDeltaNet",
        "LMHead",
        "LayerNorm",
        "LayerNormDenseGeneral",
        "LayerNormMLP",
        "Mamba2",
        "MoEBlock",
        "MultiHeadAttention",
        "MultiHeadLatentAttention",
        "RelativePositionBiases",
        "TransformerLayer",
    },
    "the same function for Linen and for NNX": {"value_and_grad"},
    "te_jax.hf reads and writes checkpoints": {"load", "save"},
    "te_jax.compat has the incumbent's names, which take the incumbent's arguments": {
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "MXFP8BlockScaling",
        "QuantizerSet",
        "activation",
        "autocast",
        "dense",
        "fp8_autocast",
        "get_cudnn_version",
        "grouped_dense",
        "inverse_reorder_causal_load_balancing",
        "layernorm",
        "layernorm_dense",
        "layernorm_mlp",
        "reorder_causal_load_balancing",
        "wrap_function_in_te_state_module",
    },
    "the parts of an Op, in each module that declares one": {
        "_bwd_reference",
        "_cuda",
        "_reference",
        "_workspace",
    },
}


def files(*folders: str) -> list[Path]:
    found = ((path, FOLDERS[folder].split()) for folder in folders for path in (ROOT / folder).rglob("*.*"))
    return sorted(path for path, suffixes in found if path.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def check(offences: dict[str, str]):
    """Fails with all offences {what: more about it}."""
    assert not offences, "\n".join(["", *(f"{what}: {more}" for what, more in sorted(offences.items()))])


# -- imports ---------------------------------------------------------------------------------------------------


def imported(path: Path, nodes) -> set[str]:
    """What the import statements among `nodes` name; `from a import b` names a.b, which may be a module or not."""
    package, found = path.relative_to(ROOT).parent.parts, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            found |= {".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return found


def test_jax_is_used_by_its_public_names():
    """No file that git tracks names another, in an import or elsewhere."""
    private = "jax" + "._src"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs git")
    paths = [ROOT / name for name in tracked.stdout.split("\0") if name and not name.startswith("third_party/")]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    check({name_of(path): f"names {private}" for path, text in texts.items() if private in text})


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_cycle_of_imports():
    """Among the modules of te_jax, by imports at module level. Whoever imports a name from a package needs all of the
    package; whoever imports a module of it, only the module."""
    modules, edges = {module_of(path): path for path in files("te_jax")}, {}
    for module, path in modules.items():
        names = imported(path, parsed(path).body)
        edges[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
    check({" -> ".join(cycle): "a cycle of imports" for cycle in cycles(edges)})


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """A cycle for each edge that closes one in a search in depth."""
    found, done = [], set()

    def visit(name, path):
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


def test_a_cycle_is_seen():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c", "b"]]


# Floors of te_jax, the lowest first: a module imports of its own and of lower ones. Files of the root count by name.
FLOORS = (
    {"core"},
    {"recipe"},
    {"sharding"},
    {"ops"},
    {"state"},  # The law of a scale is an op.
    {"layers"},
    {"gradients", "stats"},
    {"optim"},
    {"flax"},
    {"nnx", "models"},
    {"hf"},
)
MOST_LOOSE_FILES = 8


def test_no_arrow_up():
    """Among the folders of te_jax, by imports at module level."""
    height = {name: i for i, names in enumerate(FLOORS) for name in names}
    up = {}
    for path in files("te_jax"):
        own = module_of(path).split(".")[1:2]
        for name in imported(path, parsed(path).body) if own and own[0] in height else ():
            other = name.split(".")[1:2] if name.startswith("te_jax.") else []
            if height.get("".join(other), -1) > height[own[0]]:
                up[f"{name_of(path)} imports {name}"] = f"{other[0]} is above {own[0]}"
    check(up)


# Floors of csrc, the lowest first: a file includes of its own folder and of lower floors.
FLOORS_OF_CSRC = (
    {"base", "include"},
    {"quantize"},
    {"activation", "attention", "gemm", "norm", "rope", "ssm"},
    {"delta", "experts"},
    {"interface"},
)


def test_includes_of_csrc():
    """No arrow up or across, and no circle. What other projects' headers are is not looked at."""
    height = {name: i for i, names in enumerate(FLOORS_OF_CSRC) for name in names}
    texts = {path.relative_to(ROOT / "csrc").as_posix(): path.read_text() for path in files("csrc")}
    includes = {name: re.findall(r'^#include "(.+)"', text, re.MULTILINE) for name, text in texts.items()}
    edges = {name: {other for other in found if other in texts} for name, found in includes.items()}
    folder = lambda name: name.partition("/")[0]
    allowed = lambda own, other: own == other or height[other] < height[own]
    up = {(a, b) for a, others in edges.items() for b in others if not allowed(folder(a), folder(b))}
    check({f"{a} includes {b}": f"{folder(b)} is not below {folder(a)}" for a, b in up})
    check({" -> ".join(cycle): "a circle of includes" for cycle in cycles(edges)})


def test_few_loose_files():
    loose = [path.name for path in (ROOT / "te_jax").glob("*.py")]
    assert len(loose) <= MOST_LOOSE_FILES, sorted(loose)
    assert not [*(ROOT / "csrc").glob("*.*")] and [*(ROOT / "tests").glob("*.py")] == [ROOT / "tests/conftest.py"]


def test_a_test_file_imports_no_other():
    each = {path: imported(path, ast.walk(parsed(path))) for path in files("tests")}
    others = {path: sorted(name for name in names if name.startswith("test_")) for path, names in each.items()}
    check({name_of(path): f"imports {', '.join(names)}" for path, names in others.items() if names})


def test_no_benchmark_shadows_a_module_of_python():
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "__main__"}
    assert not names & sys.stdlib_module_names


# -- lengths ---------------------------------------------------------------------------------------------------


def test_no_file_is_too_long():
    lengths = {name_of(path): path.read_text().count("\n") for path in files(*FOLDERS)}
    check({name: f"{lines} lines" for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE})


@cache
def code_lines(path: Path) -> frozenset[int]:
    """The lines that hold more than a comment."""
    skipped = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return frozenset(i for t in tokens if t.type not in skipped for i in range(t.start[0], t.end[0] + 1))


def of_python(path: Path):
    """(name, lines) of its functions; of long ones the lines of code, without a docstring."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.lineno, node.end_lineno + 1)
            if len(lines) > MOST_LINES_OF_A_FUNCTION:  # else they are few enough, whatever is code among them
                first = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
                docstring = range(first.lineno, first.end_lineno + 1) if first else ()
                lines = code_lines(path).intersection(lines).difference(docstring)
            yield node.name, len(lines)


# As clang-format has it: what begins in the first column and ends with the first brace there.
_CPP_FUNCTION = re.compile(
    r"^(?!namespace|struct|class|enum|union|extern|#)(\w[^\n;]*\([^;{}]*)\{\n.*?^\}", re.MULTILINE | re.DOTALL
)


def of_cpp(path: Path):
    """The same of functions that are no members."""
    text = re.sub(r"__launch_bounds__\(.*?\)\s*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    for found in _CPP_FUNCTION.finditer(text):
        name = re.search(r"([\w:~]+)\(", found[1])
        yield name[1], sum(bool(re.sub(r"//.*", "", line).strip()) for line in found[0].splitlines())


def test_a_function_fits_a_screen():
    of = lambda path: of_python(path) if path.suffix == ".py" else of_cpp(path)
    lengths = {f"{name_of(path)}: {name}": lines for path in files(*FOLDERS) for name, lines in of(path)}
    too_long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION}
    check({name: f"{lines} lines" for name, lines in too_long.items()})


# -- names -----------------------------------------------------------------------------------------------------


def homes() -> dict[str, list[str]]:
    """{name: modules of te_jax that define it at their top}: functions, classes, and private constants."""
    found = collections.defaultdict(list)
    for path in files("te_jax"):
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            else:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                parts = itertools.chain(*(getattr(target, "elts", [target]) for target in targets))
                names = [part.id for part in parts if isinstance(part, ast.Name) and part.id.startswith("_")]
            for name in {name for name in names if not re.fullmatch(r"_*|__\w+__", name)}:
                found[name].append(name_of(path))
    return found


def test_a_name_has_one_home():
    allowed = set().union(*SHARED_NAMES.values())
    twice = {name: where for name, where in homes().items() if len(where) > 1}
    assert allowed <= twice.keys(), f"stand in one module: {sorted(allowed - twice.keys())}"
    check({name: f"in {', '.join(where)}" for name, where in twice.items() if name not in allowed})


def test_what_a_package_shows_can_be_imported():
    """`te_jax` lists its packages, which are imported at first use, and each what it exports; no name is there by
    accident, so that `help` and completion show what a user wants."""
    import te_jax

    packages = [te_jax, *(each for name in te_jax.__all__ if hasattr(each := getattr(te_jax, name), "__path__"))]
    assert dir(te_jax) == sorted(te_jax.__all__) and len(packages) >= 10
    for package in packages:
        assert len(set(package.__all__)) == len(package.__all__), package
        for name in package.__all__:
            value = getattr(package, name)
            assert getattr(value, "__module__", "te_jax").startswith("te_jax"), f"{package.__name__}.{name}"
    with pytest.raises(AttributeError, match="'te_jax' has no attribute 'transformer'"):
        te_jax.transformer  # noqa: B018


# -- the page of ops -------------------------------------------------------------------------------------------


def test_every_op_is_on_the_page():
    assert op_table.PATH.read_text() == op_table.text(), "run `python tests/support/op_table.py`"
