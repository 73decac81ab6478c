"""Loads one rank's shard of a model, ready for the ranks to agree on budgets."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
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
        LoadError: Explains the problem in the user's terms.
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
        options: The options of its LoadModel.
        directory: The model's directory.
        make_room: Told the size of the weights before they are read.

    Raises:
        LoadError: Explains the problem in the user's terms.
    """
    _set_wired_limit(options)
    return load(options, directory, renders=False, make_room=make_room)


def synchronise() -> None:
    """Wait until every rank has reached this point."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


def exchange(value: float) -> Sequence[float]:
    """Return the numbers of all ranks, once each has provided its own."""
    numbers: list[float] = mx.distributed.all_gather(mx.array([value]), stream=mx.cpu).tolist()
    return numbers


def _directory(options: ModelOptions, directory: Path) -> Path:
    """Return the model's directory on this machine: the same path, or the hub's."""
    if directory.is_dir():
        return directory
    # This process has these variables already.
    return asyncio.run(locate(replace(options, environment=())))


def _set_wired_limit(options: ModelOptions) -> None:
    if (wired_mb := options.tuning.memory.wired_limit_mb) > 0:
        mx.set_wired_limit(wired_mb * 2**20)
