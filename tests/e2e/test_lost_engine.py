"""A stream through the socket whose engine process is killed goes on with the same reply."""

import json
import os
import shutil
import signal

import grpc
import pytest
from serving import UNENDING, code_of, goes_on_after_a_loss, served, stream, undrafted

from backend.core.metric_table import counters_of
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.smoke),
        {"Temperature": 0.9, "Seed": 7},
        {"Grammar": 'root ::= ("ba" | "be"){200}'},
    ],
)
async def test_a_stream_goes_on_with_the_same_reply(tiny_models, sampling):
    request = pb.PredictOptions(
        Prompt="ba be", Tokens=600, IgnoreEOS=True, CorrelationId="one", **sampling
    )
    # Drafts would end it before the engine is killed.
    request = undrafted(request)
    async with served(tiny_models("llama")) as running:
        alone = await stream(running.stub, request)
        counted = counters_of(running.engine.status().metrics)
        folded = await goes_on_after_a_loss(running, request)
        metrics = running.engine.status().metrics
        assert min(metrics[name] - before for name, before in counted.items()) == 0
        assert metrics["generated_tokens"] > counted["generated_tokens"] >= alone.last.tokens
    assert (folded.message, folded.content) == (alone.message, alone.content)
    assert (folded.last.tokens, folded.last.prompt_tokens) == (
        alone.last.tokens,
        alone.last.prompt_tokens,
    )


async def rest_of(replies):
    async for _ in replies:
        pass


async def test_a_model_whose_files_have_changed_is_not_resumed_as_another(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    async with served(directory) as running:
        request = pb.PredictOptions(Prompt="ba be", IgnoreEOS=True, **UNENDING)
        replies = aiter(running.stub.PredictStream(request))
        await anext(replies)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
        os.kill(running.engine.process_id, signal.SIGKILL)
        code, details = await code_of(rest_of(replies))
    assert code is grpc.StatusCode.INTERNAL
    assert f"{directory} holds another model than before" in details
