"""Cases of a few Llama layers under tensor and sequence parallelism on all GPUs: all tokens at once, and in pieces that
travel while others are multiplied (`MeshResource.tpsp_pieces`). Each row says how long collectives take, and how long
nothing else runs meanwhile, by a trace of the first GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax

import te_jax as te

from . import layers, meshes
from .cases import Case

_IMPL = "te_jax fp8 fast"
_PIECES = (1, 2, 4)


@dataclass
class Trainee(meshes.Trainee):
    """`meshes.Trainee`, with tokens in `pieces`."""

    pieces: int

    @property
    def resource(self) -> te.MeshResource:
        return replace(self.role.resource, tpsp_pieces=self.pieces)


def cases(tiny: bool, pieces: str | None = None) -> Iterator[Case]:
    """Rates are those of one GPU. pieces: numbers, separated by commas, instead of 1, 2 and 4; 1 is measured in any
    case."""
    counts = dict.fromkeys([1, *map(int, pieces.split(","))]) if pieces else _PIECES
    gpus = jax.device_count()
    model = next(model for model, role, _ in meshes.models(tiny, gpus) if role is meshes.TP)
    for count in counts:
        make = partial(layers.trainee, model, _IMPL, meshes.TP, gpus, count, make=Trainee)
        case = layers.case(model, _IMPL, backward=True, suite="tp", beside=(_IMPL,) if count > 1 else ())
        work = dict(flops=case.flops / gpus, fp8_flops=case.fp8_flops / gpus)
        impl = _IMPL if count == 1 else f"{_IMPL}, {count} pieces"
        build = lambda make=make: make().build(backward=True)
        yield replace(case, impl=impl, build=build, profiled=_crossing, **work)


def _crossing(summary: dict) -> dict:
    return {name: summary[name] for name in ("collective_ms", "exposed_ms")}
