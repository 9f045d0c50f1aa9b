"""The C interface: where its header and library are, and the ops of that header for Python programs without JAX.

`te_jax.h` says what each op takes. Here a call is made by ctypes, whose structs are read from the header:

    lib = te_jax.c_api.load_library()
    array = lambda t, type: lib.array(t.data_ptr(), type, t.shape)  # of torch, say
    args = dict(x=array(x, "BF16"), scale=array(scale, "F32"), data=array(data, "E4M3"), split=1)
    workspace = torch.empty(lib.workspace("quantize", **args), dtype=torch.uint8, device="cuda")
    lib.call("quantize", stream, workspace.data_ptr(), workspace.numel(), **args)
"""

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_jax.core import extension

_C_TYPES = {"void*": ctypes.c_void_p, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.DOTALL)
_FIELDS = re.compile(r"(\w+\*?) ([^;]+);")
_NUMBER = re.compile(r"\bTE_JAX_(\w+)(?: =)? (\d+)")
_TYPE_NAMES = re.compile(r"enum te_jax_type \{(.*?)\}", re.DOTALL)
_ERRORS = {3: ValueError, 12: NotImplementedError}  # by status; RuntimeError for others


def get_include() -> str:
    """The folder of `te_jax.h`. Raises RuntimeError if te_jax was installed without its CUDA extension."""
    return str(_installed("include/te_jax.h").parent)


def get_library() -> str:
    """The path of `libte_jax.so`. Raises RuntimeError if te_jax was installed without its CUDA extension."""
    return str(_installed("libte_jax.so"))


def get_cmake_dir() -> str:
    """The folder for CMake's `-Dte_jax_DIR=`, with which `find_package(te_jax)` makes the target te_jax::te_jax. Raises
    RuntimeError if te_jax was installed without its CUDA extension."""
    return str(_installed("cmake/te_jax-config.cmake").parent)


def _installed(name: str) -> Path:
    spec = importlib.util.find_spec("te_jax._cuda")
    path = Path(spec.origin).parent / name if spec and spec.origin else None
    if path is None or not path.is_file():
        raise RuntimeError(
            f"te_jax was installed without its CUDA extension, to which {name} belongs. {extension.REBUILD}"
        )
    return path


class Header:
    """What `te_jax.h` in the folder `include` declares."""

    def __init__(self, include: str):
        text = _COMMENT.sub("", (Path(include) / "te_jax.h").read_text())
        numbers = {name: int(number) for name, number in _NUMBER.findall(text)}
        self.version: int = numbers["API_VERSION"]
        self.max_rank: int = numbers["MAX_RANK"]
        self.types: dict[str, int] = {
            name: int(number) for name, number in _NUMBER.findall(_TYPE_NAMES.search(text)[1]) if int(number)
        }
        structs = self._structs(text, numbers)
        self.array: type[ctypes.Structure] = structs.pop("te_jax_array")
        self.ops: dict[str, type[ctypes.Structure]] = {
            name[len("te_jax_") : -len("_args")]: struct for name, struct in structs.items()
        }

    @staticmethod
    def _structs(text: str, numbers: dict[str, int]) -> dict[str, type[ctypes.Structure]]:
        types, structs = dict(_C_TYPES), {}
        for name, body in _STRUCT.findall(text):
            fields = []
            for c_type, names in _FIELDS.findall(body):
                for field in re.split(r",\s*", names):
                    field, _, size = field.rstrip("]").partition("[")
                    of = types[c_type]
                    fields.append((field, of * numbers[size[len("TE_JAX_") :]] if size else of))
            types[name] = structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        return structs


