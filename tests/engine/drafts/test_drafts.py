"""Where drafts come from, and when they pay."""

import random
from dataclasses import replace

import pytest
from drafting import Cycle
from engine_driver import VOCAB
from virtual_decoding import ScriptedModel, row_of

from backend.config import SpeculationOptions
from backend.engine.drafts.drafter import MATCH_TOKENS, MAX_MATCH_TOKENS, Lookup
from backend.engine.drafts.drafting import Drafting
from backend.engine.drafts.pricing import MAX_PASS_TOKENS, Offer, PassCosts, Prices, Source, Trust
from backend.engine.rows.pacing import Counters


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
    for _ in range(60):
        trust.learn(4, 4, 0)
    assert trust.chance > 0.9
    for _ in range(60):
        trust.learn(4, 0, 0)
    assert trust.chance < 0.1


def test_a_source_that_did_not_pay_is_tried_again_after_a_while():
    trust = Trust(0.1, pays=False)
    trust.learn(3, 0, 100)
    assert not trust.wants_trial(101)
    assert trust.wants_trial(200)


def test_costs_begin_with_what_was_measured_and_follow_what_is_seen():
    costs = PassCosts({1: 1.0, 4: 1.3, 8: 2.1})
    assert costs.of(1, 1) == 1.0
    assert costs.of(1, 2) == pytest.approx(1.1)
    assert costs.of(2, 8) == pytest.approx(2.1)
    assert costs.of(4, 16) == pytest.approx(3.7), "beyond the last one they grow on"
    for _ in range(50):
        costs.observe(4, 4, 2.6)
    assert costs.of(4, 4) == pytest.approx(2.6, rel=0.01)
    assert costs.of(4, 16) == pytest.approx(7.4, rel=0.01), "wider passes are dearer alike"
    assert costs.of(1, 1) == 1.0, "those of other rows are not"
    for _ in range(50):
        costs.observe(4, 16, 3.0)
    assert costs.of(4, 16) == pytest.approx(3.0, rel=0.01)
    assert costs.of(4, 4) == pytest.approx(2.6, rel=0.01)


def test_one_pass_that_was_held_up_does_not_end_drafting():
    costs = PassCosts({1: 1.0, 8: 1.5})
    for _ in range(20):
        costs.observe(1, 8, 1.5)
    costs.observe(1, 8, 100.0)
    assert costs.of(1, 8) < 1.7


def test_a_pass_without_drafts_is_due_when_its_cost_is_a_guess_or_old():
    costs = PassCosts({1: 1.0, 8: 1.5})
    assert costs.wants_plain(1), "other work may have delayed what was measured at load"
    assert costs.wants_plain(4)
    costs.observe(4, 12, 1.5)
    assert costs.wants_plain(4)
    costs.observe(4, 4, 1.2)
    assert not costs.wants_plain(4)
    passes = 0
    while not costs.wants_plain(4):
        costs.observe(4, 12, 1.5)
        passes += 1
    assert passes > 30, "what it costs is small beside what drafts save"
    costs.observe(2, 2, 1.0)
    assert costs.wants_plain(4), "other rows tell nothing"
    costs.observe(4, 4, 1.2)
    assert not costs.wants_plain(4)


def drafting_of(model, *rows, seconds=None, **options):
    costs = PassCosts(seconds or {1: 1.0, 8: 1.2})
    drafting = Drafting(costs, Counters(), VOCAB, SpeculationOptions(**options), model)
    drafting.follow(rows)
    drafting.observe(len(rows), len(rows), costs.of(len(rows), len(rows)))
    return drafting


def advance(row, count=1):
    """Let a row take tokens that nobody drafted."""
    for _ in range(count):
        row.take(len(row.token_ids) % 50 + 100)
        row.drawn += 1
        row.fed += 1


@pytest.mark.parametrize(("own_s", "depth"), [(0.01, 6), (0.2, 2), (30.0, 0)])
def test_a_draft_model_writes_as_much_as_pays(own_s, depth):
    model = ScriptedModel({1: own_s, 64: own_s})
    drafting = drafting_of(model, row_of([1, 2]), max_draft_tokens=8)
    assert drafting.may_draft
    assert drafting.drafts() == [(7,) * depth]
    assert model.written == ([(1, depth)] if depth else [])


