"""What fields may be: the docs' table, and what a list of probes (probes_modules.py) does not show."""

from typing import Any

import field_table
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field_meanings import MEANINGS
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.flax import _fields
from te_jax.flax._refused import Refused
from te_jax.flax.dot_general import QuantizingModule

KEY = jax.random.key(0)


def test_every_field_is_declared_and_in_the_docs():
    for cls in field_table.MODULES:
        undeclared = {f.name for f in field_table.fields_of(cls)} - {name for name, _ in _fields.kinds_of(cls)}
        assert not undeclared, f"{cls.__name__}: {undeclared}; declare them in te_jax/flax/_fields.py"
    assert field_table.PATH.read_text() == field_table.text(), "run `python tests/support/field_table.py`"


def test_every_field_has_a_sentence_and_every_sentence_a_field():
    """In tests/support/field_meanings.py. Only names that are there to be refused need none."""
    used = set()
    for cls in field_table.MODULES:
        for name, kind in _fields.kinds_of(cls):
            key = next((k for k in (f"{cls.__name__}.{name}", name) if k in MEANINGS), None)
            assert key, f"{cls.__name__}.{name} has no sentence in tests/support/field_meanings.py"
            assert bool(MEANINGS[key]) != isinstance(kind, Refused), key
            used.add(key)
    assert not MEANINGS.keys() - used, f"no module has {sorted(MEANINGS.keys() - used)}"


