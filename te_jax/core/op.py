"""A kernel and everything jax needs to know of it, declared once.

An `Op` is one jax primitive. On CUDA it lowers to the FFI target of the same name, elsewhere to `reference`. From
the axis rule follow the shape checks, the result shapes, the vmap rule, the Shardy rule, the per-device call with its
psum or pmax, and the explicit-sharding types. Derivatives come from `reference` (`core/derivatives.py`). This is the
file that knows jax's machinery; `core/placement.py` says which mesh axes split a call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, ManualAxisType, NamedSharding, PartitionSpec

from te_jax.core import extension
from te_jax.core.amax import amax_across
from te_jax.core.derivatives import differentiate_primitive, with_derivative_of
from te_jax.core.placement import place, spec_of_sharding
from te_jax.core.rule import Rule, factors_of, is_group
from te_jax.core.types import align, splittable_axes, varying_axes
from te_jax.core.versions import installed_version

_VERSION = installed_version("te_jax")  # whose kernels the program calls
_NO_MESH = AbstractMesh((), ())
# In jaxlib 0.11 a kernel whose result `lax.scan` keeps for the backward pass runs again for the result's other readers
# (https://github.com/openxla/xla/pull/45799); not so behind a barrier.
_FENCES = (0, 11) <= jax.__version_info__ < (0, 12)
# The maxima are amaxes, never negative.
_ACROSS_DEVICES = {"sum": lax.psum, "max": amax_across}

ops: dict[str, "Op"] = {}  # every declared op by name: what the generated tests walk over


class Op:
    """A kernel as one jax primitive.

    name:       jax primitive, FFI target, HLO op and profiler name in one.
    rule:       the axes, see `core/rule.py`.
    dtypes:     (operand dtypes (None if absent), **attrs) -> the dtypes of all results.
    reference:  plain jax, (operands (None if absent), **attrs) -> all results: the meaning, and the lowering off CUDA.
    replicated: axes that stay on one device. Space-separated names; a group is named like `m...`.
    combine:    {result: "sum" | "max"}: how shards of an axis that the result lacks add up.
    once:       operands that enter such a sum once, not once per shard (a bias): over the mesh axes that do not split
                them.
    apart:      axes that are summed in different terms of a sum: one mesh axis may split several of them.
    ranks:      {group: attr}: the attribute that holds the group's number of axes.
    sizes:      {axis: (**attrs) -> the size of an axis that no operand has}.
    fenced:     results that the forward pass reads, and may keep for the backward pass: see _FENCES.
    partials:   {result: (operand shapes, **attrs) -> leading shape}: the CUDA kernel leaves partial results with these
                leading axes, f32, or i32 of integers, and a second one of the same call makes the results of them, as
                `combine` says. Behind its results, and the workspace, the call has an array for the partials of each.
                No atomics, nothing to zero.
    aside:      {result: (operand, function)}: results that follow from only one operand, element by element. The kernel
                writes them on its way; a call that is mapped, or varies over manual mesh axes, leaves them to the
                function, so that they have the operand's types.
    workspace:  (operand shapes and dtypes, outputs=, **attrs) -> bytes of a uint8 result that only the CUDA call has;
                outputs are the names of the chosen results.
    layout:     (name, ndim, **attrs) -> the order in memory of an operand's or result's axes in the CUDA call, the
                outermost first. Without it all are row-major.
    cuda:       (call, *operands, **attrs) -> all results, or the chosen ones: plain jax around the CUDA call.
    composed:   no kernel of its own: `reference`, of plain jax and other ops' `on_shard`, is the lowering everywhere;
                only off CUDA where `cuda` is given, which then makes no use of `call`.
    """

    name: str
    rule: Rule
    dtypes: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]
    replicated: frozenset[str]
    combine: Mapping[str, str]
    once: frozenset[str]
    rank_attrs: Mapping[str, str]  # `ranks` of the constructor
    sizes: Mapping[str, Callable[..., int]]
    partials: Mapping[str, Callable[..., tuple[Any, ...]]]
    aside: Mapping[str, tuple[str, Callable[[jax.Array], jax.Array]]]
    workspace: Callable[..., Any] | None
    fenced: frozenset[str]
    apart: frozenset[str]
    layout: Callable[..., Sequence[int]] | None
    cuda: Callable[..., Sequence[Any]] | None
    composed: bool
    primitive: Primitive

    def __init__(
        self,
        name: str,
        rule: str,
        *,
        dtypes: Callable[..., Sequence[Any]],
        reference: Callable[..., Sequence[Any]],
        replicated: str = "",
        combine: Mapping[str, str] | None = None,
        once: Iterable[str] = (),
        apart: str = "",
        ranks: Mapping[str, str] | None = None,
        sizes: Mapping[str, Callable[..., int]] | None = None,
        fenced: str = "",
        partials: Mapping[str, Callable[..., tuple[Any, ...]]] | None = None,
        aside: Mapping[str, tuple[str, Callable[[jax.Array], jax.Array]]] | None = None,
        workspace: Callable[..., Any] | None = None,
        layout: Callable[..., Sequence[int]] | None = None,
        cuda: Callable[..., Sequence[Any]] | None = None,
        composed: bool = False,
    ) -> None:
        self.name, self.rule, self.dtypes, self.reference = name, Rule.parse(rule), dtypes, reference
        self.replicated, self.combine, self.once = frozenset(replicated.split()), combine or {}, frozenset(once)
        self.rank_attrs, self.sizes = ranks or {}, sizes or {}
        self.partials, self.workspace, self.aside = partials or {}, workspace, aside or {}
        self.fenced = frozenset(fenced.split() if _FENCES else ())
        self.apart, self.layout, self.cuda, self.composed = frozenset(apart.split()), layout, cuda, composed
        self._check_declaration()
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._evaluate)
        differentiate_primitive(self.primitive, self._meaning)
        mlir.register_lowering(self.primitive, partial(self._lower, self._traced_reference))
        if cuda or not composed:
            mlir.register_lowering(self.primitive, self._lower_cuda, platform="cuda")
        ops[name] = self

    def _check_declaration(self):
        factors = lambda o: {f for a in o.axes if a not in o.broadcast for f in factors_of(a)}
        free = set().union(*map(factors, self.rule.inputs)) - self.replicated
        for out in self.rule.outputs:
            if (lost := free - factors(out)) and out.name not in (*self.combine, *self.aside):
                raise ValueError(
                    f"{self.name}: {out} drops {sorted(lost)}; say how shards combine "
                    f"(combine={{'{out.name}': 'sum'}}) or list them in `replicated`."
                )

    def __call__(
        self,
        *args: jax.Array | None,
        outputs: Sequence[str] | None = None,
        out_specs: Iterable[PartitionSpec | None] | None = None,
        **attrs: Any,
    ) -> tuple[jax.Array, ...]:
        """Operands by position (None where absent) -> the tuple of the results named in `outputs` (default: all).

        out_specs: on an Explicit mesh, a PartitionSpec for each of them, which the op follows as far as it can without
                   another collective; elsewhere the compiler says it.
        """
        wanted = {} if out_specs is None else dict(out_specs=tuple(out_specs))
        params = self._params(args, outputs, attrs | wanted)
        return self._mappable_call(_key(params))(*(a for a in args if a is not None))

    def on_shard(
        self, *args: jax.Array | None, outputs: Sequence[str] | None = None, **attrs: Any
    ) -> Sequence[jax.Array]:
        """The results of a call on operands of one device, inside the reference of a composed op."""
        return self._bind(self._params(args, outputs, attrs), [a for a in args if a is not None])

    def _params(self, args, outputs, attrs) -> dict:
        """The static parameters of a call: attributes, and the names of operands and results that it has."""
        present = tuple(o.name for o, a in zip(self.rule.inputs, args, strict=True) if a is not None)
        for o in self.rule.inputs:
            if o.name not in present and not o.optional:
                raise ValueError(f"{self.name}: operand {o} is None; pass an array.")
        names = tuple(o.name for o in self.rule.outputs if outputs is None or o.name in outputs)
        lost = [o.name for o in self.rule.outputs if not o.optional and o.name not in names]
        for name, (operand, _) in self.aside.items():
            if name in names and operand not in present:
                raise ValueError(f"{self.name}: outputs has {name}, but operand {operand} is None; pass an array.")
        if lost or (outputs is not None and names != tuple(outputs)):
            known = ", ".join(str(o) for o in self.rule.outputs)
            needs = f"; {', '.join(lost)} may not be left out" if lost else ""
            raise ValueError(f"{self.name}: outputs is {outputs}; choose from {known}, in this order{needs}.")
        return dict(attrs, inputs=present, outputs=names)

    # -- one device ---------------------------------------------------------------------------------------------

    def _solve(self, shapes, inputs, outputs, filled=False, mapped=(), **attrs):
        """-> the rule of this call, its group ranks, its axis sizes. filled: see `Rule.sizes`. mapped: see `_each`."""
        rule = self.rule.select(inputs, outputs).mapped(mapped)
        ranks = rule.ranks(self.name, map(len, shapes), {g: attrs[a] for g, a in self.rank_attrs.items()})
        rule = rule.broadcast(shapes, ranks)
        known = {axis: size(**attrs) for axis, size in self.sizes.items()}
        return rule, ranks, rule.sizes(self.name, shapes, ranks, filled, known)

    def _fill(self, args, inputs):
        """One entry per declared operand, None where absent."""
        rest = iter(args)
        return [next(rest) if o.name in inputs else None for o in self.rule.inputs]

    def _results(self, shapes, dtypes, inputs, outputs, filled=False, **attrs):
        """-> ShapeDtypeStructs of the chosen results."""
        rule, ranks, sizes = self._solve(shapes, inputs, outputs, filled, **attrs)
        types = dict(zip((o.name for o in self.rule.outputs), self.dtypes(*self._fill(dtypes, inputs), **attrs)))
        return [jax.ShapeDtypeStruct(rule.shape(o, ranks, sizes), types[o.name]) for o in rule.outputs]

    def _abstract_eval(self, *args, **params):
        union = frozenset().union(*(a.manual_axis_type.varying for a in args))
        mesh, vary = args[0].sharding.mesh, ManualAxisType(varying=union)

        def aval(out):
            replicated = NamedSharding(mesh, PartitionSpec(*[None] * len(out.shape)))
            return ShapedArray(out.shape, out.dtype, sharding=replicated, manual_axis_type=vary)

        return [aval(out) for out in self._results([a.shape for a in args], [a.dtype for a in args], **params)]

    def _evaluate(self, *args, **params):
        """Under `jax.disable_jit`, where no `jax.jit` is around the primitive."""
        with jax.disable_jit(False):
            return self._compile(_key(params))(*args)

    @cache  # noqa: B019  (ops live as long as the process)
    def _compile(self, key):
        return jax.jit(partial(self.primitive.bind, **{name: value for name, _, value in key}))

    def _run_reference(self, *args, inputs, outputs, **attrs):
        return self._chosen(self.reference(*self._fill(args, inputs), **attrs), outputs)

    def _traced_reference(self, *args, **params):
        """Traced once for operands of the same shapes: tracing references was half of the time to lower a layer."""
        return self._reference_of(_key(params))(*args)

    @cache  # noqa: B019  (ops live as long as the process)
    def _reference_of(self, key):
        return jax.jit(partial(self._run_reference, **{name: value for name, _, value in key}), inline=True)

    def _run_cuda(self, *args, inputs, outputs, **attrs):
        call = partial(self.custom_call, outputs=outputs)
        args = self._fill(args, inputs)
        results = self.cuda(call, *args, **attrs) if self.cuda else call(*args, **attrs)
        return results if len(results) == len(outputs) else self._chosen(results, outputs)

    def _chosen(self, results, outputs):
        return [r for o, r in zip(self.rule.outputs, results, strict=True) if o.name in outputs]

    def custom_call(
        self, *args: Any, outputs: Sequence[str], in_place: dict[str, str] | None = None, **attrs: Any
    ) -> list[jax.Array]:
        """The FFI call itself, where `cuda` is traced: absent names have no element. in_place: {operand: result}.

        Returns the results that `outputs` names, in that order.
        """
        inputs = tuple(o.name for o, a in zip(self.rule.inputs, args) if a is not None)
        given = [a for a in args if a is not None]
        shapes, dtypes = [a.shape for a in given], [a.dtype for a in given]
        results = dict(zip(outputs, self._results(shapes, dtypes, inputs, outputs, filled=True, **attrs), strict=True))
        absent = jax.ShapeDtypeStruct((0,), jnp.uint8)
        raw = dict.fromkeys((o.name for o in self.rule.outputs), absent) | results
        partials = dict.fromkeys((f"{name}_partials" for name in self.partials), absent)
        for name in self.partials.keys() & results.keys():
            lead = self.partials[name](*self._fill(shapes, inputs), **attrs)
            dtype = jnp.int32 if jnp.issubdtype(results[name].dtype, jnp.integer) else jnp.float32
            partials[f"{name}_partials"] = jax.ShapeDtypeStruct((*lead, *results[name].shape), dtype)
        if self.workspace:
            size = self.workspace(*args, outputs=outputs, **attrs)
            raw["workspace"] = jax.ShapeDtypeStruct((size,), jnp.uint8)
        raw |= partials
        operands = {o.name: jnp.zeros((0,), jnp.float32) if a is None else a for o, a in zip(self.rule.inputs, args)}
        layouts = self._layouts(operands, raw, attrs)
        aliases = {list(operands).index(o): list(raw).index(r) for o, r in (in_place or {}).items()}
        # The handler reads types off its operands and results.
        attrs = {name: value for name, value in attrs.items() if not isinstance(value, jnp.dtype)}
        call = jax.ffi.ffi_call(self.name, tuple(raw.values()), input_output_aliases=aliases, **layouts)
        got = dict(zip(raw, call(*operands.values(), **attrs), strict=True))
        return [lax.optimization_barrier(got[name]) if name in self.fenced else got[name] for name in results]

    def _layouts(self, operands, results, attrs):
        if not self.layout:
            return {}
        order = lambda arrays: [self.layout(name, x.ndim, **attrs) for name, x in arrays.items()]
        return dict(input_layouts=order(operands), output_layouts=order(results))

    def _lower(self, run, ctx, *operands, **params):
        plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            lower = mlir.lower_fun(partial(run, **params), multiple_results=True)
            return lower(ctx.replace(avals_in=plain), *operands)

    def _lower_cuda(self, ctx, *operands, **params):
        extension.require_for_lowering()
        return self._lower(self._run_cuda, ctx, *operands, **params)

    # -- derivatives --------------------------------------------------------------------------------------------

    def _meaning(self, *args, inputs, outputs, mapped=(), out_specs=None, **attrs):
        """The results of a call in plain JAX, to be differentiated."""
        run = partial(self._run_reference, inputs=inputs, outputs=outputs, **attrs)
        for level in reversed(mapped):
            run = jax.vmap(run, [0 if name in level else None for name in inputs])
        return run(*align(*args))

    # -- vmap ---------------------------------------------------------------------------------------------------

    @cache  # noqa: B019  (ops live as long as the process)
    def _mappable_call(self, key):
        params = {name: value for name, _, value in key}

        def call(*args):
            return self._distribute(params, *args)

        call.__name__ = self.name
        mapped = custom_vmap(call)

        @mapped.def_vmap
        def map_call(size, batched, *args):
            outs = self._with_asides(params, args, partial(self._map_call, size, batched))
            mapped = dict(zip(params["inputs"], batched))
            return outs, tuple(name not in self.aside or mapped[self.aside[name][0]] for name in params["outputs"])

        return jax.jit(with_derivative_of(mapped, partial(self._meaning, **params), self.name))

    def _map_call(self, size, batched, params, args):
        """The results of a call of mapped operands, all mapped along axis 0."""
        rule, ranks, _ = self._solve([a.shape[1:] if b else a.shape for a, b in zip(args, batched)], **params)
        group = self._absorbing_group(rule, batched)
        if group is None:
            return self._map(params, batched, args)
        return self._absorb(rule, ranks, group, size, params, batched, args)

    def _with_asides(self, params, args, run):
        """All results of a call, of which `run(params, args)` computes those that are not aside."""
        names, given = params["outputs"], dict(zip(params["inputs"], args))
        asides = {name: self.aside[name][1](given[self.aside[name][0]]) for name in names if name in self.aside}
        kept = [i for i, name in enumerate(names) if name not in asides]
        chosen = {key: tuple(params[key][i] for i in kept) for key in ("outputs", "out_specs") if key in params}
        outs = run({**params, **chosen}, args) if kept else ()
        outs = asides | dict(zip(chosen["outputs"], outs, strict=True))
        return tuple(outs[name] for name in names)

    def _absorbing_group(self, rule, batched):
        """The axis group that a mapped axis can join, or None: all mapped operands and all results must have it."""
        for group in rule.groups:
            takers = [o for o, b in zip(rule.inputs, batched) if b]
            if group not in self.replicated and all(o.has(group) for o in (*takers, *rule.outputs)):
                return group
        return None

    def _absorb(self, rule, ranks, group, size, params, batched, args):
        """One call, in which the mapped axis (axis 0 of every mapped operand) is one more of `group`."""

        def position(o):
            before = o.axes[: o.axes.index(group)]
            return sum(ranks[a] if is_group(a) else 1 for a in before)

        def join(o, a, is_mapped):
            if group not in o.axes:
                return a
            at = position(o)
            if is_mapped:
                return jnp.moveaxis(a, 0, at)
            is_one = group in o.broadcast and all(out.like != o.name for out in rule.outputs)
            return jnp.broadcast_to(jnp.expand_dims(a, at), (*a.shape[:at], 1 if is_one else size, *a.shape[at:]))

        joined = [join(*o) for o in zip(rule.inputs, args, batched)]
        params = _ask_with_mapped(params, batched, args, map(position, rule.outputs))
        if attr := self.rank_attrs.get(group):
            params = {**params, attr: params[attr] + 1}
        outs = self._mappable_call(_key(params))(*joined)
        return [jnp.moveaxis(out, position(o), 0) for o, out in zip(rule.outputs, outs)]

    def _map(self, params, batched, args):
        """One call with one more mapped axis: devices split it, and each then calls the kernel for its examples."""
        level = tuple(name for name, b in zip(params["inputs"], batched) if b)
        params = _ask_with_mapped(params, batched, args, (0 for _ in params["outputs"]))
        return self._mappable_call(_key({**params, "mapped": (level, *params.get("mapped", ()))}))(*args)

    # -- many devices -------------------------------------------------------------------------------------------

    def _distribute(self, params, *args):
        params = dict(params)
        wanted = params.pop("out_specs", None)  # of an Explicit mesh; elsewhere the compiler asks for shardings
        rule, ranks, sizes = self._solve([a.shape for a in args], **params)
        mesh = jax.typeof(args[0]).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            specs = [jax.typeof(a).sharding.spec for a in args], wanted
            ins, res, run = self._shards(rule, ranks, sizes, mesh, *specs, params)
            if not (axes := splittable_axes(mesh)):  # all are mapped: this is only for the types, of one example
                return run(*args)
            args = [jax.sharding.reshard(a, s) for a, s in zip(args, ins)]
            return jax.shard_map(run, in_specs=tuple(ins), out_specs=tuple(res), axis_names=axes)(*args)
        if AxisType.Manual in mesh.axis_types:  # in a partly manual region custom_partitioning knows no mesh
            return self._bind(params, args)

        def partition(mesh, arg_infos, out_infos):
            specs = [[spec_of_sharding(mesh, info) for info in infos] for infos in (arg_infos, out_infos)]
            ins, res, run = self._shards(rule, ranks, sizes, mesh, *specs, params)
            named = lambda specs: tuple(NamedSharding(mesh, s) for s in specs)

            def local(*args):  # an Explicit mesh in context would leak into the shard
                with jax.sharding.use_abstract_mesh(_NO_MESH):
                    return run(*args)

            return mesh, local, named(res), named(ins)

        text, inner, fixed = rule.shardy(ranks, sizes, self.replicated)
        call = custom_partitioning(lambda *args: self._bind(params, args))
        call.def_partition(
            partition=partition,
            decode_shardings=False,  # jax's own decoding raises where a part of a mesh axis splits an array
            sharding_rule=text,
            need_replication_factors=fixed,
            **inner,
        )
        # Of `partition` the program has only an address. Where jax is told to leave that out of the key of its
        # compilation cache (jax_remove_custom_partitioning_ptr_from_cache_key), this tells ops and attributes apart.
        # Of symbolic sizes (`jax.export`) there is no program yet, and no operation may bear a mark when it is made.
        is_known = all(isinstance(n, int) for a in args for n in a.shape)
        mark = dict(te_jax_op=f"{self.name} {sorted(params.items())} {_VERSION}") if is_known else {}
        with set_xla_metadata(**mark):
            return call(*args)

    def _each(self, params, args):
        """The calls of one device. params["mapped"]: for each mapped axis, the outermost first, the names of the
        operands that have it, in front; there is one call for each entry, and all results have these axes."""
        (level, *deeper), inputs = params["mapped"], params["inputs"]
        inner = {**params, "mapped": tuple(deeper)}
        is_mapped = [name in level for name in inputs]
        args = align(*args)

        def one(examples):
            examples = iter(examples)
            return self._bind(inner, [next(examples) if m else a for a, m in zip(args, is_mapped)])

        examples = [a for a, m in zip(args, is_mapped) if m]
        if examples[0].shape[0] == 1:
            return tuple(jnp.expand_dims(out, 0) for out in one([jnp.squeeze(a, 0) for a in examples]))
        return tuple(lax.map(one, examples))

    def _bind(self, params, args):
        if params.get("mapped"):
            return self._each(params, args)
        if not self.aside.keys().isdisjoint(params["outputs"]) and any(varying_axes(jax.typeof(a)) for a in args):
            return self._with_asides(params, args, self._bind)
        params = {name: value for name, value in params.items() if name != "mapped"}
        return tuple(self.primitive.bind(*align(*args), **params))

    def _shards(self, rule, ranks, sizes, mesh, in_specs, out_specs, params):
        """-> the specs of all operands and of all results, from those that are known; the function of one shard."""
        placement = place(self, rule, ranks, sizes, mesh.shape, in_specs, out_specs)
        return placement.in_specs, placement.out_specs, partial(self._run_shard, rule, placement, params)

    def _run_shard(self, rule, placement, params, *args):
        """Operands of one device -> results of one device."""
        given = [
            (o, f, a) for i, (o, f, a) in enumerate(zip(rule.inputs, placement.ins, args)) if i not in placement.later
        ]
        later = [args[i] for i in sorted(placement.later)]
        outs = self._bind(
            params | dict(inputs=tuple(o.name for o, *_ in given)),
            [self._count_once(rule, placement, *each) for each in given],
        )
        of_each = zip(rule.outputs, placement.outs, placement.scattered, outs)
        return tuple(self._combine(placement, *each, later) for each in of_each)

    def _combine(self, placement, operand, factors, scatter, out, later):
        names = () if operand.name in self.aside else placement.dropped(factors)
        for factor, over in scatter.items():  # first, for the rest of the sum then moves less
            out = lax.psum_scatter(out, over, scatter_dimension=factors.index(factor), tiled=True)
            names = tuple(n for n in names if n not in over)
        out = _ACROSS_DEVICES[self.combine[operand.name]](out, names) if names else out
        if scatter and later:
            out = sum((a.astype(jnp.float32) for a in later), out.astype(jnp.float32)).astype(out.dtype)
        return out

    def _count_once(self, rule, placement, operand, factors, arg):
        if operand.name not in self.once:
            return arg
        sums = [fs for o, fs in zip(rule.outputs, placement.outs) if o.name in self.combine]
        copied = set(placement.dropped(factors)) & {n for fs in sums for n in placement.dropped(fs)}
        first = [lax.axis_index(n) == 0 for n in sorted(copied)]
        return jnp.where(jnp.all(jnp.stack(first)), arg, 0).astype(arg.dtype) if first else arg


def _ask_with_mapped(params, batched, args, positions) -> dict:
    """`params` of a call with a mapped axis at these positions of its results: `out_specs` with what splits it."""
    if "out_specs" not in params:
        return params
    leads = ((*jax.typeof(a).sharding.spec, None)[0] for a, b in zip(args, batched) if b)
    lead = next(filter(None, leads), None)

    def asked(spec, at):
        entries = (*spec, *[None] * (at - len(spec)))
        return PartitionSpec(*entries[:at], lead, *entries[at:])

    return {**params, "out_specs": tuple(map(asked, params["out_specs"], positions))}


def _key(params):
    """Hashable, and distinct for 1, 1.0 and True: they are different attributes of a custom call."""
    return tuple((name, type(params[name]), params[name]) for name in sorted(params))
