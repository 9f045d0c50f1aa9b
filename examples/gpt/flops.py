"""How much arithmetic a step holds, and how much the GPU could do."""

from .config import Model
from .model import VOCAB

# Dense peak in TFLOP/s, (FP8, bf16), from NVIDIA's data sheets (half of the figures "with sparsity").
# The first name found in the device's own is taken.
PEAKS = (
    ("H100 PCIe", 1513, 756),
    ("H200", 1979, 989),
    ("H100", 1979, 989),
    ("B200", 4500, 2250),
    ("L40S", 733, 362),
    ("A100", None, 312),
)


def per_token(c: Model, seq_len: int) -> float:
    """FLOPs of the model for one token, forward and backward (three times forward).

    Only matrix products, two per weight; causal attention is counted as the half that is not masked, other mixers
    as their recurrence.
    Recomputation (--remat) is not counted: this is what the model needs, not what the program does.
    """
    kv_width = c.hidden * (c.gqa_groups or c.heads) // c.heads
    attention = 2 * c.hidden * c.hidden + 2 * c.hidden * kv_width  # query, out; key, value
    attention += 2 * c.hidden * seq_len / 2  # scores and values
    mlp_weights = (len(c.activations) + 1) * c.hidden * c.ffn
    if c.experts:  # a token meets its own ones, and the router
        mlp_weights = c.experts.top_k * mlp_weights + c.hidden * c.experts.count
    mixers = c.layers_with_attention * attention
    if c.ssm:
        mixers += (c.layers - c.layers_with_attention) * _with_a_state(c)
    return 3 * 2 * (mixers + c.layers * mlp_weights + c.hidden * VOCAB)


def _with_a_state(c):
    """Products of a mixer with a state, for one token."""
    channels, state = c.ssm_heads * c.ssm.head_dim, c.ssm.state
    if c.ssm.kind == "mamba2":  # projections to x, z, B, C, steps, and back; the state's change, and what is read of it
        return c.hidden * (3 * channels + 2 * state + c.ssm_heads) + 2 * channels * state
    keys = c.ssm_heads // 2 * state  # to q, k, v, z, two numbers a head, and back; the state is read twice
    return c.hidden * (2 * keys + 3 * channels + 2 * c.ssm_heads) + 3 * channels * state


def peak(device_kind: str, precision: str) -> float | None:
    """FLOP/s of a device in "fp8" or "bf16"; None for a CPU and for a GPU that the table lacks."""
    for part, fp8, bf16 in PEAKS:
        if part in device_kind:
            tflops = fp8 if precision == "fp8" else bf16
            return tflops and tflops * 1e12
    return None