def test_defaults_are_of_their_kinds():
    needs = dict(features=8, head_dim=8, num_attention_heads=2, num_buckets=8, max_distance=20)
    needs |= dict(
        ssm_num_heads=2, linear_num_value_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    for cls in field_table.MODULES:
        names = [f.name for f in field_table.fields_of(cls)]
        _fields.check_fields(cls(**{name: value for name, value in needs.items() if name in names}, parent=None))


def test_subclasses_and_clones():
    class Mine(te_flax.DenseGeneral):
        extra: str = "anything"

    module = Mine(8, extra="mine")
    assert jax.eval_shape(module.clone(features=4).init, KEY, jnp.ones((2, 3)))["params"]["kernel"].value.shape == (
        3,
        4,
    )
    with pytest.raises(TypeError, match="Mine: got an unexpected keyword argument 'extras'; did you mean 'extra'"):
        Mine(8, extras=1)
    with pytest.raises(TypeError, match="Mine: use_bias is 'no'"):
        module.clone(use_bias="no").init(KEY, jnp.ones((2, 3)))


def test_a_scan_that_does_not_name_the_axis_of_layers():
    """Its name is None then. Parameters of layers that are named differently are refused in our words."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return te_flax.DenseGeneral(8, kernel_axes=("embed", "mlp"))(x), None

    def scan(**options):
        axes = {"params": 0, "fp8_metas": 0}
        return nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=2, **options)()

    key, x = jax.random.key(0), jnp.ones((4, 8))
    with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=4)):
        got, want = (
            jax.jit(scan(**options).init)(key, x, None)
            for options in ({}, {"metadata_params": {nn.PARTITION_NAME: None}})
        )
        out, _ = scan().apply(got, x, None)
    jax.tree.map(np.testing.assert_array_equal, got, want)  # Trees of the same structure, names included.
    kernel = got["params"]["DenseGeneral_0"]["kernel"]
    assert isinstance(kernel, nn.LogicallyPartitioned) and kernel.names == (None, "embed", "mlp")
    assert nn.get_partition_spec(got)["params"]["DenseGeneral_0"]["kernel"] == PartitionSpec(None, "embed", "mlp")
    assert kernel == nn.LogicallyPartitioned(kernel.value, kernel.names) and kernel != 1
    assert np.all(np.isfinite(out))
    named = jax.eval_shape(scan(metadata_params={nn.PARTITION_NAME: "layers"}).init, key, x, None)
    with pytest.raises(ValueError, match="axis of layers None.*'layers' there; pass metadata_params"):
        jax.eval_shape(scan().apply, named, x, None)


def test_a_layer_in_a_scan_says_its_path():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                te_flax.DenseGeneral,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
                in_axes=(),
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scan(8, dtype="bf16", name="layers")(x)

    with pytest.raises(TypeError, match="`layers`: dtype is 'bf16'"):
        Model().init(KEY, jnp.ones((2, 8)))


def test_false_is_no_relative_embedding():
    layer = te_flax.TransformerLayer(16, 8, 2, hidden_dropout=0.0, attention_dropout=0.0)
    x = jnp.ones((2, 4, 16))
    variables = jax.eval_shape(layer.init, KEY, x)
    off = layer.clone(relative_embedding=False)
    assert str(jax.make_jaxpr(off.apply)(variables, x)) == str(jax.make_jaxpr(layer.apply)(variables, x))


# -- boxes of initializers --------------------------------------------------------------------------------------

INIT = nn.initializers.normal()


def test_a_box_of_an_initializer_keeps_names_and_values():
    """A kernel_init of nn.with_partitioning draws what the bare one draws, and its names win."""
    x = jnp.ones((2, 4, 16))
    for cls, fields in (
        (te_flax.DenseGeneral, dict(features=8)),
        (te_flax.LayerNormMLP, dict(intermediate_dim=8, activations=("silu", "linear"))),
        (te_flax.MultiHeadAttention, dict(head_dim=8, num_attention_heads=2, scaled_query_init=True)),
    ):
        bare = cls(**fields, kernel_init=INIT).init(KEY, x)
        for wrap in (nn.with_partitioning, nn.with_logical_partitioning):
            boxed = cls(**fields, kernel_init=wrap(INIT, ("in", "out"))).init(KEY, x)
            jax.tree.map(np.testing.assert_array_equal, nn.unbox(boxed), nn.unbox(bare))
            specs = jax.tree.leaves(nn.get_partition_spec(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec))
            assert {spec[0] for spec in specs if len(spec) > 1} == {"in"}
            assert {spec[-1] for spec in specs if len(spec) > 1} == {"out"}


def test_mesh_axes_in_a_box_place_an_nnx_parameter():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        module = te_nnx.DenseGeneral(16, 8, kernel_init=nn.with_partitioning(INIT, (None, "model")), rngs=nnx.Rngs(0))
    assert module.kernel.get_metadata()["out_sharding"] == (None, "model")


# -- what is excluded -------------------------------------------------------------------------------------------


def test_excluded_patterns_are_told_once(recwarn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.DenseGeneral(16, name="lm_head")(te_flax.DenseGeneral(16, name="first")(x))

    def init(*patterns):
        recwarn.clear()
        with te.autocast(True, te.recipe.Float8CurrentScaling(exclude=patterns)):
            jax.eval_shape(Model().init, KEY, jnp.ones((2, 16)))
        return [str(w.message) for w in recwarn]

    assert init("lm_head", "f*") == []
    (text,) = init("first", "decoder/*")
    assert "exclude has 'decoder/*', which is the path of no module in FP8 so far; there are first, lm_head." in text
    assert init("first", "decoder/*") == [], "once"
    with te.autocast(True, te.recipe.Float8CurrentScaling(exclude=("nowhere",))):
        pass  # no module was there to be named
    assert not recwarn.list


def test_a_users_subclass_names_its_own_fields():
    """Names that te_jax's fields have too are its own; fields that it inherits, or gives another default, are not."""

    class Mine(QuantizingModule):
        features: str = "all"
        dtype: Any = None
        recipe: str = "delayed"

    class Wide(te_flax.DenseGeneral):
        features: Any = 8
        collection: int = 3

    assert Mine().dtype is None and Wide().collection == 3
    with pytest.raises(TypeError, match="features is '8'"):
        Wide("8").init(jax.random.key(0), jnp.ones((2, 4)))
