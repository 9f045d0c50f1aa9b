"""Cases of small layers, where launches and the host count: a training step each, whose FP8 state is donated to the
next, as a training loop does it. `profile` of a row is a trace of some steps after the timing: kernels and launches.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax

from .cases import Case
from .layers import Layer, Model, Stack, Trainee, case
from .timing import Call, on_gpu

BF16 = "te_jax bf16"
IMPLS = (BF16, "te_jax fp8", "te_jax fp8 current", "te_jax fp8 block", "flax bf16", "flax fp8 direct")
_STATE = 1  # its place among the arguments of a step; among its results it is the third


def models(tiny: bool) -> list[Model]:
    if tiny:
        layer = Layer("gpt layer h64 b2 s16", 2, 16, 64, 128, 4, 4)
        return [layer, Stack("2 gpt layers h64 b2 s16", 2, replace(layer, name=""))]
    sizes = [(2, 512, 1024), (8, 512, 1024), (8, 512, 512), (1, 128, 4096)]  # batch, sequence, hidden size
    layers = [Layer(f"gpt layer h{h} b{b} s{s}", b, s, h, 4 * h, h // 64, h // 64) for b, s, h in sizes]
    return [*layers, *(Stack(f"8 {layer.name.replace('layer', 'layers')}", 8, layer) for layer in layers[:2])]


def build(model: Model, impl: str) -> Call:
    """Steps whose FP8 state is that which the one before them left."""
    trainee = Trainee(model, impl)
    options = {"xla_enable_command_buffers_during_profiling": True} if on_gpu() else {}
    call = trainee.compile(donate=(_STATE,), **options)
    params, state, *others = call.inputs[0]
    held = [jax.tree.map(lambda a: a.copy(), state)]

    def run():
        y, dparams, held[0], dx = call.run(params, held[0], *others)
        return y, dparams, held[0], dx

    return call._replace(run=run, inputs=[()])


def cases(tiny: bool) -> Iterator[Case]:
    for model in models(tiny):
        for impl in IMPLS:
            beside = (BF16,) if impl != BF16 else ()
            more = dict(build=partial(build, model, impl), suite="small", profiled=lambda profile: {"profile": profile})
            yield case(model, impl, backward=True, beside=beside, **more)
