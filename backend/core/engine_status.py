"""The state of the engine, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from backend.core.metric_table import Values, zeros
from backend.core.prefix_listing import HitKind


class EngineState(Enum):
    """The overall state of the engine."""

    UNINITIALIZED = "uninitialized"
    BUSY = "busy"
    READY = "ready"
    ERROR = "error"


class RequestPhase(Enum):
    """How far a request has come."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One waiting or running request.

    Attributes:
        prefilled_tokens: Prompt tokens in the KV cache.
        cached_tokens: The part of them that came from the prompt cache.
        first_token_ms: From submission to the first token; 0 until then.
        tokens_per_s: Rate since the first token.
        kv_bytes: Upper limit of its own KV cache.
        kv_shared_bytes: Prompt cache that it uses in place, perhaps together with other requests.
        drafted_tokens: Tokens that were drafted for it.
        accepted_tokens: The part of them that it drew itself.
    """

    request_id: str
    phase: RequestPhase
    prompt_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    hit_kind: HitKind
    generated_tokens: int
    first_token_ms: float
    tokens_per_s: float
    kv_bytes: int = 0
    kv_shared_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """A process of the backend.

    Attributes:
        role: `server` or `engine`.
        resident_bytes: Physical memory in use; 0 where the system does not say.
    """

    role: str
    process_id: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A lost engine process, and how long it took until its successor had loaded the model."""

    reason: str
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """A backend on this machine, as it reports itself to the others.

    Attributes:
        process_id: Id of its engine process.
        held_bytes: Used by weights and media.
        reserved_bytes: Reserved by running requests.
        wanted_bytes: Needed on top by requests that wait or grow.
        cached_bytes: Prompt cache not in use by a running request.
        budget_bytes: Limit for requests and prompt cache.
    """

    process_id: int
    model: str
    held_bytes: int
    reserved_bytes: int
    wanted_bytes: int
    cached_bytes: int
    budget_bytes: int
    is_busy: bool
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The backends that share this machine's memory, this one first."""

    usable_bytes: int
    backends: tuple[BackendStatus, ...]

    @property
    def claimed_bytes(self) -> int:
        """Memory claimed by all of them together."""
        return sum(backend.held_bytes + backend.budget_bytes for backend in self.backends)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot.

    Attributes:
        memory_bytes: By part: `weights`, `kv_active`, `prompt_cache`, `mlx_active`, `mlx_cache`,
            `mlx_peak`; the reservations of running requests (`kv_reserved`), the prompt cache that
            they use in place (`kv_shared`), the shortage of requests that wait or grow
            (`kv_wanted`), and the limit of reservations plus prompt cache (`kv_budget`).
        metrics: By key; counters since the loading of the model.
        processes: The server, and the engine unless it is being replaced.
        machine: The backends that share the memory; `None` if unknown.
    """

    state: EngineState = EngineState.UNINITIALIZED
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    metrics: Values = field(default_factory=zeros)
    requests: tuple[RequestStatus, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    latest_restarts: tuple[Restart, ...] = ()
    machine: MachineStatus | None = None
