"""Models of the hub in this user's cache: fetched with a bar, checked, listed."""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from backend import demo
from backend.cli.render import LABEL_STYLE, printable
from backend.config import ModelOptions
from backend.errors import BackendError
from backend.model.checkpoint import hub
from backend.model.checkpoint.hub import HubModel, resolve

_CHUNK_BYTES = 2**20
# The hub's cache names a file by its checksum: of LFS, else of git.
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


class DamagedError(Exception):
    """Files differ from their checksums, twice in a row."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        name: `org/name`.
        size: In bytes, all revisions together.
        used_at: The time of its last use, in seconds since the epoch.
    """

    name: str
    size: int
    used_at: float


def cached_models() -> list[CachedModel]:
    """Return the models in the hub's cache by name; none if there is no cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = (each for each in repositories if each.repo_type == "model" and each.size_on_disk)
    found = (CachedModel(each.repo_id, each.size_on_disk, each.last_accessed) for each in models)
    return sorted(found, key=lambda model: model.name.lower())


async def pull(console: Console, repo_id: str) -> Path:
    """Fetch a model, going on where an earlier try stopped, check it and return its directory.

    Raises:
        BackendError: The hub does not have it, or cannot be reached.
        DamagedError: Files stay damaged when they are fetched again.
    """
    directory = await _fetched(console, repo_id)
    damaged = _checked(console, directory)
    if damaged:
        remove(damaged)
        directory = await _fetched(console, repo_id)
        if damaged := list(damaged_files(directory)):
            names = ", ".join(path.name for path in damaged)
            raise DamagedError(f"{repo_id}: damaged twice, check disk and network: {names}")
    return directory


async def _fetched(console: Console, repo_id: str) -> Path:
    with _bar(console, repo_id) as progress:
        return await hub.download(repo_id, progress=progress)


def _checked(console: Console, directory: Path) -> list[Path]:
    with console.status("checking the files"):
        return list(damaged_files(directory))


def damaged_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a cached snapshot that differ from the checksum that names them."""
    for path in sorted(directory.rglob("*")):
        name = path.resolve().name
        if path.is_file() and name != path.name and not _is_whole(path, name):
            yield path


def remove(files: Iterable[Path]) -> None:
    """Remove files of a snapshot with their content, so that they are fetched again."""
    for path in files:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _is_whole(path: Path, name: str) -> bool:
    if _SHA256.fullmatch(name):
        return _digest(path, hashlib.sha256()) == name
    if _GIT_SHA1.fullmatch(name):
        head = b"blob %d\0" % path.stat().st_size
        return _digest(path, hashlib.sha1(head, usedforsecurity=False)) == name
    return True


def _digest(path: Path, digest: "hashlib._Hash") -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _bar(console: Console, name: str) -> Iterator[hub.Progress]:
    """Draw a bar on a terminal, and yield the function that moves it."""
    name_and_bar = (TextColumn("{task.description}"), BarColumn())
    numbers = (DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *(*name_and_bar, *numbers),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@click.command("pull")
@click.argument("model", metavar="ORG/NAME")
def pull_command(model: str) -> None:
    """Download a model of the hub and check its files.

    A download that was stopped goes on where it was. Private models need HF_TOKEN.
    """
    console = Console()
    try:
        place = resolve(ModelOptions(model=model))
        if isinstance(place, HubModel):
            place = asyncio.run(pull(console, place.repo_id))
    except (BackendError, DamagedError) as error:
        raise click.ClickException(printable(str(error))) from None
    except KeyboardInterrupt:
        raise click.ClickException("stopped; the same command goes on") from None
    click.echo(f"{model} is in {place}")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def list_models(*, as_json: bool) -> None:
    """List the models on this machine, with the embedded one."""
    models = [_embedded(), *cached_models()]
    if as_json:
        for model in models:
            click.echo(json.dumps({"name": model.name, "bytes": model.size}))
        return
    table = Table(box=None, pad_edge=False, header_style=LABEL_STYLE)
    table.add_column("model")
    table.add_column("size", justify="right")
    table.add_column("last used")
    for model in models:
        used = f"{datetime.fromtimestamp(model.used_at).astimezone():%Y-%m-%d}"
        table.add_row(printable(model.name), decimal(model.size), used)
    Console().print(table)


def _embedded() -> CachedModel:
    files = [path.stat() for path in Path(demo.MODEL_DIR).iterdir() if path.is_file()]
    size, used_at = sum(file.st_size for file in files), max(file.st_atime for file in files)
    return CachedModel(demo.NAME, size, used_at)
