"""`exclude` of a recipe: which modules it keeps out of FP8, and which of its patterns keep out none."""

from fnmatch import fnmatchcase

from te_jax._check import did_you_mean, warn_once

_asked: dict[tuple[str, ...], set[str]] = {}  # exclude -> the paths that it was asked about, in this process


def excludes(patterns: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether one of the patterns (`fnmatch`) names the module at `path`, or one that it is in."""
    chain = ["/".join(path[: i + 1]) for i in range(len(path))]
    _asked.setdefault(patterns, set()).update(chain)
    return any(fnmatchcase(each, pattern) for each in chain for pattern in patterns)


def warn_of_strays(patterns: tuple[str, ...]) -> None:
    """Warns, once, of patterns that name none of the modules that there were, if there were any."""
    paths = _asked.get(patterns, set())
    for pattern in patterns if paths else ():
        if not any(fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(sorted(paths, key=lambda path: (path.count("/"), path))[:8])
            hint = did_you_mean(pattern, paths) or f"there are {some}."
            warn_once(
                "autocast", f"the recipe's exclude has {pattern!r}, which is the path of no module in FP8; {hint}"
            )
