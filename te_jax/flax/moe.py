"""MoEBlock: a mixture of experts, whose router sends each token to some of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_jax.core.check import ARRAY, BOOL, Kind, check, show
from te_jax.flax._common import (
    Axes,
    Initializer,
    check_input_axes,
    floating,
    in_compute_dtype,
    kernel_initializer,
    parameter,
)
from te_jax.flax._field_rules import activations_take_their_params, norm_fields_need_a_norm
from te_jax.flax._fields import Module, check_call, norm_type, shared_fields, warn_unused
from te_jax.flax._state import describe, expert_metas, is_lifted, not_passed_on, recipe_of
from te_jax.flax.dense import DenseGeneral, norm_options
from te_jax.flax.kernels import expert_operand
from te_jax.flax.mlp import LayerNormMLP
from te_jax.flax.norm import norm_parameters
from te_jax.layers import layernorm
from te_jax.layers.experts.block import MoEOptions, moe
from te_jax.layers.experts.devices import ExpertExchange
from te_jax.layers.norm_mlp import split_residual
from te_jax.ops.experts.router import RouterOptions, updated_expert_bias
from te_jax.ops.quantize.norm import norm_and_input
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.logical_axes import resolve_logical_axes
from te_jax.sharding.resource import check_current_mesh_resource
from te_jax.state.misplaced import keys_of

BIAS_COLLECTION, LOSSES = "expert_bias", "losses"
_COLLECTIONS = Kind("a dict of collections, as `init` returns it", lambda value: isinstance(value, Mapping))


def update_expert_bias(
    collections: Mapping[str, Any], grads: Mapping[str, Any], rate: float | jax.Array
) -> dict[str, Any]:
    """`collections` with the next biases of experts, where it has the collection `expert_bias`.

    grads: the gradients with respect to it, which are the counts of tokens that each expert got, added up over uses,
           microbatches and devices, or their mean.
    rate:  the step of the law (`te_jax.ops.router.updated_expert_bias`), a number or f32[].

    Raises TypeError for collections that are no dict, ValueError where `grads` lack the collection or have it of
    another tree, for biases outside of it, and for a rate below 0.
    """
    name = "te_jax.flax.update_expert_bias"
    for argument, value in dict(collections=collections, grads=grads).items():
        check(name, argument, value, _COLLECTIONS)
    if BIAS_COLLECTION not in collections:
        paths = [keys_of(path) for path, _ in jax.tree.leaves_with_path(collections)]
        if any(path[-1:] == ("expert_bias",) and path[0] != "params" for path in paths):
            raise ValueError(
                f"{name}: collections has biases of experts, but no collection of them at the top; pass "
                f"{{{BIAS_COLLECTION!r}: ...}} as `init` returns it, of one model."
            )
        return dict(collections)
    if BIAS_COLLECTION not in grads:
        raise ValueError(
            f"{name}: grads lack the collection {BIAS_COLLECTION!r}; differentiate with respect to it: its "
            "gradient is the counts of tokens."
        )
    held, counted = (
        {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(t[BIAS_COLLECTION])}
        for t in (collections, grads)
    )
    if held != counted:
        raise ValueError(
            f"{name}: the biases are {show(held)}, but grads has {show(counted)}; pass the gradients with respect to "
            "these biases."
        )
    law = lambda bias, counts: jnp.vectorize(lambda b, c: updated_expert_bias(b, c, rate), signature="(e),(e)->(e)")(
        bias, counts
    )
    return {**collections, BIAS_COLLECTION: jax.tree.map(law, collections[BIAS_COLLECTION], grads[BIAS_COLLECTION])}


def router_of(module: nn.Module) -> RouterOptions:
    """The options of the router that the fields say."""
    return RouterOptions(
        module.num_experts_per_tok,
        module.score_function,
        module.use_pre_softmax,
        module.normalize_weights,
        module.scaling_factor,
        module.num_groups,
        module.group_topk,
    )


def tokens_find_experts(module: nn.Module) -> str | None:
    """`num_groups` divides `num_experts`; a token chooses `num_experts_per_tok` of them, of `group_topk` groups."""
    return router_of(module).why_not(module.num_experts, "num_experts_per_tok")


def weighed_tokens_have_one_expert(module: nn.Module) -> str | None:
    """`weights_before_experts` needs `num_experts_per_tok` 1."""
    if module.weights_before_experts and module.num_experts_per_tok != 1:
        return f"weights_before_experts is True, but num_experts_per_tok is {module.num_experts_per_tok}; pass 1 for it"


def gates_have_experts(module: nn.Module) -> str | None:
    """`shared_expert_gate` needs `num_shared_experts`."""
    if module.shared_expert_gate and not module.num_shared_experts:
        return "shared_expert_gate is True, but num_shared_experts is 0; pass both, or neither"


def router_fields_say_something(module: nn.Module) -> str | None:
    """`use_pre_softmax` needs the score function "softmax", `num_groups` needs `group_topk`, and `per_sequence_loss`
    `aux_loss_coeff`; else a warning."""
    for on, text in (
        (
            module.use_pre_softmax and module.score_function != "softmax",
            f"use_pre_softmax is True, but score_function is {module.score_function!r}; use 'softmax', or leave it out",
        ),
        (
            module.num_groups > 1 and module.group_topk is None,
            f"num_groups is {module.num_groups}, but group_topk is None, by which a token's experts are of all groups; "
            "set it, or leave num_groups out",
        ),
        (
            module.per_sequence_loss and not module.aux_loss_coeff,
            "per_sequence_loss is True, but aux_loss_coeff is 0: there is no such loss; set it, or leave "
            "per_sequence_loss out",
        ),
    ):
        if on:
            warn_unused(module, text)


def sequences_are_rows(module: nn.Module) -> str | None:
    """`per_sequence_loss` needs arrays [batch, sequence, ...]."""
    if module.per_sequence_loss and module.transpose_batch_sequence:
        return "per_sequence_loss and transpose_batch_sequence are both True; set one of them"


class MoEBlock(Module):
    """A mixture of experts: each token goes to `num_experts_per_tok` of `num_experts` MLPs act(x . wi) . wo, which are
    computed in FP8 under `te_jax.autocast`, and gets the sum of what they say, weighed by the router.

    num_experts, intermediate_dim, activations, activation_params: E, F, and as in `LayerNormMLP`. F is an expert's.
    num_experts_per_tok, score_function, use_pre_softmax, normalize_weights, scaling_factor, num_groups, group_topk:
                       k and the other fields of `te_jax.ops.router.RouterOptions`.
    num_shared_experts: n: besides, all tokens go to an MLP of width n F, the submodule `shared_experts`.
    capacity_factor:   None: no token is dropped. Else as in `te_jax.layers.MoEOptions`.
    exchange:          a `te_jax.layers.ExpertExchange`: how tokens reach the devices of their experts, where the
                       `ep_resource` of the MeshResource in force, or the sharding of the parameters on an Explicit
                       mesh, divides the experts. The logical axis "expert" of the parameters lies on it.
    aux_loss_coeff, z_loss_coeff, per_sequence_loss: the losses of `te_jax.ops.router`, times these, are sown as
                       `balancing_loss` and `z_loss` into the collection `losses`, where they are not 0. A call that is
                       not deterministic warns if that is not mutable, for they would be lost:

        y, sown = model.apply(variables, x, mutable=["losses"])
        loss = loss_of(y) + sum(map(jnp.sum, jax.tree.leaves(sown)))

    use_expert_bias:   experts are chosen with a bias, `expert_bias` f32[E] in a collection `expert_bias` of its own,
                       which no optimizer sees. The gradient of that collection is the counts of tokens, by which the
                       loads are evened out (`TrainState`, or `update_expert_bias`).
    latent_size:       L: experts compute with L channels of a token, which `latent_down` makes of its H; `latent_up`
                       makes H of their sum, as in Nemotron 3. The router and shared experts read all H. None: L is H.
    shared_expert_gate: a sigmoid for each token multiplies what shared experts give, as in Qwen 2.
    router_bias:       logits of the router have a bias.
    router_norm:       the router reads the inputs in front of the norm, over the root of their mean square plus
                       epsilon, times `router_scale` / sqrt(H), as in Gemma 4.
    expert_scales:     a parameter for each expert multiplies what it gives, as in Gemma 4.
    weights_before_experts: an expert gets the token times its weight, instead of the result; for one expert of a
                       token, as in Llama 4.
    enable_layernorm:  a norm in front, as in `LayerNormMLP`, and the fields of it.
    gate_axes, kernel_axes_1, kernel_axes_2, bias_axes_1, bias_axes_2: logical axes of the parameters.
    ffn1_ckpt_name, ffn2_ckpt_name: names of the activation's input and of the result for `jax.checkpoint` policies.

    Parameters: `gate_kernel` [H, E], `gate_bias` [E] with router_bias, `router_scale` [H] with router_norm,
    `expert_scale` [E] with expert_scales, `shared_gate_kernel` [H, 1] with
    shared_expert_gate; `wi_0` and, of gated activations, `wi_1` [E, H, F]; `wo` [E, F, H]; with use_bias `wi_0_bias`,
    `wi_1_bias` [E, F] and `wo_bias` [E, H]; `scale`, `ln_bias` [H] with enable_layernorm. With latent_size, wi, wo and
    wo_bias have L for H, and there are `latent_down/kernel` [H, L] and `latent_up/kernel` [L, H]. FP8 state: `*_0_*`
    belongs to wi, `*_1_*` to wo, with an axis of experts in front but for `x_0_*` and `grad_1_*`. Sown into
    `intermediates` where it is mutable: `tokens_per_expert` and `dropped`, i32[E].
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    intermediate_dim: int = 2048
    activations: Sequence[str | Callable[..., Any]] = ("silu", "linear")
    activation_params: Mapping[str, Any] | None = None
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    normalize_weights: bool | None = None
    scaling_factor: float = 1.0
    num_groups: int = 1
    group_topk: int | None = None
    num_shared_experts: int = 0
    capacity_factor: float | None = None
    exchange: ExpertExchange = ExpertExchange()
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    per_sequence_loss: bool = False
    use_expert_bias: bool = False
    enable_layernorm: bool = False
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    gate_axes: Axes = ("embed", None)
    kernel_axes_1: Axes = ("expert", "embed", "mlp")
    kernel_axes_2: Axes = ("expert", "mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("expert", "mlp")
    bias_axes_2: Axes = ("expert", "embed")
    dtype: jnp.dtype = jnp.float32
    layernorm_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    params_dtype: jnp.dtype | None = None
    router_bias: bool = False
    weights_before_experts: bool = False
    shared_expert_gate: bool = False
    latent_size: int | None = None
    router_norm: bool = False
    expert_scales: bool = False

    if not TYPE_CHECKING:  # as `Module` says
        rules = (
            activations_take_their_params,
            tokens_find_experts,
            sequences_are_rows,
            router_fields_say_something,
            weighed_tokens_have_one_expert,
            gates_have_experts,
            norm_fields_need_a_norm,
        )

    @nn.compact
    def __call__(
        self, inputs: jax.Array, deterministic: bool = False, *, residual: bool | jax.Array = False
    ) -> jax.Array:
        """inputs [..., H] -> [..., H] of the same dtype.

        deterministic: True: no losses are sown.
        residual:      True: the inputs are added to the result. An array [..., H] of their dtype is added too.

        Raises TypeError for inputs that are not floating, ValueError for what `te_jax.layers.moe` refuses and for a
        parameter `expert_bias`, as others have it.
        """
        check_call(self, inputs=inputs, deterministic=deterministic)
        check(describe(self), "residual", residual, BOOL | ARRAY)
        inputs = in_compute_dtype(self, floating(self, "inputs", inputs))
        check_input_axes(self, inputs.ndim, "layernorm_input_axes")
        inputs = constrain(inputs, self.layernorm_input_axes)
        norm, gate, wi, wo = self._parameters(inputs.shape[-1])
        h, of_norm, read = inputs, {}, self._router_input(inputs)
        if norm is not None and (self.num_shared_experts or self.latent_size):
            of_op = dict(kind=norm_type(self.layernorm_type), zero_centered=self.zero_centered_gamma, eps=self.epsilon)
            h, through = norm_and_input(inputs, *norm, **of_op, name=describe(self))
            residual = through if split_residual(residual)[0] else residual
        elif norm is not None:
            of_norm = dict(gamma=norm[0], beta=norm[1], **norm_options(self))
        if self.latent_size is None:
            y, aux = self._experts(h, gate, wi, wo, residual=residual, router_input=read, **of_norm)
        else:
            read = h if read is None else read
            y, aux = self._experts(self._latent("latent_down", self.latent_size)(h), gate, wi, wo, router_input=read)
            own, added = split_residual(residual)
            y = self._latent("latent_up", h.shape[-1])(y, residual=inputs if own else added)
        self._sow(aux, deterministic)
        if self.num_shared_experts:
            y = self._with_shared(h, y, deterministic)
        return checkpoint_name(constrain(y, self.layernorm_input_axes), self.ffn2_ckpt_name)

    def _options(self) -> MoEOptions:
        params = None if self.activation_params is None else dict(self.activation_params)
        of_call = self.capacity_factor, self.per_sequence_loss, self.exchange, self.weights_before_experts
        return MoEOptions(router_of(self), self.activations, params, *of_call)

    def _router_input(self, inputs):
        """What the router reads with router_norm, else None."""
        if not self.router_norm:
            return None
        width = inputs.shape[-1]
        scale = parameter(self, "router_scale", nn.initializers.ones, self.gate_axes[:1], (width,))
        of_norm = dict(norm="rmsnorm", epsilon=self.epsilon, name=f"{describe(self)} router_norm")
        return layernorm(inputs, scale.astype(jnp.float32) * width**-0.5, **of_norm)

    def _latent(self, name: str, features: int) -> DenseGeneral:
        """A projection to or from the channels that experts compute with."""
        axes = self.gate_axes if name == "latent_down" else self.gate_axes[::-1]
        own = dict(features=features, use_bias=False, kernel_axes=axes)
        return DenseGeneral(**shared_fields(self, DenseGeneral) | own, name=name)

    def _experts(self, h, gate, wi, wo, **more):
        """gate: the kernel and the bias of the router."""
        check_current_mesh_resource()
        metas = expert_metas(self, self.num_experts)
        of_scale = nn.initializers.ones, self.gate_axes[1:], (self.num_experts,)
        scale = parameter(self, "expert_scale", *of_scale) if self.expert_scales else None
        names = tuple(f"wi_{i}" for i in range(len(wi[0])))
        wi_kernel = expert_operand(self, names, wi[0], metas and metas[0])
        wo_kernel = expert_operand(self, ("wo",), wo[0], metas and metas[1])
        return moe(
            h,
            gate[0],
            *(wi_kernel, wo_kernel, wi[1], wo[1]),
            gate_bias=gate[1],
            options=self._options(),
            expert_bias=self._bias(),
            expert_scale=scale,
            recipe=recipe_of(self),
            metas=metas,
            checkpoint=self.quantization_checkpoint_name,
            middle_name=self.ffn1_ckpt_name,
            token_spec=resolve_logical_axes(self.layernorm_input_axes, h.shape),
            name=describe(self),
            **more,
        )

    def _bias(self):
        """f32[E], or None."""
        if self.has_variable("params", "expert_bias"):
            raise ValueError(
                f"{describe(self)}: the parameters hold `expert_bias`, which an optimizer would train; move it to the "
                f'collection {BIAS_COLLECTION!r}, {{"{BIAS_COLLECTION}": {{... {{"expert_bias": bias}}}}}}, and set '
                "use_expert_bias."
            )
        if not self.use_expert_bias:
            return None
        if not self.has_variable(BIAS_COLLECTION, "expert_bias"):
            if not self.is_initializing():
                raise ValueError(
                    f"{describe(self)}: use_expert_bias is True, but the collection {BIAS_COLLECTION!r} lacks "
                    "expert_bias; pass the collection that `init` returns next to params, and on through a stack of "
                    f"layers: variable_axes={{{BIAS_COLLECTION!r}: 0}} of `nn.scan`."
                )
            if not self.is_mutable_collection(BIAS_COLLECTION) and is_lifted(self):
                raise ValueError(f"{describe(self)}: expert_bias {not_passed_on(BIAS_COLLECTION)}")
        bias = self.variable(BIAS_COLLECTION, "expert_bias", lambda: jnp.zeros(self.num_experts)).value
        if bias.shape != (self.num_experts,):
            raise ValueError(
                f"{describe(self)}: {BIAS_COLLECTION} leaf expert_bias has shape {bias.shape}; pass "
                f"[{self.num_experts}]; a stack of layers needs variable_axes={{{BIAS_COLLECTION!r}: 0}} of `nn.scan`."
            )
        return bias

    def _sow(self, aux, deterministic: bool):
        if self.is_initializing():  # What `init` returns would be passed on, and added to.
            return
        self.sow("intermediates", "tokens_per_expert", aux.counts)
        self.sow("intermediates", "dropped", aux.dropped)
        terms = dict(balancing_loss=(self.aux_loss_coeff, aux.balancing_loss), z_loss=(self.z_loss_coeff, aux.z_loss))
        for name, (coefficient, loss) in terms.items():
            if not coefficient or deterministic:
                continue
            if not self.is_mutable_collection(LOSSES):
                warn_unused(
                    self,
                    f"{name} is asked for, but the collection {LOSSES!r} is not mutable here, so that it is in no "
                    f"loss; apply with mutable=[{LOSSES!r}] and add what comes back (`nn.scan` needs "
                    f"variable_axes={{{LOSSES!r}: 0}}), or pass deterministic=True",
                )
            self.sow(LOSSES, name, coefficient * loss, init_fn=lambda: 0.0, reduce_fn=jnp.add)

    def _with_shared(self, h, y, deterministic: bool):
        """y and what shared experts say of h."""
        if not self.shared_expert_gate:
            return self._shared()(h, deterministic, residual=y)[0]
        each = kernel_initializer(self.kernel_init)
        kernel = parameter(self, "shared_gate_kernel", each, self.gate_axes, (h.shape[-1], 1))
        precision = jax.lax.Precision.HIGHEST if h.dtype == jnp.float32 else None
        gate = jnp.einsum("...h,hn->...n", h, kernel.astype(h.dtype), precision=precision)
        shared = self._shared()(h, deterministic)[0]
        gated = jax.nn.sigmoid(gate.astype(jnp.float32)) * shared.astype(jnp.float32)
        return y + gated.astype(y.dtype)

    def _shared(self) -> LayerNormMLP:
        slotted = lambda axes: (*axes[1:-1], None, axes[-1]) if axes else ()
        own = dict(
            intermediate_dim=self.num_shared_experts * self.intermediate_dim,
            enable_layernorm=False,
            kernel_axes_1=slotted(self.kernel_axes_1),
            kernel_axes_2=self.kernel_axes_2[1:],
            bias_axes_1=slotted(self.bias_axes_1),
            bias_axes_2=self.bias_axes_2[1:],
        )
        return LayerNormMLP(**shared_fields(self, LayerNormMLP) | own, name="shared_experts")

    def _parameters(self, width: int):
        """(gamma, beta) or None; kernel and bias of the router; (kernels, biases) of wi; (kernels, bias) of wo. The
        order of creation fixes the keys."""
        experts, hidden, slots = self.num_experts, self.intermediate_dim, range(len(self.activations))
        each = kernel_initializer(self.kernel_init)

        def stacked(key, shape, dtype):  # one draw per expert, so that fan-in is one expert's
            made = jax.vmap(lambda key: each(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
            names = {nn.PARTITION_NAME: self.kernel_axes_1[0] if self.kernel_axes_1 else None}
            return made.add_axis(0, names) if isinstance(made, nn.meta.AxisMetadata) else made

        norm = norm_parameters(self, width, self.ln_bias_init, self.ln_bias_axes) if self.enable_layernorm else None
        gate = parameter(self, "gate_kernel", each, self.gate_axes, (width, experts))
        width = self.latent_size or width
        wi = [parameter(self, f"wi_{i}", stacked, self.kernel_axes_1, (experts, width, hidden)) for i in slots]
        wo = parameter(self, "wo", stacked, self.kernel_axes_2, (experts, hidden, width))
        wi_bias = wo_bias = None
        if self.use_bias:
            of_wi = self.bias_init, self.bias_axes_1, (experts, hidden)
            wi_bias = [parameter(self, f"wi_{i}_bias", *of_wi) for i in slots]
            wo_bias = parameter(self, "wo_bias", self.bias_init, self.bias_axes_2, (experts, width))
        of_gate = self.bias_init, self.gate_axes[1:], (experts,)
        gate_bias = parameter(self, "gate_bias", *of_gate) if self.router_bias else None
        return norm, (gate, gate_bias), (wi, wi_bias), ([wo], wo_bias)
