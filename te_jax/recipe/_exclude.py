"""`exclude` of a recipe: which modules it keeps out of FP8, and which of its patterns keep out none."""

from fnmatch import fnmatchcase

from te_jax.core.check import did_you_mean, warn_once

_asked: dict[tuple[str, ...], set[str]] = {}  # exclude -> the paths that it was asked about, in this process
_searched: dict[tuple[str, ...], int] = {}  # exclude -> how many paths there were when strays were looked for


def excluding(patterns: tuple[str, ...], path: tuple[str, ...]) -> str | None:
    """The first of the patterns (`fnmatch`) that names the module at `path`, or one that it is in; None without."""
    _asked.setdefault(patterns, set()).update(_chain(path))
    return naming(patterns, path)


def naming(patterns: tuple[str, ...], path: tuple[str, ...]) -> str | None:
    """As `excluding`, of other patterns than a recipe's."""
    return next((pattern for each in _chain(path) for pattern in patterns if fnmatchcase(each, pattern)), None)


def _chain(path: tuple[str, ...]) -> list[str]:
    return ["/".join(path[: i + 1]) for i in range(len(path))]


def warn_of_strays(patterns: tuple[str, ...]) -> None:
    """Warns, once, of patterns that name none of the modules that there were so far, if there were any."""
    paths = _asked.get(patterns, set()).copy()  # other threads may add to it
    if _searched.get(patterns, 0) == len(paths):
        return
    _searched[patterns] = len(paths)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(sorted(paths, key=lambda path: (path.count("/"), path))[:8])
            hint = did_you_mean(pattern, paths) or f"there are {some}."
            text = f"the recipe's exclude has {pattern!r}, which is the path of no module in FP8 so far; {hint}"
            warn_once("autocast", text)
