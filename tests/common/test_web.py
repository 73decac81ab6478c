"""The HTTP server of the metrics and the dashboard, under callers that mean no good."""

import socket
import time
import urllib.request
from contextlib import ExitStack, suppress

import pytest

from common.web import MAX_CONNECTIONS, MAX_HEAD_BYTES, HttpServer, Patience

TIMEOUT_S = 30.0


def hello(_environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


@pytest.fixture
def server():
    with HttpServer("127.0.0.1:0", hello, "hello") as running:
        yield running


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def ask(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=TIMEOUT_S) as reply:
        return reply.read()


def test_a_caller_is_answered_among_many_that_send_half_a_request(server):
    with ExitStack() as others:
        for _ in range(3 * MAX_CONNECTIONS):
            others.enter_context(connect(server)).send(b"GET / HT")
        assert ask(server) == b"hello"


def test_the_one_that_waits_longest_is_dropped_when_there_are_too_many(server):
    with ExitStack() as others:
        first, *_ = [others.enter_context(connect(server)) for _ in range(MAX_CONNECTIONS + 1)]
        assert first.recv(1) == b""


def test_a_request_that_comes_byte_by_byte_has_no_more_time_than_another():
    patience = Patience(request_s=0.3)
    with HttpServer("127.0.0.1:0", hello, "hello", patience) as server, connect(server) as slow:
        start = time.monotonic()
        slow.settimeout(0.05)
        with suppress(ConnectionError):
            while time.monotonic() < start + TIMEOUT_S:
                slow.send(b"G")
                with suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
        assert time.monotonic() < start + TIMEOUT_S / 2


def test_an_answer_has_its_time_however_it_is_read():
    def endless(_environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        while True:
            yield b"x" * 2**16

    patience = Patience(answer_s=0.3)
    with HttpServer("127.0.0.1:0", endless, "x", patience) as server, connect(server) as caller:
        caller.send(b"GET / HTTP/1.0\r\n\r\n")
        with suppress(ConnectionError):
            while caller.recv(2**16):
                pass


@pytest.mark.parametrize(
    "head", [b"GET /" + b"x" * MAX_HEAD_BYTES, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 3000]
)
def test_a_long_head_is_refused(server, head):
    with connect(server) as caller:
        caller.sendall(head + b"\r\n\r\n")
        assert caller.recv(64).startswith(b"HTTP/1.0 431 ")
