"""Cases of a layer of experts whose experts are divided among all GPUs: `moe` over an axis "ep", forward and backward,
in bf16 and FP8, by each way in which tokens reach their experts; and on one GPU, with as many rows and its part of the
experts, which is what the layer takes without other devices.

--strategies and --pieces choose other rows: each strategy in each number of pieces, in bf16 and by one recipe. `MB
received` is what a GPU gets from others in one call; of an exchange that sends exactly what is needed, for tokens that
choose experts at random.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.layers import ExpertExchange, MoEOptions
from te_jax.layers import moe as experts_layer
from te_jax.ops.experts.router import RouterOptions

from . import expert_strategies, experts, moe
from .cases import Case
from .layers import RECIPES
from .timing import Call, compiled, normal

_AXIS = "ep"
_TOKENS = 8192  # of a GPU
_EXCHANGES = {
    "": ExpertExchange(),
    ", all_to_all of 1.25 means": ExpertExchange("all_to_all", block_factor=1.25),
    ", rows for 1.25 means": ExpertExchange(rows_factor=1.25),
}
_FP8 = "te_jax fp8", "te_jax fp8 current", "te_jax fp8 block"
BF16 = "te_jax bf16"
ONE_GPU = ", one GPU's part"
_COMPARED = BF16, "te_jax fp8"  # where --strategies or --pieces asks for rows
_BLOCKS = dict(all_to_all=1.25)  # factors


@dataclass(frozen=True)
class Divided:
    """A layer on `devices` GPUs; model: what each GPU has."""

    model: experts.Experts
    impl: str
    exchange: str  # its name
    how: ExpertExchange
    devices: int

    @property
    def on_one(self) -> bool:
        return self.exchange == ONE_GPU


def cases(tiny: bool, strategies: str | None = None, pieces: str | None = None) -> Iterator[Case]:
    """strategies, pieces: of other rows, both separated by commas."""
    devices = jax.device_count()
    asked = _asked(strategies, pieces) if strategies or pieces else None
    for model in models(tiny, devices):
        if asked:
            rows = [Divided(model, impl, *way, devices) for impl in _COMPARED for way in asked.items()]
        else:
            rows = [Divided(model, impl, "", _EXCHANGES[""], devices) for impl in (BF16, *_FP8)]
            ways = [*_EXCHANGES.items(), (ONE_GPU, _EXCHANGES[""])]
            rows += [replace(row, exchange=name, how=how) for row in rows for name, how in ways if _takes(row, name)]
        for row in rows:
            flops = 6 * (3 * model.pairs * model.hidden * model.ffn + model.tokens * model.hidden * model.experts)
            others = dict.fromkeys((BF16, row.impl, row.impl + ONE_GPU))
            beside = tuple(other for other in others if other != row.impl + row.exchange)
            name = f"{model.name}, {model.tokens} tokens a GPU, {devices} GPUs: layer of experts fwd+bwd"
            more = dict(fp8_flops=flops if "fp8" in row.impl else 0, suite="ep", tokens=model.tokens, beside=beside)
            more |= dict(profiled=moe.routing, figures=partial(_figures, row))
            yield Case(name, row.impl + row.exchange, partial(build, row), flops, **more)


def _asked(strategies: str | None, pieces: str | None) -> dict[str, ExpertExchange]:
    """Name of a way -> the way; the first is te_jax's default."""
    expert_strategies.register()
    names, counts = (strategies or "all_gather").split(","), list(map(int, (pieces or "1").split(",")))
    ways = {
        f", {name}" + (f" in {count} pieces" if count > 1 else ""): ExpertExchange(name, _BLOCKS.get(name), None, count)
        for name in names
        for count in counts
    }
    ways = {name: how for name, how in ways.items() if name != ", all_gather"}
    return {"": ExpertExchange(), **ways, ONE_GPU: ExpertExchange()}


def _figures(row: Divided, ms: float) -> dict:
    return {"received_bytes": 0 if row.on_one else _received(row)}


def _received(row: Divided) -> int:
    """Bytes that a GPU gets from others in one call."""
    model, recipe = row.model, RECIPES[row.impl]
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    e, h, f = model.experts, model.hidden, model.ffn
    options = MoEOptions(RouterOptions(model.topk), exchange=row.how)
    operands = shape(row.devices * model.tokens, h), shape(h, e), (shape(e, h, f),) * 2, shape(e, f, h)
    mesh = Mesh(np.asarray(jax.devices()[: row.devices]), (_AXIS,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(ep_resource=_AXIS)):
        said = te.explain_moe(*operands, options=options, recipe=recipe)
    lacks = comb(e - e // row.devices, model.topk) / comb(e, model.topk)  # a token has no expert on a GPU
    share = 1 - lacks if row.how.strategy == "ragged" else 1
    crossing = [*said.forward.items(), *said.backward.items()]
    return round(sum(size * (1 if what == "choices" else share) for what, size in crossing))


def _takes(row: Divided, how: str) -> bool:
    """The ways are compared in bf16 and by one recipe."""
    if not how or how == ONE_GPU:
        return bool(how)
    return row.impl == "te_jax fp8 current" or (row.impl == BF16 and "rows" not in how)


def models(tiny: bool, devices: int) -> list[experts.Experts]:
    """Experts in all, and the tokens of one GPU."""
    if tiny:
        return [experts.Experts("tiny", 512, 64, 4 * devices, 2, 64)]
    mixtral, qwen = ("Mixtral 8x7B", 4096, 14336, 8, 2), ("Qwen3-30B-A3B", 2048, 768, 128, 8)
    return [experts.Experts(*sizes, _TOKENS) for sizes in (mixtral, qwen)]


def build(row: Divided) -> Call:
    model, recipe = row.model, RECIPES[row.impl]
    count = 1 if row.on_one else row.devices
    mine = replace(model, experts=model.experts // row.devices) if row.on_one else model
    mesh = Mesh(np.asarray(jax.devices()[:count]), (_AXIS,), axis_types=(AxisType.Auto,))
    options = MoEOptions(RouterOptions(model.topk), exchange=row.how)
    resource = te.MeshResource(ep_resource=_AXIS)

    def forward(params, metas, x):
        wi, wo = (params["wi_0"], params["wi_1"]), params["wo"]
        fields = dict(gamma=params["gamma"], norm="rmsnorm", residual=True, options=options, recipe=recipe)
        return experts_layer(x, params["gate"], wi, wo, metas=metas, **fields)[0]

    def step(params, metas, x, dy):
        y, vjp = jax.vjp(forward, params, metas, x)
        return y, vjp(dy)

    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        by_expert = lambda name: P(_AXIS) if name.startswith("w") else P()
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        params = {name: place(a, by_expert(name)) for name, a in moe.parameters(mine).items()}
        shape = count * model.tokens, model.hidden
        x, dy = (place(normal(seed, shape), P(_AXIS)) for seed in (6, 7))
        metas = None
        if recipe is not None and recipe.has_state:
            metas = jax.tree.map(lambda a: place(a, P(_AXIS) if a.ndim else P()), moe.fresh_metas(mine))
            seen = jax.jit(lambda *a: step(*a)[1][1])
            for _ in range(2):
                metas = moe.settled(metas, seen(params, metas, x, dy), recipe)
                metas = jax.tree.map(lambda a: place(a, P(_AXIS) if a.ndim else P()), metas)
        return compiled(step, [(params, metas, x, dy)])
