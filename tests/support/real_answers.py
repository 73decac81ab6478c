"""Compares a server's replies on a published model with those of llama.cpp."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving import Served
from tokenizers import Tokenizer as FastTokenizer

from backend.pb import backend_pb2 as pb
from scripts.real_models.prompts import LONG_PROMPTS, PROMPTS, TEXTS

MODELS = Path(__file__).parents[2] / "build" / "real-models"
# Findings of the trials are kept, as in production: the next run does not repeat the trials.
FINDINGS = MODELS / "findings.json"
# The least log-probability of a token that is compared between types of weights: 5 %.
_LIKELY = -3.0
TEXT_OF = {**PROMPTS, **LONG_PROMPTS}


async def tokens_of(backend: Served, text: str) -> list[int]:
    return list((await backend.stub.TokenizeString(pb.PredictOptions(Prompt=text))).tokens)


async def require_ids_of_the_file(backend: Served, checkpoint: Path) -> None:
    """Compare ids of every text, of each two in a row and of all, with those of the file."""
    file = FastTokenizer.from_file(str(checkpoint / "tokenizer.json"))
    joined = [one + two for one, two in pairwise(TEXTS)]
    for text in [*TEXTS, *joined, " ".join(TEXTS) * 20]:
        assert await tokens_of(backend, text) == file.encode(text, add_special_tokens=False).ids


async def require_ids(backend: Served, expected: list[list[int]]) -> None:
    """Compare ids of every text with those of llama.cpp."""
    assert [await tokens_of(backend, text) for text in TEXTS] == expected


def asked(name: str, count: int, **options: Any) -> pb.PredictOptions:
    """Ask for greedy tokens with five alternatives each."""
    return pb.PredictOptions(
        Prompt=TEXT_OF[name], Tokens=count, IgnoreEOS=True, Logprobs=5, TopLogprobs=5, **options
    )


def listed(reply: pb.Reply) -> list[dict[str, Any]]:
    return json.loads(reply.logprobs)["content"]


def require_near(reply: pb.Reply, expected: dict[str, Any], within: float) -> int:
    """Require log-probabilities within a bound, up to a token whose choice the bound leaves open.

    Those of unlikely tokens are not compared.

    Returns:
        The number of equal tokens.
    """
    for count, (one, token_id, best) in enumerate(
        zip(listed(reply), expected["reply"], expected["top"], strict=True)
    ):
        ours, theirs = dict(map(_pair, one["top_logprobs"])), dict(best)
        likely = [known for known in ours if theirs.get(known, -math.inf) > _LIKELY]
        assert max((abs(ours[known] - theirs[known]) for known in likely), default=0.0) <= within
        if one["id"] != token_id:
            assert theirs[token_id] - theirs.get(one["id"], -math.inf) <= 2 * within
            return count
    return len(expected["reply"])


def require_reply(reply: pb.Reply, expected: dict[str, Any], within: float) -> None:
    """Require the same tokens, and log-probabilities within a bound."""
    assert reply.prompt_tokens == len(expected["prompt"])
    found = listed(reply)
    assert [one["id"] for one in found] == expected["reply"]
    distances = [
        abs(dict(map(_pair, one["top_logprobs"])).get(token_id, math.inf) - logprob)
        for one, best in zip(found, expected["top"] or [[]] * len(found), strict=True)
        for token_id, logprob in best[:4]  # the fifth may be a tie with a sixth
    ]
    assert max(distances, default=0.0) <= within


def _pair(listed: dict[str, Any]) -> tuple[int, float]:
    return listed["id"], listed["logprob"]
