"""Where drafts come from, and when they pay."""

import random

import pytest

from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.lookup import MATCH_TOKENS, MAX_MATCH_TOKENS, Lookup
from backend.engine.drafts.trust import Trust


def test_what_followed_the_latest_tokens_before_is_drafted():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert Lookup(text).follow(3) == ([4, 5, 6], 3)


def test_the_last_of_several_places_counts():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3]
    assert Lookup(text).follow(1)[0] == [5]


def test_a_text_that_repeats_itself_up_to_its_end_is_followed_round_and_round():
    text = [8, 1, 2, 1, 2, 1, 2]
    assert Lookup(text).follow(5)[0] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("text", [[], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_a_text_without_a_repetition_gives_no_draft(text):
    assert Lookup(text).follow(4) == ([], 0)


def test_a_longer_match_is_told_from_a_shorter_one():
    phrase = list(range(100, 160))
    for length in (MATCH_TOKENS, 8, MAX_MATCH_TOKENS, 50):
        text = [*phrase, 1, 2, 3, *phrase[60 - length :]]
        found, matched = Lookup(text).follow(3)
        assert found == [1, 2, 3]
        assert matched == min(length, MAX_MATCH_TOKENS)


def test_an_index_that_grows_with_its_text_is_the_index_of_the_whole():
    rng = random.Random(1)
    text, whole = [], [rng.randrange(4) for _ in range(400)]
    grown = Lookup(text)
    for token_id in whole:
        text.append(token_id)
        if rng.random() < 0.5:
            assert grown.follow(6) == Lookup(list(text)).follow(6)


def test_drafts_are_what_followed_in_the_text():
    rng = random.Random(2)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randrange(3, 60))]
        found, matched = Lookup(text).follow(8)
        if not found:
            continue
        tail = tuple(text[-matched:])
        extended = [*text, *found]
        places = [i for i in range(matched, len(text)) if tuple(text[i - matched : i]) == tail]
        assert any(extended[i : i + 8] == found for i in places)


def test_trust_follows_what_came_true():
    trust = Trust(0.5)
    assert trust.expected(2) == pytest.approx(0.75)
    for _ in range(60):
        trust.learn(4, 4, 0)
    assert trust.expected(4) > 3.5
    for _ in range(60):
        trust.learn(4, 0, 0)
    assert trust.expected(4) < 0.1


def test_a_source_that_did_not_pay_is_tried_again_after_a_while():
    trust = Trust(0.1, pays=False)
    trust.learn(3, 0, 100)
    assert not trust.wants_trial(101)
    assert trust.wants_trial(200)


def test_costs_begin_with_what_was_measured_and_follow_what_is_seen():
    costs = PassCosts({1: 1.0, 4: 1.3, 8: 2.1})
    assert costs.of(1, 1) == 1.0
    assert costs.of(1, 2) == pytest.approx(1.1)
    assert costs.of(2, 4) == pytest.approx(2.1)
    assert costs.of(4, 4) == pytest.approx(3.7), "beyond the last one they grow on"
    for _ in range(50):
        costs.observe(4, 1, 2.6)
    assert costs.of(4, 1) == pytest.approx(2.6, rel=0.01)
    assert costs.of(4, 4) == pytest.approx(7.4, rel=0.01), "wider passes are dearer alike"
    assert costs.of(1, 1) == 1.0, "those of other rows are not"
    for _ in range(50):
        costs.observe(4, 4, 3.0)
    assert costs.of(4, 4) == pytest.approx(3.0, rel=0.01)
    assert costs.of(4, 1) == pytest.approx(2.6, rel=0.01)


def test_one_pass_that_was_held_up_does_not_end_drafting():
    costs = PassCosts({1: 1.0, 8: 1.5})
    for _ in range(20):
        costs.observe(1, 8, 1.5)
    costs.observe(1, 8, 100.0)
    assert costs.of(1, 8) < 1.7


def test_a_pass_without_drafts_is_due_when_its_cost_is_a_guess_or_old():
    costs = PassCosts({1: 1.0, 8: 1.5})
    assert not costs.wants_plain(1), "it was measured at load"
    assert costs.wants_plain(4)
    costs.observe(4, 3, 1.5)
    assert costs.wants_plain(4)
    costs.observe(4, 1, 1.2)
    assert not costs.wants_plain(4)
    passes = 0
    while not costs.wants_plain(4):
        costs.observe(4, 3, 1.5)
        passes += 1
    assert passes > 30, "what it costs is small beside what drafts save"
    costs.observe(2, 1, 1.0)
    assert costs.wants_plain(4), "other rows tell nothing"
    costs.observe(4, 1, 1.2)
    assert not costs.wants_plain(4)
