"""What the API reference has: pages, the modules on each, and their public names.

A page is a table of names with a line for each, examples, and what autodoc makes of the docstrings. Its title, its
introduction and its examples stand in `api/*.md`.
"""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

from jax.typing import ArrayLike

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the reference, `api/{file}.md`: names of `module` in groups, in the order of the page.

    `...` among the names stands for all that the package exports and that no page names.
    """

    file: str
    module: str
    groups: dict[str, tuple[str | EllipsisType, ...]]


PAGES = (
    Page("te_jax", "te_jax", {
        "Autocast": ("autocast", "fp8_autocast", "get_delayed_scaling"),
        "Training steps": (
            *("value_and_grad", "update_fp8_metas", "update_collections"),
            *("combine_by_max", "max_fp8_metas"),
        ),
        "FP8 state": ("FP8_COLLECTION", "convert_fp8_metas"),
        "What happens in a model": (
            *("explain_fp8", "explain_attention", "explain_moe", "explain_sharding"),
            *("fp8_stats", "fp8_stats_table", "fp8_probes"),
            *("expert_stats", "expert_stats_table", "expert_heat_map", ...),
        ),
        "Devices": ("MeshResource", "ShardingResource"),
        "For programs in C++": ("get_include", "get_library", "get_cmake_dir"),
    }),
    Page("recipe", "te_jax.recipe", {
        "": ("DelayedScaling", "Float8CurrentScaling", "FixedScaling", "Float8BlockScaling", "MXFP8BlockScaling", ...),
        "What they share": ("Format", "Recipe"),
    }),
    Page("flax-layers", "te_jax.flax", {"": ("TransformerLayer", "TransformerLayerType", "DiTBlock")}),
    Page("flax-dense", "te_jax.flax", {"": ("DenseGeneral", "LayerNormDenseGeneral", "LayerNormMLP", "LayerNorm")}),
    Page("flax-attention", "te_jax.flax", {
        "": (
            *("MultiHeadAttention", "MultiHeadLatentAttention", "DotProductAttention", "Mamba2", "GatedDeltaNet"),
            "KeysValues",
        ),
    }),
    Page("flax-experts", "te_jax.flax", {"": ("MoEBlock", "update_expert_bias")}),
    Page("flax-head", "te_jax.flax", {"": ("LMHead", "RelativePositionBiases")}),
    Page("flax-products", "te_jax.flax", {
        "": (
            *("DotGeneral", "make_dot_general_cls", "wrap_function_in_te_state_module"),
            *("QuantizerSet", "QuantizingModule"),
        ),
    }),
    Page("flax-state", "te_jax.flax", {"": ("TrainState", "fp8_masked", "extend_logical_axis_rules")}),
    Page("flax-weights", "te_jax.flax", {
        "Weights in FP8": ("fp8_params", "fp8_model_init", "dequantize_params"),
        "Weights quantized once": ("fp8_kernels", "wgrads"),
        "Low-rank adaptation": ("split_lora", "join_lora", "merge_lora", "lora_mask", ...),
    }),
    Page("nnx", "te_jax.nnx", {
        "Modules": (
            *("TransformerLayer", "DenseGeneral", "Linear", "LayerNormDenseGeneral", "LayerNormMLP", "LayerNorm"),
            *("RMSNorm", "MultiHeadAttention", "MultiHeadLatentAttention", "DotProductAttention", "MoEBlock", "LMHead"),
            *("RelativePositionBiases", "DotGeneral", "Mamba2", "GatedDeltaNet", "DiTBlock", "Layer", ...),
        ),
        "Training steps": ("value_and_grad",),
        "State": ("Fp8State", "ExpertBias", "Loss", "convert_fp8_state", "from_linen", "to_linen"),
    }),
    Page("layers", "te_jax.layers", {
        "Layers": (
            *("dense", "layernorm_dense", "layernorm_mlp", "layernorm", "dot_general"),
            *("linear_cross_entropy", ...),
        ),
        "Attention": ("attention_fp8", "explain_attention"),
        "Experts": ("moe", "MoEOptions", "ExpertExchange", "MoEAux", "explain_moe", "MoEExplanation", "grouped_dense"),
        "Weights in FP8": ("quantize_kernel", "quantize_experts", "QuantizedKernel", "Projection"),
    }),
    Page("models", "te_jax.models", {
        "Models": ("ModelConfig", "published", "CausalLM", "EncoderLM", "EncoderDecoder", "VisionEncoder", "unscan"),
        "Generating text": ("generate", "Sampling", "read_prompts", "write_tokens"),
    }),
    Page("hf", "te_jax.hf", {"": ("load", "save", "FP8Export", "read_config", "FAMILIES")}),
    Page("optim", "te_jax.optim", {
        "AdamW with moments in FP8": ("adamw_fp8", "scale_by_adam_fp8", "AdamFp8State", "state_sharding"),
        "Masters of weights in FP8": ("master_weights", "beside", "apply_updates", "MasterWeightsState", ...),
    }),
    Page("sharding", "te_jax.sharding", {
        "Which axis plays which part": (
            *("MeshResource", "ShardingResource", "global_shard_guard", "current_mesh_resource"),
            *("extend_logical_axis_rules", "resolve_logical_axes", "with_sharding_constraint_by_logical_axes"),
        ),
        "Context parallelism": (
            *("reorder_causal_load_balancing", "inverse_reorder_causal_load_balancing"),
            "causal_load_balanced_positions",
        ),
        "XLA": ("recommended_xla_flags",),
    }),
    Page("checkpoint_policies", "te_jax.checkpoint_policies", {"": ("save", "offload")}),
    Page("ops-attention", "te_jax.ops.attention", {
        "": (
            *("dot_product_attention", "dot_product_attention_packed", "dot_product_attention_kv_packed"),
            *("explain_attention", "AttentionChoice", "AttentionOptions", "SequenceDescriptor"),
        ),
    }),
    Page(
        "ops-rope",
        "te_jax.ops.rope",
        {
            "": (
                *("rope", "LinearScaling", "NTKScaling", "Llama3Scaling", "YarnScaling"),
                *("ProportionalScaling", "PositionSections"),
            )
        },
    ),
    Page("ops-ssm", "te_jax.ops.ssm", {"": ("causal_conv1d", "ssd")}),
    Page("ops-delta", "te_jax.ops.delta", {"": ("gated_delta",)}),
    Page("ops-gemm", "te_jax.ops.gemm", {"": ("tune_all", "save_tuning", "load_tuning")}),
    Page("ops-router", "te_jax.ops.router", {"": ("route", "RouterOptions")}),
    Page("ops-permute", "te_jax.ops.permute", {"": ("group", "permute", "combine")}),
    Page("compat", "te_jax.compat", {"": (...,)}),
)  # fmt: skip

# What is no function and no class says nothing of itself.
DATA = {
    "te_jax.FP8_COLLECTION": "The collection in which Linen modules have their FP8 state: {value}.",
    "te_jax.hf.FAMILIES": "The families, by the `model_type` of config.json: {value}.",
}


@functools.cache
def exported(module: str) -> tuple[str, ...]:
    """The names that a package's __init__.py re-exports (`from a import b as b`) or defines, in its order."""
    path = ROOT.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names.append(node.name)
    return tuple(names)


