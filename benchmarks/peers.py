"""Figures of the peers, measured on one NVIDIA H200 (700 W; CUDA 13.0, cuBLASLt 13.1, cuDNN 9.19, jax 0.11.2,
torch 2.11): the same shapes, data and timing as here. TE is TransformerEngine 2.20.2 for JAX. XLA is plain
Flax with cuDNN attention; "direct" is its Fp8DirectDotGeneralOp. FP8 peers accumulate fast in all GEMMs.

(case name, impl) -> (figure, unit, whose).
"""

_T, _B = "TFLOP/s", "TB/s"
_FAST, _SPLIT = ("te_jax fp8 fast", "torch fp8 fast"), ("te_jax fp8 split", "torch fp8 split")


def _layers(name: str, **figures: float) -> dict:
    """ms by column of the peers' table."""
    delayed = ("te_jax fp8", "te_jax fp8 fast") if name.endswith("+bwd") else ("te_jax fp8",)
    columns = {
        "xla": (("flax bf16",), "XLA bf16"),
        "direct": (("flax fp8 direct",), "XLA FP8 direct"),
        "te": (("te_jax bf16",), "TE bf16"),
        "delayed": (delayed, "TE FP8 delayed"),
    }
    found = {}
    for column, ms in figures.items():
        impls, whose = columns[column]
        found |= {(name, impl): (ms, "ms", whose) for impl in impls}
    return found


def _gemm(shape: str, tflops: float, impls=_FAST, whose="cuBLASLt") -> dict:
    return {(f"gemm {shape}", impl): (tflops, _T, whose) for impl in impls}


def _attention(shape: str, forward: float, both: float, whose: str, impl: str, unit=_T) -> dict:
    name = f"attention {shape} causal"
    return {(f"{name} fwd", impl): (forward, unit, whose), (f"{name} fwd+bwd", impl): (both, unit, whose)}


def _norm(name: str, forward: float, both: float) -> dict:
    return {
        (f"{name} fwd", "te_jax"): (forward, "ms", "TE"),
        (f"{name} fwd+bwd", "te_jax"): (both, "ms", "TE"),
    }


PEERS: dict[tuple[str, str], tuple[float, str, str]] = {
    ("copy 32768x32768", "xla"): (4.24, _B, "device-to-device copy"),
    **_gemm("8192x8192x8192", 1371, whose="torch"),
    **_gemm("8192x4096x16384", 1404),
    **_gemm("8192x16384x4096", 1263),
    **_gemm("8192x12288x4096", 1330),
    **_gemm("8192x4096x4096", 1291),
    **_gemm("8192x4096x16384", 1244, _SPLIT),
    **_gemm("8192x16384x4096", 1185, _SPLIT),
    **_gemm("8192x12288x4096", 1271, _SPLIT),
    **_gemm("8192x4096x4096", 1257, _SPLIT),
    **_gemm("4096x4096x7168", 1398, whose="torch"),
    **_gemm("8192x8192x8192", 1097, ("te_jax fp8 block",)),
    **_gemm("8192x8192x8192", 905, ("te_jax fp8 block wgrad",)),
    **_gemm("4096x4096x7168", 1275, ("te_jax fp8 block",)),
    **_gemm("4096x4096x7168", 1013, ("te_jax fp8 block wgrad",)),
    **_gemm("4096x7168x16384", 1500, whose="DeepGEMM, H800"),
    **_gemm("2048x2048x2048", 568),
    **_gemm("1024x1024x1024", 73),
    ("gemm 4096x4096x4096", "te_jax fp8 fast tuned"): (0.0940, "ms", "cuBLASLt, best of 8"),
    ("gemm 4096x4096x4096", "te_jax fp8 fast"): (0.0990, "ms", "cuBLASLt, heuristic"),
    ("gemm 8192x8192x8192", "xla bf16"): (725, _T, "torch"),
    ("gemm 8192x4096x16384", "xla bf16"): (1.504, "ms", "TE bf16"),
    ("quantize both layouts 8192x4096", "te_jax"): (0.104, "ms", "TE"),
    **_norm("layernorm 8192x4096", 0.050, 0.121),
    **_norm("rmsnorm 8192x4096", 0.039, 0.097),
    **_norm("rmsnorm 32768x8192", 0.278, 0.840),
    **_norm("layernorm 32768x8192", 0.317, 1.121),
    **_attention("b4 s4096 h32/32 d128", 0.936, 4.02, "TE", "te_jax", "ms"),
    **_attention("b4 s4096 h32/32 d128", 0.92, 3.78, "cuDNN", "jax.nn cudnn", "ms"),
    **_attention("b4 s4096 h32/8 d128", 0.923, 4.06, "TE", "te_jax", "ms"),
    **_attention("b4 s2048 h32/32 d128", 0.263, 1.09, "cuDNN", "te_jax", "ms"),
    **_attention("b1 s8192 h32/8 d128", 0.903, 3.705, "cuDNN", "te_jax", "ms"),
    **_attention("b8 s4096 h32/32 d64", 443, 394, "cuDNN", "te_jax"),
    **_attention("b1 s8192 h64/8 d128", 644, 541, "cuDNN 9.19", "te_jax"),
    **_attention("b1 s16384 h32/8 d128", 568, 532, "cuDNN", "te_jax"),
    **_layers("gpt layer fwd", xla=5.5, direct=3.54),
    **_layers("gpt layer fwd+bwd", xla=16.8, direct=11.40, te=17.8, delayed=11.11),
    **_layers("gpt layer, dropout 0.1 fwd+bwd", te=18.3, delayed=11.95),
    **_layers("llama layer fwd", xla=6.7, direct=4.23),
    **_layers("llama layer fwd+bwd", xla=21.3, direct=14.71, te=21.4, delayed=14.58),
    **_layers("LayerNormMLP 8192 tokens 4096-16384-4096, biases fwd+bwd", te=10.44, delayed=6.74),
    **_layers("LayerNormMLP 8192 tokens 4096-16384-4096 fwd+bwd", te=10.16, delayed=6.04),
    **_layers("dense 8192x4096x16384 fwd", te=1.54, delayed=0.894),
    **_layers("dense 8192x4096x16384 fwd+bwd", te=4.83, delayed=2.80),
}  # fmt: skip
# Two GPUs of one host: bytes per GPU over time, as NCCL's tests count.
PEERS |= {
    ("psum 512 MB per GPU, 2 GPUs", "xla"): (1.99, "ms", "jax"),
    ("all_gather 512 MB per GPU, 2 GPUs", "xla"): (2.01, "ms", "jax"),
    ("psum 64 MB per GPU, 2 GPUs", "xla"): (0.195, _B, "jax"),
    ("all_gather 64 MB per GPU, 2 GPUs", "xla"): (0.183, _B, "jax"),
}
