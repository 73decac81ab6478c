"""Injected faults to test recovery: a pass over some token ends the process, or worse."""

import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from backend.errors import BackendError
from backend.model.loaded import RunnableModel

_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_DEVICE = "device"
_EXIT = "exit"
_ON_SIGNAL = "usr1"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in a pass over a token.

    Attributes:
        kind: A signal to the process; `exit` from the model's code; `device`,
            after which every pass raises; or `usr1`, the same once the process gets SIGUSR1.
        token_id: The token; unused for `usr1`.
    """

    kind: str
    token_id: int | None

    def built_into(self, model: RunnableModel) -> RunnableModel:
        """Return a model with the fault."""
        network = _FaultyNetwork(model.network, self)
        if self.kind == _ON_SIGNAL:
            signal.signal(signal.SIGUSR1, lambda *_: network.lose_device())
        return replace(model, network=network)

    def strike(self) -> None:
        """Trigger the fault."""
        if self.kind == _EXIT:
            raise SystemExit
        if self.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.kind])


def parse_fault(text: str) -> InjectedFault | None:
    """Return the fault of `kind:token`; `None` for no text.

    Raises:
        BackendError: The text is something else.
    """
    if not text:
        return None
    kind, _, token = text.partition(":")
    if kind not in (*_SIGNALS, _DEVICE, _EXIT, _ON_SIGNAL) or not f"0{token}".isdecimal():
        raise BackendError(f"{text!r} is no fault: try segv:7")
    return InjectedFault(kind, int(token) if token else None)


class _FaultyNetwork:
    """Wraps a network."""

    def __init__(self, network: Any, fault: InjectedFault) -> None:  # noqa: ANN401
        self._network = network
        self._fault = fault
        self._is_broken = False

    def lose_device(self) -> None:
        """Make every further pass raise."""
        self._is_broken = True

    def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        token_id = self._fault.token_id
        if token_id is not None and (inputs == token_id).any().item():
            self.lose_device()
            self._fault.strike()
        if self._is_broken:
            raise RuntimeError("[METAL] Command buffer execution failed: the device was lost")
        return self._network(inputs, *arguments, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._network, name)
