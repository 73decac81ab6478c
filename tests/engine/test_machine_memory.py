"""A session whose budget shrinks and grows while it works, because other backends need memory."""

import pytest
from engine_driver import Driver, make_request, prompt_of, room_for

from backend.core.engine_status import RequestPhase
from backend.core.step import FinishReason
from backend.engine import open_requests
from backend.engine.messages.protocol import Resize
from backend.errors import OverloadedError

pytestmark = pytest.mark.mlx

EXPECTED = 32
FAMILIES = ["llama", "gemma3_text"]


class Shared:
    """A driver with a budget for three rows, and orders of a ledger."""

    def __init__(self, network, *, tokens=400, rows=3, **tuning):
        self.row_bytes = room_for(network, tokens)
        self.whole = room_for(network, tokens, rows=rows)
        self.driver = Driver(network, max_kv_bytes=self.whole, expected_tokens=EXPECTED, **tuning)
        self.orders = 0

    def order(self, budget, attainable=None):
        self.orders += 1
        self.driver.turn(Resize(self.orders, budget, attainable or self.whole))

    def submit(self, *requests):
        for request in requests:
            self.driver.loop.requests.submit(request)

    def finish(self, *requests):
        for _ in range(3000):
            if not self.driver.loop.status().requests:
                return [self.driver.outcomes[request.request_id] for request in requests]
            self.driver.turn()
        raise AssertionError("it does not end")

    @property
    def memory(self):
        return self.driver.loop.status().memory_bytes

    def phases(self):
        return [request.phase for request in self.driver.loop.status().requests]


def requests(count, *, prompt=300, max_tokens=40):
    return [
        make_request(f"r{i}", prompt_of(prompt, i), max_tokens=max_tokens, may_speculate=False)
        for i in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_running_requests_keep_what_they_have_and_say_the_same(networks, family):
    network = networks(family)
    asked = requests(3)
    alone = [outcome.token_ids for outcome in Driver(network).run(*requests(3))]
    shared = Shared(network)
    shared.submit(*asked)
    while shared.phases() != [RequestPhase.ACTIVE] * 3:
        shared.driver.turn()
    held = shared.memory["kv_reserved"] + shared.memory["kv_shared"]
    shared.order(shared.row_bytes // 4)
    assert shared.memory["kv_budget"] == max(held, shared.memory["kv_reserved"])
    assert shared.phases() == [RequestPhase.ACTIVE] * 3
    outcomes = shared.finish(*asked)
    assert [outcome.token_ids for outcome in outcomes] == alone
    assert shared.memory["kv_budget"] == shared.row_bytes // 4


def test_the_prompt_cache_gives_way_at_once_and_fills_again(networks):
    shared = Shared(networks("llama"))
    (first,) = requests(1)
    shared.driver.run(first)
    stored = shared.memory["prompt_cache"]
    assert stored > 0
    shared.order(stored // 2)
    assert shared.memory["prompt_cache"] <= stored // 2
    shared.order(shared.whole)
    again = make_request("again", prompt_of(300), max_tokens=4)
    shared.driver.run(again)
    assert shared.memory["prompt_cache"] > stored // 2


def test_what_the_prompt_cache_gave_away_is_on_disk(networks, tmp_path):
    shared = Shared(networks("llama"), cache_dir=str(tmp_path))
    (first,) = requests(1)
    shared.driver.run(first)
    shared.order(0)
    assert shared.memory["prompt_cache"] == 0
    shared.driver.loop.close()
    again = make_request("again", prompt_of(300), max_tokens=4)
    (outcome,) = Shared(networks("llama"), cache_dir=str(tmp_path)).driver.run(again)
    assert outcome.cached_tokens >= 256


def test_a_request_waits_for_memory_of_others_and_says_how_much_it_wants(networks):
    shared = Shared(networks("llama"))
    shared.order(shared.row_bytes // 8)
    (asked,) = requests(1)
    shared.submit(asked)
    shared.driver.turn()
    loop = shared.driver.loop
    assert loop.is_idle
    assert loop.idle_timeout_s is not None
    assert shared.phases() == [RequestPhase.WAITING]
    wanted = shared.memory["kv_wanted"]
    assert shared.row_bytes // 8 < wanted <= shared.row_bytes
    shared.order(wanted)
    assert not loop.is_idle
    (outcome,) = shared.finish(asked)
    assert (outcome.finish, len(outcome.token_ids)) == (FinishReason.LENGTH, 40)


def test_a_request_for_which_nobody_gives_is_refused_after_a_while(networks, monkeypatch):
    shared = Shared(networks("llama"))
    shared.order(shared.row_bytes // 8)
    (asked,) = requests(1)
    shared.submit(asked)
    shared.driver.turn()
    monkeypatch.setattr(open_requests, "MEMORY_WAIT_S", 0.0)
    shared.driver.turn()
    assert isinstance(shared.driver.outcome(asked).error, OverloadedError)
    assert "other backends of this machine" in str(shared.driver.outcome(asked).error)
    assert shared.phases() == []


def test_one_that_could_not_run_on_the_whole_machine_is_refused_at_once(networks):
    shared = Shared(networks("llama"))
    shared.order(shared.row_bytes // 8)
    asked = make_request("a", prompt_of(300), max_tokens=3000)
    shared.submit(asked)
    shared.driver.turn()
    assert isinstance(shared.driver.outcome(asked).error, OverloadedError)


def test_an_open_end_begins_with_what_can_be_had_and_pauses_for_more(networks):
    network = networks("llama")
    asked = make_request(
        "a", prompt_of(300), max_tokens=200, is_open_ended=True, may_speculate=False
    )
    (alone,) = Driver(network).run(asked)
    shared = Shared(network, tokens=600, rows=1)
    part = room_for(network, 300 + EXPECTED // 2)
    shared.order(part, part)
    shared.submit(asked)
    for _ in range(300):
        shared.driver.turn()
        if shared.driver.loop.is_idle:
            break
    assert shared.phases() == [RequestPhase.WAITING]
    assert len(shared.driver.outcome(asked).token_ids) > 1
    assert shared.driver.outcome(asked).finish is None
    shared.order(shared.whole)
    (outcome,) = shared.finish(asked)
    assert outcome.token_ids == alone.token_ids