class Library:
    """`libte_jax.so`, its ops by their names in the header, such as "quantize"."""

    def __init__(self, library: str, include: str):
        """library: the path of the library. include: the folder of its `te_jax.h`. Raises RuntimeError if their
        versions differ."""
        self.path: str = library
        self._header = Header(include)
        self._library = ctypes.CDLL(library)
        self._library.te_jax_error.restype = ctypes.c_char_p
        if (built := self._library.te_jax_api_version()) != self._header.version:
            raise RuntimeError(f"te_jax.c_api: {library} has version {built} of te_jax.h, {include} has another.")

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of all ops."""
        return tuple(self._header.ops)

    def fields(self, op: str) -> dict[str, Any]:
        """{name: ctypes type} of the arguments of `op`, the workspace left out. Raises ValueError for another name."""
        if op not in self._header.ops:
            raise ValueError(f"te_jax.c_api: {op!r} is no op; use one of {', '.join(self.ops)}.")
        return dict(self._header.ops[op]._fields_[:-2])

    def array(self, pointer: int, type: str, shape: Sequence[int]) -> ctypes.Structure:
        """An argument of an op: memory of the device, "F32", "BF16", "F16", "E4M3", "E5M2" or "I32", and its sizes.

        Raises ValueError for another type, and for more than 8 axes.
        """
        header = self._header
        if type not in header.types or len(shape) > header.max_rank:
            known = f"{', '.join(header.types)}, and at most {header.max_rank} axes"
            raise ValueError(f"te_jax.c_api: an array has type {type!r} and {len(shape)} axes; use {known}.")
        sizes = (*shape, *[0] * (header.max_rank - len(shape)))
        return header.array(pointer or None, header.types[type], len(shape), sizes)

    def workspace(self, op: str, **args: Any) -> int:
        """How many bytes of the device `call` needs for these arguments, whose pointers may be 0. Raises as `call`."""
        of, size = self._args(op, args, 0, 0), ctypes.c_int64()
        self._run(f"{op}_workspace", ctypes.byref(of), ctypes.byref(size))
        return size.value

    def call(self, op: str, stream: int | None, workspace: int, workspace_bytes: int, **args: Any) -> None:
        """Enqueues an op on a CUDA stream (None: the default stream) of the current device.

        workspace: a pointer to memory of the device, aligned to 256 bytes. args: the fields of the op's struct; those
        left out are 0, arrays absent. Raises TypeError for a field that the op lacks, ValueError for bad arguments,
        NotImplementedError for what this GPU lacks, RuntimeError for errors of CUDA.
        """
        self._run(op, ctypes.byref(self._args(op, args, workspace, workspace_bytes)), ctypes.c_void_p(stream))

    def plan(self, op: str, stream: int | None, workspace_bytes: int, **args: Any) -> None:
        """Makes the plan of "gemm" or "gemm_block", and launches nothing: before the stream is captured. Raises as
        `call`."""
        if op not in ("gemm", "gemm_block"):
            raise ValueError(f"te_jax.c_api: {op!r} has no plan; use gemm or gemm_block.")
        self._run(f"{op}_plan", ctypes.byref(self._args(op, args, 0, workspace_bytes)), ctypes.c_void_p(stream))

    def set_library_path(self, soname: str, path: str) -> None:
        """Where a library is that products need: "libcublasLt.so.13". Raises ValueError once it was looked for."""
        self._run("set_library_path", soname.encode(), path.encode())

    def _args(self, op: str, args: dict[str, Any], workspace: int, workspace_bytes: int) -> ctypes.Structure:
        known = self.fields(op)
        if unknown := [name for name in args if name not in known]:
            raise TypeError(f"te_jax.c_api: {op} has no {', '.join(unknown)}; its fields are {', '.join(known)}.")
        return self._header.ops[op](workspace=workspace or None, workspace_bytes=workspace_bytes, **args)

    def _run(self, function: str, *args: Any) -> None:
        if status := getattr(self._library, f"te_jax_{function}")(*args):
            raise _ERRORS.get(status, RuntimeError)(self._library.te_jax_error().decode())


def load_library() -> Library:
    """The library that te_jax was installed with, which takes cuBLASLt from NVIDIA's wheels where they are installed.
    Raises RuntimeError if te_jax was installed without its CUDA extension."""
    library = Library(get_library(), get_include())
    for soname, path in extension.library_paths():
        if not soname.startswith("libcublasLt."):
            continue
        try:
            library.set_library_path(soname, path)
        except ValueError:  # This process, or jax in it, uses one already; or it is another CUDA's.
            pass
    return library
