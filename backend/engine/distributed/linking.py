"""Links this process to the others of its group, and divides a network.

`mx.distributed.init` waits without limit and holds Python's lock (mlx 0.32): the kernel's alarm
ends a process that waits too long, and only ending the process leaves a group.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from backend.config import ModelOptions
from backend.engine.assembly import set_wired_limit
from backend.engine.distributed.messages import Join
from backend.engine.distributed.topology import GroupBackend, Parallelism, Topology
from backend.errors import InvalidRequestError, LoadFailedError
from backend.model.checkpoint.hub import locate
from backend.model.checkpoint.upstream import Network
from backend.model.loaded import RunnableModel
from backend.model.loader import load

_PREFERENCE = (GroupBackend.NCCL, GroupBackend.JACCL, GroupBackend.RING)


def link(topology: Topology, rank: int, *, timeout_s: float) -> mx.distributed.Group:
    """Return the group, once every rank is linked; the process dies by SIGALRM if one is not.

    Args:
        topology: Of the group, with a backend that MLX supports.
        rank: Of this process.
        timeout_s: How long to wait for the others.

    Raises:
        LoadFailedError: The links cannot be established.
    """
    backend = topology.backend
    with tempfile.TemporaryDirectory() as directory:
        for name, value in _environment(topology, rank, backend, Path(directory)).items():
            os.putenv(name, value)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            group = mx.distributed.init(strict=True, backend=backend.value)
        except (RuntimeError, ValueError) as error:
            raise LoadFailedError(f"rank {rank} of {topology.size}: {error}") from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    if group.size() != topology.size:
        raise LoadFailedError(f"MLX linked {group.size()} processes, not {topology.size}")
    return group


def divide(network: Network, join: Join, group: mx.distributed.Group) -> None:
    """Keep this rank's part of a network that is not in memory yet."""
    match join.form.topology.parallelism:
        case Parallelism.TENSOR:
            network.shard(group)
        case Parallelism.PIPELINE if join.split:
            network.model.pipeline(group, split=list(join.split))
        case Parallelism.PIPELINE:
            network.model.pipeline(group)


def usable_backend(topology: Topology) -> GroupBackend:
    """Return the requested backend, or the best available one; links nothing.

    Raises:
        InvalidRequestError: It cannot be used here; the message names the usable ones.
    """
    wanted = topology.backend
    has_rdma = all(host.rdma for host in topology.hosts)
    usable = [
        backend
        for backend in _PREFERENCE
        if mx.distributed.is_available(backend.value)
        and (backend is not GroupBackend.JACCL or has_rdma)
    ]
    if wanted is GroupBackend.ANY and usable:
        return usable[0]
    if wanted in usable:
        return wanted
    names = ", ".join(backend.value for backend in usable) or "none"
    problem = f"{wanted.value} cannot be used here; usable: {names}"
    raise InvalidRequestError("Options: distributed_backend", problem)


def _environment(
    topology: Topology, rank: int, backend: GroupBackend, directory: Path
) -> Mapping[str, str]:
    """Return the variables of a group that MLX reads, as `mlx.launch` sets them."""
    first = topology.hosts[0].endpoints[0]
    common = {"MLX_RANK": str(rank)}
    match backend:
        case GroupBackend.JACCL:
            devices = _written(directory, [host.rdma for host in topology.hosts])
            return common | {"MLX_IBV_DEVICES": devices, "MLX_JACCL_COORDINATOR": str(first)}
        case GroupBackend.NCCL:
            size = str(topology.size)
            place = {"NCCL_HOST_IP": first.address, "NCCL_PORT": str(first.port)}
            return common | place | {"MLX_WORLD_SIZE": size}
        case _:
            rings = [list(map(str, host.endpoints)) for host in topology.hosts]
            return common | {"MLX_HOSTFILE": _written(directory, rings)}


def _written(directory: Path, content: object) -> str:
    path = directory / "hosts.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


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
