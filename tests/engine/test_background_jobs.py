"""Work between steps: its order, its share of the time, and what becomes of a job that fails."""

import time
from concurrent.futures import Future

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, prompt_of
from wrapped_network import WrappedNetwork

from backend.core.delta import FinishReason
from backend.core.embedding import EmbeddingRequest, Pooling
from backend.core.prompt import Prompt
from backend.core.scoring import ScoreRequest
from backend.engine.background import jobs as background_jobs
from backend.engine.background.embedder import find_decoder
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.messages.commands import Compute, deliver_all
from backend.errors import GenerationFailedError, UnsupportedError

pytestmark = pytest.mark.mlx


def job(log, name, pieces, *, error=None):
    try:
        for piece in range(pieces - 1):
            log.append((name, piece))
            yield
        log.append((name, pieces - 1))
        if error:
            raise error
        return name
    finally:
        log.append((name, "closed"))


def added(jobs, work):
    reply = Future()
    jobs.add(work, reply)
    return reply


def finish(jobs):
    while not jobs.is_idle:
        jobs.advance(jobs.pace(), is_alone=True)
        deliver_all(jobs.take_ended())


def test_jobs_run_one_after_another():
    jobs, log = BackgroundJobs(64, share=0.25), []
    replies = [added(jobs, job(log, name, 2)) for name in "ab"]
    finish(jobs)
    assert [reply.result(0) for reply in replies] == ["a", "b"]
    assert log == [
        *(("a", 0), ("a", 1), ("a", "closed")),
        *(("b", 0), ("b", 1), ("b", "closed")),
    ]


def test_a_cancelled_job_computes_no_further_piece():
    jobs, log = BackgroundJobs(64, share=0.25), []
    first, second = (added(jobs, job(log, name, 9)) for name in "ab")
    jobs.advance(jobs.pace(), is_alone=True)
    first.cancel()
    jobs.advance(jobs.pace(), is_alone=True)
    assert log == [("a", 0), ("a", "closed"), ("b", 0)]
    second.cancel()
    jobs.advance(jobs.pace(), is_alone=True)
    deliver_all(jobs.take_ended())
    assert jobs.is_idle


def test_a_job_that_fails_is_blamed_alone():
    jobs, log = BackgroundJobs(64, share=0.25), []
    bad = added(jobs, job(log, "a", 1, error=RuntimeError("x")))
    good = added(jobs, job(log, "b", 1))
    with pytest.raises(RuntimeError) as caught:
        jobs.advance(jobs.pace(), is_alone=True)
    assert jobs.blame(caught.value)
    assert not jobs.blame(caught.value)
    finish(jobs)
    assert good.result(0) == "b"
    with pytest.raises(GenerationFailedError, match="x"):
        bad.result(0)


def test_an_error_for_the_caller_ends_its_job_only():
    jobs, log = BackgroundJobs(64, share=0.25), []
    refused = added(jobs, job(log, "a", 1, error=UnsupportedError("not this")))
    finish(jobs)
    with pytest.raises(UnsupportedError, match="not this"):
        refused.result(0)


def test_beside_decoding_rows_jobs_get_their_share_of_the_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(background_jobs.time, "monotonic", lambda: now)
    jobs = BackgroundJobs(64, share=0.25)

    def slow():
        nonlocal now
        while True:
            now += 1.0
            yield

    added(jobs, slow())
    assert jobs.pace().has_rested
    jobs.advance(jobs.pace(), is_alone=False)
    now += 2.9
    assert not jobs.pace().has_rested
    now += 0.2
    assert jobs.pace().has_rested


def embed_command(token_ids, pooling=Pooling.MEAN):
    request = EmbeddingRequest(token_ids=tuple(token_ids), pooling=pooling, is_normalized=False)
    return Compute(request, Future())


def score_command(token_ids, *continuations):
    request = ScoreRequest(
        request_id="s", prompt=Prompt(tuple(token_ids)), continuations=continuations
    )
    return Compute(request, Future())


def drive(driver):
    while not driver.session.is_idle:
        driver.turn()


def test_a_prompt_gets_its_pauses_though_pieces_take_longer(networks, monkeypatch):
    driver = Driver(networks("llama"), prefill_chunk=16, side_share=1.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    advance = BackgroundJobs.advance

    def advance_slowly(*arguments, **options):
        nonlocal now
        advance(*arguments, **options)
        now += 1.0

    monkeypatch.setattr(BackgroundJobs, "advance", advance_slowly)
    stream = make_request("a", prompt_of(20), max_tokens=2000)
    driver.session.submit(stream)
    while not driver.outcome(stream).token_ids:
        driver.turn()
    for _ in range(100):
        driver.session.compute(embed_command(prompt_of(20)))
    prompt = make_request("b", prompt_of(100), max_tokens=2)
    driver.session.submit(prompt)
    for _ in range(40):
        driver.turn()
    assert driver.outcome(prompt).finish is FinishReason.LENGTH
    assert 0 < driver.session.status().metrics["waiting"] < 100, "both have gone on"


def test_a_long_job_is_computed_in_pieces_while_a_stream_goes_on(networks):
    request = make_request("a", prompt_of(20), max_tokens=40)
    (alone,) = Driver(networks("llama")).run(request)
    driver = Driver(networks("llama"), prefill_chunk=16)
    command = embed_command(prompt_of(400))
    driver.session.submit(request)
    driver.turn()
    driver.session.compute(command)
    tokens_before = 0
    while not driver.session.is_idle:
        driver.turn()
        if not command.reply.done():
            tokens_before = len(driver.outcome(request).token_ids)
    assert tokens_before > 5
    assert driver.outcome(request).token_ids == alone.token_ids
    assert command.reply.result(0).prompt_tokens == 400
    assert driver.session.status().metrics["prompt_tokens"] == 19 + 400


def test_chunks_change_no_embedding(networks):
    vectors = []
    for chunk in (1, 7, 512):
        driver = Driver(networks("gemma3_text"), prefill_chunk=chunk)
        command = embed_command(prompt_of(90))
        driver.session.compute(command)
        drive(driver)
        vectors.append(list(command.reply.result(0).values))
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-4)
    assert vectors[1] == pytest.approx(vectors[2], abs=1e-4)


