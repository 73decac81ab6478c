"""The one command that adds an optional package, as this backend was installed itself."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement


def version_of(package: str) -> str:
    """Return the version of an installed package, or an empty string if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions_of(packages: Iterable[str]) -> str:
    """Return names and versions as one text."""
    return ", ".join(f"{name} {version_of(name) or 'without version'}" for name in packages)


DISTRIBUTION = "mlx-grpc-backend"
CHECKOUT = "make install"
# Of the extra `vision`: its other dependencies are large, and nothing here imports them.
_WITHOUT_DEPENDENCIES = "mlx-vlm"


def install_command(*extras: str) -> str:
    """Return the command that adds extras of this project.

    A checkout has `make install`, a wheel the tool that installed it, and a package of
    `make package`, which has all of them, is built again.
    """
    try:
        ours = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return CHECKOUT
    if (source := source_of(ours)) is None:
        return CHECKOUT
    return command_of(ours, source, extras)


def vision_command() -> str:
    """Return the command that adds image and audio models without packages that nothing needs."""
    command = install_command("media")
    if command == CHECKOUT:
        return command
    return f"{command} && {adding(distribution(DISTRIBUTION))}"


def adding(ours: Distribution) -> str:
    """Return the command that adds mlx-vlm alone, in its pinned version, to this environment."""
    pinned = next(
        (
            f"{needed.name}{needed.specifier}"
            for text in ours.requires or ()
            if (needed := Requirement(text)).name == _WITHOUT_DEPENDENCIES
        ),
        _WITHOUT_DEPENDENCIES,
    )
    return f"{_adder(ours)} --no-deps {pinned}"


def no_mlx(error: ImportError) -> str:
    """Return why MLX cannot be imported, and the command that adds it."""
    return f"MLX cannot be imported: {error}; this adds it: {mlx_command()}"


def mlx_command() -> str:
    """Return the command that adds the build of MLX for this machine."""
    return install_command(mlx_extra()) if sys.platform == "linux" else install_command()


def mlx_extra() -> str:
    """Return the extra with the Linux build of MLX for this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "cpu"
    done = subprocess.run([program], capture_output=True, text=True, check=False)  # noqa: S603
    return "cuda12" if "CUDA Version: 12" in done.stdout else "cuda13"


def source_of(ours: Distribution) -> str | None:
    """Return the source from which a tool installs this project again; `None` for a checkout."""
    text = ours.read_text("direct_url.json")
    if not text:
        return DISTRIBUTION
    record = json.loads(text)
    if "dir_info" in record:
        return None
    url: str = record["url"]
    if "vcs_info" in record:
        return f"{DISTRIBUTION} @ {record['vcs_info']['vcs']}+{url}"
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else f"{DISTRIBUTION} @ {url}"


def command_of(ours: Distribution, source: str, extras: tuple[str, ...]) -> str:
    """Return the command that installs a source with extras."""
    if is_uv_tool():
        # It makes the environment anew: the present extras must be named again.
        extras = (*extras, *(extra for extra in present_extras(ours) if extra not in extras))
    project, at, place = source.partition(" @ ")
    chosen = f"[{','.join(extras)}]" if extras else ""
    wanted = f"{project}{chosen}{at}{place}"
    return f"{_installer(ours)} {shlex.quote(wanted)}"


def is_uv_tool() -> bool:
    """Tell whether `uv tool install` made the environment of this process."""
    return (Path(sys.prefix) / "uv-receipt.toml").is_file()


def present_extras(ours: Distribution) -> list[str]:
    """Return the extras whose packages are all installed."""
    names = ours.metadata.get_all("Provides-Extra") or []
    needed = [Requirement(text) for text in ours.requires or ()]
    return [name for name in names if _is_present(name, needed)]


def _is_present(extra: str, needed: list[Requirement]) -> bool:
    own = [
        each
        for each in needed
        if each.marker and each.marker.evaluate({"extra": extra}) and "extra" in str(each.marker)
    ]
    return bool(own) and all(_has(each) for each in own)


def _has(requirement: Requirement) -> bool:
    """Tell whether a package is there, with the extras that are wanted of it."""
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        return False
    if not requirement.extras:
        return True
    return requirement.extras <= set(present_extras(found))


def _installer(ours: Distribution) -> str:
    """Return the command of the tool that installed this project, without a package."""
    return "uv tool install --force" if is_uv_tool() else _adder(ours)


def _adder(ours: Distribution) -> str:
    """Return the tool that adds a package to this environment; `uv tool` makes another."""
    python = shlex.quote(sys.executable)
    if (ours.read_text("INSTALLER") or "").strip() == "uv":
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"
