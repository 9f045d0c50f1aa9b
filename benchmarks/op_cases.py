"""Calls of every op: the generated tests walk over them, and `python -m benchmarks ops` measures what is `large`.

Tests import the list from here, for benchmarks know nothing of the folders of tests.
"""

import jax.numpy as jnp

from te_jax.ops import attention, gemm, gemm_grouped, norm, quantize, rope  # noqa: F401  (declares the ops)
from te_jax.ops import scale_update as scaling
from te_jax.ops.experts import peers, permute, router, rows  # noqa: F401
from te_jax.ops.quantize import activation

from .mixer_cases import MIXERS
from .op_case import E4M3, E5M2, Case, Large, bf16, e8m0, f32, i32, u32

_IN_BLOCKS = "te_jax, 1x128"


def _groups(*names, first=8, second=8):
    return {f"{n}...{i}": (first, second)[i] for n in names for i in range(2)}


_norm_sizes = {"...0": 8, "...1": 8, "h": 24}
_gated_norm_sizes = {"...0": 8, "...1": 8, "g": 8, "c": 24}
_gate_first = dict(eps=1e-6, norm_before_gate=False, dtype=E4M3)
_norm_first = _gate_first | dict(norm_before_gate=True)
_permuted = {"m...0": 8, "h": 16, "k": 2, "r": 16, "f": 4}
_mlp_sizes = {"m...0": 8, "m...1": 8, "a": 2, "f": 24}
_relu = activation.attributes(("relu",))
_swiglu = activation.attributes(("silu", "linear"))
_attention_sizes = {"b...0": 8, "s": 8, "t": 8, "g": 8, "r": 2, "d": 16, "e": 8, "w": 4, "n": 1, "f": 4}
_kv_sizes = {**_attention_sizes, "c": 2, "e": 16}
_qkv_sizes = {**_kv_sizes, "c": 3, "r": 1}
_fp8_sizes = {"b...0": 4, "s": 4, "t": 4, "g": 4, "r": 2, "d": 128}
_attention_ranks = {"b...": 1}
_memory = dict(seq_major=False, interleaved=False)
_attention = dict(_memory, left=-1, right=0, bottom_right=False, scale=0.25, dropout_rate=0.0)
_attention_dropout = dict(_attention, dropout_rate=0.3)
_absent = (None,) * 4  # kv, qkv, bias, segments
_qkv = (*(None,) * 4, f32)
_law = dict(dtype=E4M3, power_2=False, epsilon=0.0)
_blocks = dict(_law, lead=1, square=False)
_rows = ("data", "data_t", "scale_inv", "scale_inv_t", "dbias")
_of_rows = {"m...": 1, "n...": 0}
_products = dict(out_dtype=jnp.dtype(f32), tune=False)
_groups_sizes = {"r": 384, "e": 2, "o": 3, "a": 2, "f": 8}
_pairs = {"r": 256, "e": 2, "o": 3, "a": 2, "p": 128}
_mx, _in_mx = dict(dtype=E4M3), {"m...0": 4, "m": 128}
_group_in_mx = {"r": 128, "e": 1, "o": 2, "a": 1, "f": 128}
_group_in_blocks = {"r": 128, "e": 1, "o": 2, "a": 1, "f": 512}
_grouped = dict(out_dtype=jnp.dtype(f32), fast_accum=False)

_both = ("data", "data_t", "amax")
_both_in_blocks = ("data", "data_t", "scale_inv", "scale_inv_t")
_matrix, _in_rows = {"m...": 1, "n...": 1}, {"m...": 0, "n...": 0}
_matrices = tuple({"m...0": 8192, "n...0": n} for n in (4096, 16384))
_blocked_matrices = tuple({"m": 8192, "n": n} for n in (4096, 16384))
_norm_shapes = ((8192, 4096), (32768, 8192))


