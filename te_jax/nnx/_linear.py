"""The arguments of `nnx.Linear` and `nnx.LinearGeneral`, in the terms of `te_jax.flax.DenseGeneral`."""

import inspect

import jax
from flax import nnx

from te_jax.core.check import check_names
from te_jax.flax._calls import names_of_constructor
from te_jax.nnx._layer import signature_of

_OWN = "this module has its own product"
_PROMOTE = inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default
_HOOK = "use nnx.Linear(dot_general=te_jax.nnx.DotGeneral())"
_OF_FLAX = {  # argument -> (values that ask for nothing, the way out of others)
    "precision": ((None, "default", jax.lax.Precision.DEFAULT), "leave it None: FP8 has one precision"),
    "promote_dtype": ((None, _PROMOTE), f"say by dtype and param_dtype what is computed in, or {_HOOK}"),
    "preferred_element_type": ((None,), f"the output has the type of the inputs: cast it, or {_HOOK}"),
    "dot_general": ((None, jax.lax.dot_general), f"{_OWN}: use nnx.Linear"),
    "dot_general_cls": ((None,), f"{_OWN}: use nnx.LinearGeneral"),
    "batch_axis": ((None, {}), "use nnx.vmap over the module"),
}
_FIELD_NAMES = {"out_features": "features", "param_dtype": "params_dtype"}
_ARGUMENTS = (*_FIELD_NAMES, "kernel_metadata", "bias_metadata", *_OF_FLAX)


def fields_from_nnx(cls: type, kwargs: dict) -> dict:
    """`kwargs` of the constructor of `cls` with the names that `te_jax.flax.DenseGeneral` has for them. Raises
    ValueError for what it does not do, TypeError for unknown names and for one argument by two names."""
    kwargs, where = dict(kwargs), cls.__name__
    names = names_of_constructor(cls.linen_type)
    check_names(where, kwargs, (*signature_of(cls).parameters, *_ARGUMENTS), **names)
    for name, (defaults, way_out) in _OF_FLAX.items():
        value = kwargs.pop(name, None)
        if not any(value is default or value == default for default in defaults):
            raise ValueError(f"{where}: {name} is {value!r}; {way_out}.")
    for name, field in _FIELD_NAMES.items():
        if name in kwargs and field in kwargs:
            raise TypeError(f"{where}: {name} is {kwargs[name]!r} next to {field}, its other name; pass one of them.")
        if name in kwargs:
            kwargs[field] = kwargs.pop(name)
    if kwargs.get("dtype", "given") is None:
        del kwargs["dtype"]
    if kwargs.get("params_dtype") is not None and "dtype" not in kwargs:
        kwargs["dtype"] = kwargs.pop("params_dtype")  # by itself it leaves the computation in the inputs' type
    return kwargs


def with_linear_arguments(cls: type) -> type:
    """`cls`, whose constructor's signature shows the arguments of `nnx.Linear` as well as its own."""
    parameter = inspect.Parameter
    more = [parameter(name, parameter.KEYWORD_ONLY, default=None) for name in _ARGUMENTS]
    cls.__signature__ = inspect.Signature([*signature_of(cls).parameters.values(), *more])
    return cls
