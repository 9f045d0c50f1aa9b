"""Fields that have no effect with the others of their module, and the same fields where they have one."""

import warnings

import jax
from probes import Probe
from probes_modules import MHA, MLP, MOE, TRANSFORMER, field_probes, made

import te_jax

W = UserWarning

UNUSED = [
    (MLP, dict(low_rank_adaptation_dim=5), W, "dim is 5, but enable_low_rank_adaptation adapts nothing; set it, or"),
    (TRANSFORMER, dict(low_rank_adaptation_alpha=2.0), W, "alpha is 2.0, but low_rank_adaptation_scope adapts nothing"),
    (MHA, dict(low_rank_adaptation_scope="mlp"), W, "low_rank_adaptation_scope is 'mlp', but this module has no MLP"),
    (MOE, dict(layernorm_type="rmsnorm"), W, "layernorm_type is 'rmsnorm', but enable_layernorm is False; set it, or"),
]


def in_silence(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def handed_on():
    """The modules inside get fields of which only some are theirs."""
    return made(TRANSFORMER, dict(low_rank_adaptation_scope="mlp", low_rank_adaptation_dim=2))


def sequence_parallel(**resource):
    mesh = jax.make_mesh((2,), ("t",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), te_jax.autocast(False, mesh_resource=te_jax.MeshResource(**resource)):
        return made(TRANSFORMER, dict(enable_sequence_parallel=True))


PROBES = [
    *field_probes(UNUSED),
    Probe(
        "sequences that stay whole",
        lambda: sequence_parallel(tp_resource="t"),
        W,
        "^TransformerLayer: enable_sequence_parallel is True, but .*tp_resource='t'.*tpsp_resource instead",
    ),
    Probe("sequences in parts", lambda: in_silence(lambda: sequence_parallel(tpsp_resource="t"))),
    Probe(
        "a field of experts in a layer",
        lambda: made(TRANSFORMER, dict(moe=dict(layernorm_type="rmsnorm"), mlp_layernorm=False)),
        W,
        "^MoEBlock `moe`: layernorm_type is 'rmsnorm', but enable_layernorm is False",
    ),
    Probe("fields of modules inside", lambda: in_silence(handed_on)),
    Probe("another spelling", lambda: in_silence(lambda: made(MOE, dict(layernorm_type="LayerNorm")))),
]
