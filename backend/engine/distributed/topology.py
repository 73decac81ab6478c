"""The processes of a group: their number, addresses and split of the model."""

import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from backend.config import GroupOptions, TuningOptions
from backend.errors import InvalidRequestError
from backend.model.checkpoint.config_file import text_config

# mlx.launch counts from here too.
FIRST_PORT = 32323
# Added to the ring port of rank 0: the port for the plan.
CONTROL_PORT_DISTANCE = 1000
_MAX_PORT = 65535
_MAX_HOSTFILE_BYTES = 2**20
_LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?P<address>[\w.-]+)(:(?P<port>[0-9]{1,5}))?", re.ASCII)


class Parallelism(Enum):
    """How the model is split: within every layer, or by layers."""

    TENSOR = "tensor"
    PIPELINE = "pipeline"


class GroupBackend(Enum):
    """MLX's ways to link ranks; `ANY` takes the best one available."""

    RING = "ring"
    JACCL = "jaccl"
    NCCL = "nccl"
    MPI = "mpi"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether this machine has the address."""
        return _is_free(Endpoint(self.address, 0))


@dataclass(frozen=True, slots=True)
class Host:
    """The location of one rank.

    Attributes:
        endpoints: Where it listens for its neighbours, one for each link of the ring.
        rdma: The device towards each other rank, for JACCL; otherwise empty.
    """

    endpoints: tuple[Endpoint, ...]
    rdma: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return self.endpoints[0].address

    @property
    def is_local(self) -> bool:
        """Whether it is this machine."""
        return self.endpoints[0].is_local


@dataclass(frozen=True, slots=True)
class Topology:
    """A group of processes, by rank."""

    hosts: tuple[Host, ...]
    parallelism: Parallelism = Parallelism.TENSOR
    backend: GroupBackend = GroupBackend.ANY

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    def neighbours(self, rank: int) -> int:
        """Return the number of ranks on the machine of a rank, itself included."""
        places = [host.endpoints[0].address for host in self.hosts]
        return places.count(places[rank])

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this machine; each uses the GPU of its index among them."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host.is_local)

    @property
    def control(self) -> Endpoint:
        """The endpoint where rank 0 sends the plan."""
        first = self.hosts[0].endpoints[0]
        port = first.port + CONTROL_PORT_DISTANCE
        return Endpoint(first.address, port if port <= _MAX_PORT else port - _MAX_PORT // 2)


_Entry: TypeAlias = tuple[Sequence[str], Sequence[str | None]]


_HEADS = "num_attention_heads"
_PARTS = {
    Parallelism.TENSOR: (_HEADS, "attention heads"),
    Parallelism.PIPELINE: ("num_hidden_layers", "layers"),
}


def require_parts(tuning: TuningOptions, config: Mapping[str, Any]) -> None:
    """Refuse a group that cannot share the parts of the model, before its processes start.

    Raises:
        InvalidRequestError: So it is, or the hosts cannot be read, or are wrong.
    """
    hosts = _named_hosts(tuning.group)
    _require_agreement(tuning.group, hosts)
    size = group_size(tuning)
    if size > 1:
        require_linkable(GroupBackend(tuning.group.distributed_backend), hosts)
    field = "Options: hosts" if hosts else "TensorParallelSize"
    key, parts = _PARTS[Parallelism(tuning.group.distributed)]
    most = text_config(config).get(key)
    if type(most) is int and size > max(most, 1):
        raise InvalidRequestError(field, f"{size} processes: the model has {most} {parts}")
    heads = divided_heads(text_config(config)) if key == _HEADS else ()
    if size > 1 and heads and size not in sizes_for(heads):
        raise InvalidRequestError(field, f"{size} processes: the model has {with_sizes(heads)}")


def require_linkable(backend: GroupBackend, hosts: Sequence[Host]) -> None:
    """Refuse a way to link hosts that cannot work, whatever MLX was built with.

    Raises:
        InvalidRequestError: It must start all ranks, or needs RDMA devices that are not named.
    """
    if backend is GroupBackend.MPI:
        problem = "mpi must start all ranks, and here the host starts the first; use another"
    elif backend is GroupBackend.JACCL and not (hosts and all(host.rdma for host in hosts)):
        problem = "jaccl needs a hostfile with the RDMA devices of all hosts"
    else:
        return
    raise InvalidRequestError("Options: distributed_backend", problem)


def divided_heads(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of heads that the size of the group must divide; none if one is odd."""
    heads = config.get(_HEADS) or 1
    # Latent attention shares its compressed keys among all heads.
    kv_heads = None if config.get("kv_lora_rank") else config.get("num_key_value_heads")
    found = (heads, kv_heads) if kv_heads else (heads,)
    return found if all(type(count) is int for count in found) else ()


def sizes_for(heads: Sequence[int]) -> list[int]:
    """Return the sizes of groups that divide all numbers of heads."""
    return [n for n in range(2, min(heads) + 1) if all(count % n == 0 for count in heads)]