class BreaksOnToken:
    """A network that raises when it reads a token."""

    def __init__(self, network, token):
        self._network, self._token = network, token

    def __getattr__(self, name):
        return getattr(self._network, name)

    def __call__(self, inputs, **options):
        if any(self._token in row for row in inputs.tolist()):
            raise RuntimeError("bad token")
        return self._network(inputs, **options)


def test_a_score_that_breaks_the_model_leaves_the_streams_alone(networks):
    request = make_request("a", prompt_of(20), max_tokens=12)
    (alone,) = Driver(networks("llama")).run(request)
    # The look at a model when it is loaded feeds the first tokens of the vocabulary.
    token = next(t for t in range(100, 500) if t not in [*prompt_of(20), *alone.token_ids])
    driver = Driver(BreaksOnToken(networks("llama"), token))
    good, bad = score_command([1, 2], (3,)), score_command([1, 2], (token, 4))
    driver.session.submit(request)
    for command in (bad, good):
        driver.session.compute(command)
    drive(driver)
    assert driver.outcome(request).token_ids == alone.token_ids
    assert good.reply.result(0)[0][0] < 0.0
    with pytest.raises(GenerationFailedError, match="bad token"):
        bad.reply.result(0)


BATCHING = [
    "llama",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v32",
    "qwen3_next",
    "mamba2",
    "kimi_linear",
]


@pytest.mark.parametrize("family", BATCHING)
def test_texts_that_wait_together_are_embedded_as_alone(networks, family):
    texts = [prompt_of(n, salt=n) for n in (9, 12, 5, 11, 40, 1)]
    vectors = {}
    for batches in (True, False):
        driver = Driver(networks(family), batches=batches)
        commands = [embed_command(text, pooling) for text in texts for pooling in Pooling]
        for command in commands:
            driver.session.compute(command)
        drive(driver)
        vectors[batches] = [list(command.reply.result(0).values) for command in commands]
    for together, alone in zip(vectors[True], vectors[False], strict=True):
        assert together == pytest.approx(alone, abs=1e-4)


def test_texts_of_several_calls_share_a_pass(networks):
    driver = Driver(networks("llama"))
    commands = [embed_command(prompt_of(9 + n)) for n in range(3)]
    for command in commands:
        driver.session.compute(command)
    driver.turn()
    assert all(command.reply.done() for command in commands)


def test_a_text_that_breaks_the_model_fails_alone(networks):
    network = WrappedNetwork(networks("llama"))
    network.model = BreaksOnToken(networks("llama").model, 77)
    driver = Driver(network)
    good, bad = embed_command([1, 2, 3]), embed_command([4, 77])
    for command in (bad, good):
        driver.session.compute(command)
    drive(driver)
    assert good.reply.result(0).prompt_tokens == 3
    with pytest.raises(GenerationFailedError, match="bad token"):
        bad.reply.result(0)


def test_a_cancelled_score_lets_go_of_the_prompt_cache(networks):
    driver = Driver(networks("llama"), prefill_chunk=16)
    command = score_command(prompt_of(200), (1, 2, 3))
    driver.session.compute(command)
    driver.turn()
    command.reply.cancel()
    drive(driver)
    again = score_command(prompt_of(200), (1, 2, 3))
    driver.session.compute(again)
    drive(driver)
    assert len(again.reply.result(0)[0]) == 3


FAMILIES = [
    *("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v32", "qwen3_next", "qwen3_5"),
    *("mamba2", "nemotron_h", "granitemoehybrid", "kimi_linear", "llama4"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_decoder_with_hidden_states(networks, family):
    network = networks(family)
    decoder = find_decoder(network, lambda: make_cache(network), 512)
    assert decoder(mx.array([[1, 2, 3]]), cache=make_cache(network)).shape == (1, 3, 64)


def make_cache(network):
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(network)


class HeadOnly:
    """A network whose inner part has the head."""

    def __init__(self, network):
        self.model = lambda inputs, cache: network(inputs, cache=cache)


def test_a_part_that_gives_logits_is_no_decoder(networks):
    network = networks("llama")
    assert find_decoder(HeadOnly(network), lambda: make_cache(network), 512) is None
