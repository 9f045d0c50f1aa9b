"""The table of ops in docs/ops.md from their declarations: `python tests/support/op_table.py` writes it."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import te_jax.layers  # noqa: E402, F401  (declares the ops)
from te_jax.core.op import Op, ops  # noqa: E402
from te_jax.ops import delta, rope, ssm  # noqa: E402, F401
from te_jax.ops.formats import FORMATS  # noqa: E402
from te_jax.ops.producers import PRODUCERS  # noqa: E402

PATH = ROOT / "docs" / "ops.md"
BEGIN = "<!-- written by tests/support/op_table.py -->\n"
END = "<!-- end of what is written -->\n"
KERNEL = "own kernel, sm_80 and up"
# What runs on CUDA, by names of ops; a composed op that is not here is plain JAX there, too.
ON_CUDA = {
    r"te_gemm": "cuBLASLt, or on sm_90 own kernel; FP8 from sm_89",
    r"te_gemm_block": "cuBLASLt or own kernel, sm_90 only",
    r"te_gemm_into": "`te_gemm`, which writes an entry of `into` in place",
    r"te_gemm_mx": "`jax.nn.scaled_matmul`, from sm_100 on, not tested",
    r"te_gemm_sum": "`te_gemm` for each FP8 term, else XLA's products",
    r"te_gemm_grouped.*": "own kernel, sm_90 only; elsewhere plain JAX",
    r"te_attention_(fwd|bwd)": "cuDNN 9.15.1 and up, sm_80 and up; what it does not take: plain JAX",
    r"te_attention_fp8_.*": "cuDNN, sm_90 and sm_100",
    r"te_.*_block(_.*)?": "own kernel, sm_90 only",
}


def on_cuda(op: Op) -> str:
    known = [text for pattern, text in ON_CUDA.items() if re.fullmatch(pattern, op.name)]
    return known[0] if known else "plain JAX" if op.composed else KERNEL


def row(op: Op) -> str:
    side = lambda operands: "<br>".join(f"`{'?' * o.optional}{o}`" for o in operands)
    results = side(op.rule.outputs[:12]) + (", .." if len(op.rule.outputs) > 12 else "")  # each of many tensors has two
    return f"| `{op.name}` | {side(op.rule.inputs)} | {results} | {on_cuda(op)} |"


def table() -> str:
    """All ops: first those that write FP8, by what they write, then the others."""
    written = [op.name for p in PRODUCERS.values() for form in FORMATS.values() if (op := p.op_of(form)) is not None]
    own = {name for name, op in ops.items() if op.reference.__module__.startswith("te_jax.")}
    names = [*dict.fromkeys(written), *sorted(own - set(written))]
    head = ["| op | operands | results | CUDA |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(ops[name]) for name in names), ""])


def text() -> str:
    """The page with the table as it is now."""
    before, rest = PATH.read_text().split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PATH.write_text(text())
