"""Whatever a grammar or a medium does to the threads that take orders, only its request fails."""

import queue
import socket

import numpy as np
import pytest
from engine_driver import make_request

from backend.core.guide import Guide, ReplyRule
from backend.core.model import ModelCard
from backend.core.prompt import MediaKind
from backend.engine.grammars.pool import GrammarPool, GrammarWorkshop
from backend.engine.leading.boot import Intake
from backend.engine.messages.codec import Channel, Codec
from backend.engine.messages.protocol import Job, News, Order, PrepareMedium, Submit, Told
from backend.errors import GenerationFailedError, InvalidRequestError

pytestmark = pytest.mark.mlx

CARD = ModelCard(
    name="tiny",
    path="",
    model_type="tiny",
    context_length=64,
    vocab_size=8,
    eos_token_ids=frozenset({1}),
    weights_bytes=0,
    supports_tools=False,
    supports_thinking=False,
)


class Line:
    """The intake of an engine process, and the server's end of its connection."""

    def __init__(self, media=None):
        ours, theirs = socket.socketpair()
        # A tokenizer that is none: its vocabulary cannot be read.
        workshop = GrammarWorkshop(object(), CARD)
        self.server = Channel(ours, Codec(News))
        self.channel = Channel(theirs, Codec(Order))
        self.commands = queue.SimpleQueue()
        self.failures = queue.SimpleQueue()
        grammars = GrammarPool(workshop, lambda _requests: None)
        Intake(self.channel, media, grammars, self.commands, self.failures.put).start()
        grammars.start()


@pytest.fixture
def lines(monkeypatch):
    # The thread that listens ends the process when the connection does.
    ends = queue.SimpleQueue()
    monkeypatch.setattr("backend.engine.leading.boot.exit_at_once", ends.put)
    made = []

    def make(media=None):
        made.append(Line(media))
        return made[-1]

    yield make
    for line in made:
        line.server.close()
        assert ends.get(timeout=30) == 0
        line.channel.close()


def test_a_grammar_that_fails_in_an_unforeseen_way_fails_its_own_request(lines):
    line = lines()
    guide = Guide(rule=ReplyRule(text='root ::= "a"'))
    for name in ("a", "b"):
        line.server.send(Submit(make_request(name, [1], guide=guide)))
        told = line.server.receive(30)
        assert isinstance(told, Told)
        error = told.failures[name].error()
        assert isinstance(error, GenerationFailedError)
        assert "grammar could not be compiled" in str(error)
    assert line.commands.empty()
    assert line.failures.empty()


def test_a_medium_that_fails_in_an_unforeseen_way_fails_its_own_job(lines):
    line = lines(media=object())
    for number in (1, 2):
        image = np.zeros((2, 2, 2, 2, 2), np.uint8)
        request = PrepareMedium(kind=MediaKind.IMAGE, content=image, fps=1.0, digest=b"")
        line.server.send(Job(number, request))
        answer = line.server.receive(30)
        assert answer.number == number
        assert isinstance(answer.result.error(), GenerationFailedError)
    assert line.failures.empty()


def test_a_medium_for_a_model_that_reads_text_is_refused(lines):
    line = lines()
    request = PrepareMedium(kind=MediaKind.AUDIO, content=np.zeros(2), fps=1.0, digest=b"")
    line.server.send(Job(1, request))
    assert isinstance(line.server.receive(30).result.error(), InvalidRequestError)
