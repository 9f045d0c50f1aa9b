"""Loops over layers without copies that only loops make.

`lax.scan` makes the arrays of its stacked results of zeros, and its steps write over all of them. On a GPU the zeros
are a pass over memory: for what autodiff keeps of layers, and for their gradients, 0.9 ms of 15 for each layer of Llama
3 8B on an H200. Memory from `lax.empty` needs none. And XLA copies each number that a step reads from a stack, or
writes to one, by a kernel of its own: scales and amaxes are 57 of the 112 kernels and copies of such a layer. In one
array for each dtype they are two.

Autodiff makes these loops. So `plain_loops` goes over a function that is differentiated already, and puts a
`lax.while_loop` in place of each scan.

When text is generated, layers read stacks of keys and values and write them anew with one more token. Operand and
result of a scan are two arrays, so XLA copies each layer's rows out of one and into the other, and for the next token
all of the other back. The steps of a `lax.while_loop` hand on one array, into which each writes its token.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_jax.core.jaxprs import equation_of, run_rewritten, without_constants
from te_jax.core.placement import mesh_axes, spec_of_sharding
from te_jax.core.stack_writes import with_stacks
from te_jax.core.types import on_explicit_mesh, splittable_axes, varying_axes

_FILL_BYTES = 2**20  # bytes of a result whose zeros take longer than a kernel's launch
_ROW_NUMBERS = 4096  # numbers of FP8 state that cross a loop together with others
# What may hold a scan that is worth a loop, by jax's names of several versions. Within `shard_map` values vary over
# mesh axes, and functions with a derivative of their own are differentiated already.
_NESTED = {"jit", "pjit", "scan", "while", "cond", "checkpoint", "remat", "remat2", "closed_call", "eval_jaxpr"}


def plain_loops(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose scans do not fill their results with zeros first, write single entries of a row into the stack, and
    read and write the numbers of a step together (not on Explicit meshes), where one of their results has a MiB or
    more.

    fun: a function that returns arrays in trees. Of its arguments, arrays are traced, and other leaves are static.

    All of a result is written, so numbers are those of the scans, but for how XLA fuses what reads a written row. The
    scans give the derivatives. Left as they are: scans with an unroll other than 1, of symbolic sizes, within a
    `shard_map` or around one in which `fun` is called, on meshes of both Explicit and Auto axes, with results in the
    host's memory or of a weak type, with a `jax.Ref`, of 64 bits by `jax.enable_x64` within a `fun` of 32; and all
    under jax_debug_nans and jax_debug_infs, which would look into what is not written yet.
    """

    def call(*args, **kwargs):
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
            return fun(*args, **kwargs)
        enters = lambda eqn: eqn.primitive.name in _NESTED
        return run_rewritten(fun, enters, _other_loop, args, kwargs)[0]

    return call


def _other_loop(eqn: JaxprEqn) -> JaxprEqn:
    """A loop of `eqn`, where it is a scan that is worth one; else itself."""
    if eqn.primitive.name != "scan" or not (step := _Step(eqn)).is_worth_a_loop:
        return eqn
    scan = lambda *args: eqn.primitive.bind(*args, **eqn.params)
    loop = equation_of(_loop(scan, step), _avals(eqn.invars), eqn)
    return loop.replace(invars=eqn.invars, outvars=eqn.outvars)


def _avals(variables: Sequence[Any]) -> list[ShapedArray]:
    return [variable.aval for variable in variables]


def _stacked(of_loop: Sequence[Any], of_step: Sequence[Any]) -> int:
    """How many of a scan's variables, from the last on, have an axis of steps, which one step's lack."""
    ranks = [[len(a.shape) for a in _avals(variables)] for variables in (of_loop, of_step)]
    same = [i for i, (loop, step) in enumerate(zip(*(reversed(each) for each in ranks))) if loop == step]
    return min(same, default=min(map(len, ranks)))


