"""Checks of the installation: Python, package versions, and extras."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from packaging.requirements import Requirement

from backend.cli.doctor.finding import Finding, bad, good, warning
from common.remedies import CHECKOUT, DISTRIBUTION, install_command, vision_command
from common.versions import version_of

OLDEST_PYTHON = (3, 11)

# A module that only this extra brings, and the feature that needs it.
EXTRAS = {
    "media": ("PIL", "pictures and sounds"),
    "video": ("av", "MP4 and WebM videos; animated pictures work without"),
    "metrics": ("prometheus_client", "--metrics-addr"),
    "tracing": ("opentelemetry.sdk", "traces to OpenTelemetry"),
}
MISSING_EXTRA = "not installed: no {}"


def check_python() -> Iterator[Finding]:
    """Check the interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        yield good("python", version)
    else:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield bad("python", f"{version}, and {oldest} is the oldest that works", "install a newer")


def check_packages() -> Iterator[Finding]:
    """Compare each installed package with the version that this backend was tested with."""
    try:
        texts = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        yield warning(
            "packages", f"{DISTRIBUTION} is not installed here, only its files are", CHECKOUT
        )
        return
    needed = [Requirement(text) for text in texts]
    always = [each for each in needed if each.marker is None or each.marker.evaluate()]
    wrong = [finding for each in always if (finding := compared(each))]
    yield from wrong
    if not wrong:
        pinned = (each.name for each in always if "==" in str(each.specifier))
        yield good("packages", ", ".join(f"{name} {version_of(name)}" for name in pinned))


def check_extras() -> Iterator[Finding]:
    """Look for optional packages."""
    for extra, (module, use) in EXTRAS.items():
        if _is_importable(module):
            yield good(f"extra {extra}", "installed")
        else:
            yield warning(f"extra {extra}", MISSING_EXTRA.format(use), install_command(extra))
    if _is_importable("mlx_vlm"):
        yield good("mlx-vlm", version_of("mlx-vlm"))
    else:
        text = MISSING_EXTRA.format("models that see or hear, and no encoders")
        yield warning("mlx-vlm", text, vision_command())


def compared(requirement: Requirement) -> Finding | None:
    """Return the problem of an installed package, or `None`."""
    found = version_of(requirement.name)
    remedy = install_command()
    if not found:
        return bad(requirement.name, "not installed", remedy)
    if requirement.specifier.contains(found, prereleases=True):
        return None
    text = f"{found}, and this backend was tested with {requirement.specifier}"
    return warning(requirement.name, text, remedy)


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
