"""Loops on tiny networks, driven turn by turn without a thread."""

import math
import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_events import events_in

from backend.config import TuningOptions
from backend.core.model import ModelCard
from backend.core.prompt import Prompt
from backend.core.request import GenerationParams, GenerationRequest
from backend.core.scoring import Embedding
from backend.core.step import FinishReason, PrefillDone, StepLogprobs, TokenStep
from backend.engine.drafts.pricing import PassCosts
from backend.engine.messages.protocol import DiskNews, Fetched, Resize, Told
from backend.errors import BackendError
from scripts.tiny_models import VOCAB_SIZE

VOCAB = VOCAB_SIZE


@dataclass
class Outcome:
    """The tokens and the end of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BackendError | None = None
    cached_tokens: int = 0
    parted_at: int = 0


_PLANS: dict[tuple[int, int | None], tuple[Any, Any]] = {}


def _plan_of(network: Any, fresh_caches: Any) -> Any:
    """Look once at a network with its caches, at the inner one of those that are made to fail."""
    from whole_trial import batch_plan

    while hasattr(network, "network"):
        network = network.network
    key = id(network), fresh_caches.bits if fresh_caches.group_sizes else None
    if key not in _PLANS:
        inner = replace(fresh_caches, network=network)
        _PLANS[key] = network, batch_plan(network, inner, range(VOCAB))
    return _PLANS[key][1]


def model_of(network: Any, vocab: int = VOCAB, *, batches: bool = True) -> Any:
    """Return a network as a loaded model."""
    from backend.model.loaded import RunnableModel

    card = ModelCard(
        name="tiny",
        path="",
        model_type="tiny",
        context_length=4096,
        vocab_size=vocab,
        eos_token_ids=frozenset(),
        weights_bytes=0,
        supports_tools=False,
        supports_thinking=False,
        batches=batches,
    )
    return RunnableModel(tokenizer=None, template=None, card=card, network=network)


class FixedCosts(PassCosts):
    """Passes that cost the same however busy the machine is."""

    def observe(self, _rows, _width, _seconds):
        """Learn nothing."""

    def wants_plain(self, _rows):
        return False


class Desk:
    """The port of a loop without a server: a test gives the commands and reads the results.

    Attributes:
        commands: For the next turn.
        paces: For the next turns; without any, the loop's own clock decides.
        published: Events that have been handed over.
        results: Of jobs, by their numbers.
        passes: The requests of each pass that was announced.
        fetched: Nodes that the disk has read.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.commands: deque[Any] = deque()
        self.paces: deque[Any] = deque()
        self.published: list[Told] = []
        self.results: dict[int, Any] = {}
        self.passes: list[tuple[str, ...]] = []
        self.fetched: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def post(self, news: DiskNews | Resize) -> None:
        if isinstance(news, Fetched):
            self.fetched.put(news)

    def receive(self, *, waits: bool, timeout_s: float | None) -> list[Any]:  # noqa: ARG002
        commands = list(self.commands)
        self.commands.clear()
        return commands

    def agree(self, pace: Any) -> Any:
        return self.paces.popleft() if self.paces else pace

    def note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:  # noqa: ARG002
        self.passes.append(tuple(request_ids))

    def hand_over(self, told: Told) -> None:
        self.published.append(told)

    def answer(self, results: Sequence[tuple[int, object]]) -> None:
        self.results |= results

    def report(self, loop: Any, *, is_idle: bool) -> None:
        """Tell nobody."""

    def send_status(self, loop: Any) -> None:
        """Tell nobody."""


