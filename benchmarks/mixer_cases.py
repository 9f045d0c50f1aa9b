"""Calls of the ops of mixers that are not attention, for `benchmarks.op_cases`."""

from te_jax.ops.delta import rule  # noqa: F401  (declares the ops)
from te_jax.ops.ssm import conv, scan  # noqa: F401

from .op_case import Case, f32, i32

_conv_sizes = {"b...0": 8, "s": 5, "c": 8, "w": 3, "v": 2}
_ssd_sizes = {"b...0": 8, "s": 5, "g": 8, "r": 2, "p": 4, "n": 2}
_ssd = dict(softplus=True, least=0.0, most=8.0, shared=2)
_delta_sizes = {"b...0": 8, "s": 3, "g": 8, "r": 2, "d": 4, "e": 2}
_delta = dict(scale=0.5, normalize=True, shared=2)
_one_gate = {"gate": ("d",)}
_one_key = {"q": ("g",), "k": ("g",)}

MIXERS = [
    Case(
        "causal_conv1d", "te_causal_conv1d_fwd", _conv_sizes, (f32, f32, f32, i32, f32), dict(silu=True, width=3), None,
        {"b...": 1},
    ),
    Case(
        "causal_conv1d_bwd", "te_causal_conv1d_bwd", _conv_sizes, (f32, f32, f32, f32, f32, i32, f32),
        dict(silu=True, width=3), None, {"b...": 1},
    ),
    Case(
        "ssd", "te_ssd_fwd", _ssd_sizes, (*(f32,) * 8, i32, f32), _ssd, None, {"b...": 1},
    ),
    Case(
        "ssd_shared", "te_ssd_fwd", {**_ssd_sizes, "r": 1}, (*(f32,) * 6, None, None, None, None),
        dict(_ssd, shared=1), ("y", "states"), {"b...": 1}, {"B": ("g",), "C": ("g",), "D": ("p",)},
    ),
    Case(
        "ssd_bwd", "te_ssd_bwd", _ssd_sizes, (*(f32,) * 9, i32, f32), _ssd, None, {"b...": 1},
    ),
    Case(
        "ssd_shared_bwd", "te_ssd_bwd", {**_ssd_sizes, "r": 1}, (f32, None, *(f32,) * 6, None, None, f32),
        dict(_ssd, shared=1), ("dx", "ddt", "dA", "dB", "dC", "dD"), {"b...": 1},
        {"B": ("g",), "C": ("g",), "D": ("p",)},
    ),
    Case(
        "gated_delta", "te_gated_delta_fwd", _delta_sizes, (*(f32,) * 5, i32, f32), _delta, None, {"b...": 1},
        _one_gate,
    ),
    Case(
        "gated_delta_shared", "te_gated_delta_fwd", {**_delta_sizes, "r": 1}, (*(f32,) * 5, None, None),
        dict(_delta, normalize=False, shared=1), ("y", "states"), {"b...": 1}, _one_key,
    ),
    Case(
        "gated_delta_bwd", "te_gated_delta_bwd", _delta_sizes, (*(f32,) * 7, i32, f32), _delta, None, {"b...": 1},
    ),
    Case(
        "gated_delta_shared_bwd", "te_gated_delta_bwd", {**_delta_sizes, "r": 1}, (f32, None, *(f32,) * 5, None, f32),
        dict(_delta, normalize=False, shared=1), ("dq", "dk", "dv", "dbeta", "dgate"), {"b...": 1},
        _one_gate | _one_key,
    ),
]  # fmt: skip
