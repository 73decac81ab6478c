"""Which versions of packages there are."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """Return the version of an installed package, or nothing for one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions_of(packages: Iterable[str]) -> str:
    """Return names and versions as a text."""
    return ", ".join(f"{name} {version_of(name) or 'without version'}" for name in packages)
