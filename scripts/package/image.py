"""An image of a package, in the archive format that LocalAI's `ocifile://` reads."""

import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory


class ImageError(Exception):
    """The image could not be written; the message names the missing part."""


def write_image(package: Path, archive: Path, tag: str) -> None:
    """Write an archive of one image with one layer, whose root is the package.

    Raises:
        ImageError: crane is not on the PATH, or failed.
    """
    crane = shutil.which("crane")
    if crane is None:
        raise ImageError(
            "crane is not here: install it (https://github.com/google/go-containerregistry), "
            "or Go, with which `make image` installs it by itself"
        )
    with TemporaryDirectory(dir=archive.parent) as directory:
        layer = Path(directory, "layer.tar")
        write_layer(package, layer)
        command = [crane, "append", "-f", str(layer), "-t", tag, "-o", str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - as found
    if done.returncode != 0:
        raise ImageError(f"crane: {done.stderr.strip()}")


def write_layer(package: Path, layer: Path) -> None:
    """Write a package's files with paths relative to its directory, owned by root."""
    with tarfile.open(layer, "w") as tar:
        for path in sorted(package.iterdir()):
            tar.add(path, arcname=path.name, filter=_owned_by_root)


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
