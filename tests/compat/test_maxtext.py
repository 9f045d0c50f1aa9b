"""MaxText's own trainer on te_jax.compat, unmodified, where its package is found; test_clients.py has its calls anew.

PYTHONPATH=maxtext/src python -m pytest tests/compat/test_maxtext.py
"""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

_PACKAGE = importlib.util.find_spec("maxtext")
_CUT_SMALL = """
    hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic steps=4 learning_rate=1e-3 dtype=bfloat16
    max_target_length=32 per_device_batch_size=2 base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16
    base_mlp_dim=128 base_moe_mlp_dim=128 base_num_decoder_layers=2 vocab_size=128 override_model_config=true
    enable_checkpointing=false enable_tensorboard=false gcs_metrics=false save_config_to_gcs=false log_config=false
    enable_goodput_recording=false monitor_goodput=false attention=cudnn_flash_te
""".split()
PROGRAMS = {
    "llama": [],
    "llama in FP8, delayed": ["quantization=te_fp8_delayedscaling"],
    "llama in FP8, current": ["quantization=te_fp8_currentscaling"],
    "mixtral": "model_name=mixtral-8x7b num_experts=4 sparse_matmul=true megablox=false".split(),
}


@pytest.mark.skipif(_PACKAGE is None, reason="needs MaxText: its src folder in PYTHONPATH, and what it imports")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains(name, tmp_path, monkeypatch):
    """The loss of four steps falls."""
    root = pathlib.Path(_PACKAGE.submodule_search_locations[0])
    monkeypatch.setenv("DECOUPLE_GCLOUD", "TRUE")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device
    program = "-m te_jax.compat run -m maxtext.trainers.pre_train.train".split()
    options = [str(root / "configs/base.yml"), "run_name=test", f"base_output_directory={tmp_path}", *_CUT_SMALL]
    command = [sys.executable, *program, *options, *PROGRAMS[name]]
    done = subprocess.run(command, cwd=root.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"completed step.*?loss: ([\d.]+)", done.stdout + done.stderr)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1, losses
