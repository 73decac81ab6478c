"""An engine process with a fault, to test recovery: a pass over some token ends it, or worse.

The fault is in the environment, as `kind:token`; with `load:rank` a rank dies as it loads. Run
without arguments of a rank, this is a server whose engines have it.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from backend.engine import processes

if TYPE_CHECKING:
    from backend.model.loaded import RunnableModel

VARIABLE = "MLX_BACKEND_TEST_FAULT"
FAULTY_BOOT = processes.BOOT.replace("backend.rank", "scripts.faulty_rank")

_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_DEVICE = "device"
_EXIT = "exit"
_ON_SIGNAL = "usr1"
_WATCHDOG = "watchdog"
_LOAD = "load"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in a pass over a token.

    Attributes:
        kind: A signal to the process; `exit` from the model's code; `device`,
            after which every pass raises; `usr1`, the same once the process gets SIGUSR1; or
            `watchdog`, for which a pass over more tokens than `token_id` is the fault.
        token_id: The token; unused for `usr1`.
    """

    kind: str
    token_id: int | None

    def built_into(self, model: "RunnableModel") -> "RunnableModel":
        """Return a model with the fault."""
        network = _FaultyNetwork(model.network, self)
        if self.kind == _ON_SIGNAL:
            signal.signal(signal.SIGUSR1, lambda *_: network.lose_device())
        return replace(model, network=network)

    def strike(self) -> None:
        """Trigger the fault."""
        if self.kind == _EXIT:
            raise SystemExit
        if self.kind in (*_SIGNALS, _WATCHDOG):
            os.kill(os.getpid(), _SIGNALS.get(self.kind, signal.SIGKILL))


def have_engines_fail() -> None:
    """Have engines of this process start with the fault that is in their environment."""
    processes.BOOT = FAULTY_BOOT


def install(text: str, arguments: Sequence[str]) -> None:
    """Build a fault into the models that this process loads, if it is the rank that has it.

    Args:
        text: `kind:token` for the first rank, or `load:rank`.
        arguments: Of this rank.

    Raises:
        ValueError: It is something else.
    """
    from backend.engine import assembly
    from backend.engine.distributed import linking as shard

    kind, _, token = text.partition(":")
    rank = arguments[arguments.index("--rank") + 1] if "--rank" in arguments else "0"
    if rank != (token if kind == _LOAD else "0"):
        return
    if kind == _LOAD:
        shard.load = lambda *_given, **_options: os.kill(os.getpid(), signal.SIGKILL)
        return
    if kind not in (*_SIGNALS, _DEVICE, _EXIT, _ON_SIGNAL, _WATCHDOG):
        raise ValueError(f"{text!r} is no fault: try segv:7")
    fault, load, read = (
        InjectedFault(kind, int(token) if token else None),
        shard.load,
        assembly.read,
    )
    shard.load = lambda *given, **options: fault.built_into(load(*given, **options))
    assembly.read = lambda *given, **options: fault.built_into(read(*given, **options))


def main() -> None:
    """Be a rank, the first one of a group with the fault, or else a server with such engines."""
    have_engines_fail()
    if "--parent" not in sys.argv:
        runpy.run_module("backend", run_name="__main__", alter_sys=True)
        return
    install(os.environ[VARIABLE], sys.argv)
    runpy.run_module("backend.rank", run_name="__main__", alter_sys=True)


class _FaultyNetwork:
    """Wraps a network."""

    def __init__(self, network: Any, fault: InjectedFault) -> None:  # noqa: ANN401
        self._network = network
        self._fault = fault
        self._is_broken = False

    def lose_device(self) -> None:
        """Make every further pass raise."""
        self._is_broken = True

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        token_id = self._fault.token_id
        if self._fault.kind == _WATCHDOG:
            is_hit = inputs.size > (token_id or 0)
        else:
            is_hit = token_id is not None and (inputs == token_id).any().item()
        if is_hit:
            self.lose_device()
            self._fault.strike()
        if self._is_broken:
            raise RuntimeError("[METAL] Command buffer execution failed: the device was lost")
        return self._network(inputs, *arguments, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._network, name)


if __name__ == "__main__":
    main()
