"""State-space models: the convolution and the scan of Mamba-2."""

from te_jax.ops.ssm.conv import causal_conv1d as causal_conv1d
from te_jax.ops.ssm.conv import conv_bwd as conv_bwd
from te_jax.ops.ssm.conv import conv_fwd as conv_fwd
from te_jax.ops.ssm.scan import ssd as ssd
from te_jax.ops.ssm.scan import ssd_bwd as ssd_bwd
from te_jax.ops.ssm.scan import ssd_fwd as ssd_fwd
