"""The other ranks, seen from rank 0: gathered once, told every turn, compared regularly.

Before any process starts, it is checked into how many parts the model can be divided.
"""

import importlib.util
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from msgspec import structs

from backend.engine.distributed.gathering import (
    Form,
    Join,
    Member,
    Ready,
    Report,
    Start,
    Turn,
    gather,
    make_codec,
)
from backend.engine.distributed.linking import (
    agreement,
    load_shard,
    readiness,
    synchronise,
    usable_backend,
)
from backend.engine.distributed.topology import (
    Parallelism,
    Topology,
    divided_heads,
    sizes_for,
    with_sizes,
)
from backend.engine.messages.codec import ChannelClosedError
from backend.engine.messages.protocol import Failed
from backend.engine.processes import ending, start_follower
from backend.errors import BackendError, GroupLostError, UnsupportedModelError
from backend.model.checkpoint.config_file import read_config, text_config
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import memory_bytes
from backend.model.loaded import RunnableModel
from backend.model.loader import look
from common.process import Process

# Machines that differ by less are treated alike.
_TOLERANCE = 0.1


def pipeline_split(form: Form, memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of every rank; none if an even split is as good."""
    if form.topology.parallelism is not Parallelism.PIPELINE:
        return ()
    if min(memory_bytes) >= (1.0 - _TOLERANCE) * max(memory_bytes):
        return ()
    config = read_config(form.directory)
    layers = text_config(config)["num_hidden_layers"]
    return layer_shares(layers, memory_bytes)


def layer_shares(layers: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers for each weight, in proportion and at least one.

    The layers left by rounding go to the largest remainders.
    """
    spare = layers - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: layers - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


_MARKS = {Parallelism.TENSOR: "def shard(", Parallelism.PIPELINE: "PipelineMixin"}


@dataclass(frozen=True, slots=True)
class Seat:
    """A fictional place in a group, enough to divide a network on trial."""

    place: int
    count: int

    def rank(self) -> int:
        """Return the place."""
        return self.place

    def size(self) -> int:
        """Return the number of places."""
        return self.count


def require_divisible(network: Network, config: Mapping[str, Any], topology: Topology) -> None:
    """Refuse a network that cannot be divided; it is unusable afterwards.

    Args:
        network: Not loaded into memory yet.

    Raises:
        UnsupportedModelError: Names the families, or the sizes, that work.
    """
    kind = config["model_type"]
    match topology.parallelism:
        case Parallelism.TENSOR:
            _require_shards(network, kind, text_config(config), topology.size)
        case Parallelism.PIPELINE:
            _require_stages(network, kind, topology.size)


@cache
def divisible_families(parallelism: Parallelism) -> tuple[str, ...]:
    """Return the families that the installed mlx-lm can divide, found in its source."""
    spec = importlib.util.find_spec("mlx_lm.models")
    places = spec.submodule_search_locations if spec else None
    sources = [path for place in places or () for path in Path(place).glob("*.py")]
    mark = _MARKS[parallelism]
    return tuple(
        sorted(
            path.stem
            for path in sources
            if path.stem != "pipeline" and mark in path.read_text(encoding="utf-8")
        )
    )


def _require_shards(network: Network, kind: str, config: Mapping[str, Any], size: int) -> None:
    if not hasattr(network, "shard"):
        raise _unsupported(kind, Parallelism.TENSOR)
    heads = divided_heads(config) or (1,)
    told = f"{kind} has {with_sizes(heads)}"
    if size not in sizes_for(heads):
        raise UnsupportedModelError(
            f"tensor parallel over {size} processes: {told}", field="distributed"
        )
    try:
        network.shard(Seat(0, size))
    except (AssertionError, ValueError) as error:
        raise UnsupportedModelError(
            f"tensor parallel over {size} processes: {kind} cannot be divided so: {error}; {told}",
            field="distributed",
        ) from error


def _require_stages(network: Network, kind: str, size: int) -> None:
    if not hasattr(getattr(network, "model", None), "pipeline"):
        raise _unsupported(kind, Parallelism.PIPELINE)
    layers = len(network.model.layers)
    if size > layers:
        raise UnsupportedModelError(
            f"a pipeline of {size} processes: {kind} has {layers} layers; "
            f"sizes that work: 2 to {layers}",
            field="distributed",
        )


def _unsupported(kind: str, parallelism: Parallelism) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{kind} has no {parallelism.value} parallelism in mlx-lm; "
        f"families that have it: {', '.join(divisible_families(parallelism))}",
        field="distributed",
    )


class TokenCheck:
    """The checksums of rank 0, until every other rank has confirmed them."""

    def __init__(self, reports: Mapping[int, Report]) -> None:
        self.statuses = {rank: report.status for rank, report in reports.items()}
        self._turns = {rank: report.turn for rank, report in reports.items()}
        self._checksums: dict[int, int] = {}

    def note(self, turn: int, checksum: int) -> None:
        """Record the checksum of rank 0 at the end of a turn."""
        self._checksums[turn] = checksum

    def compare(self, rank: int, report: Report) -> None:
        """Compare another rank's checksum at the end of a recorded turn.

        Raises:
            GroupLostError: They differ.
        """
        # Another rank may stop at a turn at which rank 0 goes on.
        if report.checksum != self._checksums.get(report.turn):
            raise GroupLostError(
                f"rank {rank} has drawn other tokens than rank 0 by turn {report.turn}: are the "
                "machines, their packages and the model's files alike?"
            )
        self.statuses[rank] = report.status
        self._turns[rank] = report.turn
        oldest = min(self._turns.values())
        self._checksums = {n: value for n, value in self._checksums.items() if n > oldest}


