"""LMHead: from hidden states to logits, or straight to the loss."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.core.arrays import as_jax
from te_jax.core.check import check, integer
from te_jax.core.placement import mesh_axes
from te_jax.core.products import product
from te_jax.flax._common import Axes, Initializer, activation_axes, floating, in_compute_dtype, parameter
from te_jax.flax._fields import INITIALIZER, Module, check_call, warn_unused
from te_jax.flax._state import dense_metas, describe, recipe_of
from te_jax.layers import linear_cross_entropy
from te_jax.layers._specs import dense_spec
from te_jax.layers.loss.head import REDUCTION
from te_jax.ops.gemm.dense import dot
from te_jax.sharding import BATCH_AXES, SEQLEN_AXES, W_FSDP_AXES, W_TP_AXES, resolve_logical_axes
from te_jax.sharding.resource import check_current_mesh_resource


class LMHead(Module):
    """The head of a language model: logits x . kernel^T, or with labels their cross entropy, whose logits are in memory
    for a few thousand tokens at a time; the loss is in FP8 under `te_jax.autocast`.

    features:        V, the size of the vocabulary.
    label_smoothing, z_loss, logit_softcap, ignore_index: as in `te_jax.layers.linear_cross_entropy`; the cap is on the
                     logits of both.
    kernel_axes:     logical axes of the kernel; the mesh axis of the first splits the vocabulary.
    dtype:           of the parameters.
    params_dtype:    of the parameters, if not None; then inputs are cast to `dtype`.

    Parameter: `kernel` [V, H], as an embedding's. The FP8 state is the loss's: pass labels to `init` too. A recipe
    whose `exclude` has the module's path leaves the loss out of FP8.
    """

    features: int
    kernel_init: Initializer = nn.initializers.normal(0.02)
    kernel_axes: Axes = (W_TP_AXES, W_FSDP_AXES)
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    ignore_index: int | None = -100
    dtype: jnp.dtype = jnp.float32
    transpose_batch_sequence: bool = False
    params_dtype: jnp.dtype | None = None

    if not TYPE_CHECKING:  # as `Module` says
        own_kinds = {"features": integer(1), "kernel_init": INITIALIZER}

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        labels: jax.Array | None = None,
        *,
        kernel: jax.Array | None = None,
        reduction: str = "mean",
    ) -> jax.Array:
        """inputs [..., H] -> logits f32 [..., V]; with labels, integers [...], the loss f32[], or f32 [...] with the
        reduction "none".

        kernel:    [V, H] of any floating dtype, such as an embedding, instead of the parameter, which there is none of
                   then.
        reduction: "mean" over tokens whose label is not ignore_index, "sum" or "none".

        Logits are products of the inputs' type, never in FP8. Raises TypeError for inputs that are not floating,
        ValueError for a kernel of another shape and for one next to a parameter, and what
        `te_jax.layers.linear_cross_entropy` raises.
        """
        check_call(self, inputs=inputs)
        check_current_mesh_resource()
        inputs = in_compute_dtype(self, floating(self, "inputs", inputs))
        shape = (self.features, inputs.shape[-1])
        kernel = parameter(self, "kernel", self.kernel_init, self.kernel_axes, shape, kernel)
        check(describe(self), "reduction", reduction, REDUCTION)
        if labels is None:
            if reduction != "mean":
                text = f"reduction is {reduction!r}, but labels is None, so that the result is logits"
                warn_unused(self, f"{text}; pass labels too, or leave it out")
            return self._logits(inputs, kernel)
        (labels,) = as_jax(labels)
        return linear_cross_entropy(
            inputs,
            kernel,
            labels,
            words_first=True,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logit_softcap=self.logit_softcap,
            ignore_index=self.ignore_index,
            reduction=reduction,
            recipe=recipe_of(self),
            metas=dense_metas(self),
            name=describe(self),
            **self._places(inputs),
        )

    @product("logits")
    def _logits(self, inputs, kernel):
        spec = dense_spec(jax.typeof(inputs), jax.typeof(kernel.T), 1)
        z = dot(inputs, (inputs.ndim - 1,), kernel, (1,), jnp.float32, out_spec=spec)
        return z if self.logit_softcap is None else self.logit_softcap * jnp.tanh(z / self.logit_softcap)

    def _places(self, inputs) -> dict:
        """How devices split tokens and the vocabulary, where logical axis rules say it."""
        tokens = (BATCH_AXES, SEQLEN_AXES, *[None] * inputs.ndim)[: inputs.ndim - 1]
        spec = resolve_logical_axes(activation_axes(self, *tokens) if len(tokens) > 1 else tokens)
        vocab = resolve_logical_axes(self.kernel_axes or None)
        if spec is None or vocab is None:
            return {}
        split = {axis for entry in spec for axis in mesh_axes(entry)}
        return dict(
            token_spec=spec, vocab_axis=tuple(axis for axis in mesh_axes(vocab[0]) if axis not in split) or None
        )
