"""Modules of `te_jax.flax` as NNX modules: variables and submodules are attributes.

Only the Linen modules define parameters and computations. A `Layer` holds a Linen module: `lazy_init` makes the
variables, which become attributes, and a call hands them to `apply`. So both give the same results, bit for bit.
"""

import contextlib
import dataclasses
import inspect
import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import ShapeDtypeStruct

from te_jax.core.check import Kind, bind, check, show, warn
from te_jax.core.derivatives import custom_vjp
from te_jax.core.products import is_explained
from te_jax.flax._calls import call_signature, field_names, names_of_call, names_of_constructor
from te_jax.flax._fields import SIZES, check_fields
from te_jax.flax._state import describe, on_missing_state
from te_jax.flax.cache import COLLECTION as CACHE
from te_jax.flax.moe import BIAS_COLLECTION, LOSSES
from te_jax.state.amax_type import is_amaxes
from te_jax.state.fp8 import FP8_COLLECTION, current_recipe, in_collection
from te_jax.state.metas import recipe_with_state


class Fp8State(nnx.Variable[Any]):
    """A leaf of FP8 state: `{tensor}_scale` f32[1] or `{tensor}_amax_history` f32[L].

    FP8 state is no `nnx.Param`, so `nnx.grad` and `nnx.Optimizer(..., wrt=nnx.Param)` leave it as it is.
    `te_jax.nnx.value_and_grad` updates it.
    """


class ExpertBias(nnx.Variable[Any]):
    """The bias f32[E] of a router, by which it chooses among experts. It is no `nnx.Param`: `te_jax.nnx.value_and_grad`
    moves it, by the tokens that each expert got."""


class Loss(nnx.Intermediate[Any]):
    """A loss of a router, f32[], times its coefficient: the sum over the calls since it was taken by `nnx.pop`."""


# {Linen collection: type of its variables}
_TYPES = {
    "params": nnx.Param,
    FP8_COLLECTION: Fp8State,
    CACHE: nnx.Cache,
    BIAS_COLLECTION: ExpertBias,
    LOSSES: Loss,
}
for _held in (FP8_COLLECTION, BIAS_COLLECTION):
    nnx.register_variable_name(_held, _TYPES[_held], overwrite=True)  # For nnx.bridge.ToNNX.


def collection_of(variable: nnx.Variable) -> str | None:
    """The Linen collection of a variable, None if it belongs to no collection of `te_jax.flax`."""
    return next((name for name, kind in _TYPES.items() if isinstance(variable, kind)), None)


def example(*features: int) -> ShapeDtypeStruct:
    """Inputs [batch, sequence, *features] for `lazy_init`, of sizes that the mesh in force divides."""
    # The factor of 2 is for balanced causal attention, which cuts each device's sequence in two.
    size = 2 * math.prod(jax.sharding.get_abstract_mesh().shape.values())
    return ShapeDtypeStruct((size, size, *features), jnp.bfloat16)