class Driver:
    """A loop and the results that it has published so far."""

    def __init__(
        self,
        network: Any,
        *,
        batches: bool = True,
        plan: Any = None,
        is_replicated: bool = False,
        pass_seconds: Any = None,
        learns_costs: bool = False,
        draft: Any = None,
        vocab: int = VOCAB,
        pass_bytes: float = math.inf,
        **tuning: Any,
    ) -> None:
        from whole_trial import measure

        from backend.cache.kv import Packing, Size
        from backend.engine.assembly import prompt_cache_arrays
        from backend.engine.loop import EngineLoop
        from backend.engine.parts import Resources
        from backend.engine.passes.caches import make_cache_factory
        from backend.engine.plan import Batching, BatchPlan
        from backend.engine.prefix_store import DiskSettings, PrefixStore
        from backend.engine.rows.admission import KvProfile, Reservations

        model = model_of(network, vocab, batches=batches)
        self.desk = Desk(is_shared=is_replicated)
        options = TuningOptions.of(**{"prefill_chunk_alone": 64, "max_replies_per_s": 0, **tuning})
        fresh_caches = make_cache_factory(network, options)
        if plan is None:
            plan = _plan_of(network, fresh_caches) if batches else BatchPlan(Batching.NONE)
        plan = replace(plan, pass_seconds=pass_seconds or {}, packs=plan.has_own_lengths)
        fresh_caches = replace(fresh_caches, plan=plan)
        cache = options.prompt_cache
        disk = DiskSettings(
            root=Path(cache.cache_dir) if cache.cache_dir else None,
            fingerprint="0123456789abcdef01234567",
            budget_bytes=cache.max_cache_disk_bytes,
            post=self.desk.post,
        )
        budget_bytes = 2**30 if cache.max_cache_bytes is None else cache.max_cache_bytes
        keeper = PrefixStore(
            fresh_caches,
            Size(budget_bytes, prompt_cache_arrays(model)),
            Packing(cache.cache_bits),
            disk,
            is_replicated=is_replicated,
        )
        is_free = options.memory.max_kv_bytes is None
        profile = KvProfile() if is_free else measure(network, fresh_caches)
        profile = replace(
            profile,
            has_own_lengths=plan.has_own_lengths,
            draft=draft.profile if draft and not is_free else None,
        )
        kv_bytes = options.memory.max_kv_bytes or 2**30
        expected_tokens = options.memory.expected_tokens
        reservations = Reservations(profile, kv_bytes, expected_tokens, pass_bytes)
        resources = Resources(keeper, reservations, draft)
        self.loop = EngineLoop(model, fresh_caches, resources, options, self.desk)
        if pass_seconds and not learns_costs:
            self.loop.batch.drafting.costs = FixedCosts(pass_seconds)
        self.outcomes: dict[str, Outcome] = {}
        self.jobs: list[Any] = []

    @property
    def fetched(self) -> "queue.SimpleQueue[Any]":
        """The nodes that the disk has read."""
        return self.desk.fetched

    def turn(self, *commands: Any) -> None:
        self.desk.commands += commands
        self.loop.turn()
        self.loop.check()
        published, self.desk.published[:] = list(self.desk.published), []
        for request_id, event in (event for told in published for event in events_in(told)):
            outcome = self.outcomes.setdefault(request_id, Outcome())
            match event:
                case TokenStep(token_id, reason, logprobs):
                    assert outcome.finish is None, "a step after the finish"
                    outcome.token_ids.append(token_id)
                    outcome.logprobs.append(logprobs)
                    outcome.finish = reason
                case PrefillDone(cached_tokens, parted_at=parted_at):
                    outcome.cached_tokens, outcome.parted_at = cached_tokens, parted_at
                case BackendError():
                    outcome.error = event

    def begin(self, request: Any) -> int:
        """Give the loop a job, and return its number."""
        number = len(self.jobs)
        self.jobs.append(request)
        self.loop.begin_job(number, request)
        return number

    def result(self, number: int) -> Any:
        """Return the result of a job that has ended, or raise its error."""
        result = self.desk.results[number]
        if isinstance(result, Exception):
            raise result
        return result

    def outcome(self, request: GenerationRequest) -> Outcome:
        return self.outcomes.get(request.request_id, Outcome())

    def run(self, *requests: GenerationRequest) -> list[Outcome]:
        for request in requests:
            self.loop.requests.submit(request)
        while not self.loop.is_idle or self.loop.status().metrics["waiting"]:
            if self.loop.is_idle:
                self.loop.requests.take_in(self.fetched.get(timeout=60))
            self.turn()
        return [self.outcomes[request.request_id] for request in requests]


def make_request(
    name: str, token_ids: Sequence[int], *, max_tokens: int = 12, **options: Any
) -> GenerationRequest:
    limit = None if options.pop("is_open_ended", False) else max_tokens
    server = {key: options.pop(key) for key in ("guide", "grammar") if key in options}
    return GenerationRequest(
        prompt=Prompt(
            tuple(token_ids),
            boundaries=tuple(options.pop("boundaries", ())),
            next_question=options.pop("next_question", 0),
        ),
        room=max_tokens,
        stop_token_ids=frozenset(options.pop("stop", ())),
        params=GenerationParams(request_id=name, max_tokens=limit, **options),
        **server,
    )


def endless_request(name: str, token_ids: Sequence[int] = (), **options: Any) -> GenerationRequest:
    """Return a request that runs until it is cancelled: without a limit, and without drafts."""
    return make_request(
        name,
        token_ids or prompt_of(9),
        max_tokens=1_000_000,
        is_open_ended=True,
        may_speculate=False,
        **options,
    )


def numbers_in(embedding: Embedding) -> list[float]:
    """Return the numbers of all vectors."""
    return memoryview(embedding.data).cast("f").tolist()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(37 * i + 11 * salt + i * i) % VOCAB for i in range(length)]


def room_for(network: Any, tokens: int, *, rows: int = 1) -> int:
    """Return the bytes of so many rows that hold so many tokens each."""
    from whole_trial import measure

    from backend.engine.passes.caches import make_cache_factory

    profile = measure(network, make_cache_factory(network, TuningOptions()))
    return rows * profile.row_bytes(tokens)
