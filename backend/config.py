"""Every default of the backend, once: of the process and of a model."""

from dataclasses import dataclass, field
from pathlib import Path

MESSAGE_LIMIT_BYTES = 50 * 1024 * 1024
DRAIN_TIMEOUT_S = 8.0
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_CANDIDATES = 1024
# Of the memory beside the weights, unless `max_cache_bytes` says otherwise.
PROMPT_CACHE_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the process serves; built from argv and the environment in `__main__`.

    Attributes:
        metrics_address: Where Prometheus may scrape; empty is nowhere.
    """

    address: str = "127.0.0.1:50051"
    metrics_address: str = ""
    auth_token: str = ""
    watches_parent: bool = True
    parent_watch_interval_s: float = 2.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """What `Options` (`key:value`) and `EngineArgs` (JSON) of a LoadModel may set.

    Every field is documented in `docs/options.md`; a test compares the two. `None` means
    that the model or the request decides.
    """

    max_slots: int = 16
    max_waiting: int = 256
    prefill_chunk: int = 512
    prefill_chunk_alone: int = 2048
    prefill_pause_ms: int = 500
    max_replies_per_s: int = 400
    max_cache_bytes: int | None = None
    cache_dir: str | None = None
    max_cache_disk_bytes: int = 10 * 2**30
    cache_bits: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    enable_thinking: bool | None = None
    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None
    constrain_calls: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    trust_remote_code: bool = False
    batching: bool = True
    pooling: str | None = None
    truncate: bool = False
    reranker: str | None = None
    wired_limit_mb: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter directory in mlx-lm's format, and the factor on its own scale."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a LoadModel asks for.

    Attributes:
        model: The host's name of the model: its identity, a path or a hub id.
        model_file: A local path; wins over `model` when it exists.
        models_dir: Where relative paths are looked up; `None` when the host sent none.
        max_model_len: Explicit context limit; `None` leaves the model's own.
        dtype: Weights are cast to it; `None` leaves them.
    """

    model: str
    model_file: str = ""
    models_dir: Path | None = None
    tokenizer: str = ""
    trust_remote_code: bool = False
    max_model_len: int | None = None
    dtype: str | None = None
    adapters: tuple[Adapter, ...] = ()
    grammar_triggers: tuple[str, ...] = ()
    tuning: TuningOptions = field(default_factory=TuningOptions)

    @property
    def trusts_remote_code(self) -> bool:
        """Whether Python code of the model's own may run; either place may say so."""
        return self.trust_remote_code or self.tuning.trust_remote_code