def test_a_trial_is_no_longer_than_drafts_may_be():
    model = ScriptedModel({1: 0.9, 64: 0.9})
    drafting = drafting_of(model, row_of([1, 2]), max_draft_tokens=2)
    assert drafting.drafts() == [(7, 7)]


def test_a_draft_model_writes_for_rows_whose_text_tells_nothing():
    text = [*range(20, 40), 3, *range(20, 40)]
    told, other = row_of(text), row_of([1, 2])
    model = ScriptedModel({1: 0.001, 64: 0.001})
    drafting = drafting_of(model, told, other, max_draft_tokens=4)
    drafting.observe(2, 2, 1.0)
    assert drafting.drafts() == [(20, 21, 22, 23), (7, 7, 7, 7)]
    assert model.written == [(1, 4)]


def test_a_draft_model_alone_looks_nothing_up():
    told = row_of([*range(20, 34), 3, *range(20, 34)])
    model = ScriptedModel({1: 0.001, 64: 0.001})
    drafting = drafting_of(model, told, speculation="draft", max_draft_tokens=4)
    for _ in range(3):
        drafts = drafting.drafts()
    assert drafts == [(7, 7, 7, 7)]


def test_a_prompt_is_read_in_parts_that_let_nobody_wait_long_before_a_model_writes():
    row = row_of(list(range(100, 300)))
    # 25 tokens in the time of a pass of the model.
    model = ScriptedModel({1: 0.04, 100: 4.0})
    drafting = drafting_of(model, row, seconds={1: 1.0, 8: 1.0})
    unread = []
    while not any(drafting.drafts()):
        unread.append(model.unread(row))
        assert drafting.may_draft
    assert unread == [136, 72, 8]
    assert model.unread(row) == -1


@pytest.mark.parametrize(("length", "limit"), [(4000, 400), (300, 4)])
def test_a_prompt_is_not_read_where_that_costs_more_than_drafts_save(length, limit):
    row = row_of([n % 400 + 100 for n in range(length)], limit)
    model = ScriptedModel({1: 0.1, 100: 10.0})
    drafting = drafting_of(model, row, speculation="draft")
    assert drafting.drafts() == [()]
    assert model.unread(row) == length
    assert not drafting.may_draft


def test_a_draft_model_that_is_wrong_rests_and_is_tried_again():
    row = row_of([1, 2])
    model = ScriptedModel({1: 0.01, 64: 0.01})
    drafting = drafting_of(model, row, speculation="draft")
    rounds = 0
    while any(drafting.drafts()):
        drafting.learn([0])
        drafting.observe(1, 4, 1.2)
        advance(row)
        rounds += 1
        assert rounds < 30
    assert not drafting.may_draft
    tried = 0
    for _ in range(600):
        drafting.observe(1, 1, 1.0)
        advance(row)
        if drafting.may_draft and any(drafting.drafts()):
            tried += 1
            drafting.learn([0])
    assert 1 <= tried < 600 / 32


def test_rows_that_are_not_worth_reading_rest_one_after_the_other():
    rows = [row_of([n % 400 + 100 for n in range(300 + place)], 4) for place in range(4)]
    model = ScriptedModel({1: 0.1, 100: 10.0})
    drafting = drafting_of(model, *rows, speculation="draft")
    drafting.observe(4, 4, 1.0)
    calls = 0
    while drafting.may_draft:
        assert not any(drafting.drafts())
        calls += 1
        assert calls <= len(rows)
    assert [model.unread(row) for row in rows] == [300, 301, 302, 303]


def test_rows_that_nobody_has_read_are_tried_in_time():
    rows = [row_of([n % 400 + 100 for n in range(40 + place)], 5000) for place in range(4)]
    model = ScriptedModel({1: 0.03, 64: 0.3})
    # A token costs the same in a pass of any width: no draft pays.
    drafting = drafting_of(model, *rows, seconds={1: 1.0, 64: 64.0}, speculation="draft")
    waited = 0
    for _ in range(2000):
        waited += drafting.may_draft
        if drafting.may_draft and any(drafting.drafts()):
            drafting.learn([0] * 4)
            drafting.settle(30.0, 2)
        else:
            drafting.observe(4, 4, 4.0)
        for row in rows:
            advance(row)
    assert model.written
    assert waited < 2000 / 8