# Maximum delay between a failure and the news of the rank that caused it.
NEWS_DELAY_S = 2.0


class Members:
    """All ranks of a group but the first."""

    def __init__(
        self, form: Form, members: Sequence[Member], fail: Callable[[BackendError], NoReturn]
    ) -> None:
        self.form = form
        self._members = members
        self._codec = make_codec()
        self._fail = fail
        self._ready: dict[int, queue.SimpleQueue[Ready]] = defaultdict(queue.SimpleQueue)
        self._reports: queue.SimpleQueue[tuple[int, Report]] = queue.SimpleQueue()
        self._check: TokenCheck
        for member in members:
            threading.Thread(target=self._listen, args=(member,), daemon=True).start()

    def join(self, joins: Sequence[Join]) -> None:
        """Have every rank link up and load its shard."""
        for member in self._members:
            with self._named(member):
                member.channel.send(joins[member.rank])

    def agree(self, own: Ready) -> Start:
        """Wait until all have loaded, and return their common budgets."""
        others = [self._ready[member.rank].get() for member in self._members]
        start = agreement([own, *others])
        for member in self._members:
            with self._named(member):
                member.channel.send(start)
        synchronise()
        return start

    def begin(self) -> None:
        """Wait for the first report of each."""
        self._check = TokenCheck(dict(self._reports.get() for _ in self._members))

    def send(self, turn: Turn) -> None:
        """Send the plan of a turn to all."""
        frame = self._codec.encode(turn)
        for member in self._members:
            with self._named(member):
                member.channel.send_frame(frame)

    def check(self, turn_number: int, checksum: int | None) -> None:
        """Compare the tokens drawn by others with those of rank 0.

        Args:
            checksum: Of rank 0 after that turn, if it is one to be compared.

        Raises:
            GroupLostError: One of them drew different tokens.
        """
        if checksum is not None:
            self._check.note(turn_number, checksum)
        while not self._reports.empty():
            self._check.compare(*self._reports.get())

    def memories(self) -> Mapping[int, Mapping[str, int]]:
        """Return the memory of each, by part."""
        return {rank: each.memory_bytes for rank, each in self._check.statuses.items()}

    @contextmanager
    def _named(self, member: Member) -> Iterator[None]:
        """Report the rank that cannot be reached: an orderly end would hide it."""
        try:
            yield
        except ChannelClosedError as error:
            # The thread that listens to it reports how it ended, and ends this process first.
            time.sleep(NEWS_DELAY_S)
            raise GroupLostError(f"{self._name(member)} has hung up") from error

    def _name(self, member: Member) -> str:
        size = len(self._members) + 1
        return f"rank {member.rank} of {size} (process {member.hello.process_id})"

    def _listen(self, member: Member) -> None:
        """Receive another rank's messages; if it fails or hangs up, the group is lost."""
        try:
            while True:
                match message := member.channel.receive():
                    case Ready():
                        self._ready[member.rank].put(message)
                    case Report():
                        self._reports.put((member.rank, message))
                    case Failed(failure):
                        self._fail(failure.error())
        except ChannelClosedError:
            self._fail(GroupLostError(f"{self._name(member)} {ending(member.process)}"))


def checked(form: Form) -> Form:
    """Return the form of a group with the backend that it can use, without starting a process.

    Raises:
        InvalidRequestError: MLX has no such backend here.
        LoadError: The model cannot be divided.
    """
    options = form.options
    topology = replace(form.topology, backend=usable_backend(form.topology))
    # Towers are not divided, only the text part of such a model.
    options = replace(options, tuning=options.tuning.updated(vision=False))
    network = look(options, form.directory).network
    require_divisible(network, read_config(form.directory), topology)
    return structs.replace(form, topology=topology, options=options)


def form_group(
    form: Form, fail: Callable[[BackendError], NoReturn]
) -> tuple[Members, RunnableModel, Start]:
    """Gather a checked group and load its shards; return both, and the budgets.

    Raises:
        LoadError: A rank is missing or has failed.
    """
    topology = form.topology
    # If this process fails, they end with it.
    members = gather(form, make_codec(), _started(topology))
    memory = [memory_bytes(), *(member.hello.memory_bytes for member in members)]
    split = pipeline_split(form, memory)
    joins = [Join(form=form, rank=rank, split=split) for rank in range(topology.size)]
    group = Members(form, members, fail)
    group.join(joins)
    model = load_shard(joins[0])
    return group, model, group.agree(readiness(model, form, 0))


def _started(topology: Topology) -> Mapping[int, Process]:
    """Start the other ranks of this machine."""
    return {
        rank: start_follower(rank, str(topology.control), device=device)
        for device, rank in enumerate(topology.local_ranks)
        if rank > 0
    }
