"""An encoder's loop turn by turn: calls that share passes, leave, break the model, and end."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from engine_driver import Desk, make_request, numbers_in

from backend.core.engine_status import EngineState
from backend.core.model import ModelCard, ModelKind
from backend.core.prompt import Prompt
from backend.core.scoring import EmbeddingRequest, JudgeRequest, Pooling, ScoreRequest, TokenPair
from backend.engine.encoder_loop import EncoderLoop
from backend.engine.messages.protocol import Job, Leave, Submit
from backend.errors import GenerationFailedError, UnsupportedError
from backend.model.loaded import RunnableModel

pytestmark = pytest.mark.mlx

BAD = 66


class Network:
    """Gives every token its id as its vector and as its label; breaks on one of them."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self):
        self.passes = []

    def __call__(self, input_ids, *, attention_mask, token_type_ids):  # noqa: ARG002 (as upstream)
        rows = input_ids.tolist()
        self.passes.append(rows)
        if any(BAD in row for row in rows):
            raise RuntimeError("bad token")
        states = (input_ids * attention_mask).astype(mx.float32)[..., None]
        return SimpleNamespace(last_hidden_state=states, logits=states[:, 0])


class Driver:
    def __init__(self, kind=ModelKind.ENCODER):
        card = ModelCard(
            name="tiny",
            path="",
            model_type="tiny",
            context_length=None,
            vocab_size=100,
            eos_token_ids=frozenset(),
            weights_bytes=0,
            supports_tools=False,
            supports_thinking=False,
            kind=kind,
        )
        self.network = Network()
        model = RunnableModel(tokenizer=None, template=None, card=card, network=self.network)
        self.desk = Desk()
        self.loop = EncoderLoop(model, self.desk)
        self.asked = 0

    def embed(self, *token_ids, pooling=Pooling.MEAN):
        request = EmbeddingRequest(token_ids=token_ids, pooling=pooling, is_normalized=False)
        return self.begin(request)

    def judge(self, *pairs):
        return self.begin(JudgeRequest(tuple(map(TokenPair, pairs))))

    def begin(self, request):
        """Give the loop a job, and return its number."""
        self.asked += 1
        self.desk.commands.append(Job(self.asked, request))
        return self.asked

    def turn(self):
        self.loop.turn()

    def finish(self):
        self.turn()
        while not self.loop.is_idle:
            self.turn()

    def result(self, number):
        """Return the result of a job, or raise its error."""
        result = self.desk.results[number]
        if isinstance(result, Exception):
            raise result
        return result


def test_calls_that_wait_together_share_a_pass():
    driver = Driver()
    replies = [driver.embed(*range(1, count + 1)) for count in (3, 5, 4)]
    driver.finish()
    assert [numbers_in(driver.result(reply)) for reply in replies] == [[2.0], [3.0], [2.5]]
    assert len(driver.network.passes) == 1
    status = driver.loop.status()
    assert (status.state, status.metrics["waiting"], status.metrics["prompt_tokens"]) == (
        EngineState.READY,
        0,
        12,
    )


def test_each_pooling_sees_its_own_tokens_only():
    driver = Driver()
    replies = [driver.embed(7, 8, 9, 9, 9), *(driver.embed(4, 6, pooling=p) for p in Pooling)]
    driver.finish()
    assert [numbers_in(driver.result(reply)) for reply in replies[1:]] == [[5], [6], [4], [4, 6]]


def test_a_call_of_many_texts_does_not_hold_up_the_others():
    driver = Driver(ModelKind.CROSS_ENCODER)
    long = driver.judge(*((each,) * 60 for each in range(1, 20)))
    short = driver.judge((30,), (31,))
    driver.turn()
    driver.turn()
    assert driver.result(short).logits == (30.0, 31.0)
    assert driver.loop.status().state is EngineState.BUSY
    driver.finish()
    assert driver.result(long).logits == tuple(map(float, range(1, 20)))


def test_a_text_that_breaks_the_model_fails_its_own_call_only():
    driver = Driver(ModelKind.CROSS_ENCODER)
    good, bad = driver.judge((1,), (2,)), driver.judge((3,), (BAD,), (4,))
    driver.finish()
    assert driver.result(good).logits == (1.0, 2.0)
    with pytest.raises(GenerationFailedError, match="bad token"):
        driver.result(bad)
    after = driver.judge((5,))
    driver.finish()
    assert driver.result(after).logits == (5.0,)


def test_a_caller_that_leaves_is_not_computed():
    driver = Driver()
    gone, stays = driver.embed(1), driver.embed(2)
    driver.desk.commands.append(Leave(gone))
    driver.finish()
    assert driver.network.passes == [[[2]]]
    assert list(driver.desk.results) == [stays]


def test_what_an_encoder_cannot_do_is_refused_here_too():
    driver = Driver()
    driver.desk.commands.append(Submit(make_request("a", [1, 2])))
    driver.turn()
    (refusal,) = driver.desk.published
    assert isinstance(refusal.failures["a"].error(), UnsupportedError)
    score = driver.begin(ScoreRequest(request_id="s", prompt=Prompt((1,)), continuations=()))
    judgement = driver.judge((1,))
    driver.finish()
    for reply in (score, judgement):
        with pytest.raises(UnsupportedError):
            driver.result(reply)