def with_sizes(heads: Sequence[int]) -> str:
    """Return the numbers of heads in words, with the sizes that work."""
    working = ", ".join(map(str, sizes_for(heads))) or "none"
    return f"{' and '.join(map(str, heads))} heads; sizes that work: {working}"


def group_size(tuning: TuningOptions) -> int:
    """Return how many processes the options name; fails as `topology_of`."""
    return len(_named_hosts(tuning.group)) or tuning.group.tensor_parallel_size or 1


def _require_agreement(group: GroupOptions, hosts: Sequence[Host]) -> None:
    """Refuse hosts that contradict the size of the group, or begin on another machine."""
    if len(hosts) < 2:
        return
    if group.tensor_parallel_size not in (None, 1, len(hosts)):
        problem = f"is {group.tensor_parallel_size}, and there are {len(hosts)} hosts"
        raise InvalidRequestError("TensorParallelSize", problem)
    if not hosts[0].is_local:
        raise InvalidRequestError(
            "Options: hosts", f"the first one, {hosts[0]}, must be an address of this machine"
        )


def topology_of(tuning: TuningOptions) -> Topology | None:
    """Return the group that the options request; `None` for a single process.

    Raises:
        InvalidRequestError: They contradict each other, or name no usable hosts.
    """
    hosts = _named_hosts(tuning.group) or local_hosts(tuning.group.tensor_parallel_size or 1)
    if len(hosts) < 2:
        return None
    _require_agreement(tuning.group, hosts)
    return Topology(
        hosts, Parallelism(tuning.group.distributed), GroupBackend(tuning.group.distributed_backend)
    )


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file of `mlx.launch`, or of MLX's ring.

    Raises:
        InvalidRequestError: It cannot be read, or has another format.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_HOSTFILE_BYTES:
            raise ValueError(f"it is no file of at most {_MAX_HOSTFILE_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content.get("hosts") if isinstance(content, Mapping) else content
        if not isinstance(entries, list):
            raise ValueError("it has no list of hosts")
        return tuple(_numbered(map(_entry, entries)))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidRequestError("Options: hostfile", f"{path} cannot be used: {error}") from error


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of `address,address:port,...`; an address listed twice is two ranks.

    Raises:
        InvalidRequestError: One is not an address.
    """
    try:
        return tuple(_numbered(([part.strip()], ()) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise InvalidRequestError("Options: hosts", f"{text!r} cannot be used: {error}") from error


def local_hosts(count: int) -> tuple[Host, ...]:
    """Return `count` places on this machine, on ports that are free now."""
    with ExitStack() as held:
        while True:
            hosts = tuple(Host((Endpoint(_LOOPBACK, _held_port(held)),)) for _ in range(count))
            if _is_free(Topology(hosts).control):
                return hosts


def _named_hosts(group: GroupOptions) -> tuple[Host, ...]:
    if group.hosts and group.hostfile:
        raise InvalidRequestError("Options", "hosts and hostfile are both given: one is enough")
    if group.hostfile:
        return read_hostfile(Path(group.hostfile).expanduser())
    return parse_hosts(group.hosts or "")


def _entry(entry: Any) -> _Entry:  # noqa: ANN401 (JSON)
    """Return addresses and RDMA devices of an entry of a hostfile, in either form."""
    addresses, rdma = entry, ()
    if isinstance(entry, Mapping):
        addresses, rdma = entry.get("ips"), entry.get("rdma", ())
    if not isinstance(addresses, list) or not all(isinstance(text, str) for text in addresses):
        raise ValueError(f"an entry has no list of addresses, in `ips` or by itself: {entry!r}")
    return addresses, rdma


def _numbered(entries: Iterable[_Entry]) -> Iterator[Host]:
    """Assign ports to addresses without one, as `mlx.launch` does."""
    port = FIRST_PORT
    taken: set[Endpoint] = set()
    for addresses, rdma in entries:
        endpoints = []
        for text in addresses:
            endpoints.append(_endpoint(text, port))
            port += 1
        if not endpoints:
            raise ValueError("a host has no address")
        if twice := taken.intersection(endpoints):
            raise ValueError(f"{twice.pop()} stands twice")
        taken.update(endpoints)
        yield Host(tuple(endpoints), tuple(rdma))


def _endpoint(text: str, default_port: int) -> Endpoint:
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port <= _MAX_PORT:
        raise ValueError(
            f"{text!r} is no address with or without a port, as 10.0.0.2 or 10.0.0.2:32330 (MLX's "
            "links do not support IPv6)"
        )
    return Endpoint(match["address"], port)


def _is_free(endpoint: Endpoint) -> bool:
    """Tell whether the address is local and the port is free."""
    with socket.socket() as probe:
        try:
            probe.bind((endpoint.address, endpoint.port))
        except OSError:
            return False
    return True


def _held_port(held: ExitStack) -> int:
    """Return a free port that is not assigned again while it is held."""
    holder = held.enter_context(socket.socket())
    holder.bind((_LOOPBACK, 0))
    return int(holder.getsockname()[1])
