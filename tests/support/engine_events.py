"""The events of requests one by one, though the engine sends them together."""

from collections.abc import Iterator

from backend.core.step import EngineEvent, Steps, TokenStep
from backend.engine.messages.protocol import Told
from backend.errors import BackendError


def steps_of(*events: EngineEvent) -> Steps:
    """Return events together."""
    steps = Steps()
    for event in events:
        steps.add(event)
    return steps


def events_of(steps: Steps) -> Iterator[EngineEvent]:
    """Yield the events of a request."""
    if steps.prefill is not None:
        yield steps.prefill
    last = len(steps.token_ids) - 1
    for i, token_id in enumerate(steps.token_ids):
        logprobs = steps.logprobs[i] if steps.logprobs else None
        if i == last:
            counts = (steps.drafted, steps.accepted)
            yield TokenStep(token_id, steps.finish_reason, logprobs, *counts)
        else:
            yield TokenStep(token_id, None, logprobs)


def events_in(told: Told) -> Iterator[tuple[str, EngineEvent | BackendError]]:
    """Yield the events of all requests with their ids, those of one request in order."""
    for request_id, steps in told.steps.items():
        for event in events_of(steps):
            yield request_id, event
    for request_id, failure in told.failures.items():
        yield request_id, failure.error()
