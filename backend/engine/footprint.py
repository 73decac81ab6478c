"""The memory of a model, estimated before its weights are read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from backend.config import MEDIA_BYTES, ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.engine.rows.admission import KvProfile, kv_budget_bytes, working_set_bytes
from backend.engine.trials.draft_model import foresee_draft
from backend.engine.trials.pass_costs import foresee_kv
from backend.model.checkpoint.expert_store import read_rate
from backend.model.checkpoint.gate import tokenizer_directory
from backend.model.checkpoint.weights import files_bytes, memory_bytes
from backend.model.experts import layers_of_experts
from backend.model.loaded import RunnableModel
from backend.model.loader import look
from backend.model.text.tokenizer_file import TOKENIZER_FILE

KV_WIDTHS = (None, 8, 4)
# Measured on Linux, without a model: Python, its libraries, MLX. They hold no more on a Mac.
SERVER_BYTES, ENGINE_BYTES = 110_000_000, 115_000_000
# A vocabulary in a Rust tokenizer, for each byte of tokenizer.json and for each token; a library
# without that file has Python objects.
_RUST_BYTES, _RUST_TOKEN_BYTES, _PYTHON_TOKEN_BYTES = 2.2, 75, 300
# The bytes of a token beside it, and its place in the tree that grammars are checked with.
_PIECE_BYTES, _TREE_BYTES = 55, 380


@dataclass(frozen=True, slots=True)
class KvForecast:
    """The KV caches at one width.

    Attributes:
        bits: The option `kv_bits`; `None` leaves the model's own type.
    """

    bits: int | None
    profile: KvProfile


@dataclass(frozen=True, slots=True)
class ExpertForecast:
    """The experts of a mixture, on disk.

    Attributes:
        store_bytes: Of the file with all of them.
        budget_bytes: For those in memory; a part of the weights.
        token_bytes: Read for a token if none is in memory.
    """

    store_bytes: int
    budget_bytes: int
    token_bytes: int
    disk_bytes_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of one stream at best, if none is in memory."""
        return self.disk_bytes_per_s / self.token_bytes


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """A model on this machine; sizes are in bytes.

    Attributes:
        vocabulary_bytes: The tokens in both processes, with the tree for grammars.
        draft: The card of its draft model, if one was named; its KV is a part of each profile.
        media_bytes: Kept for images and audio; 0 for a text model.
        budget_bytes: For the KV caches of all requests and of the prompt cache.
        caches: For each useful width, the widest first; none of an encoder.
        experts: Those that stay on disk, if any.
        is_mixture: Whether it has experts in memory that could stay there.
    """

    card: ModelCard
    files_bytes: int
    vocabulary_bytes: int
    memory_bytes: int
    working_set_bytes: int
    draft: ModelCard | None = None
    media_bytes: int = 0
    budget_bytes: int = 0
    caches: tuple[KvForecast, ...] = ()
    experts: ExpertForecast | None = None
    is_mixture: bool = False

    server_bytes: ClassVar[int] = SERVER_BYTES
    engine_bytes: ClassVar[int] = ENGINE_BYTES

    @property
    def weights_bytes(self) -> int:
        """Size of all weights, including a draft model's."""
        return self.card.weights_bytes + (self.draft.weights_bytes if self.draft else 0)

    @property
    def resident_bytes(self) -> int:
        """The memory that server and engine hold after a load, before any request."""
        return SERVER_BYTES + ENGINE_BYTES + self.vocabulary_bytes + self.weights_bytes

    @property
    def free_bytes(self) -> int:
        """The memory left to compute with, for neither weights nor KV nor media."""
        taken = self.weights_bytes + self.budget_bytes + self.media_bytes
        return max(0, self.working_set_bytes - taken)

    @property
    def has_room(self) -> bool:
        """Whether the weights fit into the memory."""
        return self.weights_bytes <= self.memory_bytes

    def rows(self, cache: KvForecast, tokens: int) -> int:
        """Return the number of concurrent requests of a length in tokens."""
        return self.budget_bytes // cache.profile.row_bytes(tokens) if self.has_room else 0


def forecast(
    options: ModelOptions, directory: Path, disk_bytes_per_s: float | None = None
) -> MemoryForecast:
    """Return a model's memory; reads its files except the weights.

    Args:
        options: Of the future load; a draft model is named by its directory.
        disk_bytes_per_s: The rate of a disk with experts; `None` measures that of the checkpoint.

    Raises:
        LoadError: It cannot be loaded; or its draft model cannot be, is an encoder, or cannot
            draft for it.
    """
    model = look(options, directory)
    if model.card.kind is not ModelKind.DECODER:
        return _of_encoder(options, directory, model)
    draft, draft_profile = foresee_draft(options, model) or (None, None)
    media_bytes = MEDIA_BYTES if model.media else 0
    working_set = working_set_bytes()
    weights_bytes = model.card.weights_bytes + (draft.weights_bytes if draft else 0)
    profiles: dict[KvProfile, KvForecast] = {}
    for bits in KV_WIDTHS:
        memory = replace(options.tuning.memory, kv_bits=bits)
        own = foresee_kv(model.network, replace(options.tuning, memory=memory))
        if own is None:
            continue
        profile = replace(own, draft=draft_profile)
        profiles.setdefault(profile, KvForecast(bits, profile))
    return MemoryForecast(
        card=model.card,
        files_bytes=files_bytes(directory),
        vocabulary_bytes=_vocabulary_bytes(options, model),
        draft=draft,
        media_bytes=media_bytes,
        memory_bytes=memory_bytes(),
        working_set_bytes=working_set,
        budget_bytes=kv_budget_bytes(options, weights_bytes, working_set, media_bytes=media_bytes),
        caches=tuple(profiles.values()),
        experts=_experts(model, directory, disk_bytes_per_s),
        is_mixture=bool(layers_of_experts(model.network)),
    )


def _experts(
    model: RunnableModel, directory: Path, disk_bytes_per_s: float | None
) -> ExpertForecast | None:
    experts = model.experts
    if experts is None:
        return None
    return ExpertForecast(
        store_bytes=experts.store_bytes,
        budget_bytes=experts.budget_bytes,
        token_bytes=experts.token_bytes,
        disk_bytes_per_s=disk_bytes_per_s or read_rate(list(directory.glob("*.safetensors"))),
    )


def _of_encoder(options: ModelOptions, directory: Path, model: RunnableModel) -> MemoryForecast:
    """Return the memory of an encoder, which has no KV cache."""
    return MemoryForecast(
        card=model.card,
        files_bytes=files_bytes(directory),
        vocabulary_bytes=_vocabulary_bytes(options, model),
        memory_bytes=memory_bytes(),
        working_set_bytes=working_set_bytes(),
    )


def _vocabulary_bytes(options: ModelOptions, model: RunnableModel) -> int:
    """Return the memory of a model's tokens in both processes."""
    tokens = len(model.tokenizer.vocabulary)
    file = tokenizer_directory(options, Path(model.card.path)) / TOKENIZER_FILE
    held = tokens * _PYTHON_TOKEN_BYTES
    if file.is_file():
        held = int(_RUST_BYTES * file.stat().st_size) + tokens * _RUST_TOKEN_BYTES
    if model.card.kind is ModelKind.DECODER:
        return 2 * (held + tokens * _PIECE_BYTES) + model.card.vocab_size * _TREE_BYTES
    return 2 * held + tokens * _PIECE_BYTES
