"""Loads one rank's shard of a model, ready for the ranks to agree on budgets."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from backend.config import ModelOptions
from backend.engine.assembly import set_wired_limit
from backend.engine.distributed.linking import divide, link
from backend.engine.distributed.messages import Join
from backend.model.checkpoint.hub import locate
from backend.model.loaded import RunnableModel
from backend.model.loader import load


def load_shard(join: Join) -> RunnableModel:
    """Link this process to the others and load its part of the model.

    Raises:
        LoadError: Explains the problem in the user's terms.
    """
    form = join.form
    group = link(form.topology, join.rank, timeout_s=form.timeout_s)
    set_wired_limit(form.options)
    return load(
        form.options,
        _directory(form.options, form.directory),
        renders=False,
        divide=partial(divide, join=join, group=group),
    )


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