class Layer(nnx.Module):
    """A module of `te_jax.flax` with its variables.

    The attributes are named as in the collections of the Linen module: parameters (`nnx.Param`; `nnx.LoRAParam` for
    low-rank adaptation), the FP8 state under autocast (`Fp8State`), the cache when decoding (`nnx.Cache`), biases of
    experts (`ExpertBias`), losses of routers until they are taken (`Loss`) and submodules. Others:

    linen:         The Linen module. Its fields can be read as attributes too.
    deterministic: False. The default of calls.
    rngs:          The stream of keys for dropout, where some rate is not 0; else None.

    A subclass has the Linen module's class as `linen_type` and returns in `inputs` what to initialize it with. The
    constructor takes the arguments of `inputs`, then the fields of the Linen module, and `rngs`. A module that is made
    under `te_jax.autocast` has the FP8 state of that recipe. Initial values equal Linen's `init` with the key
    `rngs.params()`. Under a mesh and logical axis rules (`flax.linen.logical_axis_rules`) parameters are sharded by
    them, which their metadata `out_sharding` says.
    """

    linen_type: type[nn.Module] = nn.Module
    defaults: dict[str, Any] = {}  # Defaults of fields that the Linen module has others for.
    __signature__: inspect.Signature
    init_fields: dict[str, Any] = {}  # Fields that the Linen module has while it is initialized.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _layers.setdefault(cls.linen_type, cls)
        if "__init__" not in vars(cls):
            cls.__signature__ = signature_of(cls)

    def __init__(self, *args: Any, rngs: nnx.Rngs | None = None, **kwargs: Any) -> None:
        part = args[0] if args and isinstance(args[0], nn.Module) else None  # Its parent sets its variables.
        if part is None:
            names = names_of_constructor(self.linen_type)
            bound = bind(type(self).__name__, signature_of(type(self)), args, {"rngs": rngs, **kwargs}, **names)
            bound.apply_defaults()
            fields = {name: bound.arguments.pop(name) for name in field_names(self.linen_type)}
            for name, value in fields.items():
                if isinstance(value, nnx.Module):
                    raise TypeError(
                        f"{type(self).__name__}: {name} is an nnx.Module, {type(value).__name__}; pass the module of "
                        f"te_jax.flax, and assign the attribute {name} of what comes out."
                    )
        self.linen: nn.Module = self.linen_type(**fields, parent=None) if part is None else part
        self.submodules: tuple[tuple[str, nn.Module], ...] = ()  # Pairs (name, Linen module) of the submodules.
        self.parameter_names: tuple[str, ...] = ()  # Names of the Linen module's own; a subclass may have more.
        if "deterministic" in call_signature(type(self.linen)).parameters:
            self.deterministic: bool = False
        self.rngs: Any = nnx.data(None)
        if part is not None:
            return
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"{type(self).__name__}: rngs is {rngs!r}; pass nnx.Rngs(seed).")
        del bound.arguments["rngs"]
        check_fields(self.linen)  # `inputs` computes sizes from fields.
        for name, size in bound.arguments.items():
            if kind := SIZES.get(bound.signature.parameters[name].annotation):
                check(type(self).__name__, name, size, kind)
        self._initialize(type(self).inputs(self.linen, **bound.arguments), rngs)
        if self._drops and _has_stream(rngs, self._stream):
            self.rngs = rngs[self._stream].fork()

    @staticmethod
    def inputs(linen: Any, in_features: int) -> Any:
        """The arguments to initialize `linen` with, arrays as ShapeDtypeStructs: here inputs [..., in_features]. The
        constructor takes the other parameters of this method."""
        return (example(in_features),)

    def _initialize(self, inputs: tuple, rngs: nnx.Rngs):
        """Sets variables and submodules as attributes, as Linen's `lazy_init` with `inputs` makes them."""
        modules = {}  # {path: Linen module}

        def note(call, args, kwargs, context):
            if context.method_name == "__call__":
                modules[context.module.path] = _detach(context.module)
            return call(*args, **kwargs)

        def call(linen, *arrays):
            arrays = iter(arrays)
            options = {"deterministic": True} if hasattr(self, "deterministic") else {}
            return linen(*(next(arrays) if isinstance(x, ShapeDtypeStruct) else x for x in inputs), **options)

        arrays = [x for x in inputs if isinstance(x, ShapeDtypeStruct)]
        with nn.intercept_methods(note), in_collection(FP8_COLLECTION):
            variables = self.linen.clone(**self.init_fields).lazy_init({"params": rngs.params()}, *arrays, method=call)
        for (collection, *path, name), value in flatten_dict(variables).items():
            node = self
            for at, part in enumerate(path, 1):
                if part not in vars(node):
                    linen = modules[tuple(path[:at])]
                    setattr(node, part, _layers.get(type(linen), Layer)(linen))
                    node.submodules = (*node.submodules, (part, linen))
                node = vars(node)[part]
            setattr(node, name, _variable(collection, name, value))
            if collection == "params":
                node.parameter_names = (*node.parameter_names, name)

    def __call__(self, *args: Any, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None, **kwargs: Any) -> Any:
        """The result of the Linen module's call with these arguments.

        rngs: The source of dropout's key, instead of the attribute.

        `deterministic` is the attribute if it is None or not given. decode=True reads and writes the cache in the
        module's attributes; see `te_jax.flax.MultiHeadAttention`. A submodule that was replaced is called instead of
        the old one, with its arguments.

        Raises what the Linen module raises; ValueError where dropout has no key, and where the recipe in force needs
        FP8 state that the module lacks.
        """
        linen_type = type(self.linen)
        call = bind(type(self).__name__, call_signature(linen_type), args, kwargs, **names_of_call(linen_type))
        if hasattr(self, "deterministic") and call.arguments.get("deterministic") is None:
            call.arguments["deterministic"] = self.deterministic
        variables, replaced = self._gather()
        warn_of_plain_gradients(type(self).__name__, variables)
        decode = call.arguments.get("decode", False)
        keys = {} if call.arguments.get("deterministic", True) else self._keys(rngs)
        options = dict(rngs=keys, mutable=[LOSSES, CACHE] if decode else [LOSSES])
        intercepted = nn.intercept_methods(_intercept(replaced)) if replaced else contextlib.nullcontext()
        with _errors_of_state(), intercepted, in_collection(FP8_COLLECTION):
            out, written = self.linen.apply(unflatten_dict(variables), *call.args, **options, **call.kwargs)
        for (collection, *path, name), value in flatten_dict(written).items():
            node = self
            for part in path:
                node = vars(node)[part]
            if name in vars(node):
                vars(node)[name].set_value(value)
            else:
                setattr(node, name, _TYPES[collection](value))
        return out

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the attribute `deterministic`; `nnx.view` calls this."""
        if deterministic is not None and hasattr(self, "deterministic"):
            self.deterministic = deterministic

    def __getattr__(self, name: str) -> Any:
        linen = vars(self).get("linen")
        if linen is None or name not in field_names(type(linen)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(linen, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "linen" in vars(self) and name in field_names(type(self.linen)) and not isinstance(value, nnx.Module):
            raise AttributeError(
                f"{type(self).__name__}: {name} is a field, fixed when the module is made; make another module, and "
                "take over the weights with nnx.update(new, nnx.state(old))."
            )
        if isinstance(vars(self).get(name), nnx.Variable) and isinstance(value, _NO_VARIABLE):
            kind = type(vars(self)[name]).__name__
            raise TypeError(
                f"{type(self).__name__}: {name} is {show(value)}; it holds a variable: assign to {name}[...], or pass "
                f"a variable of its type, {kind}(array)."
            )
        super().__setattr__(name, value)

    def _gather(self, path: tuple[str, ...] = ()) -> tuple[dict, dict]:
        """{(collection, *path, name): value} of the variables, and {path: module} of the modules that replaced
        submodules. path: The path of this module."""
        submodules, variables, replaced = dict(self.submodules), {}, {}
        of_user = not type(self).__call__.__module__.startswith("te_jax.")  # such a call may read more parameters
        for name, value in vars(self).items():
            if isinstance(value, nnx.Variable) and (collection := collection_of(value)):
                if of_user and collection == "params" and name not in self.parameter_names:
                    continue
                variables[collection, *path, name] = value.get_value()
            elif name in submodules and isinstance(value, Layer) and value.linen == submodules[name]:
                below = value._gather((*path, name))
                variables, replaced = variables | below[0], replaced | below[1]
            elif name in submodules:
                replaced[*path, name] = value
        return variables, replaced

    @property
    def _drops(self) -> bool:
        """Whether some dropout rate is above 0."""
        values = (getattr(self.linen, name) for name in field_names(type(self.linen)) if "drop" in name)
        return any(isinstance(value, int | float) and value > 0 for value in values)

    @property
    def _stream(self) -> str:
        """The name of the stream of keys for dropout."""
        fields = [name for name in field_names(type(self.linen)) if name.endswith("rng_name")]
        return getattr(self.linen, fields[0])

    def _keys(self, rngs) -> dict[str, jax.Array]:
        if not self._drops:
            return {}
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                f"{type(self).__name__}: dropout needs a key; pass rngs=nnx.Rngs({self._stream}=seed), or "
                "deterministic=True."
            )
        check(type(self).__name__, "rngs", rngs, _RNGS)
        if isinstance(rngs, nnx.Rngs) and not _has_stream(rngs, self._stream):
            raise ValueError(
                f"{type(self).__name__}: dropout needs a key, but rngs has only the streams ({', '.join(rngs)}); pass "
                f"rngs=nnx.Rngs({self._stream}=seed), or deterministic=True."
            )
        stream = rngs[self._stream] if isinstance(rngs, nnx.Rngs) else rngs
        return {self._stream: stream() if isinstance(stream, nnx.RngStream) else stream}


def _has_stream(rngs: nnx.Rngs, name: str) -> bool:
    """Whether `rngs` has keys of this name: "default" stands for all."""
    return name in rngs or "default" in rngs


_NO_VARIABLE = jax.Array | np.ndarray | np.generic | list | tuple | int | float
_RNGS = Kind(
    "nnx.Rngs, one of its streams or a key", lambda rngs: isinstance(rngs, nnx.Rngs | nnx.RngStream | jax.Array)
)
_layers: dict[type[nn.Module], type[Layer]] = {}  # {Linen class: the class for its submodules}


@cache
def signature_of(cls: type[Layer]) -> inspect.Signature:
    """The signature of the constructor: parameters of `inputs`, fields of the Linen module, rngs."""
    parameter = inspect.Parameter
    sizes = list(inspect.signature(cls.inputs).parameters.values())[1:]  # Without the Linen module.
    fields = []
    for f in dataclasses.fields(cls.linen_type):
        if f.name in field_names(cls.linen_type):
            default = cls.defaults.get(f.name, f.default)
            default = parameter.empty if default is dataclasses.MISSING else default
            fields.append(parameter(f.name, parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=f.type))
    rngs = parameter("rngs", parameter.KEYWORD_ONLY, annotation=nnx.Rngs)
    by_place = [p for p in sizes if p.kind is parameter.POSITIONAL_OR_KEYWORD]
    return inspect.Signature([*by_place, *fields, *(p for p in sizes if p not in by_place), rngs])


def _detach(linen: nn.Module) -> nn.Module:
    """A submodule without its parent, and with default initializers.

    The parent makes initializers in its call, and such a function equals no other; but `nnx.jit` has to see two layers
    of equal fields as equal.
    """
    inits = {f.name: f.default for f in dataclasses.fields(linen) if f.name.endswith("_init")}
    return linen.clone(parent=None, name=None, **inits)


def _variable(collection: str, name: str, value) -> nnx.Variable:
    """The variable for a leaf that `init` returned, in a box with its logical axes or without a box."""
    metadata = {}
    rules, mesh = nn.get_logical_axis_rules(), jax.sharding.get_abstract_mesh()
    if isinstance(value, nn.LogicallyPartitioned):
        if rules and not mesh.empty:
            metadata["out_sharding"] = tuple(nn.logical_to_mesh_axes(value.names, rules))
    elif isinstance(value, nn.Partitioned) and not mesh.empty:  # Its names are mesh axes.
        metadata["out_sharding"] = tuple(value.names)
    kind = nnx.LoRAParam if collection == "params" and "lora_" in name else _TYPES[collection]
    return kind(nn.meta.unbox(value), **metadata)


def warn_of_plain_gradients(name: str, variables: dict):
    """Warns of parameters that are differentiated, as by `nnx.value_and_grad`, without FP8 state or together with it,
    or without biases of experts."""
    if is_explained():  # then nothing is trained
        return
    of = lambda held: [x for (collection, *_), x in variables.items() if collection == held]
    states, biases = of(FP8_COLLECTION) if recipe_with_state() else [], of(BIAS_COLLECTION)
    floating = [x for x in jax.tree.leaves(of("params")) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not (states or biases) or any(map(is_amaxes, states)):  # None, or state that te_jax's value_and_grad moves.
        return
    if any(isinstance(x, jax.core.Tracer) for x in floating):
        _watch(name, floating, states, biases)  # Its result is not used, so it computes nothing.


@partial(jax.jit, static_argnums=0, inline=True)  # `jax.shard_map` has no rule for symbolic zeros.
@custom_vjp(0)
def _watch(name, parameters, states, biases):
    return jnp.zeros(())


def _watch_fwd(name, parameters, states, biases):
    moving, states_too, biases_too = (any(x.perturbed for x in tree) for tree in (parameters, states, biases))
    if not moving or (biases_too and not states):
        return jnp.zeros(()), None
    if states_too:
        text = (
            "gradients of the FP8 state are taken as well as of parameters. They are its next values, which an "
            "nnx.Optimizer(wrt=nnx.Variable) would take for gradients; use te_jax.nnx.value_and_grad, which writes "
            "them into the module, and nnx.Optimizer(wrt=nnx.Param)."
        )
    elif not states:
        text = (
            "gradients of parameters are taken, but not of the biases of experts, so they stay as they are; use "
            "te_jax.nnx.value_and_grad instead of nnx.value_and_grad, or ignore this if they should stay."
        )
    else:
        text = (
            "gradients of parameters are taken, but not of the FP8 state, so it stays as it is; use "
            "te_jax.nnx.value_and_grad instead of nnx.value_and_grad, or ignore this if the scales should stay fixed."
        )
    warn(f"{name}: {text}")
    return jnp.zeros(()), None


_watch.__wrapped__.defvjp(_watch_fwd, lambda name, _, g: (None, None, None), symbolic_zeros=True)


def _intercept(replaced: dict):
    """An interceptor that calls the modules of `replaced`, {path: module}, instead of Linen's submodules."""
    root = None  # The root scope of this `apply`: a replacing module may have an `apply` of its own.

    def interceptor(call, args, kwargs, context):
        nonlocal root
        scope, path = context.module.scope, context.module.path
        root = root or scope.root
        ours = scope.root is root and context.method_name == "__call__" and path in replaced
        return replaced[path](*args, **kwargs) if ours else call(*args, **kwargs)

    return interceptor


@contextlib.contextmanager
def _errors_of_state():
    """Makes missing FP8 state an error within the block: each call would start from fresh state and forget it."""

    def refuse(module, name, mutable, collection):
        recipe = type(current_recipe()).__name__
        raise ValueError(
            f"{describe(module)}: {recipe} is in force, but there is no FP8 state {name}; make the module under "
            f"te_jax.autocast(True, recipe), and take over weights with nnx.update(new, nnx.state(old, nnx.Param))."
        )

    token = on_missing_state.set(on_missing_state.get() or refuse)
    try:
        yield
    finally:
        on_missing_state.reset(token)
