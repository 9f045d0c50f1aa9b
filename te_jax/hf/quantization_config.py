"""`quantization_config` of a config.json, read and written: what it says of weights in FP8."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from te_jax.core.check import show
from te_jax.hf.mxfp4 import is_mxfp4
from te_jax.hf.scales import Scheme
from te_jax.ops.formats import SQUARES_128, TENSOR

_SQUARE = [SQUARES_128.block] * 2
_COMPRESSED = "compressed-tensors"
_METHODS = ("fp8", "mxfp4", _COMPRESSED)
# The values that te_jax reads, by key; None: any, since nothing of the weights depends on it. An absent key is the
# first of them.
_Keys = Mapping[str, tuple[Any, ...] | None]
_OF_FP8: _Keys = dict(
    quant_method=_METHODS,
    fmt=("e4m3",),
    weight_block_size=(None, _SQUARE),
    activation_scheme=("dynamic", "static"),
    scale_fmt=(None, "float", "ue8m0"),  # ue8m0: scales are powers of 2, stored as floats
    expert_dtype=(None, "fp8"),
    modules_to_convert=(None,),
    modules_to_not_convert=None,
    ignored_layers=None,
    dequantize=None,
)
_OF_COMPRESSED: _Keys = dict(
    quant_method=_METHODS,
    format=(None, "float-quantized"),
    quantization_status=(None, "compressed"),
    kv_cache_scheme=(None,),
    moe_sparsity_config=(None, {}),
    sparsity_config=(None, {}),
    transform_config=(None, {}),
    config_groups=None,
    ignore=None,
    global_compression_ratio=None,
    version=None,
    run_compressed=None,
)
_OF_GROUPS: _Keys = dict(
    targets=(["Linear"],),
    output_activations=(None,),
    format=(None, "float-quantized"),
    weights=None,
    input_activations=None,
)
_OF_ARRAYS: _Keys = dict(
    num_bits=(8,),
    type=("int", "float"),  # "int" is refused below: it is what an absent one means
    symmetric=(True,),
    actorder=(None,),
    scale_dtype=(None,),
    zp_dtype=None,  # what is symmetric has no zero point
    observer=None,
    observer_kwargs=None,
)
_OF_WEIGHTS: _Keys = dict(
    strategy=("tensor", "channel", "block"), dynamic=(False,), block_structure=(None, _SQUARE), group_size=(None,)
)
_OF_INPUTS: _Keys = dict(
    strategy=("tensor", "token", "group"),
    dynamic=(False, True),
    block_structure=(None,),
    group_size=(None, SQUARES_128.block),
)


def read_scheme(found: Mapping[str, Any], folder: Path) -> Scheme | None:
    """The scheme of a config.json; None without weights in FP8. Raises ValueError, naming it, for what te_jax does not
    read."""
    said = found.get("quantization_config")
    if said is None:
        return None
    where = f"te_jax.hf: quantization_config of {folder / 'config.json'}"
    _check_is_object(where, said)
    if said.get("quant_method") not in _METHODS:
        _refuse_key(where, "quant_method", said.get("quant_method"), _METHODS)
    if is_mxfp4(found):  # which is dequantized as it is read
        return None
    if said["quant_method"] == _COMPRESSED:
        return _read_compressed(where, said)
    _check_keys(where, said, _OF_FP8)
    return Scheme(TENSOR if said.get("weight_block_size") is None else SQUARES_128)


def _read_compressed(where: str, said: Mapping[str, Any]) -> Scheme:
    _check_keys(where, said, _OF_COMPRESSED)
    groups = said.get("config_groups")
    _check_is_object(f"{where}: config_groups", groups)
    if len(groups) != 1:
        raise ValueError(f"{where} has config_groups={show(groups)}; te_jax reads one group.")
    ((name, group),) = groups.items()
    where = f"{where}: group {show(name)}"
    _check_is_object(where, group)
    _check_keys(where, group, _OF_GROUPS)
    weights = group.get("weights")
    _check_array(f"{where}: weights", weights, _OF_WEIGHTS)
    if group.get("input_activations") is not None:
        _check_array(f"{where}: input_activations", group["input_activations"], _OF_INPUTS)
    strategy = weights.get("strategy", "tensor")
    if (strategy == "block") != (weights.get("block_structure") is not None):
        _refuse_key(
            f"{where}: weights", "block_structure", weights.get("block_structure"), [_SQUARE], "of strategy 'block'"
        )
    return Scheme(SQUARES_128 if strategy == "block" else TENSOR, by_row=strategy == "channel", compressed=True)


def _check_array(where: str, said: Any, keys: _Keys):
    _check_is_object(where, said)
    _check_keys(where, said, {**_OF_ARRAYS, **keys})
    if said.get("type") != "float":
        _refuse_key(where, "type", said.get("type"), ["float"])


def _check_is_object(where: str, said: Any):
    if not isinstance(said, Mapping):
        raise ValueError(f"{where} is {show(said)}; an object in braces is due.")


def _check_keys(where: str, said: Mapping[str, Any], keys: _Keys):
    for key, value in said.items():
        if key not in keys:
            raise ValueError(f"{where} has {show(key)}={show(value)}, which te_jax does not know.")
        may = keys[key]
        # True is 1, but not where a size or a word is due.
        if may is not None and not any(type(value) is type(each) and value == each for each in may):
            _refuse_key(where, key, value, may)


def _refuse_key(where: str, key: str, value: Any, may: Iterable[Any], more: str = "") -> NoReturn:
    raise ValueError(
        f"{where} has {key}={show(value)}; te_jax reads {' or '.join(map(repr, may))}{more and f' {more}'}."
    )


def write_scheme(scheme: Scheme, static: bool, unquantized: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json. static: activations have scales too. unquantized: names of weights of
    linear layers that are not in FP8."""
    apart = ["lm_head", *sorted({name.removesuffix(".weight") for name in unquantized} - {"lm_head"})]
    if scheme.compressed:
        return _write_compressed(scheme, static, apart)
    said = dict(quant_method="fp8", fmt="e4m3", activation_scheme="static" if static else "dynamic")
    # The words of transformers and of vLLM for the same.
    said |= dict(modules_to_not_convert=apart, ignored_layers=apart)
    return said | (dict(weight_block_size=_SQUARE) if scheme.block else {})


def _write_compressed(scheme: Scheme, static: bool, apart: list[str]) -> dict[str, Any]:
    array: Callable[..., dict[str, Any]] = lambda **more: dict(num_bits=8, type="float", symmetric=True, **more)
    if scheme.block:
        weights = array(strategy="block", block_structure=_SQUARE, dynamic=False)
        inputs = array(strategy="group", group_size=scheme.block, dynamic=True)
    else:
        weights = array(strategy="channel" if scheme.by_row else "tensor", dynamic=False)
        inputs = array(strategy="token" if scheme.by_row else "tensor", dynamic=not static)
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs, output_activations=None)
    return dict(
        quant_method=_COMPRESSED,
        format="float-quantized",
        quantization_status="compressed",
        kv_cache_scheme=None,
        config_groups=dict(group_0=group),
        ignore=apart,
    )
