"""te_jax.compat as a package in TransformerEngine's place: a name is there or says why not, programs run unedited."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import te_jax.compat
from te_jax.compat import _install, install
from te_jax.compat.__main__ import command
from te_jax.compat._absent import ABSENT
from te_jax.compat._program import find_served, findings

ROOT = Path(__file__).resolve().parents[2]

# What the clients and the tests of TransformerEngine import, by module.
SERVED = {
    "transformer_engine.common.recipe": """Recipe Format DelayedScaling Float8CurrentScaling Float8BlockScaling
        MXFP8BlockScaling NVFP4BlockScaling CustomRecipe MMParams QParams""",
    "transformer_engine.jax": """autocast fp8_autocast update_collections update_fp8_metas MeshResource ShardingResource
        NVTE_FP8_COLLECTION_NAME flax quantize sharding attention checkpoint_policies dense layernorm layernorm_dense
        layernorm_mlp cpp_extensions softmax permutation router version_utils""",
    "transformer_engine.jax.flax": """DenseGeneral LayerNorm LayerNormDenseGeneral LayerNormMLP DotProductAttention
        MultiHeadAttention RelativePositionBiases TransformerLayer TransformerLayerType extend_logical_axis_rules
        wrap_function_in_te_state_module make_dot_general_cls make_grouped_dense_cls module transformer""",
    "transformer_engine.jax.attention": """AttnBiasType AttnMaskType AttnSoftmaxType QKVLayout QKVFormat CPStrategy
        ReorderStrategy SequenceDescriptor fused_attn is_fused_attn_kernel_available make_swa_mask run_length_fill
        canonicalize_attn_mask_type reorder_causal_load_balancing inverse_reorder_causal_load_balancing""",
    "transformer_engine.jax.cpp_extensions": """FusedAttnHelper CollectiveOp CollectiveOpSet noop_collective_op_set
        collective_gemm_bootstrap""",
    "transformer_engine.jax.quantize": """autocast fp8_autocast update_collections noop_quantizer_set QuantizerFactory
        QuantizerSet ScalingMode TensorSource QuantizeLayout AmaxComputeAlgo is_fp8_available is_scaling_mode_supported
        get_global_quantize_recipe get_quantize_config_with_recipe get_supported_quantization_recipes helper""",
    "transformer_engine.jax.sharding": """MeshResource global_shard_guard global_mesh_resource get_mesh_axis_size
        BATCH_AXES W_TP_AXES with_sharding_constraint_by_logical_axes""",
    "transformer_engine.jax.checkpoint_policies": """te_gemms_saveable dots_and_te_gemms_with_no_batch_dims
        checkpoint_dots_and_te_gemms""",
    "transformer_engine_jax": """DType NVTE_Fused_Attn_Backend get_cudnn_version get_device_compute_capability
        nvte_built_with_cublasmp""",
}


def test_names_are_served():
    for module, names in SERVED.items():
        for name in names.split():
            assert find_served(f"{module}.{name}") is not None


@pytest.mark.parametrize("module", ABSENT)
def test_absent_names_say_why(module):
    for name, reason in ABSENT[module].items():
        with pytest.raises((ImportError, AttributeError)) as said:
            find_served(f"{module}.{name}")
        assert f"{module}.{name}" in str(said.value) and reason in str(said.value)
        with pytest.raises(ImportError) as said:
            exec(f"from te_jax.compat.{module} import {name}")
        assert reason in str(said.value)
    module = importlib.import_module(f"te_jax.compat.{module}")
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        module.nothing_of_that_name  # noqa: B018
    assert all(getattr(module, name, None) is None for name in ABSENT[module.__name__.removeprefix("te_jax.compat.")])


# -- install, run, check -----------------------------------------------------------------------------------------

PROGRAM = """
import importlib.util
import sys
import transformer_engine
import transformer_engine.jax.flax as flax
from transformer_engine.jax import attention
import te_jax.compat.transformer_engine.jax.attention as same
import te_jax.compat
te_jax.compat.install()
assert attention is same and flax.TransformerLayer.__module__.startswith("te_jax.compat")
assert attention.__spec__.name == same.__name__
try:
    import transformer_engine.pytorch
except ImportError as error:
    assert "only JAX" in str(error)