def test_what_one_row_has_learnt_of_a_draft_model_the_next_row_knows():
    first, second = row_of([1, 2]), row_of([1, 2])
    model = ScriptedModel({1: 0.01, 64: 0.01})
    drafting = drafting_of(model, first, speculation="draft")
    rounds = []
    for row in (first, second):
        drafting.follow([row])
        rounds.append(0)
        while any(drafting.drafts()):
            drafting.learn([0])
            advance(row)
            rounds[-1] += 1
    assert rounds[0] > 3
    assert rounds[1] < 3


def test_a_draft_that_a_grammar_forbids_counts_as_wrong():
    row = row_of([1, 2])
    row.request = replace(row.request, grammar=Cycle([8], 400))
    model = ScriptedModel({1: 0.01, 64: 0.01})
    drafting = drafting_of(model, row, speculation="draft")
    for _ in range(30):
        assert drafting.drafts() == [()]
    assert len(model.written) < 20


def test_a_draft_model_that_fails_is_asked_no_more(caplog):
    class Failing(ScriptedModel):
        def write(self, _rows, _depth):
            raise RuntimeError("gone")

    drafting = drafting_of(Failing({1: 0.01, 64: 0.01}), row_of([1, 2]))
    assert drafting.drafts() == [()]
    assert not drafting.may_draft
    assert "the draft model fails, and drafts no more" in caplog.text


def test_a_draft_model_that_cannot_read_is_asked_no_more(caplog):
    class Unreadable(ScriptedModel):
        def read(self, _row, _count):
            raise RuntimeError("gone")

    row = row_of(list(range(100, 300)))
    drafting = drafting_of(Unreadable({1: 0.04, 100: 4.0}), row, seconds={1: 1.0, 8: 1.0})
    assert drafting.drafts() == [()]
    assert not drafting.may_draft
    assert "the draft model fails, and drafts no more" in caplog.text


@pytest.mark.parametrize(("keeps_parts", "depth"), [(True, 2), (False, 0)])
def test_a_draft_has_to_pay_more_where_what_is_right_of_it_has_to_be_fed_again(keeps_parts, depth):
    prices = Prices(PassCosts({1: 1.0, 8: 3.0}), None, rows=1, keeps_parts=keeps_parts)
    row = row_of([1, 2])
    plan = prices.best({row: Offer(8, Source.MODEL, Trust(0.7))})
    assert plan.depths.get(row, 0) == depth


@pytest.mark.parametrize(("limit_s", "depth"), [(9.0, 7), (2.0, 3), (0.5, 0)])
@pytest.mark.parametrize("packs", [True, False])
def test_drafts_make_no_pass_longer_than_the_device_allows(packs, limit_s, depth):
    costs = PassCosts({1: 1.0, 4: 1.9, 8: 3.0}, limit_s)
    row = row_of([1, 2])
    prices = Prices(costs, None, rows=1, keeps_parts=True, packs=packs)
    plan = prices.best({row: Offer(7, Source.LONG_MATCH, Trust(1.0))})
    assert plan.depths.get(row, 0) == depth


def planned(*offers, rows, packs):
    """Return the drafted tokens of each offer in the best pass."""
    everyone = {row_of([1, 2]): offer for offer in offers}
    # Half of a pass is as dear for any number of tokens, the other half costs by the token.
    costs = PassCosts({n: 0.5 + 0.5 * n / rows for n in (1, rows, 200)})
    plan = Prices(costs, None, rows=rows, keeps_parts=True, packs=packs).best(everyone)
    return [plan.depths.get(row, 0) for row in everyone]


def test_where_rows_are_not_padded_each_has_a_depth_of_its_own():
    sure, unsure = Offer(20, Source.LONG_MATCH, Trust(1.0)), Offer(20, Source.MATCH, Trust(0.97))
    deep, shallow = planned(sure, unsure, rows=2, packs=True)
    assert deep == 20
    assert 1 <= shallow < 6
    padded = planned(sure, unsure, rows=2, packs=False)
    assert padded[0] == padded[1] < deep


def test_one_row_of_many_drafts_only_where_the_others_do_not_pay_for_it():
    sure = Offer(20, Source.LONG_MATCH, Trust(1.0))
    assert planned(sure, rows=16, packs=True) == [20]
    assert planned(sure, rows=16, packs=False) == [0]


def test_a_packed_pass_takes_no_more_tokens_than_have_room_for_their_logits():
    sure = [Offer(31, Source.LONG_MATCH, Trust(1.0))] * 8
    assert sum(planned(*sure, rows=8, packs=True)) == MAX_PASS_TOKENS - 8
