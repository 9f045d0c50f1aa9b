"""What the API reference has: pages, the modules on each, and their public names."""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the reference: `names` of `module`; () for all that its __init__.py exports."""

    module: str
    title: str
    text: str
    names: tuple[str, ...] = ()


PAGES = (
    Page("te_jax", "te_jax", "Autocast, FP8 state and its gradients, statistics."),
    Page("te_jax.recipe", "te_jax.recipe", "How tensors get their scales. [Recipes](../recipes.md) compares them."),
    Page("te_jax.flax", "te_jax.flax", "Modules of Flax Linen, and what goes with them."),
    Page("te_jax.nnx", "te_jax.nnx", "The same modules for Flax NNX."),
    Page("te_jax.layers", "te_jax.layers", "The functional layers that the modules call: arrays in, arrays out."),
    Page(
        "te_jax.models",
        "te_jax.models",
        "Whole language models of these layers. [Whole models](../howto/whole-models.md) has a program.",
        (
            *("ModelConfig", "published", "CausalLM", "EncoderLM", "EncoderDecoder"),
            *("Sampling", "generate", "read_prompts", "write_tokens", "unscan"),
        ),
    ),
    Page("te_jax.hf", "te_jax.hf", "Checkpoints of Hugging Face's form, in and out.", ("load", "read_config", "save")),
    Page("te_jax.optim", "te_jax.optim", "Optimizers of optax with FP8 in their state."),
    Page(
        "te_jax.sharding",
        "te_jax.sharding",
        "Which mesh axis plays which part. [Several devices](../several_devices.md) has programs.",
        (
            *("MeshResource", "ShardingResource", "current_mesh_resource", "global_shard_guard"),
            *("extend_logical_axis_rules", "resolve_logical_axes", "with_sharding_constraint_by_logical_axes"),
            *("causal_load_balanced_positions", "reorder_causal_load_balancing"),
            *("inverse_reorder_causal_load_balancing", "recommended_xla_flags"),
        ),
    ),
    Page(
        "te_jax.checkpoint_policies",
        "te_jax.checkpoint_policies",
        "What `jax.checkpoint` and `nn.remat` keep. [Recomputation](../howto/recomputation.md) has measurements, and "
        "the policies that have names of their own: `te_gemms_saveable`, `dots_and_te_gemms_with_no_batch_dims` and "
        "`checkpoint_dots_and_te_gemms`.",
        ("save", "offload"),
    ),
    Page("te_jax.ops.attention", "te_jax.ops.attention", "Scaled dot-product attention.", (
        *("dot_product_attention", "dot_product_attention_kv_packed", "dot_product_attention_packed"),
        *("explain_attention", "AttentionChoice", "AttentionOptions", "SequenceDescriptor"),
    )),  # fmt: skip
    Page("te_jax.ops.gemm", "te_jax.ops.gemm", "GEMMs that are timed once: `te_jax.ops.gemm`.", (
        *("tune_all", "save_tuning", "load_tuning"),
    )),  # fmt: skip
    Page("te_jax.ops.router", "te_jax.ops.router", "Which expert a token goes to.", ("route",)),
    Page("te_jax.ops.permute", "te_jax.ops.permute", "Tokens in the order of their experts, and back.", (
        *("group", "permute", "combine"),
    )),  # fmt: skip
    Page("te_jax.compat", "te_jax.compat", "TransformerEngine's module paths. [Migration](../migration.md) says how."),
)  # fmt: skip


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


def documented() -> dict[str, object]:
    """{full name: the object} of all that the reference has, without modules."""
    found = {}
    for page in PAGES:
        module = importlib.import_module(page.module)
        for name in page.names or exported(page.module):
            value = getattr(module, name)
            if not inspect.ismodule(value):
                found[f"{page.module}.{name}"] = value
    return found


def members(cls: type) -> list[str]:
    """Methods that a class defines itself and says something of."""
    said = lambda value: bool(getattr(getattr(value, "__func__", value), "__doc__", None) or "")
    kinds = (staticmethod, classmethod, property)
    own = {name: value for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, kinds)}
    wanted = lambda name: name == "__call__" or not name.startswith("_")
    return [name for name, value in own.items() if wanted(name) and said(value) and "te_jax" in cls.__module__]


def signature(value) -> str:
    """The signature of a function or class, with functions by their names and types as they are written."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ""
    own = value.__init__ if dataclasses.is_dataclass(value) and isinstance(value, type) else value
    parameters = [p for p in inspect.signature(own).parameters.values() if p.name not in ("self", "parent")]
    parts, star = [], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            star = True
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(mark + p.name + ("" if p.default is p.empty else f"={_default(p.default)}"))
    return f"({', '.join(parts)})"


def _default(value) -> str:
    if value is dataclasses.MISSING or "MISSING" in repr(value):
        return "..."
    if isinstance(value, type) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = repr(value)
    return text if len(text) < 60 and not text.startswith("<") else str(getattr(value, "name", "..."))


def page_text(page: Page) -> str:
    """The page in MyST, which autodoc fills."""
    module = importlib.import_module(page.module)
    lines = [f"# {page.title}", "", page.text, "", f"```{{py:currentmodule}} {page.module}", "```", ""]
    for name in page.names or exported(page.module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
        directive = [f".. auto{kind}:: {page.module}.{name}"]
        if kind == "class" and members(value):
            directive.append(f"    :members: {', '.join(members(value))}")
        if kind == "data":
            directive.append("    :no-value:")
        if page.module != "te_jax" and name in exported("te_jax"):
            directive.append("    :no-index:")  # its entry is that of the first page
        lines += ["```{eval-rst}", *directive, "```", ""]
    return "\n".join(lines)
