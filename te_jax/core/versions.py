"""The newest jax and Flax that te_jax is tested with. pyproject.toml has the oldest; .ci/run tests both ends."""

import re
from importlib import metadata

from te_jax.core.check import warn

NEWEST_TESTED = {"jax": "0.12.0.1", "flax": "0.12.12"}


def installed_version(package: str) -> str | None:
    """The installed version of `package`; None if it is not installed, as te_jax in a source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def reason_untested(package: str, version: str | None) -> str:
    """Why `version` of `package` is not tested: it is newer than the newest tested one. Else, and for None, ""."""
    newest = NEWEST_TESTED.get(package)
    if newest is None or version is None or _release(version) <= _release(newest):
        return ""
    return f"newer than {newest}, the newest that te_jax is tested with"


def warn_if_untested() -> None:
    """Warns (UserWarning) of each package that is newer than the newest tested one. `import te_jax` calls it once."""
    for package in NEWEST_TESTED:
        version = installed_version(package)
        if reason := reason_untested(package, version):
            warn(
                f"te_jax: {package} is {version}, {reason}; update te_jax, or install {package}=="
                f"{NEWEST_TESTED[package]} where something fails. To go on without this text call "
                f"warnings.filterwarnings('ignore', 'te_jax: {package} is') before the import."
            )


def _release(version: str) -> tuple[int, ...]:
    """ "0.12.1.dev3" -> (0, 12, 1)."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))
