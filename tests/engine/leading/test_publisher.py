import time

from backend.core.step import TokenStep
from backend.engine.messages.protocol import Told
from backend.engine.port import Publisher
from backend.errors import GenerationFailedError


def make_publisher(max_replies_per_s: int = 1) -> tuple[Publisher, list[dict[str, list[int]]]]:
    handed: list[dict[str, list[int]]] = []

    def hand_over(told: Told) -> None:
        handed.append({name: steps.token_ids for name, steps in told.steps.items()})

    publisher = Publisher(hand_over, max_replies_per_s)
    publisher.put("warm", TokenStep(0))
    publisher.flush()
    handed.clear()
    return publisher, handed


def test_tokens_in_quick_succession_are_handed_over_together(monkeypatch):
    publisher, handed = make_publisher(200)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for token in (1, 2):
        publisher.put("a", TokenStep(token))
        publisher.flush(2)
    assert handed == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.011)
    publisher.put("a", TokenStep(3))
    publisher.flush(2)
    assert handed == [{"a": [1, 2, 3]}]


def test_what_is_urgent_goes_at_once_and_in_order():
    publisher, handed = make_publisher()
    publisher.put("a", TokenStep(1))
    publisher.flush(2)
    assert handed == []
    publisher.put("b", TokenStep(2), is_urgent=True)
    publisher.put("a", TokenStep(3))
    publisher.flush(2)
    assert handed == [{"a": [1, 3], "b": [2]}]
    publisher.put("a", TokenStep(4))
    publisher.flush(2)
    assert len(handed) == 1, "the urgent one is gone"


def test_nothing_is_handed_over_twice_or_empty():
    publisher, handed = make_publisher()
    publisher.put("a", TokenStep(1), is_urgent=True)
    publisher.flush(2)
    publisher.flush()
    assert handed == [{"a": [1]}]


def test_without_a_bound_each_token_goes_by_itself():
    publisher, handed = make_publisher(0)
    for token in (1, 2):
        publisher.put("a", TokenStep(token))
        publisher.flush(2)
    assert handed == [{"a": [1]}, {"a": [2]}]


def test_errors_travel_like_events():
    handed: list[Told] = []
    publisher = Publisher(handed.append, 1)
    publisher.put("a", GenerationFailedError("broken"), is_urgent=True)
    publisher.flush(2)
    assert isinstance(handed[0].failures["a"].error(), GenerationFailedError)
