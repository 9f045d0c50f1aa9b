"""Probes of layers whose arguments say how arrays lie, of experts, and of the head's loss."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec
from probes import Probe
from probes_functions import CURRENT, O, T, V, mesh, probes, shaped, under

import te_jax as te
from te_jax.flax import LMHead
from te_jax.layers import (
    DeltaState,
    DeltaWeights,
    MambaState,
    MambaWeights,
    MoEOptions,
    dense,
    dot_general,
    gated_delta_net,
    gated_norm_dense,
    layernorm_dense,
    layernorm_mlp,
    linear_cross_entropy,
    mamba2,
    moe,
)
from te_jax.ops.router import RouterOptions, route


def named_partial(f, **kwargs):
    """`functools.partial`, of the function's name."""
    return functools.update_wrapper(functools.partial(f, **kwargs), f)


GATED = probes(
    gated_norm_dense, O((4, 2, 4)), O((4, 2, 4)), O(8), O((8, 3)),
    rows=[
        ("recipe 'fp8'", {"recipe": "fp8"}, T, "gated_norm_dense: recipe is 'fp8'"),
        ("grad_spec a name", {"grad_spec": "data", "recipe": CURRENT}, T, "grad_spec is 'data'"),
        ("out of another width", {"out": O((4, 8)), "recipe": CURRENT}, V, "out has the shape"),
    ],
)  # fmt: skip
PRODUCT = probes(
    dot_general, O((8, 8)), O((8, 8)), (((1,), (0,)), ((), ())),
    rows=[
        ("more axes of lhs", {2: (((1, 0), (0,)), ((), ())), "recipe": CURRENT}, T, "contracting dimensions"),
        ("an axis that lhs lacks", {2: (((5,), (0,)), ((), ())), "recipe": CURRENT}, T, "less than the number of axes"),
        ("lhs None", {0: None, "recipe": CURRENT}, T, "te_jax.layers.dot_general: lhs is None; pass an array"),
        ("a type 'bf16'", {"preferred_element_type": "bf16", "recipe": CURRENT}, T, "'bf16'.*did you mean 'bfloat16'"),
    ],
)  # fmt: skip
OPTIONS = MoEOptions(RouterOptions(1))
EXPERTS = O((4, 8)), O((8, 2)), (O((2, 8, 6)), O((2, 8, 6))), O((2, 6, 8))
MIXTURE = probes(
    named_partial(moe, options=OPTIONS), *EXPERTS,
    rows=[
        ("a norm that is not there", {"norm": "batchnorm"}, V, "norm is 'batchnorm'"),
        ("epsilon 0", {"epsilon": 0}, V, "epsilon is 0"),
        ("token_spec a name", {"token_spec": "data"}, T, "token_spec is 'data'; pass None or a PartitionSpec"),
        ("expert_bias a list", {"expert_bias": [0.0, 0.0]}, T, "te_jax.layers.moe: expert_bias is"),
    ],
)  # fmt: skip
EXPLAINED = probes(
    named_partial(te.explain_moe, options=OPTIONS), *EXPERTS,
    rows=[
        ("gate of other experts", {1: O((8, 3))}, V, r"explain_moe: gate_kernel has the shape \(8, 3\)"),
        ("one array of two", {2: O((2, 8, 6))}, V, "pass 2, one for each slot"),
        ("x None", {0: None}, T, "explain_moe: x is None"),
        ("token_spec of four axes", {"token_spec": PartitionSpec(*"abcd")}, V, "it is for 2 axes"),
    ],
)  # fmt: skip
EXPLAINED_LATENT = Probe(
    "explain_moe: another router input",
    lambda: te.explain_moe(EXPERTS[0], O((5, 2)), *EXPERTS[2:], options=OPTIONS, router_input=O((4, 5))),
)
LOSS = probes(
    linear_cross_entropy, O((4, 8)), O((8, 3)), O(4, int),
    rows=[
        ("token_spec of three axes", {"token_spec": PartitionSpec(*"abc")}, V, "it is for 1 axes"),
        ("ignore_index 2**40", {"ignore_index": 2**40}, V, "ignore_index is 1099511627776"),
        ("words_first of numpy", {"words_first": np.bool_(False)}, None, ""),
    ],
)  # fmt: skip
HEADS, CONVS = O((2, 5, 4, 3)), (O((4, 12)), O((4, 6)), O((4, 6)), None, None, None)
OF_MAMBA = MambaWeights(*CONVS, O(4), O(4), O(4), O(12))
OF_DELTA = DeltaWeights(*CONVS, O(4), O(4), O(3))
WEIGHTS = [
    ("weights a tuple", {6: tuple(OF_DELTA)}, T, "weights is .*; pass a te_jax.layers.DeltaWeights"),
    ("one decay for all heads", {6: OF_DELTA._replace(A_log=O(1))}, V, r"weights.A_log has shape \(1,\); pass \[4\]"),
    ("decays of ints", {6: OF_DELTA._replace(A_log=O(4, int))}, T, "weights.A_log is int32"),
    ("one step for all heads", {6: OF_DELTA._replace(dt_bias=O(()))}, V, "weights.dt_bias has shape"),
    ("q None", {0: None}, T, "te_jax.layers.gated_delta_net: q is None"),
    ("b of ints", {3: O((2, 5, 4), int)}, T, "b is int32"),
    ("state 0", {"state": 0}, T, "state is 0; pass None or a te_jax.layers.DeltaState"),
    ("no norm", {6: OF_DELTA._replace(norm=None)}, T, "te_jax.layers.gated_delta_net: weights.norm is None"),
    ("inputs lost", {"state": DeltaState(None, *[O(2)] * 3)}, T, "state.v is None; pass an array"),
    ("a Mamba's state", {"state": MambaState(*[O(2)] * 4)}, T, "pass None or a te_jax.layers.DeltaState"),
    ("axis a list", {"axis": ["cp"]}, T, "axis is .*pass None or a string"),
    ("as it is", {}, None, ""),
]
MIXERS = [
    *probes(gated_delta_net, *[O((2, 5, 2, 3))] * 2, HEADS, *[O((2, 5, 4))] * 2, HEADS, OF_DELTA, rows=WEIGHTS),
    *probes(mamba2, HEADS, *[O((2, 5, 2, 3))] * 2, O((2, 5, 4)), HEADS, OF_MAMBA, rows=[
        ("weights None", {5: None}, T, "weights is None; pass a te_jax.layers.MambaWeights"),
        ("decays of ints", {5: OF_MAMBA._replace(A_log=O(4, int))}, T, "weights.A_log is int32"),
        ("no taps", {5: OF_MAMBA._replace(x_kernel=None)}, T, "te_jax.layers.mamba2: weights.x_kernel is None"),
        ("x None", {0: None}, T, "te_jax.layers.mamba2: x is None"),
        ("state ''", {"state": ""}, T, "state is ''; pass None or a te_jax.layers.MambaState"),
        ("as it is", {}, None, ""),
    ]),
]  # fmt: skip
HEAD = Probe(
    "LMHead(kernel_init=None)",
    lambda: LMHead(8, kernel_init=None).init(jax.random.key(0), O((2, 4))),
    T,
    "LMHead: kernel_init is None; pass an initializer",
)
ROUTER = probes(route, O((4, 8)), RouterOptions(1), rows=[("options a number", {1: 2}, T, "options is 2; pass a Rou")])
ON_MESHES = [
    *(
        Probe(f"{f.__name__}: an axis that the mesh lacks", under(None, shaped(f, *args, **of_call), mesh), V,
              r"names the mesh axis 'batch', but the mesh in force has \('data', 'model'\)")
        for f, args, of_call in (
            (dense, (O((4, 8)), O((8, 3))), dict(tokens=PartitionSpec("batch"))),
            (layernorm_dense, (O((4, 8)), O((8, 3)), O(8)), dict(tokens=PartitionSpec("batch"))),
            (layernorm_mlp, (O((4, 8)), O(8), None, O((8, 1, 6)), O((6, 8))), dict(middle_spec=PartitionSpec("batch"))),
            (moe, EXPERTS, dict(options=OPTIONS, token_spec=PartitionSpec("batch"))),
        )
    ),
]  # fmt: skip

PROBES = [*GATED, *PRODUCT, *MIXTURE, *EXPLAINED, EXPLAINED_LATENT, *LOSS, *MIXERS, HEAD, *ROUTER, *ON_MESHES]