def groups(page: Page) -> dict[str, tuple[str, ...]]:
    """The groups of a page with names for `...`."""
    named = {name for other in PAGES if other.module == page.module for of in other.groups.values() for name in of}
    module = importlib.import_module(page.module)
    rest = [name for name in exported(page.module) if name not in named and not inspect.ismodule(getattr(module, name))]
    spread = lambda names: [each for name in names for each in (rest if name is ... else [name])]
    return {title: tuple(spread(names)) for title, names in page.groups.items()}


def documented() -> dict[str, Any]:
    """{full name: the object} of all that the reference has, without modules."""
    found = {}
    for page in PAGES:
        module = importlib.import_module(page.module)
        for names in groups(page).values():
            found |= {f"{page.module}.{name}": getattr(module, name) for name in names}
    return found


@functools.cache
def homes() -> dict[str, str]:
    """{full name: the full name under which the reference describes the object}: in te_jax where that has it, else in
    the package that it comes from, else where it is first."""
    known = documented()

    def home(name: str, value: Any) -> str:
        same = [other for other, of in known.items() if of is value] if callable(value) else [name]
        package = lambda other: other.rpartition(".")[0]
        comes_from = lambda other: value.__module__.startswith(package(other)) * len(package(other))
        return max(same, key=lambda other: (package(other) == "te_jax", comes_from(other))) if len(same) > 1 else name

    return {name: home(name, value) for name, value in known.items()}


def members(cls: type) -> list[str]:
    """Methods that a class defines itself and says something of. Fields, whose defaults may be functions, are none."""
    said = lambda value: bool(getattr(getattr(value, "__func__", value), "__doc__", None) or "")
    kinds = (staticmethod, classmethod, property)
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    own = {name: value for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, kinds)}
    wanted = lambda name: name == "__call__" or not (name.startswith("_") or name in fields)
    inherited = lambda value: not getattr(value, "__module__", cls.__module__).startswith("te_jax")
    return [
        name
        for name, value in own.items()
        if wanted(name) and said(value) and not inherited(value) and cls.__module__.startswith("te_jax")
    ]


# -- signatures --------------------------------------------------------------------------------------------------


