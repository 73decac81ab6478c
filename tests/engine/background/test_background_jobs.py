"""Work between steps: its order, its share of the time, and the errors of jobs that fail."""

import time

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, numbers_in, prompt_of
from wrapped_network import WrappedNetwork

from backend.core.prompt import Prompt
from backend.core.scoring import EmbeddingRequest, Pooling, ScoreRequest
from backend.core.step import FinishReason
from backend.engine.background import jobs as background_jobs
from backend.engine.background.jobs import MAX_PASSING_TOKENS, BackgroundJobs
from backend.engine.background.work import find_decoder
from backend.engine.messages.protocol import Leave
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


def finish(jobs):
    """Compute all jobs, and return their results by number."""
    results = {}
    while not jobs.is_idle:
        jobs.advance(jobs.pace(), is_alone=True)
        results |= jobs.take_ended()
    return results


def test_jobs_run_one_after_another():
    jobs, log = BackgroundJobs(64, share=0.25), []
    for number, name in enumerate("ab"):
        jobs.add(number, job(log, name, 2))
    assert finish(jobs) == {0: "a", 1: "b"}
    assert log == [
        *(("a", 0), ("a", 1), ("a", "closed")),
        *(("b", 0), ("b", 1), ("b", "closed")),
    ]


def test_short_jobs_pass_a_running_one_and_put_off_none_for_ever():
    jobs, log = BackgroundJobs(64, share=0.25), []
    for number in range(40):
        jobs.add(number, job(log, number, 2), tokens=500)
    jobs.advance(jobs.pace(), is_alone=True)
    for number in range(40, 40 + 2200):
        jobs.add(number, job(log, number, 1), tokens=10)
        jobs.advance(jobs.pace(), is_alone=True)
    order = [name for name, piece in log if piece == 0]
    assert order[:3] == [0, 40, 41]
    assert 1 in order
    assert (0, 1) in log


def test_of_a_long_job_and_those_that_pass_it_at_most_two_have_begun():
    jobs, log = BackgroundJobs(64, share=0.25), []
    jobs.add(0, job(log, "long", 3), tokens=9000)
    jobs.advance(jobs.pace(), is_alone=True)
    jobs.add(1, job(log, "large", 2), tokens=MAX_PASSING_TOKENS + 1)
    jobs.add(2, job(log, "short", 2), tokens=20)
    jobs.add(3, job(log, "shorter", 2), tokens=10)
    finish(jobs)
    assert [(name, piece) for name, piece in log if piece != "closed"] == [
        *(("long", 0), ("shorter", 0), ("shorter", 1), ("short", 0), ("short", 1)),
        *(("long", 1), ("long", 2), ("large", 0), ("large", 1)),
    ]


def test_jobs_whose_callers_left_before_their_turn_put_off_no_other():
    jobs, log = BackgroundJobs(64, share=0.25), []
    jobs.add(0, job(log, "long", 1), tokens=500)
    for number in range(1, 9):
        jobs.add(number, job(log, "gone", 1), tokens=5000)
        jobs.drop(number)
    jobs.add(9, job(log, "short", 1), tokens=5)
    finish(jobs)
    assert [name for name, piece in log if piece == 0] == ["short", "long"]


def test_a_cancelled_job_computes_no_further_piece():
    jobs, log = BackgroundJobs(64, share=0.25), []
    for number, name in enumerate("ab"):
        jobs.add(number, job(log, name, 9))
    jobs.advance(jobs.pace(), is_alone=True)
    jobs.drop(0)
    jobs.advance(jobs.pace(), is_alone=True)
    assert log == [("a", 0), ("a", "closed"), ("b", 0)]
    jobs.drop(1)
    assert jobs.is_idle
    jobs.advance(jobs.pace(), is_alone=True)
    assert not jobs.take_ended()


def test_a_job_that_fails_is_blamed_alone():
    jobs, log = BackgroundJobs(64, share=0.25), []
    jobs.add(1, job(log, "a", 1, error=RuntimeError("x")))
    jobs.add(2, job(log, "b", 1))
    with pytest.raises(RuntimeError) as caught:
        jobs.advance(jobs.pace(), is_alone=True)
    assert jobs.blame(caught.value)
    assert not jobs.blame(caught.value)
    results = finish(jobs)
    assert results[2] == "b"
    assert isinstance(results[1], GenerationFailedError)
    assert "x" in str(results[1])


def test_an_error_for_the_caller_ends_its_job_only():
    jobs, log = BackgroundJobs(64, share=0.25), []
    jobs.add(1, job(log, "a", 1, error=UnsupportedError("not this")))
    assert isinstance(finish(jobs)[1], UnsupportedError)


