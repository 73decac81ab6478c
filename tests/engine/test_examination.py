"""Trials that a load leaves for later: between requests, without a changed token."""

import logging
from collections import deque
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engine_driver import Desk, make_request, prompt_of

from backend.config import ModelOptions, TuningOptions
from backend.engine import assembly
from backend.engine.assembly import assemble_any_loop
from backend.engine.examination import DELAY_S
from backend.engine.findings import MAX_BEGUN, Findings, Notebook
from backend.engine.plan import Batching
from backend.engine.trials.model_key import model_key
from backend.model.loader import load

pytestmark = pytest.mark.mlx


class Counting:
    """Counts the passes of a network, and may refuse those over several rows."""

    def __init__(self, network: Any, *, breaks: bool = False) -> None:
        self.network = network
        self.passes = 0
        self.widest = 0
        self.breaks = breaks

    def __call__(self, inputs: Any, *given: Any, **options: Any) -> Any:
        self.passes += 1
        self.widest = max(self.widest, inputs.shape[0])
        if self.breaks and inputs.shape[0] > 1:
            raise ValueError("one row at a time, please")
        return self.network(inputs, *given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)


class Bench:
    """A session assembled as an engine does, with the reported findings of its model."""

    def __init__(
        self,
        directory: Any,
        known: dict[str, Findings] | None = None,
        *,
        breaks: bool = False,
        **tuning: Any,
    ) -> None:
        self.options = ModelOptions(model=str(directory), tuning=TuningOptions.of(**tuning))
        model = load(self.options, directory, renders=False)
        self.network = Counting(model.network, breaks=breaks)
        model = replace(model, network=self.network)
        self.key = model_key(self.options, model)
        self.told: deque[tuple[str, Findings]] = deque()
        notebook = Notebook(known or {}, lambda *found: self.told.append(found))
        self.desk = Desk()
        self.loop: Any = assemble_any_loop(model, self.options, self.desk, notebook)
        self.loading_passes, self.network.passes = self.network.passes, 0

    @property
    def plan(self) -> Any:
        return self.loop.batch.caches.plan

    @property
    def found(self) -> Findings:
        return self.told[-1][1]

    def run(self, *requests: Any) -> list[list[int]]:
        if requests:
            self.desk.published.clear()
        for request in requests:
            self.loop.requests.submit(request)
        while not self.loop.scheduler.is_idle:
            self.turn()
        return [self.tokens(request) for request in requests]

    def turn(self) -> None:
        self.loop.turn()
        self.loop.check()

    def rest(self) -> None:
        """Leave the session idle until it has tried everything."""
        self.loop.active_at -= DELAY_S
        self.turn()
        while not self.loop.is_idle:
            self.turn()

    def tokens(self, request: Any) -> list[int]:
        name = request.request_id
        mine = (told.steps[name] for told in self.desk.published if name in told.steps)
        return [token_id for steps in mine for token_id in steps.token_ids]


UNDRAFTED = {"may_speculate": False}


def requests(count=3, **options):
    return [
        make_request(str(i), prompt_of(20 + 9 * i, i), **{"max_tokens": 30, **options})
        for i in range(count)
    ]


@cache
def tokens_alone(directory):
    """Return the tokens that each of three requests gets of a session of its own."""
    return [Bench(directory).run(request)[0] for request in requests()]


@pytest.fixture
def llama(tiny_models):
    return tiny_models("llama")


def known_by(bench):
    return {bench.key: bench.found}


def test_a_load_computes_one_short_pass_and_the_rest_comes_when_nobody_waits(llama, caplog):
    bench = Bench(llama)
    # Whether it computes at all, and the shapes of its caches, which are not computed.
    assert bench.loading_passes == 2
    assert (bench.plan.batching, bench.plan.pass_seconds) == (Batching.NONE, {})
    bench.turn()
    assert bench.network.passes == 0
    with caplog.at_level(logging.INFO):
        bench.rest()
    assert bench.plan.batching is Batching.RAGGED
    assert bench.plan.shares_prefixes
    assert bench.plan.takes_several
    assert bench.plan.packs
    assert bench.plan.pass_seconds
    assert "trying between requests" in caplog.text
    assert "requests are computed together, with drafts" in caplog.text
    assert (bench.found.begun, bench.found.knows_drafts) == (0, True)


def test_what_is_known_is_not_tried_again(llama):
    first = Bench(llama)
    first.rest()
    second = Bench(llama, known_by(first))
    assert second.loading_passes == 1
    assert second.plan == first.plan
    second.rest()
    assert second.network.passes == 0
    assert not second.told
    assert second.run(*requests()) == first.run(*requests())


@pytest.mark.parametrize("options", [{"kv_bits": 8, "kv_group_size": 32}, {"eos_token": "a"}])
def test_with_other_options_all_is_tried_again(llama, options):
    first = Bench(llama)
    first.rest()
    second = Bench(llama, known_by(first), **options)
    assert second.key != first.key
    assert second.plan.batching is Batching.NONE


def test_other_libraries_other_files_and_another_machine_are_tried_again(
    llama, tmp_path, monkeypatch
):
    from backend.engine.trials import model_key as keys
    from backend.model.checkpoint import gate

    options = ModelOptions(model=str(llama))
    model = load(options, llama, renders=False)
    first = model_key(options, model)
    assert model_key(options, model) == first
    for module, name in ((keys, "version_of"), (gate, "version_of")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda _: "99.9")
            assert model_key(options, model) != first
    for name in ("device_name", "usable_cores", "kernel_name"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, lambda: "another")
            assert model_key(options, model) != first
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    moved = replace(model, card=replace(model.card, path=str(elsewhere)))
    assert model_key(options, moved) != first


