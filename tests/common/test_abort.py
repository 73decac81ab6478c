"""The message with which a call ends fits the trailers of gRPC."""

import pytest

from common.log import MAX_MESSAGE_BYTES, shortened


@pytest.mark.parametrize("message", ["", "Prompt: is too long", "é" * (MAX_MESSAGE_BYTES // 2)])
def test_a_message_that_fits_is_left_as_it_is(message):
    assert shortened(message) == message


@pytest.mark.parametrize("letter", ["x", "é", "語", "🐍", "\0"])
@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES, 2050, 2051, 10_000, 3_000_000])
def test_of_a_long_message_the_quoted_middle_is_left_out(letter, length):
    message = f"Messages[0].role: '{letter * length}' is none of user and assistant"
    cut = shortened(message)
    assert len(cut.encode()) <= MAX_MESSAGE_BYTES
    assert cut.startswith(f"Messages[0].role: '{letter}")
    assert cut.endswith(f"{letter}' is none of user and assistant")
    assert "bytes left out ...]" in cut


def test_the_number_of_bytes_left_out_is_true():
    head, _, tail = shortened("a" * 10_000).partition(" [... ")
    number, _, tail = tail.partition(" bytes left out ...] ")
    assert len(head) + int(number) + len(tail) == 10_000


def test_what_utf_8_cannot_hold_is_written_out():
    assert shortened("a\udc80b") == "a\\udc80b"
