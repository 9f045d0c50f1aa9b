"""MeshResource, the logical axis map and its rules."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

from te_jax import sharding
from te_jax.layers import layernorm
from te_jax.sharding import MeshResource, current_mesh_resource, extend_logical_axis_rules, global_shard_guard
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.constraints import check_spec, constrain_to_spec

FIELDS = "dp_resource tp_resource tpsp_resource fsdp_resource pp_resource cp_resource ep_resource".split()


def mesh(sizes=(4, 2), names=("data", "model"), kind=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def test_mesh_resource_is_a_frozen_value():
    others = ["gradient_dtype", "tpsp_pieces", "keep_gathered_weights"]
    assert [field.name for field in dataclasses.fields(MeshResource)] == FIELDS + others
    assert list(MeshResource().axes) == FIELDS
    assert MeshResource() == MeshResource(None, None) and hash(MeshResource("data")) == hash(MeshResource("data"))
    assert sharding.ShardingResource("data", "model") == MeshResource(dp_resource="data", tp_resource="model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshResource().dp_resource = "data"
    with pytest.raises(TypeError, match="dp_resource is 3"):
        MeshResource(3)


def test_one_role_for_an_axis():
    with pytest.raises(ValueError, match="dp_resource and fsdp_resource are both 'data'; give each an axis of its own"):
        MeshResource("data", "model", fsdp_resource="data")


def test_a_size_that_the_mesh_does_not_divide():
    """6 rows constrained to 4 devices: XLA pads them, and gathers them for an op."""
    x, gamma = jnp.arange(48.0).reshape(6, 8) ** 2, jnp.ones(8)
    with jax.set_mesh(mesh()), global_shard_guard(MeshResource("data", "model")):
        with nn.logical_axis_rules(extend_logical_axis_rules(())):
            got = jax.jit(lambda x: layernorm(constrain(x, ("nvte_batch", None)), gamma))(x)
    np.testing.assert_allclose(got, layernorm(x, gamma), rtol=1e-5)


def test_guard_nests_and_is_local_to_the_thread():
    assert current_mesh_resource() is None
    outer, inner = MeshResource("data"), MeshResource("data", "model")
    with global_shard_guard(outer):
        with global_shard_guard(inner):
            assert current_mesh_resource() == inner
        with global_shard_guard(None):
            assert current_mesh_resource() == outer
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_mesh_resource()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert current_mesh_resource() is None
    with pytest.raises(TypeError, match="pass a te_jax.MeshResource"), global_shard_guard(MeshResource):
        pass


def test_guard_is_part_of_the_jit_cache_key():
    @jax.jit
    def f(x):
        resource = current_mesh_resource()
        return x + (0 if resource is None else len(resource.dp_resource))

    assert f(1) == 1
    with global_shard_guard(MeshResource("data")):
        assert f(1) == 5
    with global_shard_guard(MeshResource("batch")):
        assert f(1) == 6
    assert f(1) == 1


def test_axes_must_be_in_the_mesh():
    with jax.set_mesh(mesh()):
        with pytest.raises(ValueError, match="tp_resource is 'tp', but the mesh in force has the axes"):
            with global_shard_guard(MeshResource("data", "tp")):
                pass
        with (
            pytest.raises(ValueError, match="only one of the two"),
            global_shard_guard(MeshResource(tp_resource="data", tpsp_resource="model")),
        ):
            pass
    with (
        global_shard_guard(MeshResource("batch")),
        jax.set_mesh(mesh()),
        pytest.raises(ValueError, match="'batch'"),
    ):
        extend_logical_axis_rules(())


NONE = ("nvte_seqlen", "nvte_hidden", "nvte_joined", "nvte_w_no_shard", "nvte_w_joined", "relpos_buckets")
TENSOR = ("nvte_head", "nvte_hidden_tp", "nvte_w_tp", "heads")


@pytest.mark.parametrize(
    ("resource", "batch", "tensor", "seqlen_tp", "w_fsdp"),
    [
        (MeshResource("data", "model"), "data", "model", None, None),
        (MeshResource("data", tpsp_resource="model"), "data", "model", "model", None),
        (MeshResource("data", "model", fsdp_resource="shard"), ("data", "shard"), "model", None, "shard"),
        (MeshResource("one", "model", fsdp_resource="shard"), "shard", "model", None, "shard"),
        (MeshResource("data", "model", fsdp_resource="one"), "data", "model", None, "one"),
        (MeshResource("data", "model", tpsp_resource="one"), "data", "model", "one", None),
        (MeshResource("data", tpsp_resource="model", cp_resource="shard"), "data", "model", ("shard", "model"), None),
        (MeshResource("data", tpsp_resource="model", cp_resource="one"), "data", "model", "model", None),
        (MeshResource("data", tpsp_resource="one", cp_resource="shard"), "data", None, "shard", None),
    ],
)
def test_the_map(resource, batch, tensor, seqlen_tp, w_fsdp):
    with jax.set_mesh(mesh((2, 2, 2, 1), ("data", "model", "shard", "one"))), global_shard_guard(resource):
        rules = dict(extend_logical_axis_rules((("embed", ("data", "model")),)))
    want = {
        "embed": ("data", "model"),
        "nvte_batch": batch,
        "nvte_seqlen_tp": seqlen_tp,
        "nvte_w_fsdp": w_fsdp,
    }
    want |= {"nvte_seqlen_cp": resource.cp_resource, **dict.fromkeys(NONE), **dict.fromkeys(TENSOR, tensor)}
    assert rules == want


def test_rules():
    rules = (("nvte_batch", "data"), ("mine", None))
    assert extend_logical_axis_rules(rules) is rules, "without a mesh rules come back as they are"
    with jax.set_mesh(mesh()):
        with pytest.raises(ValueError, match="no MeshResource"):
            extend_logical_axis_rules(rules)
        with global_shard_guard(MeshResource("data", "model")):
            extended = extend_logical_axis_rules(rules)
            assert extended[:2] == rules and [key for key, _ in extended].count("nvte_batch") == 1
            with pytest.raises(ValueError, match="'nvte_batch' is given as .*'model'.*'data'"):
                extend_logical_axis_rules((("nvte_batch", "model"),))
    for bad in (("a",), ("a", 3), (3, "data"), "ab"):
        with pytest.raises(ValueError, match="not a pair"):
            extend_logical_axis_rules((bad,))


def test_constraint_follows_the_rules():
    x = jnp.ones((8, 4, 6))
    axes = ("nvte_batch", None, "nvte_hidden_tp")
    assert constrain(x, axes) is x and constrain(x, None) is x
    with jax.set_mesh(mesh()), global_shard_guard(MeshResource("data", "model")):
        assert constrain(x, axes) is x, "no rules, no constraint"
        with nn.logical_axis_rules(extend_logical_axis_rules(())):
            got = jax.jit(lambda x: constrain(x, axes))(x)
            assert got.sharding.spec == PartitionSpec("data", None, "model")
            with pytest.raises(ValueError, match="2 logical axes"):
                constrain(x, axes[:2])
        with (
            nn.logical_axis_rules((("nvte_batch", "gone"),)),
            pytest.raises(ValueError, match="mesh axis 'gone'"),
        ):
            constrain(x, axes)
    with jax.set_mesh(mesh(kind=AxisType.Explicit)), nn.logical_axis_rules((("nvte_batch", "data"),)):
        assert constrain(x, axes) is x, "under Explicit axes the type says it"


def test_stage_axes():
    assert sharding.resource.stage_axes() == frozenset()
    with global_shard_guard(MeshResource(pp_resource="stage")):
        assert sharding.resource.stage_axes() == {"stage"}


def test_a_spec_may_leave_an_axis_to_the_partitioner():
    with jax.set_mesh(mesh()):
        check_spec("f", "spec", PartitionSpec("data", PartitionSpec.UNCONSTRAINED), 2)
        with pytest.raises(ValueError, match="f: spec names the mesh axis 'rows'"):
            check_spec("f", "spec", PartitionSpec("rows", PartitionSpec.UNCONSTRAINED), 2)
        with pytest.raises(ValueError, match="f: spec is .* leaves an axis open; name mesh axes, or None"):
            check_spec("f", "spec", PartitionSpec("data", PartitionSpec.UNCONSTRAINED), 2, free=False)
        left = lambda spec: jax.make_jaxpr(lambda x: constrain_to_spec(x, spec))(jnp.ones((8, 8))).eqns[0].params
        assert left(PartitionSpec("data", PartitionSpec.UNCONSTRAINED))["unconstrained_dims"] == {1}
        assert left(PartitionSpec("data"))["unconstrained_dims"] == set()
