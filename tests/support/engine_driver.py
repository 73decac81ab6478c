"""Sessions on tiny networks, driven turn by turn without a thread."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.config import TuningOptions
from backend.core.delta import FinishReason
from backend.core.model import ModelCard
from backend.core.prompt import Prompt
from backend.core.request import GenerationRequest, SamplingParams
from backend.core.step import PrefillDone, StepLogprobs, TokenStep
from backend.engine.stream import Publication
from backend.errors import BackendError
from scripts.tiny_models import VOCAB_SIZE

VOCAB = VOCAB_SIZE


@dataclass
class Outcome:
    """What became of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BackendError | None = None
    cached_tokens: int = 0


class Driver:
    """A session and what it has published so far."""

    def __init__(self, network: Any, *, batches: bool = True, **tuning: Any) -> None:
        from backend.cache.packing import Packing
        from backend.engine.admission import KvProfile, Reservations
        from backend.engine.caches import make_cache_factory
        from backend.engine.disk_link import DiskSettings
        from backend.engine.keeper import make_keeper
        from backend.engine.kv_profile import measure
        from backend.engine.session import Session
        from backend.model.loaded import RunnableModel

        card = ModelCard(
            name="tiny",
            path="",
            model_type="tiny",
            context_length=4096,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            weights_bytes=0,
            supports_tools=False,
            supports_thinking=False,
            batches=batches,
        )
        model = RunnableModel(tokenizer=None, template=None, card=card, network=network)
        self.published: list[Publication] = []
        options = TuningOptions(**{"prefill_chunk_alone": 64, "max_replies_per_s": 0, **tuning})
        fresh_caches = make_cache_factory(network, options)
        self.fetched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        disk = DiskSettings(
            root=Path(options.cache_dir) if options.cache_dir else None,
            fingerprint="tiny",
            budget_bytes=options.max_cache_disk_bytes,
            post=self.fetched.put,
        )
        budget_bytes = 2**30 if options.max_cache_bytes is None else options.max_cache_bytes
        keeper = make_keeper(fresh_caches, budget_bytes, Packing(options.cache_bits), disk)
        is_free = options.max_kv_bytes is None
        profile = KvProfile() if is_free else measure(network, fresh_caches)
        kv_bytes = options.max_kv_bytes or 2**30
        reservations = Reservations(profile, kv_bytes, options.expected_tokens)
        self.session = Session(
            model, fresh_caches, keeper, reservations, options, self.published.extend
        )
        self.outcomes: dict[str, Outcome] = {}

    def turn(self) -> None:
        try:
            self.session.turn()
        except Exception as error:  # noqa: BLE001 (as the worker does)
            self.session.recover(error)
        self.session.check()
        published, self.published[:] = list(self.published), []
        for publication in published:
            outcome = self.outcomes.setdefault(publication.request_id, Outcome())
            match publication.event:
                case TokenStep(token_id, reason, logprobs):
                    assert outcome.finish is None, "a step after the finish"
                    outcome.token_ids.append(token_id)
                    outcome.logprobs.append(logprobs)
                    outcome.finish = reason
                case PrefillDone(cached_tokens):
                    outcome.cached_tokens = cached_tokens
                case BackendError() as error:
                    outcome.error = error

    def outcome(self, request: GenerationRequest) -> Outcome:
        return self.outcomes.get(request.request_id, Outcome())

    def run(self, *requests: GenerationRequest) -> list[Outcome]:
        for request in requests:
            self.session.submit(request)
        while not self.session.is_idle or self.session.status().waiting:
            if self.session.is_idle:
                self.session.take_in(self.fetched.get(timeout=10))
            self.turn()
        return [self.outcomes[request.request_id] for request in requests]


def make_request(
    name: str, token_ids: Sequence[int], *, max_tokens: int = 12, **options: Any
) -> GenerationRequest:
    sampling = options.pop("sampling", SamplingParams())
    return GenerationRequest(
        request_id=name,
        prompt=Prompt(tuple(token_ids), boundaries=tuple(options.pop("boundaries", ()))),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(options.pop("stop", ())),
        **options,
    )


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(37 * i + 11 * salt + i * i) % VOCAB for i in range(length)]


def room_for(network: Any, tokens: int, *, rows: int = 1) -> int:
    """Return the bytes of so many rows that hold so many tokens each."""
    from backend.engine.caches import make_cache_factory
    from backend.engine.kv_profile import measure

    profile = measure(network, make_cache_factory(network, TuningOptions()))
    return rows * profile.row_bytes(tokens)
