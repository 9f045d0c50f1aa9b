"""Which tensors of a checkpoint become which parameters, said once for both directions."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp


class Recast(NamedTuple):
    """How tensors of a checkpoint and parameters are made of each other. Both functions are traced by jax."""

    ours: Callable  # (*tensors of the checkpoint) -> tuple of parameters
    theirs: Callable  # (*parameters) -> tuple of tensors of the checkpoint


class TensorRule(NamedTuple):
    """One step of a conversion.

    ours:   paths of parameters, "a/b", behind `stack` if there is one.
    theirs: names of tensors; with a stack, `{i}` in them is the layer.
    stack:  the path of the layers: "layers", "encoder/layers"; None: the rule is of no layer.
    layers: the layers that the rule holds for; None: all.
    collection: the collection of variables that the paths are in.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Recast
    stack: str | None = None
    layers: Sequence[int] | None = None
    collection: str = "params"


SAME = Recast(lambda a: (a,), lambda a: (a,))
TURNED = Recast(lambda a: (a.T,), lambda a: (a.T,))
# n kernels [out, in] as [in, n, out]; n biases [out] as [n, out].
JOINED = Recast(
    lambda *each: (jnp.stack([a.T for a in each], -2),), lambda a: tuple(a[..., i, :].T for i in range(a.shape[-2]))
)
# Kernels of experts [out, in] as [E, in, out].
STACKED = Recast(lambda *each: (jnp.stack([a.T for a in each]),), lambda a: tuple(expert.T for expert in a))


def _in_one_tensor(n: int) -> Recast:
    """n kernels of one size in one tensor [n out, in] as [in, n, out]."""
    ours = lambda a: a.reshape(n, -1, a.shape[-1]).transpose(2, 0, 1)
    return Recast(lambda a: (ours(a),), lambda a: (a.transpose(1, 2, 0).reshape(-1, a.shape[0]),))


GATED = JOINED_KV = _in_one_tensor(2)
JOINED_QKV = _in_one_tensor(3)
# Two kernels of gated experts, [E, 2F, H], as two of [E, H, F].
GATED_STACK = Recast(
    lambda a: tuple(jnp.split(a.swapaxes(1, 2), 2, -1)), lambda a, b: (jnp.concatenate([a, b], -1).swapaxes(1, 2),)
)
# Two kernels, or biases, of gated experts in turn along the last axis.
INTERLEAVED = Recast(
    lambda a: (a[..., ::2], a[..., 1::2]), lambda a, b: (jnp.stack([a, b], -1).reshape(*a.shape[:-1], -1),)
)
TURNED_STACK = Recast(lambda a: (a.swapaxes(1, 2),), lambda a: (a.swapaxes(1, 2),))


def _as_it_is(a):
    return a


# A form is made once, so that programs of one load serve others.
def parted(sizes: Sequence[int], ours: Callable = _as_it_is, theirs: Callable = _as_it_is) -> Recast:
    """One tensor whose leading axis holds, so many each, what several parameters are made of. ours, theirs: of each
    part."""
    return _parted(tuple(sizes), ours, theirs)


@cache
def _parted(sizes, ours, theirs):
    ends = [*accumulate(sizes)][:-1]
    return Recast(
        lambda a: tuple(map(ours, jnp.split(a, ends))), lambda *parts: (jnp.concatenate([*map(theirs, parts)]),)
    )


def parted_in_groups(groups: int, sizes: Sequence[int]) -> Recast:
    """Kernels in one tensor [groups * sum(sizes), in], which has so many rows of each, group after group, as
    [in, groups * size]."""
    return _parted_in_groups(groups, tuple(sizes))


@cache
def _parted_in_groups(groups, sizes):
    ends = [*accumulate(sizes)][:-1]

    def ours(a):
        parts = jnp.split(a.reshape(groups, -1, a.shape[-1]), ends, 1)
        return tuple(part.reshape(-1, a.shape[-1]).T for part in parts)

    def theirs(*kernels):
        width = kernels[0].shape[0]
        parts = [kernel.T.reshape(groups, -1, width) for kernel in kernels]
        return (jnp.concatenate(parts, 1).reshape(-1, width),)

    return Recast(ours, theirs)


@cache
def query_and_kv(queries: int) -> Recast:
    """The kernels of queries, so many channels, keys and values in one tensor as [in, out] and [in, 2, out]."""
    two = JOINED_KV
    return Recast(
        lambda a: (a[:queries].T, *two.ours(a[queries:])), lambda q, kv: (jnp.concatenate([q.T, *two.theirs(kv)]),)
    )


def parted_taps(sizes: Sequence[int]) -> Recast:
    """The kernels [taps, channels] of causal convolutions in one tensor [channels, 1, taps]."""
    return parted(sizes, _taps_first, _taps_last)


def _taps_first(a):
    return a[:, 0].T


def _taps_last(a):
    return a.T[:, None]


