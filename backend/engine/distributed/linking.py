"""Links this process to the others of its group: a divided network, and budgets that all agree on.

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

from backend.cache.layers import cache_leaves
from backend.config import DEFAULT_TUNING, ModelOptions
from backend.engine.assembly import assemble_loop, prompt_cache_bytes, set_wired_limit
from backend.engine.distributed.gathering import Form, Join, Ready, Start
from backend.engine.distributed.topology import GroupBackend, Parallelism, Topology
from backend.engine.findings import Notebook
from backend.engine.loop import EngineLoop
from backend.engine.passes.agreement import Ranks
from backend.engine.passes.caches import make_cache_factory
from backend.engine.port import Port
from backend.engine.rows.admission import kv_budget_bytes, working_set_bytes
from backend.errors import InvalidRequestError, LoadFailedError
from backend.model.checkpoint.hub import locate
from backend.model.checkpoint.upstream import Network
from backend.model.loaded import RunnableModel
from backend.model.loader import load

_PREFERENCE = (GroupBackend.NCCL, GroupBackend.JACCL, GroupBackend.RING)


def link(topology: Topology, rank: int, *, timeout_s: float) -> mx.distributed.Group:
    """Return the group, once every rank is linked; the process dies by SIGALRM if one is not.

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


# More than any memory, and small enough to be multiplied.
_PLENTY = 2**50


def assemble_shared_loop(
    model: RunnableModel, options: ModelOptions, start: Start, port: Port
) -> EngineLoop:
    """Return the idle loop of one rank of several, which all admit and evict the same."""
    layers = len(make_cache_factory(model.network, DEFAULT_TUNING)())
    tuning = options.tuning.updated(
        max_kv_bytes=start.kv_bytes_per_layer * layers,
        max_cache_bytes=start.cache_bytes_per_layer * layers,
        # Ranks read and write at their own speed: a disk would make them diverge.
        cache_dir=None,
        # They also measure the gain of a draft at their own speed.
        speculation="off",
    )
    agreed = replace(options, tuning=tuning, models_dir=None)
    # All must make the same trials: one rank may remember results that another does not.
    loop = assemble_loop(model, agreed, port, Notebook(), ranks=Ranks(exchange))
    loop.memory.reservations.require_room(options)
    return loop


def readiness(model: RunnableModel, form: Form, rank: int) -> Ready:
    """Return the values that ranks must agree on before they start."""
    tuning = form.options.tuning
    caches = make_cache_factory(model.network, tuning, Ranks(exchange))()
    # Ranks of one machine share its memory, unless each has a GPU.
    sharing = 1 if mx.cuda.is_available() else form.topology.neighbours(rank)
    weights_bytes = model.card.weights_bytes * sharing
    kv_bytes = kv_budget_bytes(form.options, weights_bytes, working_set_bytes())
    if tuning.memory.max_kv_bytes is None:
        kv_bytes //= sharing
    return Ready(
        layers=len(caches),
        cache_kinds=tuple(sorted(_kind(leaf) for leaf in cache_leaves(caches))),
        kv_budget_bytes=kv_bytes,
        cache_budget_bytes=prompt_cache_bytes(tuning, kv_bytes),
    )


def agreement(everyone: Sequence[Ready]) -> Start:
    """Return budgets with which every rank admits and evicts the same.

    Ranks of a pipeline have different layers: with budgets per layer their accounts agree as
    long as all layers are of one kind. Otherwise no prefix is kept, and requests are not
    charged.
    """
    kinds = {kind for ready in everyone for kind in ready.cache_kinds}
    if len(kinds) > 1 and len({ready.cache_kinds for ready in everyone}) > 1:
        return Start(kv_bytes_per_layer=_PLENTY, cache_bytes_per_layer=0)
    return Start(
        kv_bytes_per_layer=min(ready.kv_budget_bytes // ready.layers for ready in everyone),
        cache_bytes_per_layer=min(ready.cache_budget_bytes // ready.layers for ready in everyone),
    )


def _kind(leaf: object) -> str:
    """Return a key that distinguishes caches by the tokens they keep and how they are cut."""
    return f"{type(leaf).__name__}:{getattr(leaf, 'max_size', '')}"
