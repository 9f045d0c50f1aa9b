"""Cases of a few layers on all GPUs: data, fully sharded, tensor + sequence and context parallel, and on one GPU."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
from te_jax.sharding import reorder_causal_load_balancing

from . import layers
from .cases import Case

IMPLS = ("te_jax bf16", "te_jax fp8", "te_jax fp8 fast", "flax bf16")
_AXIS = "gpus"  # the one axis of the mesh


@dataclass(frozen=True)
class Role:
    """What the mesh axis is for, and what it divides."""

    name: str
    x: P  # the layers' input [b, s, h]
    x_of_flax: P = P()  # whose attention, cuDNN's in jax.nn, does not take parts of the sequence
    column: P = P()  # plain Flax's kernels [depth, in, out], of the products that go in
    row: P = P()  # and of those that come out

    @property
    def resource(self) -> te.MeshResource:
        return te.MeshResource(**{"tpsp_resource" if self.name == "tp" else f"{self.name}_resource": _AXIS})


DP = Role("dp", P(_AXIS), P(_AXIS))
FSDP = Role("fsdp", P(_AXIS), P(_AXIS), P(None, _AXIS), P(None, _AXIS))
TP = Role("tp", P(None, _AXIS), P(), P(None, None, _AXIS), P(None, _AXIS))
CP = Role("cp", P(None, _AXIS))


@dataclass
class Trainee(layers.Trainee):
    """One model by one implementation on a mesh of `count` devices; all results keep the shardings of the arguments."""

    role: Role
    count: int

    def __post_init__(self):
        devices = np.asarray(jax.devices()[: self.count])
        self.mesh = Mesh(devices, (_AXIS,), axis_types=(AxisType.Auto,))
        super().__post_init__()

    @property
    def resource(self) -> te.MeshResource:
        return self.role.resource

    @contextmanager
    def scope(self):
        with ExitStack() as stack:
            stack.enter_context(jax.set_mesh(self.mesh))
            stack.enter_context(te.autocast(bool(self.recipe), self.recipe, self.resource))
            stack.enter_context(nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())))
            yield

    def _on_mesh(self, *spec):
        return NamedSharding(self.mesh, P(*spec))

    def _like_x(self):
        return self._on_mesh(*(self.role.x if self.is_te else self.role.x_of_flax))

    def _placed(self, x):
        x = reorder_causal_load_balancing(x, self.count) if self.role is CP else x
        return jax.device_put(x, self._like_x())

    def _kernel_of_flax(self, path, given):
        """`given`, but for kernels of plain Flax: .../Dense_0/kernel goes in, .../Dense_1/kernel comes out."""
        if path[-1].key != "kernel":
            return given
        return self._on_mesh(*(self.role.column if path[-2].key == "Dense_0" else self.role.row))

    def _init(self):
        self.x, self.dy = map(self._placed, (self.x, self.dy))
        key = jax.random.key(0)
        with self.scope():
            boxed = jax.eval_shape(self.boxed_init, key, self.x)
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed["params"]), self.mesh)
            if not self.is_te:
                specs = jax.tree_util.tree_map_with_path(self._kernel_of_flax, specs)
            state = {name: nn.unbox(each) for name, each in boxed.items() if name != "params"}
            self.shardings = specs, jax.tree.map(lambda _: self._on_mesh(), state)
            return jax.jit(self.init, out_shardings=self.shardings)(key, self.x)

    def step(self, params, state, x, dy, key):
        x_like, (params_like, state_like) = self._like_x(), self.shardings
        out = super().step(params, state, x, dy, key)
        return jax.lax.with_sharding_constraint(out, (x_like, params_like, state_like, x_like))


def places(count: int) -> Iterator[tuple[Role, int, str]]:
    """(role, GPUs, the `cut` of a layer there)"""
    each = (FSDP, 1), (DP, count), (FSDP, count), (TP, count), (CP, 1), (CP, count)
    for role, gpus in dict.fromkeys(each):
        yield role, gpus, role.name if role in (TP, CP) else ""


def models(tiny: bool, count: int) -> Iterator[tuple[layers.Stack, Role, int]]:
    """(model, role, GPUs). As many tokens per GPU in each, but for context parallelism: its long row is one."""
    sizes = (256, 512, 8, 8) if tiny else (4096, 14336, 32, 8)
    seq, long, depth = (64, 128, 2) if tiny else (8192, 32768, 4)
    for role, gpus, cut in places(count):
        batch, length = (1, long) if role is CP else (gpus, seq)
        layer = layers.Layer("", batch, length, *sizes, llama=True, cut=cut)
        name = f"{depth} llama layers h{sizes[0]} b{batch} s{length}, {role.name}={gpus}"
        yield layers.Stack(name, depth, layer), role, gpus


def trainees(models: Iterable[tuple]) -> Iterator[tuple]:
    """(model, role, GPUs, impl) for each (model, role, GPUs). Plain Flax has no attention over a cut sequence."""
    for model, role, gpus in models:
        for impl in IMPLS:
            if role is not CP or impl not in layers.FLAX_DOTS:
                yield model, role, gpus, impl


def cases(tiny: bool) -> Iterator[Case]:
    """Rates are those of one GPU."""
    for model, role, gpus, impl in trainees(models(tiny, jax.device_count())):
        make = partial(layers.trainee, model, impl, role, gpus, make=Trainee)
        case = layers.case(model, impl, backward=True, suite="meshes", calls=4 if role is CP else 10)
        work = dict(flops=case.flops / gpus, fp8_flops=case.fp8_flops / gpus)
        yield replace(case, build=lambda make=make: make().build(backward=True), **work)
