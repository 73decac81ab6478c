"""A lost engine process costs no stream: requests go on in the next one with the same tokens."""

import asyncio
import os
import signal
from dataclasses import dataclass, field

import pytest
from engine_driver import endless_request, make_request, numbers_in, prompt_of
from engine_events import events_of
from groups import GRAMMAR, workers
from waiting import until

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import EngineState
from backend.core.guide import Guide, ReplyRule
from backend.core.request import SamplingParams
from backend.core.scoring import EmbeddingRequest, Pooling
from backend.core.step import PrefillDone, StepLogprobs, TokenStep
from backend.engine.engine import Engine
from backend.errors import (
    EngineFailedError,
    GenerationFailedError,
    ModelNotLoadedError,
    RequestCancelledError,
)
from backend.pipeline.served_model import ServedModel

pytestmark = pytest.mark.mlx

POISON = 7
LONG = 1500


def options(directory, **tuning):
    return ModelOptions(model=str(directory), tuning=TuningOptions.of(**tuning))


@pytest.fixture
async def engine():
    engine = Engine(serve=ServedModel.of)
    try:
        yield engine
    finally:
        await engine.close(drain_timeout_s=0.0)
    assert not workers()


@dataclass
class Outcome:
    """The results of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs] = field(default_factory=list)
    prefills: int = 0


async def take(engine, request, outcome=None):
    outcome = outcome or Outcome()
    try:
        async for events in engine.submit(engine.model, request):
            for event in events_of(events):
                match event:
                    case PrefillDone():
                        outcome.prefills += 1
                    case TokenStep(token, _, logprobs):
                        outcome.tokens.append(token)
                        outcome.logprobs += [logprobs] if logprobs else []
    finally:
        engine.cancel(request.request_id)
    return outcome


def mixed_requests(engine):
    """Requests of all kinds, long enough to be in the midst when something happens."""
    guide = Guide(rule=ReplyRule(text=GRAMMAR))
    penalised = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    warm = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    guided = SamplingParams(temperature=1.0, seed=3)
    stop = engine.model.card.eos_token_ids
    return [
        make_request("greedy", prompt_of(20), max_tokens=300),
        make_request("warm", prompt_of(33, 2), sampling=warm, max_tokens=300),
        make_request("penalised", prompt_of(50, 4), sampling=penalised, max_tokens=300),
        make_request("logprobs", prompt_of(9, 5), max_tokens=300, top_logprobs=3),
        make_request(
            "guided", prompt_of(12, 6), guide=guide, max_tokens=300, sampling=guided, stop=stop
        ),
    ]


async def test_requests_of_every_kind_go_on_with_the_same_tokens(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    model = engine.model
    alone = [await take(engine, request) for request in mixed_requests(engine)]
    outcomes = [Outcome() for _ in alone]
    requests = mixed_requests(engine)
    streams = [
        asyncio.ensure_future(take(engine, request, outcome))
        for request, outcome in zip(requests, outcomes, strict=True)
    ]
    # However far the others have come when a process ends, it has work.
    endless = asyncio.ensure_future(take(engine, endless_request("endless")))
    for kind in (signal.SIGKILL, signal.SIGSEGV):
        told = [len(outcome.tokens) for outcome in outcomes]
        await until(
            lambda told=told: all(
                len(o.tokens) > n or s.done()
                for o, n, s in zip(outcomes, told, streams, strict=True)
            )
        )
        counted = engine.status().metrics["generated_tokens"]
        os.kill(engine.process_id, kind)
        await until(lambda: engine.process_id is None)
        assert engine.status().state is EngineState.BUSY
        await until(lambda: engine.process_id is not None)
        told = [len(outcome.tokens) for outcome in outcomes]
    await asyncio.gather(*streams)
    for ours, theirs in zip(outcomes, alone, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.prefills == 1
        assert [step.logprob for step in ours.logprobs] == pytest.approx(
            [step.logprob for step in theirs.logprobs], abs=1e-4
        )
    assert engine.model is model, "what is prepared for it is still right"
    status = engine.status()
    assert status.metrics["restarts"] == 2
    assert [restart.reason.split()[-1] for restart in status.latest_restarts] == [
        "SIGKILL",
        "SIGSEGV",
    ]
    assert status.metrics["lost_s"] > 0.0
    # Fewer than all: the counts of a process since its last report are lost with it.
    rest = sum(len(outcome.tokens) for outcome in outcomes) - sum(told)
    assert status.metrics["generated_tokens"] >= counted + rest
    assert counted >= sum(len(outcome.tokens) for outcome in alone)
    endless.cancel()


async def test_a_process_that_is_stopped_is_given_up_and_its_requests_go_on(engine, tiny_models):
    await engine.load(options(tiny_models("llama"), engine_timeout_s=2))
    request = make_request("a", prompt_of(9), max_tokens=400)
    alone = await take(engine, request)
    # A process without work cannot be stuck.
    endless = asyncio.ensure_future(take(engine, endless_request("endless")))
    outcome = Outcome()
    stream = asyncio.ensure_future(take(engine, request, outcome))
    await until(lambda: len(outcome.tokens) > 5)
    os.kill(engine.process_id, signal.SIGSTOP)
    await until(lambda: engine.status().latest_restarts)
    await stream
    endless.cancel()
    assert outcome.tokens == alone.tokens
    (restart,) = engine.status().latest_restarts
    assert "no turn has ended for 2 s" in restart.reason


async def test_an_embedding_is_computed_by_the_next_process(engine, tiny_models):
    await engine.load(options(tiny_models("llama"), prefill_chunk=4, prefill_chunk_alone=4))
    text = EmbeddingRequest(
        token_ids=tuple(prompt_of(LONG)), pooling=Pooling.MEAN, is_normalized=True
    )
    alone = await engine.compute(engine.model, text)
    embedding = asyncio.ensure_future(engine.compute(engine.model, text))
    await until(lambda: engine.status().state is EngineState.BUSY)
    os.kill(engine.process_id, signal.SIGKILL)
    assert numbers_in(await embedding) == pytest.approx(numbers_in(alone), abs=1e-5)


@pytest.mark.parametrize("kind", ["kill", "segv", "device", "exit"])
@pytest.mark.one_in(2)
async def test_a_request_that_ends_the_process_each_time_fails_and_its_neighbours_finish(
    engine, tiny_models, with_fault, kind
):
    with_fault(f"{kind}:{POISON}")
    await engine.load(options(tiny_models("llama")))
    prompts = {f"n{i}": [token for token in prompt_of(12, i) if token != POISON] for i in range(6)}
    # Reply tokens are passes too: the neighbours' replies are free of the poison.
    bias = SamplingParams(logit_bias={POISON: -100.0})
    neighbours = [
        make_request(name, prompt, max_tokens=120, sampling=bias)
        for name, prompt in prompts.items()
    ]
    alone = [await take(engine, request) for request in neighbours]
    outcomes = [Outcome() for _ in neighbours]
    streams = [
        asyncio.ensure_future(take(engine, request, outcome))
        for request, outcome in zip(neighbours, outcomes, strict=True)
    ]
    await until(lambda: all(outcome.tokens for outcome in outcomes))
    poison = make_request("poison", [3, POISON, 4], max_tokens=5)
    with pytest.raises(GenerationFailedError, match="lost 2 times in a row over this request"):
        await take(engine, poison)
    await asyncio.gather(*streams)
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in alone]
    # On a slow machine the neighbours have ended before the second restart.
    await until(lambda: engine.status().metrics["restarts"] == 2)


async def test_a_prompt_whose_pass_was_too_long_is_tried_in_smaller_ones(
    engine, tiny_models, with_fault
):
    with_fault("watchdog:100")
    tuning = {"batching": False, "speculation": "off", "prefill_chunk_alone": 240}
    await engine.load(options(tiny_models("llama"), **tuning))
    outcome = await take(engine, make_request("long", prompt_of(400), max_tokens=5))
    assert len(outcome.tokens) == 5
    await until(lambda: engine.status().metrics["restarts"] == 1)


async def test_what_comes_while_a_process_is_replaced_waits_for_the_next(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: engine.process_id is None)
    outcome = await take(engine, make_request("late", prompt_of(5), max_tokens=4))
    assert len(outcome.tokens) == 4


async def test_free_ends_a_recovery_and_its_requests(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    stream = asyncio.ensure_future(take(engine, endless_request("a")))
    await until(lambda: engine.status().metrics["slots_taken"] == 1)
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: engine.process_id is None)
    await engine.free()
    with pytest.raises(RequestCancelledError):
        await stream
    assert engine.status().state is EngineState.UNINITIALIZED


async def test_an_engine_that_cannot_be_replaced_says_so_until_a_load_works(
    engine, tiny_models, tmp_path
):
    moved = tmp_path / "model"
    moved.symlink_to(tiny_models("llama"))
    told = []
    engine.on_fault(lambda: told.append(engine.fault))
    await engine.load(options(moved))
    stream = asyncio.ensure_future(take(engine, endless_request("a")))
    await until(lambda: engine.status().metrics["slots_taken"] == 1)
    moved.unlink()
    os.kill(engine.process_id, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="3 in a row could not be started"):
        await stream
    assert engine.status().state is EngineState.ERROR
    with pytest.raises(ModelNotLoadedError):
        engine.submit(engine.model, make_request("b", [1]))
    await engine.load(options(tiny_models("llama")))
    assert (engine.fault, engine.status().state) == ("", EngineState.READY)
    assert [bool(fault) for fault in told] == [True, False]
