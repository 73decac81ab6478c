"""Versions of installed packages."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """Return the version of an installed package, or an empty string if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions_of(packages: Iterable[str]) -> str:
    """Return names and versions as one text."""
    return ", ".join(f"{name} {version_of(name) or 'without version'}" for name in packages)
