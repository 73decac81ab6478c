"""Every default of the backend, once: of the process and of a model."""

from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_MAX_SLOTS = 16
MAX_SLOTS = 1024
MESSAGE_LIMIT_BYTES = 50 * 1024 * 1024
DRAIN_TIMEOUT_S = 8.0
# A turn of the engine that takes longer than this is reported: it may never end.
LONG_TURN_S = 120.0
# In one list of a model's config.json; mlx-lm builds as many as it says, and asks nobody between.
MAX_LAYERS = 4096
# What one request may hold; `docs/security.md` lists these.
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIASES = 4096
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_CANDIDATES = 1024
MAX_TOKEN_IDS = 2**20
MAX_REQUEST_ID_CHARS = 128
# What no common system takes more of.
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
# Of one JSON text. Python's own parser is the slower the more of it there is.
MAX_JSON_CHARS = 4 * 2**20
MAX_JSON_DEPTH = 128
MAX_GRAMMAR_BYTES = 256 * 1024
# A larger request is parsed beside the event loop.
INLINE_REQUEST_BYTES = 256 * 1024
# One rendering of a chat template; a template is code, and may loop.
MAX_RENDER_S = 10.0
# Of the memory for KV caches, unless `max_cache_bytes` says otherwise.
PROMPT_CACHE_MEMORY_SHARE = 0.25
# Of the device's memory, unless the host says otherwise.
MEMORY_UTILIZATION = 0.9
# What is used of the memory where the device names no working set: on a CPU others live there
# too, and MLX itself stops at this share of a CUDA device.
CPU_MEMORY_SHARE = 0.75
CUDA_MEMORY_SHARE = 0.95
# Of what is beside the weights, for activations and for copies of KV on their way.
RESERVE_SHARE = 0.1
# Of the memory: so much is for KV caches however large the weights are.
MIN_KV_SHARE = 0.02
# What towers made of media of late, and what processors did.
MEDIA_MEMO_BYTES = 256 * 2**20
PREPARED_MEDIA_BYTES = 64 * 2**20
# Decode and prepare the media of all requests.
MEDIA_THREADS = 2

# What one medium of a request may be: as a file, and decoded.
MAX_IMAGE_BYTES = 20 * 2**20
MAX_AUDIO_BYTES = 32 * 2**20
MAX_VIDEO_BYTES = 32 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
# Processors of mlx-vlm fail beyond it.
MAX_ASPECT_RATIO = 200
MAX_AUDIO_S = 600
# Of all channels, at the rate of the file.
MAX_AUDIO_SAMPLES = 64_000_000
# Kept of a video, then what is decoded to choose it.
MAX_VIDEO_FRAMES = 32
MAX_VIDEO_PIXELS = 100_000_000
MAX_FILM_DECODED_PIXELS = 4_000_000_000
# Pillow takes several times as long for a frame as FFmpeg does.
MAX_ANIMATION_DECODED_PIXELS = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the process serves; built from argv and the environment in `__main__`.

    Attributes:
        metrics_address: Where Prometheus may scrape; empty is nowhere.
        traces: Whether the environment names a collector of OpenTelemetry's.
        max_slots: Default of the option of this name.
    """

    address: str = "127.0.0.1:50051"
    metrics_address: str = ""
    traces: bool = False
    max_slots: int = DEFAULT_MAX_SLOTS
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

    max_slots: int = DEFAULT_MAX_SLOTS
    max_waiting: int = 256
    prefill_chunk: int = 512
    prefill_chunk_alone: int = 2048
    prefill_pause_ms: int = 500
    max_replies_per_s: int = 400
    max_kv_bytes: int | None = None
    expected_tokens: int = 1024
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
    vision: bool = True
    side_share: float = 0.06
    pooling: str | None = None
    truncate: bool = False
    reranker: str | None = None
    wired_limit_mb: int = 0
    tensor_parallel_size: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    distributed: str = "tensor"
    distributed_backend: str = "any"
    worker_timeout_s: int = 60


DEFAULT_TUNING = TuningOptions()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter directory in mlx-lm's format, and the factor on its own scale."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """How many media of each kind one request may bring."""

    images: int = 32
    audios: int = 8
    videos: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a LoadModel asks for.

    Attributes:
        model: The host's name of the model: its identity, a path or a hub id.
        model_file: A local path; wins over `model` when it exists.
        models_dir: Where relative paths are looked up; `None` when the host sent none.
        max_model_len: Explicit context limit; `None` leaves the model's own.
        dtype: Weights are cast to it; `None` leaves them.
        memory_utilization: How much of the device's memory may be used, from 0 to 1.
    """

    model: str
    model_file: str = ""
    models_dir: Path | None = None
    tokenizer: str = ""
    trust_remote_code: bool = False
    max_model_len: int | None = None
    dtype: str | None = None
    memory_utilization: float = MEMORY_UTILIZATION
    adapters: tuple[Adapter, ...] = ()
    grammar_triggers: tuple[str, ...] = ()
    media_limits: MediaLimits = MediaLimits()
    tuning: TuningOptions = field(default_factory=TuningOptions)

    @property
    def trusts_remote_code(self) -> bool:
        """Whether Python code of the model's own may run; either place may say so."""
        return self.trust_remote_code or self.tuning.trust_remote_code
