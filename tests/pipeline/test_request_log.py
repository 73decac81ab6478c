"""The times of a reply: true, or left out."""

import logging
import time

import pytest

from backend.core.prefix_listing import HitKind
from backend.core.step import Finish, FinishReason, PrefillDone, Steps, Usage
from backend.pipeline.request_log import RequestLog

STOP = Finish(FinishReason.STOP)


def served_at_once(ended_at, tokens):
    """The log of a request whose events all arrive together."""
    log = RequestLog("a", Usage(prompt_tokens=3))
    done = PrefillDone(cached_tokens=0, prefill_ms=1.0, ended_at=ended_at)
    return log, log.note(Steps(done, [5] * tokens), tokens, STOP)


def test_a_reply_that_arrives_in_one_piece_has_the_times_of_the_engine():
    _, usage = served_at_once(time.monotonic() - 2.0, tokens=40)
    assert usage.decode_ms >= 2000.0


def test_a_rate_that_cannot_be_known_is_left_out(caplog):
    with caplog.at_level(logging.INFO):
        log, _ = served_at_once(time.monotonic(), tokens=1)
        log.close()
    assert "generated_tokens=1" in caplog.text
    assert "tokens_per_s" not in caplog.text


def test_the_rate_of_a_burst_is_that_of_the_engine(caplog):
    with caplog.at_level(logging.INFO):
        log, usage = served_at_once(time.monotonic() - 10.0, tokens=50)
        log.close()
    rate = float(caplog.text.split("tokens_per_s=")[1].split()[0])
    assert rate == pytest.approx(50 / usage.decode_ms * 1000.0, abs=0.06)
    assert rate <= 5.0


@pytest.mark.parametrize(("parted_at", "told"), [(70, True), (0, False)])
def test_the_line_says_where_a_prompt_parted_from_a_stored_one(caplog, parted_at, told):
    log = RequestLog("a", Usage(prompt_tokens=90))
    done = PrefillDone(64, 1.0, HitKind.DIVERGING, parted_at)
    with caplog.at_level(logging.INFO):
        log.note(Steps(done, [5]), 1, STOP)
        log.close()
    assert ("cache_hit=diverging parted_at=70 generated_tokens=1" in caplog.text) == told
    assert ("parted_at" in caplog.text) == told
