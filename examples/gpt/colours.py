"""The one table of colours: a recipe has its own in every plot of the examples and the benchmarks, and a mixer its own
in plots of several mixers."""

BF16 = "bf16"
OF = {
    BF16: "tab:blue",
    "delayed": "tab:orange",
    "attention": "tab:red",
    "current": "tab:green",
    "block": "tab:purple",
    "fixed": "tab:brown",
    "mxfp8": "tab:pink",
}
MIXERS = {
    "attention": "tab:blue",
    "mamba2": "tab:orange",
    "hybrid": "tab:green",
    "gated-delta": "tab:red",
    "gated-delta-hybrid": "tab:purple",
}
NO_RECIPE = "tab:cyan"  # of te_jax, but the same under all recipes
OTHERS = "tab:gray"  # not te_jax
