"""An encoder's session turn by turn: calls that share passes, leave, break the model, and end."""

from concurrent.futures import Future
from types import SimpleNamespace

import mlx.core as mx
import pytest
from engine_driver import make_request

from backend.core.embedding import EmbeddingRequest, Pooling
from backend.core.model import ModelCard, ModelKind
from backend.core.prompt import Prompt
from backend.core.scoring import JudgeRequest, ScoreRequest, TokenPair
from backend.core.status import EngineState
from backend.engine.messages.commands import Compute, Submit
from backend.engine.session.encoder_session import EncoderSession
from backend.engine.session.session import Outlets
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
        self.published = []
        model = RunnableModel(tokenizer=None, template=None, card=card, network=self.network)
        self.session = EncoderSession(model, Outlets(self.published.extend, self.published.append))

    def embed(self, *token_ids, pooling=Pooling.MEAN):
        request = EmbeddingRequest(token_ids=token_ids, pooling=pooling, is_normalized=False)
        command = Compute(request, Future())
        self.session.obey(command)
        return command.reply

    def judge(self, *pairs):
        command = Compute(JudgeRequest(tuple(map(TokenPair, pairs))), Future())
        self.session.obey(command)
        return command.reply

    def turn(self):
        try:
            self.session.turn()
        except Exception as error:  # noqa: BLE001 (as the leader does)
            self.session.recover(error)

    def finish(self):
        while not self.session.is_idle:
            self.turn()


def test_calls_that_wait_together_share_a_pass():
    driver = Driver()
    replies = [driver.embed(*range(1, count + 1)) for count in (3, 5, 4)]
    assert driver.session.status().state is EngineState.BUSY
    driver.finish()
    assert [list(reply.result(0).values) for reply in replies] == [[2.0], [3.0], [2.5]]
    assert len(driver.network.passes) == 1
    status = driver.session.status()
    assert (status.state, status.metrics["waiting"], status.metrics["prompt_tokens"]) == (
        EngineState.READY,
        0,
        12,
    )


def test_each_pooling_sees_its_own_tokens_only():
    driver = Driver()
    replies = [driver.embed(7, 8, 9, 9, 9), *(driver.embed(4, 6, pooling=p) for p in Pooling)]
    driver.finish()
    assert [list(reply.result(0).values) for reply in replies[1:]] == [[5], [6], [4], [4, 6]]


def test_a_call_of_many_texts_does_not_hold_up_the_others():
    driver = Driver(ModelKind.CROSS_ENCODER)
    long = driver.judge(*((each,) * 60 for each in range(1, 20)))
    short = driver.judge((30,), (31,))
    driver.turn()
    driver.turn()
    assert short.result(0) == (30.0, 31.0)
    assert not long.done()
    driver.finish()
    assert long.result(0) == tuple(map(float, range(1, 20)))


def test_a_text_that_breaks_the_model_fails_its_own_call_only():
    driver = Driver(ModelKind.CROSS_ENCODER)
    good, bad = driver.judge((1,), (2,)), driver.judge((3,), (BAD,), (4,))
    driver.finish()
    assert good.result(0) == (1.0, 2.0)
    with pytest.raises(GenerationFailedError, match="bad token"):
        bad.result(0)
    after = driver.judge((5,))
    driver.finish()
    assert after.result(0) == (5.0,)


def test_a_caller_that_leaves_is_not_computed():
    driver = Driver()
    gone, stays = driver.embed(1), driver.embed(2)
    gone.cancel()
    driver.finish()
    assert driver.network.passes == [[[2]]]
    assert stays.done()


def test_what_an_encoder_cannot_do_is_refused_here_too():
    driver = Driver()
    driver.session.obey(Submit(make_request("a", [1, 2])))
    (refusal,) = driver.published
    assert isinstance(refusal.event.error(), UnsupportedError)
    score = Compute(ScoreRequest(request_id="s", prompt=Prompt((1,)), continuations=()), Future())
    driver.session.obey(score)
    judgement = driver.judge((1,))
    driver.finish()
    for reply in (score.reply, judgement):
        with pytest.raises(UnsupportedError):
            reply.result(0)
