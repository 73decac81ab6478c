"""Builds a package of this backend that LocalAI accepts as it is."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from backend import __version__
from scripts.package import contents, interpreter, libraries
from scripts.package.image import ImageError, write_image
from scripts.package.interpreter import Interpreter, InterpreterError

DIRECTORY = contents.ROOT / "build" / "package"
PACKAGE = DIRECTORY / contents.NAME
SMOKE_CAPABILITIES = "health,load,predict"


@click.group(help=__doc__)
def main() -> None:
    """Group the commands."""


@main.command()
@click.option(
    "--python",
    "program",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path(sys.executable),
    help="The Python to bring along; without it this one.",
)
@click.option("--extra", default="", help="Extra of pyproject.toml with this machine's MLX.")
def build(program: Path, extra: str) -> None:
    """Write build/package/mlx from scratch."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    PACKAGE.mkdir(parents=True)
    python = PACKAGE / "python"
    try:
        source = Interpreter.from_program(program)
        source.copy(python)
        libraries.bring_libraries(python, PACKAGE / "lib")
        interpreter.check(python, PACKAGE / "lib")
    except InterpreterError as error:
        raise click.ClickException(str(error)) from None
    extras = [*contents.EXTRAS, *filter(None, [extra])]
    contents.install_requirements(source, PACKAGE, extras)
    contents.unpack_ourselves(PACKAGE)
    contents.write_papers(PACKAGE)
    contents.compile_modules(PACKAGE, python / interpreter.PROGRAM)
    click.echo(f"{PACKAGE.relative_to(contents.ROOT)}: {_megabytes(PACKAGE)} MB")


@main.command()
def smoke() -> None:
    """Move the package away, run the host's first steps against it there, and move it back."""
    with _moved(PACKAGE) as moved:
        suite = [sys.executable, "-m", "scripts.host_suite", "--caps", SMOKE_CAPABILITIES]
        done = subprocess.run([*suite, "--run-sh", moved / "run.sh"], check=False)  # noqa: S603 - ours
    sys.exit(done.returncode)


@main.command()
def image() -> None:
    """Write build/package/mlx.tar, an image whose root is the package."""
    archive = DIRECTORY / f"{contents.NAME}.tar"
    try:
        write_image(PACKAGE, archive, f"mlx-grpc-backend:{__version__}")
    except ImageError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{archive.relative_to(contents.ROOT)}: {archive.stat().st_size // 2**20} MB")


@contextmanager
def _moved(package: Path) -> Iterator[Path]:
    """Yield the temporary path of a moved package, which contains a space."""
    with TemporaryDirectory(prefix="moved to ", dir=package.parent) as directory:
        moved = package.rename(Path(directory, package.name))
        try:
            yield moved
        finally:
            moved.rename(package)


def _megabytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) // 2**20


if __name__ == "__main__":
    main()
