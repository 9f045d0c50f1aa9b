"""Names of results that are worth keeping for the backward pass, and policies that keep them by these names.

`te_jax.checkpoint_policies`, which shows them, says what they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from te_jax.core.check import did_you_mean, warn_once

_MODULE = "te_jax.checkpoint_policies"
_PREFIX = "te_"
GEMM = _PREFIX + "gemm"
ATTENTION = _PREFIX + "attention"
SSM = _PREFIX + "ssm"
QUANTIZED = _PREFIX + "quantized"
KERNEL = _PREFIX + "quantized_kernel"
STATISTICS = _PREFIX + "statistics"
_CONSTANTS = dict(GEMM=GEMM, ATTENTION=ATTENTION, SSM=SSM, QUANTIZED=QUANTIZED, KERNEL=KERNEL, STATISTICS=STATISTICS)
NAMES = tuple(_CONSTANTS.values())


def with_names(tree: Any, *names: str | None) -> Any:
    """`tree`, whose arrays have all of `names` for policies; None among them is skipped."""
    for name in names:
        tree = tree if name is None else checkpoint_name(tree, name)
    return tree


def save(*names: str) -> Callable[..., bool]:
    """A policy that keeps arrays with one of `names`, which are names of `te_jax.checkpoint_policies` or of fields of
    modules, such as `ffn1_ckpt_name`.

    The policy keeps STATISTICS too. `jax.checkpoint_policies.save_from_both_policies` combines it with other policies.

    Raises TypeError for a name that is no string; ValueError without names, and for a name that begins with "te_" and
    is not of `te_jax.checkpoint_policies`; warns of "GEMM" and the like, which are constants there, not strings.
    """
    _check_policy_names(f"{_MODULE}.save", "names", names)
    return jax.checkpoint_policies.save_only_these_names(*names, STATISTICS)


def offload(*names: str, save: Sequence[str] = ()) -> Callable[..., Any]:
    """A policy that keeps arrays with one of `names` in the memory of the host, and those with one of `save` on the
    device.

    STATISTICS stay on the device. Offloaded arrays go to pinned memory in the forward pass and come back in the
    backward pass. Offloading serves large tensors, and gains nothing where the GPU waits for them. jax does not combine
    such a policy with others.

    Raises TypeError and ValueError as `save` does, and ValueError for a name in both.
    """
    _check_policy_names(f"{_MODULE}.offload", "names", names)
    if isinstance(save, str):
        raise TypeError(f"{_MODULE}.offload: save is {save!r}; pass a tuple of names, as in save=({save!r},).")
    _check_policy_names(f"{_MODULE}.offload", "save", save or (STATISTICS,))
    if twice := sorted({*names} & {*save, STATISTICS}):
        way_out = "STATISTICS always stay on the device" if twice == [STATISTICS] else "leave it out of one"
        raise ValueError(f"{_MODULE}.offload: {twice[0]!r} is in names, but is saved on the device; {way_out}.")
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted({*save, STATISTICS}),
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _check_policy_names(where: str, argument: str, names: Sequence[str]):
    """Raises TypeError or ValueError, naming `where` and `argument`, unless policies can take `names`."""
    if not names:
        raise ValueError(f"{where}: {argument} is empty, so nothing is kept; pass some of {', '.join(NAMES)}.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{where}: {argument} has {name!r}; pass strings, such as te_jax.checkpoint_policies.GEMM.")
        if name in _CONSTANTS:
            warn_once(
                where,
                f"{argument} has {name!r}, a name that only your own program can have given; pass the constant "
                f"te_jax.checkpoint_policies.{name}, which is {_CONSTANTS[name]!r}.",
            )
        if name.startswith(_PREFIX) and name not in NAMES:
            hint = did_you_mean(name, NAMES)
            raise ValueError(
                f"{where}: {argument} has {name!r}, which nothing in te_jax is named; pass some of {', '.join(NAMES)}"
                f"{f' ({hint})' if hint else ''}."
            )


_jax = jax.checkpoint_policies
# TransformerEngine has these three under the same names.
te_gemms_saveable: Callable[..., Any] = save(GEMM)
dots_and_te_gemms_with_no_batch_dims: Callable[..., Any] = _jax.save_from_both_policies(
    _jax.dots_with_no_batch_dims_saveable, te_gemms_saveable
)
checkpoint_dots_and_te_gemms: Callable[..., Any] = _jax.save_from_both_policies(_jax.dots_saveable, te_gemms_saveable)
