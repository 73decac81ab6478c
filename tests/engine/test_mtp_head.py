"""An MTP head changes no reply, and is right where it knows the model."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from drafting import FEW, FREE, Free, assert_same, model_of, requests_of, samplings
from engine_driver import Driver, make_request, prompt_of, room_for

from backend.core.request import SamplingParams
from backend.engine.passes.row_states import MOST_TOKENS, RowStates
from backend.engine.trials.draft_model import look_at_draft
from backend.engine.trials.mtp_head import LoadedHead
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.mtp_head import HiddenTap, build_head
from scripts.mtp_head import add_head
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx


class FreeHead(LoadedHead):
    def batch(self, vocab_size):
        batch = super().batch(vocab_size)
        batch.costs = Free(FREE)
        return batch


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a network, and a head for it that is always right or hardly ever."""
    made = {}

    def pair(family, *, is_right=False):
        if (family, is_right) not in made:
            directory = tmp_path_factory.mktemp(family)
            build(family, directory)
            add_head(directory, directory / "head", is_right=is_right)
            network, _ = import_mlx_lm().load_model(directory)
            head = build_head(directory / "head", network, None)
            look = look_at_draft(model_of(head), range(60), batches=True)
            made[family, is_right] = network, look, HiddenTap(network)
        network, look, tap = made[family, is_right]
        return network, FreeHead(look.model, look.fresh_caches, look.profile, tap)

    return pair


def driver_of(pair, **options):
    """Return a driver that drafts by the head alone."""
    network, head = pair
    return Driver(network, draft=head, **{"pass_seconds": FREE, "speculation": "mtp", **options})


@pytest.mark.parametrize(
    ("family", "is_right"), [("qwen3_5", False), ("qwen3_5", True), ("qwen3_next", True)]
)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_reply_is_the_same_whether_the_head_is_right_or_not(pairs, family, rows, is_right):
    pair, drafted = pairs(family, is_right=is_right), 0
    for seed in range(2):
        requests = requests_of(seed, rows)
        expected = Driver(pair[0]).run(*requests)
        driver = driver_of(pair)
        assert_same(driver.run(*requests), expected)
        drafted += driver.session.status().drafted_tokens
    assert drafted > 10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=5)]
)
def test_a_head_that_knows_the_model_is_nearly_always_right(pairs, rows, sampling):
    pair = pairs("qwen3_5", is_right=True)
    requests = [
        make_request(f"r{n}", prompt_of(30 + 9 * n, n), max_tokens=90, sampling=sampling)
        for n in range(rows)
    ]
    expected = Driver(pair[0]).run(*requests)
    driver = driver_of(pair)
    assert_same(driver.run(*requests), expected)
    status = driver.session.status()
    assert status.accepted_tokens > 60 * rows
    assert status.accepted_tokens > 0.95 * status.drafted_tokens


def test_it_is_the_same_while_rows_come_go_and_pause(pairs):
    network, head = pairs("qwen3_5", is_right=True)
    rng = random.Random(4)
    shared = prompt_of(70)
    requests = [
        make_request(
            f"r{n}",
            [*shared[: rng.randint(8, 70)], *prompt_of(rng.randint(1, 60), n)],
            max_tokens=rng.randint(5, 50),
            sampling=replace(samplings(n)[n % 6], logit_bias=FEW if n % 2 else {}),
        )
        for n in range(16)
    ]
    expected = {r.request_id: Driver(network).run(r)[0].token_ids for r in requests}
    budget = room_for(network, 300, rows=3)
    driver = driver_of((network, head), speculation="auto", max_kv_bytes=budget)
    left = list(requests)
    while left or not driver.session.is_idle or driver.session.status().waiting:
        if left and rng.random() < 0.3:
            driver.session.submit(left.pop())
        driver.turn()
    assert {name: driver.outcomes[name].token_ids for name in expected} == expected
    assert driver.session.status().accepted_tokens > 10


def test_a_prompt_that_was_stored_is_drafted_for_from_its_reply_on(pairs):
    pair = pairs("qwen3_5", is_right=True)
    driver = driver_of(pair, max_kv_bytes=2**30)
    prompt = prompt_of(200)
    first, again = (make_request(name, prompt, max_tokens=40) for name in "ab")
    (one,) = driver.run(first)
    accepted = driver.session.status().accepted_tokens
    (other,) = driver.run(again)
    assert other.token_ids == one.token_ids
    assert driver.session.status().accepted_tokens - accepted > 25


def test_a_head_that_fails_is_left_out_and_costs_no_reply(pairs, caplog):
    network, head = pairs("qwen3_5", is_right=True)

    class Failing:
        passes = 0

        def __getattr__(self, name):
            return getattr(head.model.network, name)

        def __call__(self, inputs, cache):
            self.passes += 1
            if self.passes > 20:
                raise RuntimeError("out of memory")
            return head.model.network(inputs, cache)

    requests = [make_request(f"r{n}", prompt_of(30, n), max_tokens=80) for n in range(2)]
    expected = Driver(network).run(*requests)
    failing = replace(head, model=replace(head.model, network=Failing()))
    driver = driver_of((network, failing))
    assert_same(driver.run(*requests), expected)
    assert driver.session.status().accepted_tokens > 5
    assert caplog.text.count("the draft model fails, and drafts no more") == 1


def test_a_head_for_states_of_another_width_is_refused(tmp_path, networks):
    build("qwen3_5", tmp_path, hidden_size=128)
    add_head(tmp_path, tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match=r"states of 128 numbers, and the model has 64"):
        build_head(tmp_path / "head", networks("qwen3_5"), None)


class TestRowStates:
    def states(self, *values):
        """Return states [1, T, 1]."""
        return mx.array(values, mx.float32)[None, :, None]

    def test_those_of_consecutive_tokens_are_there(self):
        row = RowStates()
        row.add(self.states(1, 2, 3, 9), 0, 3, 3)
        row.add(self.states(4), 0, 1, 4)
        assert row.first == 0
        assert row.taken(1, 4).tolist() == [[2], [3], [4]]

    def test_a_gap_forgets_those_before_it(self):
        row = RowStates()
        row.add(self.states(1, 2), 0, 2, 2)
        row.add(self.states(5), 0, 1, 5)
        assert row.first == 4
        assert row.taken(4, 5).tolist() == [[5]]

    def test_the_latest_can_be_taken_again(self):
        row = RowStates()
        for place in range(3):
            row.add(self.states(place), 0, 1, place + 1)
        row.taken(0, 3)
        assert row.first == 2
        assert row.taken(2, 3).tolist() == [[2]]

    @pytest.mark.parametrize("width", [1, 100, 3 * MOST_TOKENS])
    def test_no_more_are_kept_than_a_head_reads(self, width):
        row, stop = RowStates(), 0
        while stop < 4 * MOST_TOKENS:
            stop += width
            row.add(mx.arange(stop - width, stop)[None, :, None], 0, width, stop)
        assert MOST_TOKENS <= stop - row.first < MOST_TOKENS + width
        assert row.taken(stop - 2, stop).tolist() == [[stop - 2], [stop - 1]]