def signature(value) -> str:
    """The signature of a function or class, with types, and with functions by their names."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ""
    is_class = isinstance(value, type)
    own = value.__init__ if is_class and dataclasses.is_dataclass(value) else value
    found = inspect.signature(own)
    hidden = ("self", "cls", "parent") + (("name",) if hasattr(value, "clone") else ())
    parts, star = [], False
    for p in found.parameters.values():
        if p.name in hidden:
            continue
        if p.kind is p.VAR_POSITIONAL:
            star = True
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = f": {type_text(p.annotation)}" if p.annotation is not p.empty else ""
        equals = " = " if kind else "="
        parts.append(mark + p.name + kind + ("" if p.default is p.empty else f"{equals}{_default(p.default)}"))
    back = found.return_annotation
    returns = "" if is_class or back is found.empty else f" -> {type_text(back)}"
    returns = "" if " _" in returns else returns  # a private class
    return f"({', '.join(parts)}){returns}"


def type_text(annotation: Any) -> str:
    """A type as a reader writes it: without the modules that its names come from."""
    of_array, parts = typing.get_args(ArrayLike), typing.get_args(annotation)
    if set(of_array) <= set(parts):
        return " | ".join(["ArrayLike", *(type_text(part) for part in parts if part not in of_array)])
    if annotation is type(None):
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"~|\b[A-Za-z_]\w*(?:\.\w+)*\.(?=\w)", "", text)
    text = text if "Literal" in text else text.replace("'", "")
    return re.sub(r"\bP\b", "PartitionSpec", text)


def _default(value) -> str:
    if value is dataclasses.MISSING or "MISSING" in repr(value):
        return "..."
    if isinstance(value, type) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = repr(value)
    return text if len(text) < 60 and not text.startswith("<") else str(getattr(value, "name", "..."))


# -- pages -------------------------------------------------------------------------------------------------------


def summary(name: str, value: Any) -> str:
    """The first sentence of what a name says of itself."""
    if not callable(value):
        values = [value] if isinstance(value, str) else value
        return DATA[name].format(value=", ".join(f"`{each}`" for each in values))
    home = homes()[name].rpartition(".")[2]
    if home != name.rpartition(".")[2]:
        return f"Another name of `{home}`."
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    paragraph = re.sub(r" \((?:[^()]|\([^()]*\))*(?:et al\.|https:)(?:[^()]|\([^()]*\))*\)", "", paragraph)
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)[0].rstrip(":")
    parts = sentence.replace("|", "\\|").split("`")  # every other part is code
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts) + ("" if sentence.endswith(".") else ".")


def source(page: Page) -> Path:
    return HERE / "api" / f"{page.file}.md"


def _table(page: Page) -> Iterator[str]:
    module, names = importlib.import_module(page.module), groups(page)
    yield from ("| name | what it is |", "|---|---|")
    for title, of in names.items():
        if title and len(names) > 1:
            yield f"| **{title}** | |"
        for name in of:
            full = f"{page.module}.{name}"
            text = f"{{py:obj}}`{name} <{homes()[full]}>`"
            yield f"| {text} | {summary(full, getattr(module, name))} |"


def _entry(full: str, value: Any) -> list[str]:
    if not callable(value):
        return [f".. py:data:: {full}", "", f"    {summary(full, value).replace('`', '``')}"]
    directive = [f".. auto{'class' if isinstance(value, type) else 'function'}:: {full}"]
    if isinstance(value, type) and members(value):
        directive.append(f"    :members: {', '.join(members(value))}")
    return directive


@functools.cache
def _modules_with_fields() -> frozenset[str]:
    """Names of modules that have a table in docs/fields.md."""
    return frozenset(re.findall(r"^## (\w+)$", (ROOT / "docs" / "fields.md").read_text(), re.MULTILINE))


def page_text(page: Page) -> str:
    """The page in MyST, which autodoc fills."""
    introduction, _, examples = source(page).read_text().partition("\n## ")
    lines = [introduction.rstrip(), "", f"```{{py:currentmodule}} {page.module}", "```", "", *_table(page), ""]
    lines += [f"## {examples}".rstrip(), ""] if examples else []
    known, named = documented(), groups(page)
    for title, names in named.items():
        own = [f"{page.module}.{name}" for name in names if homes()[f"{page.module}.{name}"] == f"{page.module}.{name}"]
        if own:
            lines += [f"## {title or 'Reference'}", ""]
        for full in own:
            name = full.rpartition(".")[2]
            if page.module in ("te_jax.flax", "te_jax.nnx") and name in _modules_with_fields():
                lines += [f"What each field of `{name}` does: [Fields](../fields.md#{name.lower()}).", ""]
            lines += ["```{eval-rst}", *_entry(full, known[full]), "```", ""]
    return "\n".join(lines)


def title(page: Page) -> str:
    return source(page).read_text().partition("\n")[0].removeprefix("# ")


def pages() -> dict[str, str]:
    """{page of the site: its text}, the index among them."""
    found = {f"api/{page.file}.md": page_text(page) for page in PAGES}
    rows = []
    for page in PAGES:
        text = source(page).read_text().split("\n\n")[1]
        rows.append(f"| [{title(page)}]({page.file}.md) | {' '.join(text.split())} |")
    listed = "\n".join(page.file for page in PAGES)
    table = "\n".join(["| page | what is on it |", "|---|---|", *rows])
    found["api/index.md"] = f"# API reference\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    return found
