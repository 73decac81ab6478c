"""A rank without a server: `python -m benchmarks.ranks HOSTS RANK MODEL_DIRECTORY`.

All ranks decode as the backend's do, without a scheduler. Rank 0 prints one line: the times of a
step, of its collectives alone, and of the transfer of a plan.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from backend.engine.background.jobs import BackgroundJobs
from backend.engine.distributed.follower import reach
from backend.engine.distributed.gathering import Turn, make_codec
from backend.engine.distributed.linking import link
from backend.engine.distributed.topology import GroupBackend, Topology, parse_hosts
from backend.engine.messages.codec import Channel
from backend.engine.port import Pace
from backend.engine.rows.pacing import PrefillPacer
from backend.model.checkpoint.upstream import Network

STEPS = 24
PLANS = 200
# One after the attention and one after the MLP.
COLLECTIVES_PER_LAYER = 2
LINK_TIMEOUT_S = 60.0


def main() -> None:
    """Measure together with the other ranks; rank 0 reports."""
    hosts, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    topology = Topology(parse_hosts(hosts), backend=GroupBackend.RING)
    group = link(topology, rank, timeout_s=LINK_TIMEOUT_S)
    network = load_model(directory, lazy=True)[0]
    network.shard(group)
    mx.eval(network.parameters())
    figures = {
        "step_ms": _step_ms(network),
        "collectives_ms": _collectives_ms(network),
        "plan_ms": _plan_ms(topology) if rank == 0 else _echo_plans(topology),
    }
    if rank == 0:
        sys.stdout.write(json.dumps(figures) + "\n")


def _step_ms(network: Network) -> float:
    caches = make_prompt_cache(network)
    token = mx.array([[1]])

    def step() -> None:
        nonlocal token
        token = mx.argmax(network(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)

    return _timed_ms(step, STEPS)


def _collectives_ms(network: Network) -> float:
    hidden = mx.ones((1, 1, network.args.hidden_size))
    count = COLLECTIVES_PER_LAYER * len(network.layers)

    def reduce() -> None:
        total = hidden
        for _ in range(count):
            total = mx.distributed.all_sum(total) * 0.5
        mx.eval(total)

    return _timed_ms(reduce, STEPS)


def _plan_ms(topology: Topology) -> float:
    """Return the time from a decision until every rank has read it."""
    codec = make_codec()
    pacer = PrefillPacer(cap=512, cap_alone=2048, pause_s=0.5)
    turn = Turn(1, (), Pace(pacer.pace(), BackgroundJobs(512, 0.25).pace()))
    with socket.create_server((topology.control.address, topology.control.port)) as listener:
        peers = [Channel(listener.accept()[0], codec) for _ in range(topology.size - 1)]

    def there_and_back() -> None:
        data = codec.encode(turn)
        for peer in peers:
            peer.send_frame(data)
        for peer in peers:
            peer.receive()

    return _timed_ms(there_and_back, PLANS) / 2.0


def _echo_plans(topology: Topology) -> float:
    leader = reach(topology.control, make_codec())
    for _ in range(PLANS + 1):
        leader.send(leader.receive())
    return 0.0


def _timed_ms(work: Callable[[], None], times: int) -> float:
    work()
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) * 1000.0 / times


main()
