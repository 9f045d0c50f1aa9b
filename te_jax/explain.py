"""Which products of a model are in FP8, and why the others are not; what crosses devices."""

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from te_jax.core.arrays import arrays_apart
from te_jax.core.check import NONE, Kind, check
from te_jax.layers.explain_fp8 import Fp8Explanation
from te_jax.recipe import Recipe
from te_jax.sharding.explain import ShardingExplanation, explain_program


def explain_fp8(
    model: Any,
    *args: Any,
    recipe: Recipe | None = None,
    variables: Any = None,
    train: bool = True,
    frozen: Sequence[str] = (),
    **kwargs: Any,
) -> Fp8Explanation:
    """Which products of a model are in FP8, why the others are not, by which ops they run, and what each module keeps
    for the backward pass.

        print(te_jax.explain_fp8(model, x, recipe=te_jax.recipe.DelayedScaling()))

    model:     a module of Flax Linen or NNX; or a function, such as a loss, all of whose floating arguments are
               differentiated. Of a function that takes gradients itself, such as a training step, pass train=False.
    args, kwargs: of its call. Arrays may be `jax.ShapeDtypeStruct`s: the call is traced, and nothing is computed.
    recipe:    None: the one in force (`te_jax.autocast`).
    variables: of a Linen module, arrays or their types, such as `jax.eval_shape(model.init, key, x)`. None: as `init`
               with these arguments makes them.
    train:     False: the forward pass only. Else also the gradients by parameters and floating arguments.
    frozen:    patterns of paths of parameters without a gradient, as a recipe's `exclude` has them of modules, such as
               ("lm_head", "layers/*/kernel"). In a function `jax.lax.stop_gradient` says that.

    The answer is read off the jaxpr of the call, by the names that modules leave there. So it has the products of any
    library that are te_jax's, or jax's own (`jax.lax.dot_general` and convolutions, not kernels of other libraries),
    and none that are not made. Bytes kept for the backward pass are what `jax.vjp` keeps of the forward pass,
    each at the module that computes it: no parameters or arguments, and before XLA joins or recomputes anything. FP8
    state that the model lacks is no error here.

    Raises TypeError for another model, no recipe and `variables` of another model than a Linen module; ValueError for
    patterns that name no parameter; and what the call raises.
    """
    options = recipe, variables, train, frozen
    # Imported here, for Flax takes a second to import.
    return importlib.import_module("te_jax.nnx.explained").explain_model(model, args, kwargs, *options)


def explain_sharding(model: Any, *args: Any, variables: Any = None, **kwargs: Any) -> ShardingExplanation:
    """What crosses devices in a training step on the mesh in force, in which type, how many bytes, and how many
    products run meanwhile.

        with jax.set_mesh(mesh), te_jax.autocast(recipe=recipe, mesh_resource=resource):
            print(te_jax.explain_sharding(model, x))

    model:     a module of Flax Linen: what is compiled is its forward and backward pass. Or a function, jitted or not,
               such as a training step: what is compiled is that function.
    args, kwargs: of its call. Arrays may be `jax.ShapeDtypeStruct`s with a sharding: nothing is computed.
    variables: of a Linen module, likewise. None: as `init` makes them, sharded by their logical axes under the rules
               of `nn.logical_axis_rules`, and the MeshResource in force if there is one.

    The answer is read off the compiled program, as it is behind the partitioner, where types are those that cross; on a
    GPU what runs between the start and the end of each transfer is read off the schedule. Compiling takes as long
    as the first call of the step.

    Raises ValueError without a mesh of several devices, TypeError for another model, and what the call raises.
    """
    is_function = inspect.isroutine(model) or isinstance(model, functools.partial) or hasattr(model, "lower")
    check("explain_sharding", "variables", variables, NONE if is_function else ANY_VARIABLES)
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.size == 1:
        raise ValueError("explain_sharding: no mesh of several devices is in force; enter jax.set_mesh(mesh).")
    call, arrays = arrays_apart(args, kwargs)
    if is_function:
        whole = not kwargs and len(arrays) == len(jax.tree.leaves(args))  # jitted, it keeps its options so
        return explain_program(model if whole else lambda *arrays: call(model, arrays), args if whole else arrays, mesh)
    # Imported here, for Flax takes a second to import.
    linen = importlib.import_module("flax.linen")
    check("explain_sharding", "model", model, Kind(_MODELS, lambda value: isinstance(value, linen.Module)))
    step, args = importlib.import_module("te_jax.flax.explained").step_of(model, variables, call, arrays, mesh)
    return explain_program(step, args, mesh)


_MODELS = "a module of Flax Linen, or a function, such as a jitted training step of a module of NNX"
ANY_VARIABLES = Kind("the variables of the model", lambda value: True)
