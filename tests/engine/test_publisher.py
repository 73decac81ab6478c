import time

from backend.core.step import TokenStep
from backend.engine.publisher import Publisher
from backend.errors import GenerationFailedError


def make_publisher(interval_s: float = 60.0) -> tuple[Publisher, list[list[int]]]:
    handed: list[list[int]] = []
    publisher = Publisher(
        lambda publications: handed.append([p.event.token_id for p in publications]), interval_s
    )
    publisher.put("warm", TokenStep(0))
    publisher.flush()
    handed.clear()
    return publisher, handed


def test_tokens_in_quick_succession_are_handed_over_together(monkeypatch):
    publisher, handed = make_publisher(0.01)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for token in (1, 2):
        publisher.put("a", TokenStep(token))
        publisher.settle()
    assert handed == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.02)
    publisher.put("a", TokenStep(3))
    publisher.settle()
    assert handed == [[1, 2, 3]]


def test_what_is_urgent_goes_at_once_and_in_order():
    publisher, handed = make_publisher()
    publisher.put("a", TokenStep(1))
    publisher.put("b", TokenStep(2), is_urgent=True)
    publisher.put("a", TokenStep(3))
    publisher.settle()
    assert handed == []
    publisher.hurry()
    publisher.hurry()
    assert handed == [[1, 2, 3]]


def test_nothing_is_handed_over_twice_or_empty():
    publisher, handed = make_publisher()
    publisher.put("a", TokenStep(1), is_urgent=True)
    publisher.hurry()
    publisher.flush()
    assert handed == [[1]]


def test_an_interval_of_zero_gathers_nothing():
    publisher, handed = make_publisher(0.0)
    for token in (1, 2):
        publisher.put("a", TokenStep(token))
        publisher.settle()
    assert handed == [[1], [2]]


def test_errors_travel_like_events():
    handed: list[object] = []
    publisher = Publisher(handed.extend, 60.0)
    publisher.put("a", GenerationFailedError("broken"), is_urgent=True)
    publisher.hurry()
    assert isinstance(handed[0].event, GenerationFailedError)
