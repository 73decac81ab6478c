"""The state of the engine, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class EngineState(Enum):
    """The overall state of the engine."""

    UNINITIALIZED = "uninitialized"
    BUSY = "busy"
    READY = "ready"
    ERROR = "error"


class RequestPhase(Enum):
    """The stage of a request."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    ACTIVE = "active"


class HitKind(Enum):
    """The relation of a prompt to the stored one that it hit."""

    MISS = "miss"
    EXACT = "exact"
    SHORTER = "shorter"
    LONGER = "longer"
    DIVERGING = "diverging"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheStatus:
    """Counters of the prompt cache's files.

    Attributes:
        bytes: Size of the files of all models.
        files: Number of files of this model.
        read_tokens: Tokens whose KV was read back.
        damaged: Files set aside as damaged.
        dropped: Nodes that were not written because too many were waiting.
        written_bytes: Keys, values and states that were written.
    """

    bytes: int = 0
    files: int = 0
    read_tokens: int = 0
    damaged: int = 0
    dropped: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCacheStatus:
    """Counters of the prompt cache; totals since the model was loaded.

    Attributes:
        bytes: Size of all nodes.
        budget_bytes: Their limit; 0 without a prompt cache.
        tokens: Tokens stored, shared ones once.
        looked_up_tokens: Prompt tokens of all requests.
        hit_tokens: Those of them that came from the cache.
        hits: Requests by kind of hit: the stored prompt was the same, shorter, longer, or went
            on differently.
    """

    bytes: int = 0
    budget_bytes: int = 0
    nodes: int = 0
    tokens: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    hits: Mapping[HitKind, int] = field(default_factory=dict)
    evictions: int = 0
    disk: DiskCacheStatus = field(default_factory=DiskCacheStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One request that waits or runs.

    Attributes:
        prefilled_tokens: Prompt tokens in the KV cache.
        cached_tokens: Those of them that came from the prompt cache.
        hit_kind: The kind of that hit.
        first_token_ms: From submission to the first token; 0 before it.
        tokens_per_s: Since the first token.
        kv_bytes: What its KV cache takes at most by itself.
        kv_shared_bytes: What it uses of the prompt cache where it lies, perhaps with others.
        drafted_tokens: Tokens that were drafted for it.
        accepted_tokens: Those of them that it drew itself.
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
        resident_bytes: Physical memory that it holds; 0 where the system does not say.
    """

    role: str
    process_id: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A lost engine process, and how long nothing was computed until another had the model."""

    reason: str
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """A backend of this machine, as it tells the others.

    Attributes:
        process_id: Of its engine.
        held_bytes: By weights and media.
        reserved_bytes: By running requests.
        wanted_bytes: Beyond that, by requests that wait or grow.
        cached_bytes: By the part of the prompt cache that no running request uses.
        budget_bytes: What requests and prompt cache may take.
        is_own: Whether it is this one.
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
    """Who holds the memory that this backend shares with others.

    Attributes:
        usable_bytes: What all may take together.
        backends: This one first.
    """

    usable_bytes: int
    backends: tuple[BackendStatus, ...]

    @property
    def claimed_bytes(self) -> int:
        """What all may take by now."""
        return sum(backend.held_bytes + backend.budget_bytes for backend in self.backends)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot; counts are totals since the model was loaded.

    Attributes:
        memory_bytes: By part: `weights`, `kv_active`, `prompt_cache`, `mlx_active`, `mlx_cache`,
            `mlx_peak`; the reservations of running requests (`kv_reserved`), what they use of the
            prompt cache in place (`kv_shared`), what requests that wait or grow lack (`kv_wanted`),
            and the limit of reservations and prompt cache together (`kv_budget`).
        drafted_tokens: Tokens that were drafted ahead of the model.
        accepted_tokens: Those of them that the model drew itself.
        tokens_per_s: Generated by all requests together, of late.
        requests: All that wait or run.
        turn_s: Seconds in the present turn; the rest of the snapshot is from before it.
        processes: The server, and the engine unless it is being replaced.
        restarts: How many processes were replaced since the model was loaded.
        latest_restarts: The last of them.
        lost_s: The time that all of them took together.
        machine: Those who share the memory; `None` where nobody tells.
    """

    state: EngineState = EngineState.UNINITIALIZED
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    slots_taken: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    media_encoded: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tokens_per_s: float = 0.0
    prompt_cache: PromptCacheStatus = field(default_factory=PromptCacheStatus)
    requests: tuple[RequestStatus, ...] = ()
    turn_s: float = 0.0
    processes: tuple[ProcessStatus, ...] = ()
    restarts: int = 0
    latest_restarts: tuple[Restart, ...] = ()
    lost_s: float = 0.0
    machine: MachineStatus | None = None
