"""Policies for `jax.checkpoint`, `nn.remat` and `nnx.remat` that know what te_jax computes.

    from te_jax.checkpoint_policies import ATTENTION, GEMM, save
    layer = nn.remat(Layer, policy=save(GEMM, ATTENTION))

A policy decides for each primitive whether its results are kept for the backward pass. FP8 GEMMs of te_jax are no
dots, so policies such as `jax.checkpoint_policies.dots_saveable` compute them again. Instead, results that are worth
keeping have names (`jax.ad_checkpoint.checkpoint_name`), under every recipe and without one, on every mesh, in addition
to the names that users give by fields of modules. The policies of this module save by these names:

GEMM:       The output of each GEMM of the forward pass, in FP8 or not.
ATTENTION:  The output of attention, and the other results of its forward kernel that the gradient needs.
SSM:        The output of a scan, of Mamba-2 or the gated delta rule, and the states that its gradient needs.
QUANTIZED:  Activations in FP8, in the layout that the gradient of a weight reads, and the operands of FP8 attention.
KERNEL:     Weights in FP8, in the layout that the gradient of the activations reads. Where FSDP divides
            them they are gathered with `MeshResource.keep_gathered_weights`, and weights of experts in any case.
STATISTICS: Scales and amaxes of whole tensors, the statistics of norms, at most 8 bytes for each row, and where routers
            send tokens, 16 bytes for each of their experts.

Use QUANTIZED and KERNEL together with GEMM: a GEMM that runs again reads other layouts, and quantizes again. With all
names the backward pass computes elementwise operations again, norms in front of routers, and without FP8 all norms and
activations.

`jax.checkpoint_policies.save_only_these_names` takes the names too. `jax.checkpoint_policies.save_any_names_but_these`
saves all of these names that it is not given.
"""

from te_jax.core.policies import ATTENTION as ATTENTION
from te_jax.core.policies import GEMM as GEMM
from te_jax.core.policies import KERNEL as KERNEL
from te_jax.core.policies import NAMES as NAMES
from te_jax.core.policies import QUANTIZED as QUANTIZED
from te_jax.core.policies import SSM as SSM
from te_jax.core.policies import STATISTICS as STATISTICS
from te_jax.core.policies import checkpoint_dots_and_te_gemms as checkpoint_dots_and_te_gemms
from te_jax.core.policies import dots_and_te_gemms_with_no_batch_dims as dots_and_te_gemms_with_no_batch_dims
from te_jax.core.policies import offload as offload
from te_jax.core.policies import save as save
from te_jax.core.policies import te_gemms_saveable as te_gemms_saveable
from te_jax.core.public import public_names as _public_names

__all__ = _public_names(globals())
