"""Which texts share a pass: nobody waits for ever, little is padded, nothing is lost."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.background.text_queue import MAX_ROWS, TextCall, TextQueue


def call(*lengths):
    texts = [SimpleNamespace(token_ids=[0] * length) for length in lengths]
    return TextCall(1, texts, tuple)


def queued(*calls):
    queue = TextQueue()
    for each in calls:
        queue.add(each)
    return queue


def lengths(texts):
    return [text.length for text in texts]


def test_texts_of_like_length_go_together():
    queue = queued(call(100), call(9), call(95), call(400), call(104))
    assert lengths(queue.take(1000)) == [9]
    assert lengths(queue.take(1000)) == [95, 100, 104]
    assert lengths(queue.take(1000)) == [400]


def test_a_pass_with_its_padding_has_no_more_tokens_than_it_may():
    queue = queued(call(*[10] * 5))
    assert len(queue.take(30)) == 3
    assert len(queue.take(30)) == 2


def test_a_text_that_is_longer_goes_alone():
    assert lengths(queued(call(500), call(500)).take(64)) == [500]


def test_calls_of_like_texts_lead_in_turn():
    queue = queued(many := call(*[50] * 9), few := call(50, 50), other := call(50))
    leads = [queue.take(1)[0].call for _ in range(6)]
    assert leads == [many, few, other, many, few, many]


def test_a_short_call_waits_for_none_of_forty_long_ones():
    queue = queued(*(call(*[500] * 100) for _ in range(40)))
    for _ in range(60):
        queue.take(500)
    queue.add(short := call(5))
    assert queue.take(500)[0].call is short


def test_a_long_text_is_not_put_off_for_ever_by_later_short_ones():
    queue = queued(long := call(500))
    leads = []
    for _ in range(201):
        queue.add(call(5))
        leads.append(queue.take(1)[0].call)
    assert long in leads


def test_what_was_dropped_is_not_taken():
    queue = queued(gone := call(5, 5), stays := call(5))
    queue.drop(gone)
    queue.drop(gone)
    assert [text.call for text in queue.take(100)] == [stays]


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), min_size=1, max_size=9),
    st.integers(1, 2000),
)
def test_every_text_is_taken_once(calls, max_tokens):
    calls = [call(*each) for each in calls]
    queue = queued(*calls)
    taken = []
    while len(taken) < sum(len(each.texts) for each in calls):
        texts = queue.take(max_tokens)
        size = len(texts) * max(lengths(texts))
        assert len(texts) == 1 or (size <= max_tokens and len(texts) <= MAX_ROWS)
        taken += [(text.call, text.index) for text in texts]
    assert sorted(taken, key=lambda each: (calls.index(each[0]), each[1])) == [
        (each, index) for each in calls for index in range(len(each.texts))
    ]
