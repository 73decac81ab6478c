"""Locates a model on disk or on the hub, and fetches it in a child process."""

import asyncio
import json
import logging
import os
import re
import sys
import time
from asyncio import StreamReader
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, starmap
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

from backend import demo
from backend.config import ModelOptions
from backend.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from backend.model.checkpoint.fetch import EXIT_NOT_FOUND
from common.process import in_own_thread

log = logging.getLogger(__name__)


def candidates(text: str, models_dir: Path | None) -> list[Path]:
    """Return the possible locations of a path, best first: hosts send paths below their models."""
    path = Path(text)
    # `~x` may be the home of nobody.
    with suppress(RuntimeError):
        path = path.expanduser()
    if path.is_absolute() or models_dir is None:
        return [path]
    return [models_dir / path, path]


def find_path(text: str, models_dir: Path | None) -> Path | None:
    """Return the first candidate that exists; `None` also for a text that is no path."""
    try:
        return next((path for path in candidates(text, models_dir) if path.exists()), None)
    except (OSError, RuntimeError, ValueError):
        # Too long for a path, as a template may be, or in a home of nobody.
        return None


def rooted(options: ModelOptions) -> ModelOptions:
    """Return the options with paths that are valid in any working directory."""
    tuning = options.tuning
    models_dir = options.models_dir.absolute() if options.models_dir else None
    return replace(
        options,
        models_dir=models_dir,
        tokenizer=_rooted(options.tokenizer, models_dir),
        adapters=tuple(
            replace(adapter, path=_rooted(adapter.path, models_dir)) for adapter in options.adapters
        ),
        tuning=tuning.updated(
            chat_template=_rooted(tuning.text.chat_template, models_dir),
            cache_dir=_absolute(tuning.prompt_cache.cache_dir),
            hostfile=_absolute(tuning.group.hostfile),
        ),
    )


Text = TypeVar("Text", str, str | None)


def _rooted(text: Text, models_dir: Path | None) -> Text:
    """Return the absolute path that a text names; other text is returned unchanged."""
    if not text:
        return text
    found = find_path(text, models_dir)
    return str(found.absolute()) if found else text


def _absolute(text: str | None) -> str | None:
    return str(Path(text).expanduser().absolute()) if text else text


PROGRESS_INTERVAL_S = 5.0
# Called with the bytes that are there, and those of the whole model.
Progress: TypeAlias = Callable[[int, int], None]
TERMINATE_TIMEOUT_S = 5.0

_HUB_ID = re.compile(r"(?:hf://|huggingface://)?([\w][\w.-]{0,95}/[\w][\w.-]{0,95})", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model that, judging by its name, is on the hub: `repo_id` is `org/name`."""

    repo_id: str


async def locate(options: ModelOptions, environment: Mapping[str, str] | None = None) -> Path:
    """Return the directory of a model, fetching it from the hub if it is not on disk.

    Cancelling this stops the download.

    Args:
        options: Name the model; their own variables come on top of a given environment.
        environment: Of the download; `None` means this process's own.

    Raises:
        LoadError: There is no such model, or it could not be fetched.
    """
    place = await in_own_thread(resolve, options)
    if isinstance(place, Path):
        return place
    own = dict(options.environment)
    return await download(
        place.repo_id,
        with_code=options.trusts_remote_code,
        environment={**(environment or {}), **own} if own else environment,
    )


def resolve(options: ModelOptions) -> Path | HubModel:
    """Decide from the disk alone where a model is; does not use the network.

    Raises:
        ModelNotFoundError: It is neither an existing path nor a hub id.
        UnsupportedModelError: It is a single file of another format.
    """
    texts = ((options.model_file, None), (options.model, options.models_dir))
    named = [(text, models_dir) for text, models_dir in texts if text]
    if found := next(filter(None, starmap(find_path, named)), None):
        return _directory(found)
    if options.model == demo.NAME:
        return demo.MODEL_DIR
    if match := _HUB_ID.fullmatch(options.model):
        return HubModel(match[1])
    tried = chain.from_iterable(starmap(candidates, named))
    paths = ", ".join(map(str, dict.fromkeys(tried)))
    raise ModelNotFoundError(
        f"there is no model {options.model!r}: it is not a hub id (org/name), and "
        + (f"nothing exists at {paths}" if paths else "no path was given")
    )


async def download(
    repo_id: str,
    *,
    with_code: bool = False,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch a model into the hub's local cache, unless it is there, and return its directory.

    Runs in a child process, which can be stopped at any time. Cancelling this stops it.

    Args:
        repo_id: `org/name`.
        with_code: Whether to fetch Python files too.
        environment: The child's environment; `None` means this process's own.
        progress: Called as bytes arrive; `None` logs them every few seconds.

    Raises:
        ModelNotFoundError: The hub does not know it, or hides it from this user.
        DownloadError: The hub is unreachable, or refused.
    """
    arguments = [repo_id, "--parent", str(os.getpid()), *(["--with-code"] if with_code else [])]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backend.model.checkpoint.fetch", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
    )
    try:
        path, complaint = await asyncio.gather(
            _follow(cast(StreamReader, child.stdout), progress or _logged(repo_id)),
            _last_line(cast(StreamReader, child.stderr)),
        )
        status = await child.wait()
    finally:
        await _end(child)
    if path is not None:
        return path
    error = ModelNotFoundError if status == EXIT_NOT_FOUND else DownloadError
    raise error(complaint or f"the download of {repo_id} ended with status {status}")


def _directory(path: Path) -> Path:
    """Return the directory of a model given by a directory or a file inside it."""
    if path.is_dir():
        return path
    if not (path.parent / "config.json").is_file():
        raise UnsupportedModelError(
            f"{path} is not an MLX model: expected a directory with config.json and "
            "safetensors weights"
        )
    return path.parent


async def _follow(reports: StreamReader, progress: Progress) -> Path | None:
    """Pass the child's progress on; return the path that it finally reports."""
    path = None
    async for line in reports:
        report = json.loads(line)
        if "path" in report:
            path = Path(report["path"])
        else:
            progress(report["done"], report["total"])
    return path


def _logged(repo_id: str) -> Progress:
    """Return a function that logs progress, every few seconds."""
    due_at = time.monotonic() + PROGRESS_INTERVAL_S

    def progress(done: int, total: int) -> None:
        nonlocal due_at
        if time.monotonic() >= due_at:
            due_at = time.monotonic() + PROGRESS_INTERVAL_S
            log.info("downloading %s: %.2f of %.2f GB", repo_id, done / 1e9, total / 1e9)

    return progress


async def _last_line(stream: StreamReader) -> str:
    last = ""
    async for line in stream:
        last = line.decode(errors="replace").strip() or last
    return last


async def _end(child: Process) -> None:
    """Kill the child if it is still running, and wait for it."""
    if child.returncode is not None:
        return
    child.terminate()
    try:
        await asyncio.wait_for(child.wait(), TERMINATE_TIMEOUT_S)
    except TimeoutError:
        child.kill()
        await child.wait()