# The forms whose tensors are weights of linear layers, or of experts: in FP8 their scales are recast alike.
OF_LINEARS = (TURNED, JOINED, STACKED)
# One tensor [..., n out] as [..., n, out].
CUT_IN_3 = Recast(lambda a: (a.reshape(*a.shape[:-1], 3, -1),), lambda a: (a.reshape(*a.shape[:-2], -1),))
ONE_OF_1 = Recast(lambda a: (a[..., None, :],), lambda a: (a[..., 0, :],))
# A parameter that the checkpoint does not have, since it is 0 there.
ZEROS = Recast(lambda: (), lambda a: ())
SWIGLU = ("gate_proj", "up_proj", "down_proj")  # what the Linears of a Llama's MLP are called


def dense_rules(path: str, name: str, bias: bool, stack: Any = None) -> list[TensorRule]:
    """`path`/{kernel, bias} of a torch Linear."""
    made = [TensorRule((f"{path}/kernel",), (f"{name}.weight",), TURNED, stack)]
    return made + ([TensorRule((f"{path}/bias",), (f"{name}.bias",), SAME, stack)] if bias else [])


def norm_rules(path: str, name: str, bias: bool, stack: Any = None) -> list[TensorRule]:
    """`path`/{scale, ln_bias} of a norm."""
    made = [TensorRule((f"{path}/scale",), (f"{name}.weight",), SAME, stack)]
    return made + ([TensorRule((f"{path}/ln_bias",), (f"{name}.bias",), SAME, stack)] if bias else [])


def attention_rules(
    path: str,
    q: str,
    k: str | None,
    v: str | None,
    out: str,
    *,
    fused: bool,
    bias: bool = False,
    out_bias: bool | None = None,
    stack: Any = None,
) -> list[TensorRule]:
    """The projections of a self-attention, of four torch Linears. k, v: None: keys are another layer's, or values, too.
    fused: queries, keys and values are one parameter. out_bias: None is as `bias`."""
    made: list[TensorRule] = []
    parts: dict[str, tuple[str, ...]] = {"query": (q,)}
    if k is not None and v is not None:
        parts = {"qkv": (q, k, v)} if fused else {**parts, "kv": (k, v)}
    elif k is not None:
        parts["key"] = (k,)
    for name, sources in parts.items():
        kernel, of_bias = (TURNED, SAME) if len(sources) == 1 else (JOINED, JOINED)
        made.append(TensorRule((f"{path}/{name}/kernel",), _with_end(sources, "weight"), kernel, stack))
        if bias:
            made.append(TensorRule((f"{path}/{name}/bias",), _with_end(sources, "bias"), of_bias, stack))
    made += dense_rules(f"{path}/out", out, bias if out_bias is None else out_bias, stack)
    return made + ([zero_rule(f"{path}/out/bias", stack)] if bias and out_bias is False else [])


def mlp_rules(path: str, wi: tuple[str, ...], wo: str, bias: bool, stack: Any = None) -> list[TensorRule]:
    """`path`/{wi, wo}_{kernel, bias} of torch Linears; several wi belong to a gated activation."""
    made = [
        TensorRule((f"{path}/wi_kernel",), _with_end(wi, "weight"), JOINED, stack),
        TensorRule((f"{path}/wo_kernel",), (f"{wo}.weight",), TURNED, stack),
    ]
    if bias:
        made.append(TensorRule((f"{path}/wi_bias",), _with_end(wi, "bias"), JOINED, stack))
        made.append(TensorRule((f"{path}/wo_bias",), (f"{wo}.bias",), SAME, stack))
    return made


def swiglu_rules(path: str, name: str, stack: Any = None) -> list[TensorRule]:
    """`mlp_rules` of the MLP `name` of a Llama."""
    gate, up, down = (f"{name}.{each}" for each in SWIGLU)
    return mlp_rules(path, (gate, up), down, False, stack)


def expert_rules(path: str, name: str, names: tuple[str, ...], count: int, stack: Any = None) -> list[TensorRule]:
    """`path`/{gate_kernel, wi_0, wi_1, wo} of the torch Linears `name`.gate and `name`.experts. names: of gate, up and
    down of an expert, or of up and down, without wi_1. count: of experts."""
    made = [TensorRule((f"{path}/gate_kernel",), (f"{name}.gate.weight",), TURNED, stack)]
    for ours, theirs in zip((*(f"wi_{i}" for i in range(len(names) - 1)), "wo"), names):
        sources = tuple(f"{name}.experts.{e}.{theirs}.weight" for e in range(count))
        made.append(TensorRule((f"{path}/{ours}",), sources, STACKED, stack))
    return made


def zero_rule(path: str, stack: Any = None) -> TensorRule:
    """A parameter that is 0."""
    return TensorRule((path,), (), ZEROS, stack)


def _with_end(names, end: str) -> tuple[str, ...]:
    return tuple(f"{name}.{end}" for name in names)
