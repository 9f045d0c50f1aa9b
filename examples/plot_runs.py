"""Draw runs of train_gpt.py from what they wrote, next to each other: losses, and the gap of each to the one in bf16.

    python examples/plot_runs.py runs/gpt/results.json runs/current/results.json --out gaps.png

A file that has several runs, of --compare, gives them all. Runs may be under several recipes, or with several mixers.
"""

import argparse
import pathlib
import sys

from gpt import config, plot


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Draw runs of train_gpt.py next to each other: losses, gaps to bf16.")
    p.add_argument("results", help="results.json of a run, one for each recipe", nargs="+", type=pathlib.Path)
    p.add_argument("--out", help="[default: loss.png next to the first file]", type=pathlib.Path, metavar="PNG")
    args = p.parse_args(argv)
    out = args.out or args.results[0].with_name("loss.png")
    try:
        config.need("matplotlib")
        found, title = plot.read(args.results)
        plot.save(out, found, title)
    except (OSError, ValueError) as error:
        print(f"plot_runs: {error}", file=sys.stderr)
        return 2
    apart = {id(gap.curve): f"; gap to bf16 {gap.text}" for gap in plot.gaps(found)}
    for curve, name in zip(found, plot.labels(found)):
        loss = curve.losses[curve.last].mean()
        print(f"{name}: loss {loss:.4f} nats over the last tenth of {curve.steps[-1]} steps{apart.get(id(curve), '')}")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