assert importlib.util.find_spec("transformer_engine.pytorch") is None
assert importlib.util.find_spec("transformer_engine.jax") and not hasattr(transformer_engine.jax, "moe")
print(__name__, sys.argv[1:], transformer_engine.__version__)
"""


def test_a_program_runs_unedited(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    words = [sys.executable, "-m", "te_jax.compat", "run", str(path), "-x", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == f"__main__ ['-x', '--help'] {te_jax.compat.INTERFACE}+te_jax", done.stderr


@pytest.fixture
def without_the_alias(monkeypatch):
    kept = [finder for finder in sys.meta_path if not isinstance(finder, _install._Finder)]
    monkeypatch.setattr(sys, "meta_path", kept)
    for name in [name for name in sys.modules if name.partition(".")[0] in _install.NAMES]:
        monkeypatch.delitem(sys.modules, name)
    yield
    sys.modules.pop("transformer_engine", None)


def test_no_other_package_is_replaced(without_the_alias, monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    install()  # A folder without a package in it is none.
    sys.meta_path.pop(0)
    (package / "__init__.py").write_text("")
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="transformer_engine is here, at .*uninstall it"):
        install()
    importlib.import_module("transformer_engine")
    with pytest.raises(ImportError, match="imported already"):
        install()


CHECKED = """
import transformer_engine.jax as te
import transformer_engine.jax.flax.module as module
from transformer_engine.common.recipe import DelayedScaling, Format, NVFP4BlockScaling
from transformer_engine.jax.attention import fused_attn_thd
from transformer_engine.jax import moe
from functools import partial
te.flax.MultiHeadAttention(8, 2, num_heads=2, dropout_rate=None)
te.nothing_here
module.Softmax()
layer = partial(te.flax.TransformerLayer, hidden_sise=8)
recipe = DelayedScaling(margin=3, fp8_format=Format.E5M2)
NVFP4BlockScaling()
te.attention.fused_attn(q, None, None, None, score_mod=f)
te.dense.dense(x, kernel, precision=None)
te.cpp_extensions.gemm(x, kernel)
try:
    from transformer_engine.jax import ep
except ImportError:
    ep = None
te.attention.AttnMaskType.CAUSAL_MASK.is_causal()
"""


def test_what_needs_an_edit_is_listed():
    found = findings(CHECKED)
    words = {
        5: "fused_attn with a SequenceDescriptor", 6: "its own layer of experts", 8: "use num_attention_heads",
        9: "nothing of that name", 10: "use DotProductAttention", 11: "did you mean 'hidden_size'?",
        12: "fp8_format is", 13: "out of te_jax's scope", 14: "te_jax has no score_mod", 15: "no argument 'precision'",
        16: "no function in te_jax.compat",
    }  # fmt: skip
    assert [line for line, _ in found] == list(words)
    for (_, text), (_, expected) in zip(found, words.items()):
        assert expected in text


def test_check_is_a_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "program.py"
    path.write_text(CHECKED)
    monkeypatch.setattr(sys, "argv", ["compat", "check", str(path)])
    with pytest.raises(SystemExit) as status:
        command()
    assert status.value.code == 1 and f"{path}:5: " in capsys.readouterr().out
    path.write_text("import transformer_engine.jax as te\nte.flax.TransformerLayer(hidden_size=8)\n")
    command()
    assert capsys.readouterr().out == f"{path}: nothing needs an edit\n"


def test_check_takes_folders(tmp_path, monkeypatch, capsys):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "program.py").write_text("import transformer_engine.jax as te\n")
    monkeypatch.setattr(sys, "argv", ["compat", "check", str(tmp_path)])
    command()
    assert capsys.readouterr().out == f"{tmp_path}/inside/program.py: nothing needs an edit\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nosuch.py"], "No such file or directory: 'nosuch.py'"),
        (["check", "README.md"], "README.md is no Python program: "),
        (["check", "empty"], "the folder empty has no file *.py"),
        (["run", "nosuch.py"], "there is no file nosuch.py; -m runs a module"),
    ],
)
def test_what_the_command_cannot_read(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("It's no program.")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["compat", *arguments])
    with pytest.raises(SystemExit) as status:
        command()
    assert status.value.code == 2 and words in capsys.readouterr().err
