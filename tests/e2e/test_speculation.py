"""Drafted tokens through the socket: the replies are the same, and everybody can see the drafts."""

import json
import re

import grpc
import pytest
from serving import (
    chat,
    code_of,
    inspect,
    require_same,
    served,
    stream,
    undrafted,
    until_accepted,
    user,
)

from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

LINES = "".join(f'{{"row": {n}, "state": "open"}}\n' for n in range(12))
FEW = json.dumps(dict.fromkeys(map(str, range(300, 304)), 60))


def repeating(seed, **options):
    return pb.PredictOptions(
        Prompt=LINES, Tokens=80, LogitBias=FEW, IgnoreEOS=True, Seed=seed, **options
    )


async def test_replies_are_the_same_and_the_counts_are_seen():
    async with served(MODEL_DIR) as backend:
        question = [user("What is the weather in Oslo?")]
        requests = [
            repeating(3),
            repeating(4, Temperature=0.4),
            repeating(5, Temperature=0.7, Penalty=1.1),
            chat(question, tools=[WEATHER_TOOL], ToolChoice="required", Tokens=120),
        ]
        replies = await require_same(backend, requests)
        assert replies[-1].calls
        report = await until_accepted(backend, repeating(3))
        assert report.accepted_tokens <= report.drafted_tokens


async def test_the_log_tells_of_the_drafts_of_a_request(caplog):
    caplog.set_level("INFO")
    async with served(MODEL_DIR) as backend:
        await stream(backend.stub, undrafted(repeating(1)))
        assert "drafted=" not in caplog.text
        await stream(backend.stub, repeating(1))
        found = re.search(r"drafted=(\d+) accepted=(\d+) finish=length", caplog.text)
        assert found
        assert int(found[1]) >= int(found[2]) > 0


async def test_it_can_be_switched_off_for_a_model():
    async with served(MODEL_DIR, Options=["speculation:off"]) as backend:
        await stream(backend.stub, repeating(1))
        assert (await inspect(backend)).drafted_tokens == 0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("speculation:fast", "must be one of auto, lookup, draft, mtp, off, not fast"),
        ("max_draft_tokens:0", "must be between 1 and 64, not 0"),
        ("max_draft_tokens:many", "max_draft_tokens"),
    ],
)
async def test_options_that_do_not_fit_are_refused(option, told):
    async with served() as backend:
        code, details = await code_of(backend.load(MODEL_DIR, Options=[option]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert told in details
