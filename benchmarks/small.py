"""Cases of small layers, where launches and the host count: steps of SGD by `jax.jit` that get the parameters and the
FP8 state which the step before left, donated, as a training loop does it. `profile` of a row is a trace of some steps
after the timing: kernels and launches.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from .cases import Case
from .layers import Layer, Model, Stack, Trainee, case
from .timing import Call, on_gpu

BF16 = "te_jax bf16"
IMPLS = (
    BF16,
    "te_jax fp8",
    "te_jax fp8 fast",
    "te_jax fp8 current",
    "te_jax fp8 block",
    "flax bf16",
    "flax fp8 direct",
)
_RATE = 1e-6  # of learning: small, so that the data stays what it was


def models(tiny: bool) -> list[Model]:
    if tiny:
        layer = Layer("gpt layer h64 b2 s16", 2, 16, 64, 128, 4, 4)
        return [layer, Stack("2 gpt layers h64 b2 s16", 2, replace(layer, name=""))]
    sizes = [(2, 512, 1024), (8, 512, 1024), (8, 512, 512), (1, 128, 4096)]  # batch, sequence, hidden size
    from_which_on = [(1, tokens, h) for h in (512, 1024, 2048, 4096) for tokens in (256, 512, 1024, 2048)]
    named = lambda b, s, h: Layer(f"gpt layer h{h} b{b} s{s}", b, s, h, 4 * h, h // 64, h // 64)
    layers = [named(*size) for size in (*sizes, *from_which_on)]
    stacks = [Stack(f"8 {layer.name.replace('layer', 'layers')}", 8, layer) for layer in layers[:2]]
    forms = {"unrolled": dict(unroll=8), "apart": dict(scan=False)}
    more = (replace(s, name=f"{s.name}, {form}", **fields) for form, fields in forms.items() for s in stacks)
    return [*layers, *stacks, *more]


def build(model: Model, impl: str) -> Call:
    """Steps, each with what the one before it left."""
    trainee = Trainee(model, impl)
    params, state, *others = trainee.train_inputs(trainee.fresh)

    def train(params, state, total, *others):
        with trainee.scope():
            y, dparams, state, _ = trainee.step(params, state, *others)
        params = jax.tree.map(lambda p, dp: p - (_RATE * dp).astype(p.dtype), params, dparams)
        return params, state, total + jnp.mean(y, dtype=jnp.float32)

    options = {"xla_enable_command_buffers_during_profiling": True} if on_gpu() else None
    # Its calls cost less than a compiled function's. The mean is donated too: a new array in each step moves what is
    # allocated next to it, and XLA then records its CUDA graph anew.
    step = jax.jit(train, donate_argnums=(0, 1, 2), compiler_options=options)
    held = list(jax.tree.map(jnp.copy, (params, state))) + [jnp.zeros(())]

    def run():
        held[:] = step(*held, *others)
        return held[2]

    return Call(run, [()])


def cases(tiny: bool) -> Iterator[Case]:
    for model in models(tiny):
        for impl in IMPLS:
            beside = (BF16,) if impl != BF16 else ()
            more = dict(build=partial(build, model, impl), suite="small", profiled=lambda profile: {"profile": profile})
            yield case(model, impl, backward=True, beside=beside, **more)