def test_beside_decoding_rows_jobs_get_their_share_of_the_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(background_jobs.time, "monotonic", lambda: now)
    jobs = BackgroundJobs(64, share=0.25)

    def slow():
        nonlocal now
        while True:
            now += 1.0
            yield

    jobs.add(1, slow())
    assert jobs.pace().has_rested
    jobs.advance(jobs.pace(), is_alone=False)
    now += 2.9
    assert not jobs.pace().has_rested
    now += 0.2
    assert jobs.pace().has_rested


def embedding(token_ids, pooling=Pooling.MEAN):
    return EmbeddingRequest(token_ids=tuple(token_ids), pooling=pooling, is_normalized=False)


def scoring(token_ids, *continuations):
    return ScoreRequest(
        request_id="s", prompt=Prompt(tuple(token_ids)), continuations=continuations
    )


def drive(driver):
    while not driver.loop.is_idle:
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
    driver.loop.requests.submit(stream)
    while not driver.outcome(stream).token_ids:
        driver.turn()
    for _ in range(100):
        driver.begin(embedding(prompt_of(20)))
    prompt = make_request("b", prompt_of(100), max_tokens=2)
    driver.loop.requests.submit(prompt)
    for _ in range(40):
        driver.turn()
    assert driver.outcome(prompt).finish is FinishReason.LENGTH
    assert 0 < driver.loop.status().metrics["waiting"] < 100, "both have gone on"


def test_a_long_job_is_computed_in_pieces_while_a_stream_goes_on(networks):
    request = make_request("a", prompt_of(20), max_tokens=40)
    (alone,) = Driver(networks("llama")).run(request)
    driver = Driver(networks("llama"), prefill_chunk=16)
    driver.loop.requests.submit(request)
    driver.turn()
    number = driver.begin(embedding(prompt_of(400)))
    tokens_before = 0
    while not driver.loop.is_idle:
        driver.turn()
        if not driver.desk.results:
            tokens_before = len(driver.outcome(request).token_ids)
    assert tokens_before > 5
    assert driver.outcome(request).token_ids == alone.token_ids
    assert driver.result(number).prompt_tokens == 400
    assert driver.loop.status().metrics["prompt_tokens"] == 19 + 400


def test_chunks_change_no_embedding(networks):
    vectors = []
    for chunk in (1, 7, 512):
        driver = Driver(networks("gemma3_text"), prefill_chunk=chunk)
        number = driver.begin(embedding(prompt_of(90)))
        drive(driver)
        vectors.append(numbers_in(driver.result(number)))
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
    driver.loop.requests.submit(request)
    bad = driver.begin(scoring([1, 2], (token, 4)))
    good = driver.begin(scoring([1, 2], (3,)))
    drive(driver)
    assert driver.outcome(request).token_ids == alone.token_ids
    assert driver.result(good).logprobs[0][0] < 0.0
    with pytest.raises(GenerationFailedError, match="bad token"):
        driver.result(bad)


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
        numbers = [driver.begin(embedding(text, pooling)) for text in texts for pooling in Pooling]
        drive(driver)
        vectors[batches] = [numbers_in(driver.result(number)) for number in numbers]
    for together, alone in zip(vectors[True], vectors[False], strict=True):
        assert together == pytest.approx(alone, abs=1e-4)


def test_texts_of_several_calls_share_a_pass(networks):
    driver = Driver(networks("llama"))
    numbers = [driver.begin(embedding(prompt_of(9 + n))) for n in range(3)]
    driver.turn()
    assert sorted(driver.desk.results) == numbers


def test_a_text_that_breaks_the_model_fails_alone(networks):
    network = WrappedNetwork(networks("llama"))
    network.model = BreaksOnToken(networks("llama").model, 77)
    driver = Driver(network)
    bad, good = driver.begin(embedding([4, 77])), driver.begin(embedding([1, 2, 3]))
    drive(driver)
    assert driver.result(good).prompt_tokens == 3
    with pytest.raises(GenerationFailedError, match="bad token"):
        driver.result(bad)


def test_a_cancelled_score_lets_go_of_the_prompt_cache(networks):
    driver = Driver(networks("llama"), prefill_chunk=16)
    number = driver.begin(scoring(prompt_of(200), (1, 2, 3)))
    driver.turn()
    driver.turn(Leave(number))
    drive(driver)
    again = driver.begin(scoring(prompt_of(200), (1, 2, 3)))
    drive(driver)
    assert list(driver.desk.results) == [again]
    assert len(driver.result(again).logprobs[0]) == 3


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
