"""The steps of main.cc from PyTorch, by ctypes: RMSNorm to FP8, weights to FP8, their product, SwiGLU; a grouped
product; and the backward pass of the norm. Each step is compared with PyTorch in float64.

    python examples/c_api/with_torch.py
"""

import torch

import te_jax

EPS, SCALE_X, SCALE_W = 1e-6, 64.0, 128.0
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "E4M3", torch.int32: "I32"}
BF16 = 1.01 / 256  # a rounding to bf16 and the f32 math before it, relative

lib = te_jax.c_api.load_library()


def run(op: str, **args):
    """Calls an op on PyTorch's stream, on which memory that is freed after the call is free once it has run."""
    array = lambda a: lib.array(a.data_ptr(), TYPES[a.dtype], a.shape) if torch.is_tensor(a) else a
    fields = {name: array(a) for name, a in args.items()}
    space = empty(lib.workspace(op, **fields), dtype=torch.uint8)
    lib.call(op, torch.cuda.current_stream().cuda_stream, space.data_ptr(), space.numel(), **fields)


def empty(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def check(what: str, got: torch.Tensor, exact: torch.Tensor, bound):
    off = (got.double() - exact).abs()
    if not (off <= bound).all():
        raise SystemExit(f"{what}: off by {off.max().item():.3g}")
    print(f"{what}: agrees")


def of_groups(counts: torch.Tensor, width: int, hidden: int):
    """Rows of experts, counts[e] of each, times the weight of their expert; groups begin at multiples of 128."""
    starts = torch.nn.functional.pad(((counts + 127) // 128 * 128).cumsum(0), (1, 0)).int()
    lhs = torch.randn(int(starts[-1]), width, device="cuda").bfloat16()
    rhs = torch.randn(len(counts), hidden, width, device="cuda").bfloat16()
    out = empty(len(lhs), hidden, dtype=torch.bfloat16)
    run("gemm_grouped", lhs=lhs, rhs=rhs, offsets=starts, counts=counts, out=out)
    exact, size = torch.zeros_like(out, dtype=torch.float64), torch.zeros_like(out, dtype=torch.float64)
    for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        rows = slice(start, start + count)
        exact[rows] = lhs[rows].double() @ rhs[expert].double().T
        size[rows] = lhs[rows].double().abs() @ rhs[expert].double().abs().T
    # Products of bf16 are exact; each of `width` additions loses at most 2^-23 of what is summed, where f32 is cut off.
    check("gemm_grouped: out", out, exact, BF16 * exact.abs() + width * 2.0**-23 * size)


def main(rows: int = 300, width: int = 512, hidden: int = 256):
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    w = (0.05 * torch.randn(2 * hidden, width, device="cuda")).bfloat16()
    gamma = torch.rand(width, device="cuda") + 0.5
    scale_x, scale_w = (torch.tensor(scale, device="cuda") for scale in (SCALE_X, SCALE_W))

    y, x8 = empty(rows, width, dtype=torch.bfloat16), empty(rows, width, dtype=torch.float8_e4m3fn)
    rstd, amax = empty(rows), empty()
    run("norm_fwd", x=x, gamma=gamma, scale=scale_x, y=y, data=x8, rstd=rstd, amax=amax, eps=EPS, rms=1)
    exact_rstd = (x.double().square().mean(1) + EPS).rsqrt()
    exact = x.double() * exact_rstd[:, None] * gamma.double()
    check("norm: y", y, exact, BF16 * exact.abs())
    check("norm: amax", amax, exact.abs().max(), 1e-5 * exact.abs().max())

    w8 = empty(2 * hidden, width, dtype=torch.float8_e4m3fn)
    run("quantize", x=w, scale=scale_w, data=w8, split=1)
    check("quantize: data", w8, (w.float() * SCALE_W).to(torch.float8_e4m3fn).double(), 0)

    out = empty(rows, 2 * hidden, dtype=torch.bfloat16)
    run("gemm", lhs=x8, rhs=w8, lhs_scale_inv=1 / scale_x, rhs_scale_inv=1 / scale_w, out=out, contract=1)
    products = (x8.double() / SCALE_X)[:, None] * (w8.double() / SCALE_W)
    exact = products.sum(-1)
    # Tensor cores align the products of 32 numbers to the largest, and keep 13 bits behind it.
    largest = products.abs().unflatten(-1, (-1, 32)).amax(-1).sum(-1)
    check("gemm: out", out, exact, 32 * 2.0**-13 * largest + BF16 * exact.abs())

    z = empty(rows, hidden, dtype=torch.bfloat16)
    run("activation_fwd", x=out.unflatten(1, (2, hidden)), y=z, kind=1)  # TE_JAX_SILU
    gate, linear = out.double().unflatten(1, (2, hidden)).unbind(1)
    exact = torch.nn.functional.silu(gate) * linear
    check("activation: y", z, exact, BF16 * exact.abs() + 1e-30)

    of_groups(torch.tensor([100, 0, 128, 200], dtype=torch.int32, device="cuda"), width, hidden)

    dy, dx, dgamma = torch.randn_like(x), torch.empty_like(x), torch.empty_like(gamma)
    run("norm_bwd", dy=dy, x=x, rstd=rstd, gamma=gamma, dx=dx, dgamma=dgamma, rms=1)
    terms = dy.double() * x.double() * exact_rstd[:, None]
    check("norm: dgamma", dgamma, terms.sum(0), 2.0**-24 * rows * terms.abs().sum(0))  # as many additions at most

    try:
        run("quantize", x=w, data=w8, split=1)
    except ValueError as error:
        print(f"refused: {error}")
    else:
        raise SystemExit("FP8 without a scale was not refused")


if __name__ == "__main__":
    main()
