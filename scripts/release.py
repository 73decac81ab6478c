"""Gathers a release in `dist/release`: wheel, package, image, notes, notices and checksums.

`make release` builds them first. The version is that of `backend/__init__.py`; its section in
`CHANGELOG.md` begins with `## [1.2.3] - 2026-01-31`.
"""

import hashlib
import platform
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from backend import __version__

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "dist" / "release"
PACKAGE = ROOT / "build" / "package"
SUMS = "SHA256SUMS"


class ReleaseError(Exception):
    """A part of the release is missing; the message says how to make it."""


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, its links into this repository as plain text.

    The page of a release does not resolve them.

    Raises:
        ReleaseError: There is none, or it has no date.
    """
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## [{version}] - DATE'")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", found[1].strip()) + "\n"


def gather(release: Path, version: str, *, dist: Path, package: Path) -> list[Path]:
    """Copy the built parts, and return the files.

    Args:
        release: Made anew.
        version: Of all of them.
        dist: Has the wheel.
        package: Has the directory `mlx`, and perhaps its image `mlx.tar`.

    Raises:
        ReleaseError: A part was not built, or of another version.
    """
    wheels = list(dist.glob(f"mlx_grpc_backend-{version}-*.whl"))
    if len(wheels) != 1 or not (package / "mlx" / "run.sh").is_file():
        raise ReleaseError(f"no wheel and package of {version}: make wheel package")
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir(parents=True)
    name = f"mlx-grpc-backend-{version}-{platform.system().lower()}-{platform.machine()}"
    shutil.copy(wheels[0], release)
    with tarfile.open(release / f"{name}.tar.gz", "w:gz", compresslevel=6) as archive:
        archive.add(package / "mlx", "mlx")
    if (package / "mlx.tar").is_file():
        shutil.copy(package / "mlx.tar", release / f"{name}-image.tar")
    shutil.copy(ROOT / "NOTICES.md", release)
    shutil.copy(package / "mlx" / "THIRD-PARTY.txt", release)
    return sorted(release.iterdir())


def sums(files: list[Path]) -> Iterator[str]:
    """Yield lines that `sha256sum --check` reads."""
    for path in files:
        with path.open("rb") as file:
            yield f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def main() -> None:
    """Gather the release of this checkout, or name the missing part."""
    try:
        text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
        files = gather(RELEASE, __version__, dist=ROOT / "dist", package=PACKAGE)
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    (RELEASE / "NOTES.md").write_text(text, encoding="utf-8")
    files.append(RELEASE / "NOTES.md")
    (RELEASE / SUMS).write_text("".join(sums(files)), encoding="utf-8")
    for path in [*files, RELEASE / SUMS]:
        print(path.relative_to(ROOT))  # noqa: T201 - a program


if __name__ == "__main__":
    main()