class _Step:
    """What the equation of a scan says of it.

    shared, carried: how many operands all steps read, and how many one step hands to the next. first: the place of the
    first stack behind both.
    stacks, results: the types of the stacks that steps read and write. xs, ys: of a step's rows of them.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self.length, self.reverse, self.body = (eqn.params[name] for name in ("length", "reverse", "jaxpr"))
        inner = without_constants(self.body)
        self.carried = len(eqn.outvars) - _stacked(eqn.outvars, inner.outvars)
        self.shared = len(eqn.invars) - _stacked(eqn.invars, inner.invars) - self.carried
        self.first = self.shared + self.carried
        self.stacks, self.results = _avals(eqn.invars[self.first :]), _avals(eqn.outvars[self.carried :])
        self.xs, self.ys = _avals(inner.invars[self.first :]), _avals(inner.outvars[self.carried :])
        operands, results = _avals(eqn.invars), _avals(eqn.outvars)
        with eqn.ctx.manager:
            mesh = jax.sharding.get_abstract_mesh()
        self.on_explicit_mesh = any(isinstance(a, ShapedArray) and on_explicit_mesh(a) for a in (*operands, *results))
        known = eqn.params["unroll"] == 1 and all(_is_plain(a, mesh, made=False) for a in operands)
        known = known and all(_is_plain(a, mesh, made=True) and not a.weak_type for a in results)
        self.is_worth_a_loop = known and any(map(_is_large, self.results))


def _is_plain(aval: Any, mesh: Any, made: bool) -> bool:
    """Whether an array of the type `aval`, in the context of `mesh`, can be made of empty memory, by each device its
    part. made: whether it is to be; a constant is read on Explicit meshes whose type shows no mesh."""
    if not isinstance(aval, ShapedArray) or not all(isinstance(n, int) for n in aval.shape):
        return False
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype != jax.dtypes.canonicalize_dtype(aval.dtype):
        return False
    spec, own = aval.sharding.spec, aval.sharding.mesh
    mesh = own if own.empty and not made else mesh
    kinds = {*mesh.axis_types, *own.axis_types}
    on_mesh = kinds <= {AxisType.Auto} or (kinds == {AxisType.Explicit} and own == mesh)
    whole = not (spec.unreduced or spec.reduced or varying_axes(aval))
    return on_mesh and whole and aval.memory_space == jax.memory.Space.Device


def _is_large(aval: ShapedArray) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and prod(aval.shape) * aval.dtype.itemsize >= _FILL_BYTES


def _loop(scan: Callable[..., Any], step: _Step) -> Callable[..., list[jax.Array]]:
    """What the function `scan` computes of its operands."""
    together = not step.on_explicit_mesh  # there reshapes would have to say shardings
    run_step, written = with_stacks(step.body, (step.first, step.carried), step.stacks, step.results)
    sources, targets = list(written), list(written.values())
    xs_rows, ys_rows = _Rows(_without(step.xs, sources), together), _Rows(_without(step.ys, targets), together)
    results = ys_rows.pack_types(_without(step.results, targets), step.length)

    @jax.custom_jvp
    def loop(*args):
        consts, carry, xs = args[: step.shared], args[step.shared : step.first], args[step.first :]
        stacks, xs = [xs[i] for i in sources], xs_rows.pack(_without(xs, sources), 1)

        def run(state):
            i, carry, stacks, ys = state
            at = step.length - 1 - i if step.reverse else i
            given = [lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False) for x in xs]
            given = _interleaved(xs_rows.unpack(given, 0), dict(zip(sources, stacks)))
            out = run_step(at, *consts, *carry, *given)
            carry, out = out[: step.carried], out[step.carried :]
            write = partial(lax.dynamic_update_index_in_dim, index=at, axis=0, allow_negative_indices=False)
            new = ys_rows.pack(_without(out, targets), 0)
            return i + 1, carry, [out[i] for i in targets], list(map(write, ys, new))

        start = jnp.array(0), [*carry], stacks, list(map(_unfilled, results))
        _, carry, stacks, ys = lax.while_loop(lambda state: state[0] < step.length, run, start)
        return [*carry, *_interleaved(ys_rows.unpack(ys, 1), dict(zip(targets, stacks)))]

    loop.defjvp(lambda primals, tangents: jax.jvp(scan, primals, tangents))  # jax transposes no loop but a scan
    return loop


def _without(values: Sequence[Any], places: Collection[int]) -> list[Any]:
    return [value for i, value in enumerate(values) if i not in places]


def _interleaved(values: Sequence[Any], others: Mapping[int, Any]) -> list[Any]:
    """`values`, and others at their places."""
    rest = iter(values)
    return [others[i] if i in others else next(rest) for i in range(len(values) + len(others))]


class _Rows:
    """How the numbers among what a step reads or writes cross a loop: in one row for each dtype that several
    have.

    Arrays of an extended dtype, such as the type of amaxes, count as numbers too: FP8 state is on every device.

    types: of one step. together: whether there are rows. axes (of the methods): how many axes of steps are in front, 0
    or 1.
    """

    def __init__(self, types: Sequence[ShapedArray], together: bool) -> None:
        places = {}
        for i, aval in enumerate(types if together else ()):
            most = _ROW_NUMBERS if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else 1
            if 1 <= prod(aval.shape) <= most:
                places.setdefault(aval.dtype, []).append(i)
        self._types, self._rows = types, [each for each in places.values() if len(each) > 1]
        self._others = [i for i in range(len(types)) if not any(i in row for row in self._rows)]

    def pack(self, arrays: Sequence[jax.Array], axes: int) -> Sequence[jax.Array]:
        """`arrays`, with the rows [..., n] behind those that are in none."""
        flat = lambda a: a.reshape(*a.shape[:axes], -1)
        rows = [jnp.concatenate([flat(arrays[i]) for i in row], axes) for row in self._rows]
        return [*(arrays[i] for i in self._others), *rows]

    def pack_types(self, results: Sequence[ShapedArray], length: int) -> Sequence[ShapedArray]:
        """The types of what `pack` returns for stacks of these types."""
        size = lambda row: sum(prod(self._types[i].shape) for i in row)
        rows = [ShapedArray((length, size(row)), self._types[row[0]].dtype) for row in self._rows]
        return [*(results[i] for i in self._others), *rows]

    def unpack(self, packed: Sequence[jax.Array], axes: int) -> Sequence[jax.Array]:
        """What `pack` was given."""
        found = dict(zip(self._others, packed))
        for array, row in zip(packed[len(self._others) :], self._rows):
            sizes = [prod(self._types[i].shape) for i in row]
            for i, size, end in zip(row, sizes, accumulate(sizes)):
                part = lax.slice_in_dim(array, end - size, end, axis=axes)
                found[i] = part.reshape(*array.shape[:axes], *self._types[i].shape)
        return [found[i] for i in range(len(self._types))]


def _unfilled(aval: ShapedArray) -> jax.Array:
    """An array of any numbers. XLA's partitioner would have each device make all of it, so a large one is made by an
    operation with a partition; of an axis that the devices do not divide, each still makes all."""
    if on_explicit_mesh(aval):
        sharding = aval.sharding
        make = lambda: lax.empty(sharding.shard_shape(aval.shape), aval.dtype)
        axes = splittable_axes(sharding.mesh)
        return jax.shard_map(make, in_specs=(), out_specs=sharding.spec, axis_names=axes)()
    if not _is_large(aval):
        return lax.empty(aval.shape, aval.dtype)

    def partition(mesh, arg_infos, out_info):
        spec = [*spec_of_sharding(mesh, out_info), *[None] * len(aval.shape)]
        parts = [prod(mesh.shape[name] for name in mesh_axes(names)) for names in spec]
        spec = [names if size % n == 0 else None for names, n, size in zip(spec, parts, aval.shape)]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        make = lambda _: lax.empty(sharding.shard_shape(aval.shape), aval.dtype)
        return mesh, make, sharding, (NamedSharding(mesh, PartitionSpec()),)

    call = custom_partitioning(lambda _: lax.empty(aval.shape, aval.dtype))
    axes = " ".join(f"a{i}" for i in range(len(aval.shape)))
    call.def_partition(partition=partition, decode_shardings=False, sharding_rule=f"-> {axes}")
    return call(jnp.array(0))
