"""Memory of inference: a stack of Llama layers with parameters in bf16, and in FP8 alone (te_jax.flax.fp8_params).

    python benchmarks/inference_memory.py --out memory.json

Each in a process of its own, whose allocator holds nothing else: the parameters after loading, as it counts them, and
the peak of a forward pass over one row of tokens, as XLA counts it for the compiled program.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from functools import partial

# Last, so that the source tree's te_jax, which has no CUDA extension, does not hide an installed one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import machine
from flax import linen as nn
from timing import normal

import te_jax as te
import te_jax.flax as te_flax

WAYS = ("bf16", "fp8")
RECIPE = te.recipe.Float8CurrentScaling()  # the same GEMMs; it has no state that the two would differ by


class _Layer(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        layer = te_flax.TransformerLayer(
            hidden_size=self.hidden,
            mlp_hidden_size=self.hidden * 7 // 2,
            num_attention_heads=self.hidden // 128,
            num_gqa_groups=max(1, self.hidden // 512),
            layernorm_type="rmsnorm",
            mlp_activations=("silu", "linear"),
            use_bias=False,
            self_attn_mask_type="causal",
            enable_rotary_pos_emb=True,
            dtype=jnp.bfloat16,
            params_dtype=jnp.bfloat16,
        )
        return layer(x, deterministic=True), None


def measured(way: str, layers: int, hidden: int, tokens: int) -> dict:
    """Bytes of the parameters, by their sizes and as the device's allocator counts them (None on a CPU), and the peak
    of a forward pass by XLA's analysis."""
    axes = dict.fromkeys(("params", "fp8_kernels"), 0)
    boxes = {nn.PARTITION_NAME: None}
    scanned = nn.scan(_Layer, variable_axes=axes, split_rngs={"params": True}, length=layers, metadata_params=boxes)
    model, x = scanned(hidden), normal(0, (1, tokens, hidden))
    with te.autocast(True, RECIPE):
        init = partial(te_flax.fp8_model_init, model) if way == "fp8" else model.init
        held = jax.block_until_ready(nn.meta.unbox(jax.jit(init)(jax.random.key(0), x)))
        in_use = _memory("bytes_in_use")
        apply = jax.jit(lambda variables, x: model.apply(variables, x)[0]).lower(held, x).compile()
    if not bool(jnp.isfinite(apply(held, x).astype(jnp.float32)).all()):
        raise FloatingPointError(f"{way}: the output of {layers} layers is not finite, so this is no pass of a model.")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    analysis = apply.memory_analysis()
    peak = None if analysis is None else analysis.peak_memory_in_bytes
    return dict(way=way, parameter_bytes=size, in_use_bytes=in_use, forward_peak_bytes=peak)


def _memory(name: str) -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get(name)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, metavar="FILE")
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--way", choices=WAYS, help="measure this one here, and print JSON")
    args = p.parse_args()
    if args.way:
        print(json.dumps(measured(args.way, args.layers, args.hidden, args.tokens)))
        return
    rows = []
    for way in WAYS:
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if args.out:
        sizes = dict(layers=args.layers, hidden=args.hidden, tokens=args.tokens)
        args.out.write_text(json.dumps({"machine": machine.describe(), **sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