def test_drafts_alone_are_tried_if_the_rest_is_known(llama):
    first = Bench(llama, speculation="off")
    first.rest()
    assert first.plan.batching is Batching.RAGGED
    assert not first.plan.pass_seconds
    whole = Bench(llama)
    whole.rest()
    second = Bench(llama, known_by(first))
    assert second.plan.batching is Batching.RAGGED
    second.rest()
    assert second.plan.pass_seconds
    assert second.network.passes < whole.network.passes
    third = Bench(llama, known_by(second), speculation="off")
    assert third.plan.batching is Batching.RAGGED
    assert not third.plan.pass_seconds


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text", "mamba2", "qwen3_next"])
@pytest.mark.one_in(2)
def test_the_way_changes_under_running_requests_without_a_changed_token(tiny_models, family):
    directory = tiny_models(family)
    expected = tokens_alone(directory)
    bench = Bench(directory)
    assert bench.run(*requests()) == expected
    # Not all of them ran before the trials were over.
    assert bench.plan.batches
    bench.rest()
    assert bench.run(*requests(6))[:3] == expected


def test_a_second_request_has_the_trials_run_beside_the_first(llama):
    bench = Bench(llama)
    first, second = requests(2, max_tokens=200)
    bench.loop.requests.submit(first)
    for _ in range(5):
        bench.turn()
    assert bench.loop.examination.is_pending
    bench.loop.requests.submit(second)
    drawn = len(bench.tokens(first))
    while not bench.tokens(second):
        bench.turn()
    # The first goes on meanwhile, and is not over when the second begins.
    assert drawn < len(bench.tokens(first)) < 200
    assert bench.plan.batching is Batching.RAGGED
    bench.run()
    assert bench.network.widest > 1


def test_trials_wait_while_one_request_runs(llama, monkeypatch):
    bench, during = Bench(llama), []
    bench.run(*requests(1))
    bench.turn()
    examination = bench.loop.examination
    assert examination.is_running
    advance = examination.advance
    monkeypatch.setattr(
        examination, "advance", lambda: advance() or during.append(len(bench.tokens(second)))
    )
    second = requests(2)[1]
    bench.run(second)
    assert set(during) <= {30}
    bench.rest()
    assert bench.plan.batches


def test_rows_use_stored_prefixes_in_place_once_no_other_has_caches(llama):
    bench = Bench(llama, max_slots=2)
    rows = [make_request(str(n), prompt_of(600, n), max_tokens=200, **UNDRAFTED) for n in range(4)]
    for row in rows:
        bench.loop.requests.submit(row)
    while bench.loop.examination.is_running or bench.loop.examination.is_pending:
        bench.turn()
    assert bench.loop.scheduler.slots_taken == 2
    assert bench.plan.takes_several
    assert not bench.plan.shares_prefixes
    bench.run()
    bench.turn()
    assert bench.plan.shares_prefixes
    again = make_request("again", [*prompt_of(600), 5], max_tokens=8)
    alone = Bench(llama).run(again)
    assert bench.run(again) == alone
    assert bench.loop.prefixes.metrics()["prompt_cache.hit_tokens"]


def test_a_model_that_fails_in_batches_runs_one_at_a_time(llama, caplog):
    bench = Bench(llama, breaks=True)
    expected = tokens_alone(llama)
    assert bench.run(*requests()) == expected
    bench.rest()
    assert bench.plan.batching is Batching.NONE
    assert "runs one request at a time: a batch raises ValueError" in caplog.text
    caplog.clear()
    again = Bench(llama, known_by(bench), breaks=True)
    assert "runs one request at a time: a batch raises ValueError" in caplog.text
    assert again.run(*requests()) == expected


def test_trials_that_raise_something_else_cost_no_request(llama, monkeypatch, caplog):
    def planning(*_, **__):
        yield
        raise OSError("no space left")

    monkeypatch.setattr(assembly, "planning", planning)
    bench = Bench(llama)
    expected = tokens_alone(llama)
    assert bench.run(*requests()) == expected
    assert "it could not be tried how requests are computed together" in caplog.text
    assert (bench.found.begun, bench.found.plan) == (0, None)


def test_trials_that_ended_processes_are_given_up(llama, caplog):
    first = Bench(llama)
    first.run(*requests(1))
    first.turn()
    assert first.found.begun == 1
    begun = {first.key: Findings(is_sound=True, group_sizes=(), begun=MAX_BEGUN)}
    bench = Bench(llama, begun)
    assert "engines have ended while they tried more" in caplog.text
    bench.rest()
    assert bench.network.passes == 0
    assert len(bench.run(*requests())) == 3
    assert Bench(llama, begun, check_at_load=True).plan.batches


def test_a_session_that_closes_is_no_failed_trial(llama):
    bench = Bench(llama)
    bench.run(*requests(1))
    bench.turn()
    bench.loop.close()
    assert bench.found.begun == 0


def test_a_load_may_wait_for_everything(llama):
    bench = Bench(llama, check_at_load=True)
    assert bench.plan.batching is Batching.RAGGED
    assert bench.plan.pass_seconds
    assert not bench.loop.examination.is_pending
    assert Bench(llama, known_by(bench), check_at_load=True).loading_passes == 1


def test_embeddings_and_trials_do_not_disturb_each_other(llama):
    from backend.core.scoring import EmbeddingRequest, Pooling

    bench = Bench(llama)
    for seed in range(3):
        request = EmbeddingRequest(
            token_ids=tuple(prompt_of(300, seed)), pooling=Pooling.MEAN, is_normalized=False
        )
        bench.loop.begin_job(seed, request)
    bench.rest()
    assert [result.dim for result in bench.desk.results.values()] == [64] * 3
    bench.rest()
    assert bench.plan.batches
