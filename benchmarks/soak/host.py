"""The surroundings of the soak's clients: a host that replaces the model, and a full disk."""

import asyncio
import itertools
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from backend.pb import backend_pb2 as pb

# Under load; the model itself loads in a second.
LOAD_TIMEOUT_S = 120.0
SLOTS = (16, 8)
DISK_BYTES = 4 * 2**20
# As an ordinary user: in its own namespace any user may mount.
_ON_SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


class Replacements:
    """Times of the model's replacements, for calls that ended meanwhile.

    Attributes:
        number: Number of starts and ends: odd during a replacement.
    """

    def __init__(self) -> None:
        """Start with the first model."""
        self.number = 0
        self._are_over = asyncio.Event()
        self._are_over.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record a replacement in progress."""
        self.number += 1
        self._are_over.clear()
        yield
        self.number += 1
        self._are_over.set()

    def overlap(self, number: int) -> bool:
        """Tell whether one was in progress at any time since `number`."""
        return bool(number % 2) or self.number != number

    async def wait(self) -> None:
        """Wait until none is in progress."""
        await self._are_over.wait()


@dataclass(slots=True)
class Host:
    """Replaces the model repeatedly, in varying ways, with the same model.

    Attributes:
        stub: Of the backend.
        options: The model options of every load.
        incomplete: A directory with a part of a model.
        replacements: Records each.
        done: Actions with counts.
        faults: Descriptions of failures.
    """

    stub: Any
    options: pb.ModelOptions
    incomplete: Path
    replacements: Replacements
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def run_until(self, end: float, every_s: float) -> None:
        """Run one action after another, with pauses; nothing without a pause."""
        slots = itertools.cycle(SLOTS[::-1])
        acts = (self._load_other_options, self._free, self._load_nothing, self._load_incomplete)
        for act in itertools.cycle(acts if every_s else ()):
            await asyncio.sleep(every_s)
            if time.monotonic() > end:
                return
            self.done[act.__name__.strip("_").replace("_", " ")] += 1
            await act(next(slots))

    async def load(self, slots: int = SLOTS[0]) -> None:
        """Load the model."""
        request = pb.ModelOptions()
        request.CopyFrom(self.options)
        request.Options.append(f"max_slots:{slots}")
        try:
            await self.stub.LoadModel(request, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.faults.append(f"LoadModel: {error.code().name}: {error.details()}")

    async def _load_other_options(self, slots: int) -> None:
        with self.replacements.one():
            await self.load(slots)

    async def _free(self, slots: int) -> None:
        with self.replacements.one():
            await self.stub.Free(pb.HealthMessage(), timeout=LOAD_TIMEOUT_S)
            await self.load(slots)

    async def _load_nothing(self, _slots: int) -> None:
        """Load a missing model: the present one stays, and no client may notice."""
        await self._fail_to_load("/nowhere", grpc.StatusCode.NOT_FOUND)

    async def _load_incomplete(self, slots: int) -> None:
        with self.replacements.one():
            await self._fail_to_load(str(self.incomplete), grpc.StatusCode.INVALID_ARGUMENT)
            await self.load(slots)

    async def _fail_to_load(self, model: str, expected: grpc.StatusCode) -> None:
        try:
            await self.stub.LoadModel(pb.ModelOptions(Model=model), timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not expected:
                self.faults.append(f"LoadModel: {error.code().name}: {error.details()}")
        else:
            self.faults.append(f"{model} was loaded")


def on_small_disk(directory: Path, size_bytes: int = DISK_BYTES) -> Sequence[str]:
    """Return the words before a command that mount a disk, soon full, in a directory for it alone.

    Raises:
        OSError: This system does not let users mount.
    """
    mount = f"mount -t tmpfs -o size={size_bytes} tmpfs '{directory}'"
    try:
        subprocess.run([*_ON_SMALL_DISK, mount], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.decode().strip()) from error
    return (*_ON_SMALL_DISK, f'{mount} && exec "$@"', "sh")