def _quantize(row, dtype=E4M3, outputs=_both) -> Large:
    changes = dict(ranks=_matrix, attrs=dict(split=1, dtype=dtype), outputs=outputs)
    return Large(f"{row} {{m}}x{{n}}", _matrices, changes)


def _quantize_block(impl, kind) -> Large:
    attrs, outputs = dict(lead=0, power_2=True), ("data", "data_t", kind, f"{kind}_t")
    changes = dict(dtypes=(bf16,), ranks=_in_rows, attrs=attrs, outputs=outputs)
    return Large("quantize both layouts {m}x{n}", _blocked_matrices, changes, impl)


def _activation(kind, d="", amax=False, block=False) -> Large:
    """d: "d" of the gradient. amax: only this."""
    names = dict(gelu=("gelu",), swiglu=("silu", "linear"))[kind]
    attrs = activation.attributes(names) | (dict(power_2=True) if block else {})
    dtypes = (*((bf16,) if d else ()), bf16, *(() if block else (None if amax else f32,)))
    both = (*(_both_in_blocks if block else _both), *(("dbias",) if d else ()))
    changes = dict(sizes={"a": len(names)}, dtypes=dtypes, ranks={"m...": 0 if block else 1}, attrs=attrs)
    what = ", amax alone" if amax else f" to fp8, both layouts{', dbias' if d else ''}"
    sizes = ({"m" if block else "m...0": 8192, "f": 16384},)
    outputs = ("amax",) if amax else both
    return Large(
        f"{d}{kind}{what} {{m}}x{{f}}", sizes, changes | dict(outputs=outputs), _IN_BLOCKS if block else "te_jax"
    )


def _norm(kind, block=False) -> Large:
    """Of x and the weights, all in 16 bits."""
    rms = kind == "rmsnorm"
    weights, statistics = (bf16, None if rms else bf16), ("rstd",) if rms else ("mean", "rstd")
    dtypes = (bf16, *weights, *(() if block else (None, None, f32)))
    outputs = (*_both_in_blocks, *statistics) if block else ("data", "data_t", *statistics, "amax")
    attrs = dict(zero_centered=False) | (dict(power_2=True) if block else {})
    changes = dict(dtypes=dtypes, ranks={"m...": 0} if block else {"...": 1}, attrs=attrs, outputs=outputs)
    sizes = tuple({"m" if block else "...0": m, "h": h} for m, h in _norm_shapes)
    row = f"{kind} to fp8, both layouts {'{m}' if block else '{rows}'}x{{h}}"
    return Large(row, sizes, changes, _IN_BLOCKS if block else "te_jax")


