"""One rank's shard of a model, loaded and ready for what the ranks agree on."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from backend.config import ModelOptions
from backend.engine.distributed.linking import divide, link
from backend.engine.distributed.messages import Join
from backend.model.checkpoint.hub import locate
from backend.model.checkpoint.weights import MakeRoom, need_no_room
from backend.model.loaded import RunnableModel
from backend.model.loader import load


def load_shard(join: Join) -> RunnableModel:
    """Link this process to the others and load its part of the model.

    Raises:
        LoadError: Says in a user's words what is wrong.
    """
    form = join.form
    group = link(form.topology, join.rank, timeout_s=form.timeout_s)
    _set_wired_limit(form.options)
    return load(
        form.options,
        _directory(form.options, form.directory),
        renders=False,
        divide=partial(divide, join=join, group=group),
    )


def load_whole(
    options: ModelOptions, directory: Path, make_room: MakeRoom = need_no_room
) -> RunnableModel:
    """Load a model into this process alone.

    Args:
        options: Of its LoadModel.
        directory: The model's.
        make_room: Told the size of the weights before they are read.

    Raises:
        LoadError: Says in a user's words what is wrong.
    """
    _set_wired_limit(options)
    return load(options, directory, renders=False, make_room=make_room)


def synchronise() -> None:
    """Wait until every rank has come here."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


def exchange(value: float) -> Sequence[float]:
    """Return the numbers of all ranks, once each has come here with its own."""
    numbers: list[float] = mx.distributed.all_gather(mx.array([value]), stream=mx.cpu).tolist()
    return numbers


def _directory(options: ModelOptions, directory: Path) -> Path:
    """Return where the model lies on this machine: at the same place, or where the hub puts it."""
    return directory if directory.is_dir() else asyncio.run(locate(options))


def _set_wired_limit(options: ModelOptions) -> None:
    if (wired_mb := options.tuning.memory.wired_limit_mb) > 0:
        mx.set_wired_limit(wired_mb * 2**20)
