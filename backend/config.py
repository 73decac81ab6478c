"""Every default of the backend, once: of the process and of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from common.options import OptionValue

DEFAULT_MAX_SLOTS = 16
MAX_SLOTS = 1024
MESSAGE_LIMIT_BYTES = 50 * 1024 * 1024
MAX_PENDING_CALLS = 2**17  # that have reached gRPC, and not yet the event loop
# Calls of one connection. The headers of each may take 1 MB, as gRPC reads them.
MAX_STREAMS, MAX_METADATA = 256, 64
# At most a half of the descriptors that the process may have: files and children need some.
MAX_CONNECTIONS = 1024
# Requests that arrive in part keep their bytes. So many may take longer than the first time, in
# seconds, and none longer than the second.
MAX_ARRIVING, ARRIVAL_GRACE_S, ARRIVAL_TIMEOUT_S = 64, 1.0, 120.0
# Of a request, with those of its inner messages. One with more than so many, and so many bytes, is
# decoded on a thread.
MAX_MESSAGE_FIELDS, INLINE_FIELDS, INLINE_BYTES = 100_000, 1024, 256 * 1024
DRAIN_TIMEOUT_S = 8.0
LONG_TURN_S = 120.0  # a longer one of the engine is reported as stuck
# For an engine to begin with the `EnvVars` of a load: an idle machine takes 1 to 3 s.
ENGINE_START_S = 90.0
# In one list of config.json: mlx-lm builds them all, without a chance to cancel.
MAX_LAYERS = 4096
# Limits of one request; `docs/reference/security.md` lists them.
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS = 64, 1024
MAX_LOGIT_BIASES = 4096
MAX_MESSAGES, MAX_TOOLS, MAX_CANDIDATES = 10_000, 1024, 1024
MAX_JOBS, MAX_ENDED_JOBS = 2, 64
MAX_TARGET_MODULES = 256
JOB_STOP_TIMEOUT_S, JOB_REPORT_INTERVAL_S = 60.0, 0.5
MAX_TOKEN_IDS = 2**20
# Of a text that is classified, in one pass of the network.
MAX_PART_TOKENS = 8192
MAX_LABELS, MAX_LABEL_CHARS = 128, 256
# A text with more characters than this per token of the context, or of MAX_TOKEN_IDS if that is
# more, is not tokenised.
MAX_CHARS_PER_TOKEN = 8
MAX_REQUEST_ID_CHARS = 128
LISTED_PREFIXES, MAX_LISTED_PREFIXES = 64, 1024
# Limits of common file systems.
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
# Of one JSON text.
MAX_JSON_CHARS = 4 * 2**20
MAX_JSON_DEPTH = 128
# Of a checkpoint's files; its libraries fail at a little more.
MAX_CHECKPOINT_JSON_DEPTH = 100
# Nobody else is served while they are parsed; the first kind takes longer.
MAX_CHECKPOINT_JSON_CONTAINERS, MAX_CHECKPOINT_JSON_VALUES = 2**17, 2**20
MAX_GRAMMAR_BYTES = 256 * 1024
# For one compilation, in processor time; and for all of the work on one grammar.
MAX_COMPILE_S, MAX_COMPILE_MEMORY_BYTES = 0.9, 2**30
MAX_WRITING_S = 20.0
GRAMMAR_PROCESSES = 3  # started when they are needed; one is for small rules alone
SMALL_RULE_BYTES, QUICK_RULE_S = 16 * 1024, 0.5
# Compiled ones in the engine: their number and all their text, 7 to 65 times less than they take.
MAX_KEPT_GRAMMARS, MAX_KEPT_GRAMMAR_CHARS = 64, 2**21
# Names and values of a load's environment variables.
MAX_ENVIRONMENT_BYTES = 64 * 1024
# A request with more bytes, or more messages, is parsed on a worker thread: either takes time.
INLINE_REQUEST_BYTES, INLINE_MESSAGES = 32 * 1024, 32
# After a larger one the heap is trimmed.
TRIMMED_REQUEST_BYTES = 256 * 1024
# For one rendering of a chat template, which is a program and may loop.
MAX_RENDER_S = 10.0
MAX_RENDER_MEMORY_BYTES = 2**30
# For its text, in characters.
MAX_RENDER_BYTES = 64 * 2**20
TEMPLATE_PROCESSES = 2  # started when they are needed
# A longer conversation is rendered by one more process, which lets others go first: 10,000 messages
# take 0.7 s. The pickled job has the template, the conversation and its possible continuations.
LONG_JOB_BYTES, LONG_JOB_MESSAGES = 2**20, 512
# Of processes for long texts and conversations, and for media: short requests come first.
LONG_TEXT_NICENESS, MEDIA_NICENESS = 10, 5
# For a helper process to finish a job whose caller has gone: a new one takes as long to start.
HELPER_GRACE_S = 1.5
# For one long text, tokenised in a process of its own.
MAX_ENCODE_CPU_S = 20
MAX_ENCODE_MEMORY_BYTES = 4 * 2**30
# Of the memory for KV caches, unless `max_cache_bytes` is set.
PROMPT_CACHE_MEMORY_SHARE = 0.25
# Of the arrays that a device can hold besides the weights: rows and passes hold others.
PROMPT_CACHE_ARRAY_SHARE = 0.5
# Of the device's memory, unless the host sets it; less than the second is no room for any model.
MEMORY_UTILIZATION, MIN_MEMORY_UTILIZATION = 0.9, 1e-7
# Of the memory, if the device reports no working set: other processes share that of a CPU, and
# MLX itself stops at this share of a CUDA device.
CPU_MEMORY_SHARE, CUDA_MEMORY_SHARE = 0.75, 0.95
# Weights that a CPU computes in float32: at least so many bytes, at most these shares of memory.
FLOAT32_MIN_BYTES = 16 * 2**20
FLOAT32_MEMORY_SHARE, DEQUANTISED_MEMORY_SHARE = 0.5, 0.25
# Passes of a training from which on a CPU compiles them: 30 to 40 kernels take 18 to 28 s of a C++
# compiler, and save a tenth of a pass.
CPU_COMPILES_FROM = 300
# Of the usable memory, for all weights of a mixture whose experts stay on disk.
EXPERT_MEMORY_SHARE = 0.6
# Of the memory besides the weights, for activations and copies of KV; and of the usable memory the
# minimum for KV caches, however large the weights are.
RESERVE_SHARE, MIN_KV_SHARE = 0.1, 0.02
# Of its limit, for a backend that cannot tell whether others take memory too.
UNTOLD_MEMORY_SHARE = 0.5
# The longest pass where the system ends a process whose work keeps the GPU: macOS does after a few
# seconds. Passes get slower as the context grows, so they aim at a share of it.
METAL_PASS_S, AIMED_PASS_SHARE = 1.0, 0.5
# How many times as long a chunk of a prompt may take while no row decodes. Each has a fixed cost,
# 0.3 s of a CPU with 135M parameters, where 2.2 ms are those of a token.
PREFILL_ALONE_PAUSES = 3
# Stored KV that is copied in one go, and of each loss of an engine over a request, how many times
# smaller its pieces and passes are in the next.
COPY_PIECE_BYTES, CUT_PER_LOSS = 2**30, 4
# How long requests wait for a model that is being loaded.
MODEL_WAIT_S = 60.0
# How long weights and requests wait for memory held by other backends on the machine.
LOAD_ROOM_WAIT_S, MEMORY_WAIT_S = 3.0, 30.0
# Recent outputs of towers, and of processors.
MEDIA_MEMO_BYTES = 256 * 2**20
PREPARED_MEDIA_BYTES = 64 * 2**20
MEDIA_BYTES = MEDIA_MEMO_BYTES + PREPARED_MEDIA_BYTES
# Threads that prepare requests: small ones, large ones, and those with media.
LIGHT_THREADS, HEAVY_THREADS, MEDIA_THREADS = 4, 2, 2
DECODING_THREADS = 1  # protobuf holds the GIL
LIGHT_WORK_BYTES = 32 * 1024
# Of work of many parts, how long it keeps a thread before others have it.
WORK_TURN_S = 0.005
# How long a thread of the server keeps the event loop waiting: a tenth of Python's own time.
SWITCH_INTERVAL_S = 0.0005
# Maximum requests of a kind that wait for their threads, and their total size.
MAX_QUEUED_WORK, MAX_QUEUED_WORK_BYTES = 1024, 2**30

# Limits of one medium, as a file and decoded.
MAX_IMAGE_BYTES, MAX_AUDIO_BYTES, MAX_VIDEO_BYTES = 20 * 2**20, 32 * 2**20, 32 * 2**20
# The largest picture that a tower takes whole: the `longest_edge` of Qwen3-VL.
MAX_IMAGE_PIXELS = 2**24
# A JPEG can be decoded at a half of its width and height, or less.
MAX_JPEG_PIXELS = 4 * MAX_IMAGE_PIXELS
# For one medium, decoded in a process of its own.
MAX_DECODE_CPU_S = 30
MAX_DECODE_MEMORY_BYTES = 2**31
DECODE_PROCESSES = 2  # started when they are needed
# mlx-vlm's processors fail beyond it.
MAX_ASPECT_RATIO = 200
MAX_AUDIO_S = 600
# Of all channels, at the rate of the file.
MAX_AUDIO_SAMPLES = 64_000_000
# For files to transcribe, which are split into passages.
MAX_SPEECH_BYTES, MAX_SPEECH_S = 512 * 2**20, 3600
MAX_SPEECH_SAMPLES = 640_000_000
SPEECH_RATE_HZ = 16_000
SPEECH_PASSAGE_S = 30
MAX_PASSAGE_TOKENS = 512
MAX_TRANSCRIPTIONS = 4
MAX_LANGUAGE_CHARS, MAX_HINT_CHARS = 64, 4096
# Frames used of a video, then frames decoded to choose them.
MAX_VIDEO_FRAMES = 32
MAX_VIDEO_PIXELS = 100_000_000
MAX_FILM_DECODED_PIXELS = 4_000_000_000
# Pillow takes several times as long for a frame as FFmpeg does.
MAX_ANIMATION_DECODED_PIXELS = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The configuration of the process, from argv and the environment.

    Attributes:
        metrics_address: Address for Prometheus to scrape; empty for none.
        dashboard_address: Address of the dashboard; empty for none.
        model: Loaded at the start: a path, a hub id or `demo`; empty for none.
        traces: Whether the environment names an OpenTelemetry collector.
        max_slots: Default of the option of this name.
        parent: The process that started this one, recorded before Python ran, if known.
    """

    address: str = "127.0.0.1:50051"
    metrics_address: str = ""
    dashboard_address: str = ""
    model: str = ""
    traces: bool = False
    max_slots: int = DEFAULT_MAX_SLOTS
    auth_token: str = ""
    parent: int | None = None
    watches_parent: bool = True
    parent_watch_interval_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """The sharing of the engine among requests."""

    max_slots: int = DEFAULT_MAX_SLOTS
    max_waiting: int = 256
    batching: bool = True
    prefill_chunk: int = 512
    prefill_chunk_alone: int = 2048
    prefill_pause_ms: int = 500
    max_replies_per_s: int = 400
    side_share: float = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The memory of KV caches."""

    max_kv_bytes: int | None = None
    expected_tokens: int = 1024
    memory_ledger: bool = True
    kv_bits: int | None = None
    kv_group_size: int = 64
    wired_limit_mb: int = 0
    expert_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCacheOptions:
    """The size and place of the prompt cache."""

    max_cache_bytes: int | None = None
    cache_dir: str | None = None
    cache_sharing: str = "all"
    max_cache_disk_bytes: int = 10 * 2**30
    cache_bits: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """The values for requests that do not set them."""

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
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The rendering of prompts and the parsing of replies."""

    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None
    write_tools: bool = True
    constrain_calls: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    calls_in_thoughts: str = "draft"
    control_tokens: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The parts of a checkpoint to load."""

    trust_remote_code: bool = False
    vision: bool = True
    dequantize: bool = True
    experts: str = "resident"

    @property
    def keeps_experts_on_disk(self) -> bool:
        """Whether a pass reads the experts that it needs."""
        return self.experts == "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """The embedding of texts and the ranking of documents."""

    pooling: str | None = None
    truncate: bool = False
    reranker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """The processes that compute a model together."""

    tensor_parallel_size: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    distributed: str = "tensor"
    distributed_backend: str = "any"
    worker_timeout_s: int = 60

    @property
    def is_named(self) -> bool:
        """Whether the options may name more processes than one."""
        return bool(self.hosts or self.hostfile) or (self.tensor_parallel_size or 1) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """The drafting of tokens; replies do not change."""

    speculation: str = "auto"
    max_draft_tokens: int = 16
    draft_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """When to give up on the engine process, and the action to take."""

    engine_timeout_s: int = 300
    check_at_load: bool = False
    reload_timeout_s: int = 1800
    exit_when_broken: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """The `Options` (`key:value`) and `EngineArgs` (JSON) of a LoadModel, by subject.

    The public name of an option is that of its field, in whichever group; a test compares them
    with `docs/reference/options.md`, which documents each. `None` leaves it to the model or
    the request.
    """

    scheduling: SchedulingOptions = SchedulingOptions()
    memory: MemoryOptions = MemoryOptions()
    prompt_cache: PromptCacheOptions = PromptCacheOptions()
    requests: RequestDefaults = RequestDefaults()
    text: TextOptions = TextOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    retrieval: RetrievalOptions = RetrievalOptions()
    group: GroupOptions = GroupOptions()
    process: ProcessOptions = ProcessOptions()
    speculation: SpeculationOptions = SpeculationOptions()

    @classmethod
    def of(cls, **options: OptionValue) -> Self:
        """Return the defaults with these options replaced, by their public names."""
        return cls().updated(**options)

    def updated(self, **options: OptionValue) -> Self:
        """Return these options with some replaced, by their public names.

        Raises:
            TypeError: There is no option of a name.
        """
        groups = {}
        for group in fields(self):
            own = getattr(self, group.name)
            names = {option.name for option in fields(own)} & options.keys()
            groups[group.name] = replace(own, **{name: options.pop(name) for name in names})
        if options:
            raise TypeError(f"there is no option {', '.join(options)}")
        return replace(self, **groups)

    def by_name(self) -> Mapping[str, OptionValue]:
        """Return all options by their public names."""
        groups = (getattr(self, group.name) for group in fields(self))
        return {option.name: getattr(own, option.name) for own in groups for option in fields(own)}


DEFAULT_TUNING = TuningOptions()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter directory in mlx-lm's format, and the factor on its own scale.

    Attributes:
        field: The one that names it, for errors.
    """

    path: str
    scale: float = 1.0
    field: str = field(default="LoraAdapter", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The maximum number of media of each kind per request."""

    images: int = 32
    audios: int = 8
    videos: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of a LoadModel.

    Attributes:
        model: The host's name of the model: its identity, a path or a hub id.
        model_file: A local path; wins over `model` when it exists.
        models_dir: Where relative paths are looked up; `None` if the host sent none.
        max_model_len: Explicit context limit; `None` leaves the model's own.
        dtype: Weights are cast to it; `None` leaves them.
        memory_utilization: The usable share of the device's memory, from 0 to 1.
        threads: Maximum for matrix products on a Linux CPU; `None` is one per core.
        environment: Variables of the engine process, in place of inherited ones.
        state_dir: Of this user's files; set by the engine, `None` is that in the home.
    """

    model: str
    model_file: str = ""
    models_dir: Path | None = None
    tokenizer: str = ""
    trust_remote_code: bool = False
    max_model_len: int | None = None
    dtype: str | None = None
    memory_utilization: float = MEMORY_UTILIZATION
    threads: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    state_dir: Path | None = None
    adapters: tuple[Adapter, ...] = ()
    grammar_triggers: tuple[str, ...] = ()
    media_limits: MediaLimits = MediaLimits()
    tuning: TuningOptions = field(default_factory=TuningOptions)

    @property
    def trusts_remote_code(self) -> bool:
        """Whether the model's own Python code may run, by the field or by the option."""
        return self.trust_remote_code or self.tuning.checkpoint.trust_remote_code


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningDefaults:
    """The defaults of a fine-tuning: the host's own."""

    rank: int = 16
    alpha: int = 16
    learning_rate: float = 2e-4
    epochs: int = 3
    batch_size: int = 2
    accumulation: int = 4
    warmup_steps: int = 5
    weight_decay: float = 0.01
    seed: int = 3407
    max_tokens: int = 2048


FINE_TUNING = FineTuningDefaults()
# Of an adapter that is trained or loaded: MLX overflows beyond it.
MAX_ADAPTER_RANK = 2**16