def _gated_norm(row, dtypes, outputs, block=False) -> Large:
    changes = dict(dtypes=dtypes, ranks={"m...": 0} if block else {"...": 1}, outputs=outputs)
    changes |= dict(attrs=dict(power_2=True)) if block else {}
    sizes = tuple({"m" if block else "...0": 8192, "g": g, "c": 8192 // g} for g in (1, 8))
    row = f"gated norm {row} {'{m}' if block else '{rows}'}x{{g}}x{{c}}"
    return Large(row, sizes, changes, _IN_BLOCKS if block else "te_jax")


CASES = [
    Case(
        "rope", "te_rope", {"b...0": 8, "s": 8, "n": 8, "h": 8, "d": 16, "r": 4}, (f32, f32, f32),
        dict(turned=2, consecutive=True, inverse=False), None, {"b...": 1},
    ),
    Case(
        "router", "te_router_fwd", {"m...0": 8, "m...1": 8, "e": 16, "k": 4}, (f32, f32),
        vars(router.RouterOptions(4, "sigmoid", num_groups=4, group_topk=2)),
    ),
    Case(
        "router_bwd", "te_router_bwd", {"m...0": 8, "m...1": 8, "e": 16, "k": 4}, (f32, f32, i32),
        vars(router.RouterOptions(4)),
    ),
    Case("group", "te_group", {"m...0": 8, "k": 2}, (i32,), dict(num_experts=5, buffer=768), None, {"m...": 1}),
    Case(
        "permute_weights", "te_permute", _permuted, (f32, i32, i32, f32, None), dict(topk=2, dtype=E5M2),
        ("rows", "amax"), {"m...": 1},
    ),
    Case("permute", "te_permute", _permuted, (bf16, i32, i32, None, f32), dict(topk=2, dtype=E4M3), None, {"m...": 1}),
    Case(
        "permute_block", "te_permute_block", dict(_permuted, h=512, r=128), (bf16, i32, i32, f32), dict(_law, topk=2),
        None, {"m...": 1},
    ),
    Case(
        "permute_mx", "te_permute_mx", dict(_permuted, h=128, r=64), (bf16, i32, i32, f32), dict(_mx, topk=2),
        None, {"m...": 1},
    ),
    Case(
        "permute_fp8", "te_permute_fp8", dict(_permuted, h=256), (E4M3, f32, i32, i32, f32, None, f32),
        dict(topk=2, dtype=E4M3), None, {"m...": 1},
    ),
    Case(
        "permute_fp8_block", "te_permute_fp8_block", dict(_permuted, h=512, r=128),
        (E4M3, f32, i32, i32, f32, None), dict(_law, topk=2), None, {"m...": 1},
    ),
    Case(
        "permute_fp8_mx", "te_permute_fp8_mx", dict(_permuted, h=512, r=64), (E4M3, f32, i32, i32, f32, None),
        dict(_mx, topk=2), None, {"m...": 1},
    ),
    Case("combine", "te_combine", _permuted, (f32, i32, f32, None), {}, None, {"m...": 1}),
    Case("combine_plain", "te_combine", _permuted, (bf16, i32, None, None), {}, None, {"m...": 1}),
    Case("combine_bwd", "te_combine_bwd", _permuted, (f32, f32, i32, None), {}, None, {"m...": 1}),
    Case(
        "combine_bwd_fp8", "te_combine_bwd", dict(_permuted, h=256), (E4M3, bf16, i32, f32), {}, None, {"m...": 1},
    ),
    Case("transpose", "te_transpose", {"m...0": 8, "n...0": 8, "n...1": 16}, (E4M3,), dict(split=1), None, {"m...": 1}),
    Case("address", "te_address", {"m...0": 8}, (bf16,), {}, ("same",), {"m...": 1}),
    Case(
        "keep", "te_keep", {"m...0": 8, "n...0": 4, "d": 2, "c": 2}, (bf16, f32, u32), {}, None,
        {"m...": 1, "n...": 1},
    ),
    Case(
        "scale_update", "te_scale_update", {"n": 3, "b...0": 8, "l": 16}, (f32, f32, f32, f32),
        dict(interval=1, margin=1.0, newest=False), scaling.results_of(3), {"b...": 1},
    ),
    Case(
        "states_apart", "te_scale_update", {"n": 2, "b...0": 8, "l": 16}, (f32, f32, None, None),
        dict(interval=1, margin=0.0, newest=False), scaling.results_of(2), {"b...": 1},
    ),
    Case(
        "quantize", "te_quantize", _groups("m", "n"), (bf16, f32), dict(split=2, dtype=E4M3),
        large=(
            _quantize("quantize both layouts"),
            _quantize("quantize both layouts, dbias", E5M2, (*_both, "dbias")),
        ),
    ),
    Case(
        "quantize_row", "te_quantize", _groups("m", "n"), (f32, f32), dict(split=1, dtype=E5M2), ("data",),
        {"m...": 1, "n...": 2},
    ),
    Case(
        "quantize_inverse", "te_quantize", _groups("m", "n"), (f32, f32), dict(split=1, dtype=E4M3),
        ("data", "scale_inv"), {"m...": 1, "n...": 2},
    ),
    Case("quantize_amax", "te_quantize", _groups("m", "n"), (bf16, None), dict(split=2, dtype=E4M3), ("amax",),
         large=(_quantize("amax alone", outputs=("amax",)),)),
    Case(
        "quantize_block", "te_quantize_block", {"m...0": 4, "m": 512, "n": 512}, (bf16,), _blocks, _rows, _of_rows,
        large=(_quantize_block(_IN_BLOCKS, "scale_inv"),),
    ),
    Case(
        "quantize_block_square", "te_quantize_block", {"m": 512, "n...0": 4, "n": 512}, (f32,),
        dict(_blocks, lead=0, square=True, power_2=True), ("data", "data_t", "block_inv", "block_inv_t"),
        {"m...": 0, "n...": 1}, large=(_quantize_block("te_jax, 128x128", "block_inv"),),
    ),
    Case(
        "gemm_block", "te_gemm_block", {"m...0": 8, "k...0": 4, "k": 512, "n": 8},
        (E4M3, E4M3, f32, f32, None, None, None), dict(_products, outer=1), None, {**_of_rows, "k...": 1},
    ),
    Case(
        "gemm_block_square_bias_c", "te_gemm_block", {"m...0": 8, "k": 512, "n": 512},
        (E5M2, E4M3, f32, None, f32, f32, f32), dict(_products, outer=0), None, {**_of_rows, "k...": 0},
    ),
    Case(
        "quantize_mx", "te_quantize_mx", {"m...0": 4, "m": 128, "n": 128}, (bf16,), dict(lead=1, dtype=E4M3), None,
        _of_rows,
    ),
    Case(
        "gemm_mx", "te_gemm_mx", {"m...0": 8, "k...0": 4, "k": 128, "n...0": 8},
        (E4M3, E5M2, e8m0, e8m0, f32, f32), dict(outer=1, out_dtype=jnp.dtype(f32)), None,
        {"m...": 1, "n...": 1, "k...": 1},
    ),
    Case(
        "gemm_fp8", "te_gemm", _groups("m", "n", "k"), (E4M3, E5M2, f32, f32, None, None),
        dict(contract=2, out_dtype=jnp.dtype(f32), fast_accum=True, tune=False),
    ),
    Case(
        "gemm_bias_c", "te_gemm", _groups("m", "n", "k"), (f32, f32, None, None, f32, f32),
        dict(contract=1, out_dtype=jnp.dtype(f32), fast_accum=False, tune=False), None, {"n...": 1, "k...": 1},
    ),
    Case(
        "gemm_into", "te_gemm_into", {**_groups("m", "n", "k"), "p": 2}, (E4M3, E5M2, f32, f32, None, f32),
        dict(contract=2, out_dtype=jnp.dtype(f32), fast_accum=True, entry=1, entries=2),
    ),
    Case(
        "gemm_sum_fp8", "te_gemm_sum", _groups("m", "n", "k0", "k1", "k2"),
        (E5M2, E4M3, f32, f32, E5M2, E4M3, f32, f32, *(None,) * 5),
        dict(lead=1, out_dtype=jnp.dtype(f32), fast_accum=True, tune=False, precision=None), None,
        {"m...": 1, "n...": 1, "k0...": 1},
    ),
    Case(
        "gemm_sum_c", "te_gemm_sum", _groups("m", "n", "k0", "k1", "k2"), (*(f32, f32, None, None) * 3, f32),
        dict(lead=2, out_dtype=jnp.dtype(f32), fast_accum=False, tune=False, precision="highest"), None,
        {"n...": 1, "k0...": 1, "k2...": 1},
    ),
    Case(
        "gemm_grouped_bias", "te_gemm_grouped", {**_groups_sizes, "k": 16, "n...0": 8, "n": 8},
        (E4M3, E5M2, i32, i32, f32, f32, None, None, f32), dict(_grouped, outer=0), None, {"n...": 1, "k...": 0},
        {"lhs_scale_inv": ("e",)},
    ),
    Case(
        "gemm_grouped_block", "te_gemm_grouped", {**_group_in_blocks, "k": 512, "n": 512},
        (E4M3, E4M3, i32, i32, None, None, f32, f32, None), dict(_grouped, outer=0), None, {"n...": 0, "k...": 0},
    ),
    Case(
        "gemm_grouped_wgrad", "te_gemm_grouped_wgrad", {**_groups_sizes, "n...0": 4, "n...1": 4, "k...0": 8},
        (E4M3, E4M3, i32, i32, f32, f32, None, None, f32), dict(_grouped, slots=0, slot=0), None,
        {"a...": 0, "k...": 1},
    ),
    Case(
        "gemm_grouped_wgrad_block", "te_gemm_grouped_wgrad", {**_groups_sizes, "r": 512, "n...0": 8, "k...0": 8},
        (E4M3, E5M2, i32, i32, None, None, f32, f32, None), dict(_grouped, slots=0, slot=0), None,
        {"n...": 1, "a...": 0, "k...": 1},
    ),
    Case(
        "gemm_grouped_wgrad_slot", "te_gemm_grouped_wgrad", {**_groups_sizes, "n...0": 8, "a...0": 2, "k...0": 8},
        (E4M3, E5M2, i32, i32, f32, f32, None, None, None), dict(_grouped, slots=1, slot=1), None,
        {"n...": 1, "a...": 1, "k...": 1},
    ),
    Case(
        "gemm_grouped_paired", "te_gemm_grouped_paired", {**_pairs, "k": 512, "n": 8, "b": 1},
        (bf16, E4M3, i32, i32, f32, f32), dict(_grouped, dtype=E5M2, slot=1), None, {}, {"lhs_scale_inv": ("e",)},
    ),
    Case(
        "gemm_grouped_paired_wgrad", "te_gemm_grouped_paired_wgrad", {**_pairs, "s": 4, "n": 8},
        (E4M3, bf16, i32, i32, f32, f32, f32), dict(_grouped, dtype=E5M2, slot=1), None, {}, {"lhs_scale_inv": ("e",)},
    ),
    Case(
        "gemm_grouped_wide", "te_gemm_grouped_wide", {**_groups_sizes, "k...0": 8, "n...0": 8},
        (bf16, bf16, i32, i32, f32), dict(out_dtype=jnp.dtype(f32)), None, {"k...": 1, "n...": 1},
    ),
    Case(
        "gemm_grouped_wide_wgrad", "te_gemm_grouped_wide_wgrad",
        {**_groups_sizes, "k...0": 8, "n...0": 4, "n...1": 4}, (bf16, bf16, i32, i32, f32),
        dict(out_dtype=jnp.dtype(f32)), None, {"k...": 1},
    ),
    Case(
        "quantize_stacked", "te_quantize_stacked", {"e...0": 8, "m...0": 8, "n...0": 8}, (bf16, None, f32),
        dict(stack=1, slots=0, split=1, dtype=E4M3), None, {"e...": 1, "m...": 1, "n...": 1},
    ),
    Case(
        "quantize_stacked_pair", "te_quantize_stacked", {"e...0": 8, "m...0": 8, "n...0": 8}, (f32, f32, f32),
        dict(stack=1, slots=1, split=1, dtype=E5M2), None, {"e...": 1, "m...": 1, "n...": 1},
    ),
    Case(
        "quantize_stacked_block", "te_quantize_stacked_block", {"e...0": 4, "m": 512, "n": 512}, (bf16, None),
        dict(_law, stack=1, slots=0, lead=0), None, {"e...": 1, "m...": 0, "n...": 0},
    ),
    Case(
        "quantize_stacked_block_pair", "te_quantize_stacked_block", {"e...0": 4, "m": 512, "n": 512}, (bf16, bf16),
        dict(_law, stack=1, slots=1, lead=0), None, {"e...": 1, "m...": 0, "n...": 0},
    ),
    Case(
        "quantize_stacked_mx_pair", "te_quantize_stacked_mx", {"e...0": 4, "m": 128, "n": 128}, (bf16, bf16),
        dict(_mx, stack=1, slots=1, lead=0), None, {"e...": 1, "m...": 0, "n...": 0},
    ),
    Case(
        "swiglu_grouped", "te_activation_grouped_fwd", _groups_sizes, (f32, i32, i32, f32, f32),
        dict(_swiglu, dtype=E4M3),
    ),
    Case(
        "relu_grouped", "te_activation_grouped_fwd", {**_groups_sizes, "a": 1}, (bf16, i32, i32, None, f32),
        dict(_relu, dtype=E4M3),
    ),
    Case(
        "swiglu_grouped_bwd", "te_activation_grouped_bwd", _groups_sizes, (f32, f32, i32, i32, None, f32),
        dict(_swiglu, dtype=E5M2),
    ),
    Case(
        "swiglu_grouped_paired_bwd", "te_activation_grouped_paired_bwd", {**_pairs, "f": 512},
        (bf16, bf16, i32, i32, f32), dict(_swiglu, dtype=E5M2),
    ),
    Case(
        "relu_grouped_block", "te_activation_grouped_block_fwd", _group_in_blocks, (bf16, i32, i32, None),
        dict(_relu, **_law),
    ),
    Case(
        "relu_grouped_bwd_block", "te_activation_grouped_block_bwd", _group_in_blocks, (f32, f32, i32, i32, None),
        dict(_relu, **_law),
    ),
    Case("relu_grouped_mx", "te_activation_grouped_mx_fwd", _group_in_mx, (bf16, i32, i32, None), dict(_relu, **_mx)),
    Case(
        "relu_grouped_bwd_mx", "te_activation_grouped_mx_bwd", _group_in_mx, (f32, f32, i32, i32, None),
        dict(_relu, **_mx),
    ),
    Case(
        "layernorm_fp8", "te_norm_fwd", _norm_sizes, (f32, f32, f32, None, None, f32),
        dict(eps=1e-6, rms=False, zero_centered=True, dtype=E4M3), large=(_norm("layernorm"),),
    ),
    Case(
        "rmsnorm", "te_norm_fwd", _norm_sizes, (f32, f32, *(None,) * 4),
        dict(eps=1e-6, rms=True, zero_centered=False, dtype=E4M3), ("y", "rstd"), large=(_norm("rmsnorm"),),
    ),
    Case(
        "layernorm_known", "te_norm_fwd", _norm_sizes, (f32,) * 6,
        dict(eps=1e-6, rms=False, zero_centered=False, dtype=E4M3), ("data", "data_t", "amax"),
    ),
    Case(
        "layernorm_amax", "te_norm_fwd", _norm_sizes, (f32, f32, f32, None, None, None),
        dict(eps=1e-6, rms=False, zero_centered=False, dtype=E4M3), ("rstd", "amax"),
    ),
    Case("layernorm_bwd", "te_norm_bwd", _norm_sizes, (f32,) * 6, dict(rms=False, zero_centered=True)),
    Case(
        "rmsnorm_bwd", "te_norm_bwd", _norm_sizes, (f32, f32, None, f32, f32, None),
        dict(rms=True, zero_centered=False), ("dx", "dgamma"),
    ),
    Case(
        "layernorm_block", "te_norm_block_fwd", {"m...0": 4, "m": 512, "h": 132}, (f32, bf16, f32),
        dict(_law, eps=1e-6, rms=False, zero_centered=True), None, {"m...": 1}, large=(_norm("layernorm", block=True),),
    ),
    Case(
        "rmsnorm_block", "te_norm_block_fwd", {"m": 512, "h": 256}, (f32, bf16, None),
        dict(_law, eps=1e-6, rms=True, zero_centered=False), ("data", "scale_inv", "rstd"), {"m...": 0},
        large=(_norm("rmsnorm", block=True),),
    ),
    Case(
        "layernorm_mx", "te_norm_mx_fwd", {**_in_mx, "h": 36}, (f32, bf16, f32),
        dict(_mx, eps=1e-6, rms=False, zero_centered=True), None, {"m...": 1},
    ),
    Case(
        "gated_norm_fp8", "te_gated_norm_fwd", _gated_norm_sizes, (bf16, bf16, f32, None, f32), _gate_first,
        large=(_gated_norm("to fp8, both layouts", (bf16,) * 3 + (None, f32), ("data", "data_t", "rstd", "amax")),),
    ),
    Case(
        "gated_norm", "te_gated_norm_fwd", _gated_norm_sizes, (f32, f32, bf16, None, None), _norm_first,
        ("y", "rstd"),
    ),
    Case("gated_norm_known", "te_gated_norm_fwd", _gated_norm_sizes, (f32,) * 5, _gate_first, _both),
    Case(
        "gated_norm_amax", "te_gated_norm_fwd", _gated_norm_sizes, (f32, f32, f32, None, None), _norm_first,
        ("rstd", "amax"),
    ),
    Case(
        "gated_norm_bwd", "te_gated_norm_bwd", _gated_norm_sizes, (f32,) * 5, dict(norm_before_gate=False),
        large=(_gated_norm("backward", (bf16, bf16, bf16, f32, bf16), ("dx", "dz", "dgamma")),),
    ),
    Case(
        "gated_norm_block", "te_gated_norm_block_fwd", {"m...0": 4, "m": 512, "g": 8, "c": 132}, (bf16, bf16, f32),
        _law | _gate_first, None, {"m...": 1},
        large=(_gated_norm("to fp8, both layouts", (bf16,) * 3, (*_both_in_blocks, "rstd"), block=True),),
    ),
    Case(
        "gated_norm_mx", "te_gated_norm_mx_fwd", {**_in_mx, "g": 4, "c": 36}, (f32, f32, bf16), _norm_first, None,
        {"m...": 1},
    ),
    Case(
        "swiglu_fp8", "te_activation_fwd", _mlp_sizes, (f32, f32), dict(_swiglu, dtype=E4M3),
        large=(_activation("swiglu"),),
    ),
    Case(
        "gelu", "te_activation_fwd", {**_mlp_sizes, "a": 1}, (f32, None),
        dict(activation.attributes(("gelu",)), dtype=E4M3), ("y",),
        large=(_activation("gelu"), _activation("gelu", amax=True)),
    ),
    Case(
        "swiglu_amax", "te_activation_fwd", _mlp_sizes, (f32, None), dict(_swiglu, dtype=E4M3), ("amax",),
        large=(_activation("swiglu", amax=True),),
    ),
    Case(
        "swiglu_bwd_amax", "te_activation_bwd", _mlp_sizes, (f32, f32, None), dict(_swiglu, dtype=E5M2), ("amax",),
        large=(_activation("swiglu", "d", amax=True),),
    ),
    Case(
        "swiglu_bwd_fp8", "te_activation_bwd", _mlp_sizes, (f32, f32, f32), dict(_swiglu, dtype=E5M2),
        large=(_activation("swiglu", "d"),),
    ),
    Case(
        "relu_bwd", "te_activation_bwd", {**_mlp_sizes, "a": 1}, (f32, f32, None),
        dict(_relu, dtype=E5M2), ("dx", "dbias"), large=(_activation("gelu", "d"), _activation("gelu", "d", amax=True)),
    ),
    Case(
        "swiglu_block", "te_activation_block_fwd", {"m...0": 4, "m": 512, "a": 2, "f": 512}, (bf16,),
        dict(_swiglu, **_law), None, {"m...": 1},
        large=tuple(_activation(kind, block=True) for kind in ("swiglu", "gelu")),
    ),
    Case(
        "gelu_bwd_block", "te_activation_block_bwd", {"m": 512, "a": 1, "f": 512}, (f32, f32),
        dict(activation.attributes(("gelu",)), **_law), None, {"m...": 0},
        large=tuple(_activation(kind, "d", block=True) for kind in ("gelu", "swiglu")),
    ),
    Case(
        "swiglu_mx", "te_activation_mx_fwd", {**_in_mx, "a": 2, "f": 128}, (f32,), dict(_swiglu, **_mx),
        None, {"m...": 1},
    ),
    Case(
        "gelu_bwd_mx", "te_activation_mx_bwd", {"m": 128, "a": 1, "f": 128}, (f32, f32),
        dict(activation.attributes(("gelu",)), **_mx), None, {"m...": 0},
    ),
    Case(
        "attention_dropout_fwd", "te_attention_fwd", _attention_sizes, (*(f32,) * 3, *_absent, u32), _attention_dropout,
        None, _attention_ranks,
    ),
    Case(
        "attention_dropout_bwd", "te_attention_bwd", _attention_sizes, (*(f32,) * 4, *_absent, f32, f32, u32),
        dict(_attention_dropout, deterministic=False), ("dq", "dk", "dv"), _attention_ranks,
    ),
    Case(
        "attention_segments_bias_b_fwd", "te_attention_fwd", _attention_sizes,
        (*(f32,) * 3, None, None, f32, i32, None), dict(_attention, left=2), ("out", "lse"), _attention_ranks,
        {"bias": ("g",)},
    ),
    Case(
        "attention_bias_h_bwd", "te_attention_bwd", _attention_sizes,
        (*(f32,) * 4, None, None, f32, None, f32, f32, None), dict(_attention, deterministic=True, right=-1),
        ("dq", "dk", "dv", "dbias"), _attention_ranks, {"bias": ("b...0",)},
    ),
    Case(
        "attention_bias_part_of_b_bwd", "te_attention_bwd", {**_attention_sizes, "b...1": 4, "g": 4},
        (*(f32,) * 4, None, None, f32, None, f32, f32, None), dict(_attention, deterministic=True),
        ("dq", "dk", "dv", "dbias"), {}, {"bias": ("b...0",)},
    ),
    Case(
        "attention_segments_bwd", "te_attention_bwd", _attention_sizes,
        (*(f32,) * 4, *(None,) * 3, i32, f32, f32, None),
        dict(_attention, deterministic=False, bottom_right=True), ("dq", "dk", "dv"), _attention_ranks,
    ),
    Case(
        "attention_qkv_fwd", "te_attention_fwd", _qkv_sizes, (*_qkv, *(None,) * 3), _attention,
        ("out", "lse"), _attention_ranks,
    ),
    Case(
        "attention_kv_segments_fwd", "te_attention_fwd", _kv_sizes,
        (f32, None, None, f32, None, None, i32, None), _attention, ("out", "lse"), _attention_ranks,
    ),
    Case(
        "attention_kv_bwd", "te_attention_bwd", _kv_sizes, (f32, f32, None, None, f32, *(None,) * 3, f32, f32, None),
        dict(_attention, deterministic=False), ("dq", "dkv"), _attention_ranks,
    ),
    Case(
        "attention_qkv_bias_bwd", "te_attention_bwd", _qkv_sizes,
        (f32, *_qkv, f32, None, f32, f32, None), dict(_attention, deterministic=False),
        ("dqkv", "dbias"), _attention_ranks, {"bias": ("b...0", "g")},
    ),
    *MIXERS,
    Case(
        "attention_fp8_fwd", "te_attention_fp8_fwd", {**_fp8_sizes, "n": 6}, (E4M3, E4M3, E4M3, f32),
        dict(causal=True, scale=0.25), None, _attention_ranks,
    ),
    Case(
        "attention_fp8_bwd", "te_attention_fp8_bwd", {**_fp8_sizes, "n": 12}, (E5M2, *(E4M3,) * 4, f32, f32),
        dict(causal=True, scale=0.25), None, _attention_ranks,
    ),
]  # fmt: skip
