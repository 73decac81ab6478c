"""`python -m backend.rank`: the engine process, which is rank 0, or another rank of its group.

The backend starts rank 0, and rank 0 the others on its machine. On another machine an operator
runs `mlx-grpc-backend rank --hostfile FILE --rank N`, or `mlx.launch` does: it serves one group
after another, each in a separate process.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from backend.engine.distributed.topology import (
    Endpoint,
    Host,
    Topology,
    parse_hosts,
    read_hostfile,
)
from backend.engine.processes import die_first, die_with_parent, start_follower
from backend.errors import BackendError, LoadFailedError
from common import log as logs
from common.directories import state_directory

if TYPE_CHECKING:
    from backend.engine.messages.codec import Channel

PROGRAM = "mlx-grpc-backend rank"
DESCRIPTION = (
    "Compute a part of a model that is divided among machines, for one backend after another, "
    "until stopped; see docs/guides/distributed.md."
)
RANK_HELP = "which of the hosts this machine is; the backend itself is 0"

_POLL_INTERVAL_S = 0.5

log = logging.getLogger("backend.rank")


def main() -> int:
    """Run a rank, or supervise one; return the exit code."""
    arguments = parse(sys.argv[1:], os.environ)
    if not logs.configure_as_named(os.environ):
        return 1
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
        if arguments.server_fd is not None:
            be_engine(arguments.server_fd)
        os.environ.update(device_environment(arguments.device, os.environ))
        be_rank(arguments)
    try:
        return look_after(named_topology(arguments), arguments.rank)
    except BackendError as error:
        log.critical("%s", error)
        return 1


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Return the arguments; `mlx.launch` passes them in the environment."""
    rank = environment.get("MLX_RANK", "")
    hostfile = environment.get("MLX_HOSTFILE") or None
    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION)
    number = int(rank) if rank.isdecimal() else None
    parser.add_argument("--rank", type=int, default=number, metavar="N", help=RANK_HELP)
    parser.add_argument(
        "--hostfile", type=Path, default=hostfile, metavar="FILE", help="as in the option hostfile"
    )
    parser.add_argument(
        "--hosts", metavar="ADDRESS,ADDRESS:PORT,...", help="as in the option hosts"
    )
    for name in ("--parent", "--server-fd", "--size", "--device"):
        parser.add_argument(name, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--control", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def named_topology(arguments: argparse.Namespace) -> Topology:
    """Return the group of a worker started by an operator."""
    hosts: tuple[Host, ...] = ()
    if arguments.hosts:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        hosts = read_hostfile(Path(arguments.hostfile))
    if not hosts:
        raise BackendError(
            "--hostfile FILE or --hosts ADDRESS,ADDRESS is needed, as the backend is loaded with, "
            "and --rank N, which of them this machine is"
        )
    if arguments.rank not in range(len(hosts)):
        raise BackendError(
            f"--rank must be between 0 and {len(hosts) - 1}, in the --hostfile or --hosts that the "
            "backend is loaded with"
        )
    return Topology(hosts)


def device_environment(device: int | None, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that limit CUDA to one device, if there are several."""
    devices = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not devices:
        devices = [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if len(devices) < 2:
        return {}
    return {"CUDA_VISIBLE_DEVICES": devices[(device or 0) % len(devices)]}


def be_engine(server_fd: int) -> NoReturn:
    """Load a model when the server asks for it, and compute it."""
    from backend.engine.messages.codec import Channel, Codec
    from backend.engine.messages.protocol import Order

    die_first()
    _leave_signals_to_server()
    server = Channel(socket.socket(fileno=server_fd), Codec(Order))
    try:
        _import_mlx_lm()
        from backend.cpu.install import install
        from backend.engine.leading.boot import Boot
    except ImportError as error:
        from common.remedies import no_mlx

        refuse(server, LoadFailedError(no_mlx(error)))
    install()
    Boot(server, state_directory(os.environ)).run()


def _leave_signals_to_server() -> None:
    """Ignore signals of terminals and service managers: this process ends with the server."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def refuse(server: "Channel", error: BackendError) -> NoReturn:
    """Answer with an error instead of a model, and end."""
    from backend.engine.messages.protocol import Failed, Failure

    server.send(Failed(Failure.of(error)))
    sys.exit(1)


def _import_mlx_lm() -> None:
    """Import mlx-lm before any module that does so without keeping the limits of this process.

    Modules imported afterwards find the classes of transformers in their index.
    """
    from backend.model.checkpoint.upstream import import_mlx_lm, index_transformers

    index_transformers(state_directory(os.environ))
    import_mlx_lm()


def be_rank(arguments: argparse.Namespace) -> NoReturn:
    """Take part in one group as a rank other than the first."""
    _import_mlx_lm()
    from backend.cpu.install import install
    from backend.engine.distributed.follower import Follower, reach
    from backend.engine.distributed.gathering import make_codec

    install()
    codec = make_codec()
    address, _, port = arguments.control.rpartition(":")
    leader = reach(Endpoint(address, int(port)), codec)
    Follower(arguments.rank, arguments.size or 0, leader, codec).run()


def look_after(topology: Topology, rank: int) -> int:
    """Keep a process waiting for rank 0, a new one for every group, until stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if rank == 0:
        log.info("rank 0 is started by the backend itself: nothing to do here")
        while True:
            _sleep()
    control, size, local = str(topology.control), topology.size, topology.local_ranks
    log.info("rank %d of %d: waiting for rank 0 at %s", rank, size, control)
    device = local.index(rank) if rank in local else 0
    while True:
        process = start_follower(rank, control, size=size, device=device)
        try:
            while process.poll() is None:
                _sleep()
        finally:
            process.kill()


def _sleep() -> None:
    """Wait briefly: a signal just before an endless wait would not interrupt it."""
    time.sleep(_POLL_INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
