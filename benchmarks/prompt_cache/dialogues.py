"""Requests to a chat model: an agent's turns, and branching conversations."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from backend.pb import backend_pb2 as pb
from benchmarks.harness.served import Served

REPLY_TOKENS = 10
# Seeds of texts, far apart from each other.
_SYSTEM_SEED, _QUESTION_SEED, _RESULT_SEED, _ANSWER_SEED = 1000, 2000, 3000, 4000
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class AgentShape:
    """The length of an agent's conversation.

    Attributes:
        system_tokens: Of the system prompt with the tools.
        result_tokens: Of a tool's result.
    """

    turns: int = 6
    system_tokens: int = 3000
    result_tokens: int = 500


def chat(messages: Sequence[pb.Message], *, tools: str = "") -> pb.PredictOptions:
    """Return a greedy request for a reply of exactly `REPLY_TOKENS`."""
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=messages,
        Tools=tools,
        Tokens=REPLY_TOKENS,
        IgnoreEOS=True,
    )


async def agent_turns(server: Served, shape: AgentShape) -> list[pb.PredictOptions]:
    """Return an agent's requests, turn by turn: the history, its call, and the tool's result."""
    tools = json.dumps([_TOOL])
    question = pb.Message(role="user", content=await server.prompt(50, _QUESTION_SEED))
    bare = await server.token_ids(chat([pb.Message(role="system"), question], tools=tools))
    system_text = await server.prompt(shape.system_tokens + 50 - len(bare), _SYSTEM_SEED)
    history = [pb.Message(role="system", content=system_text), question]
    requests = []
    for turn in range(shape.turns):
        requests.append(chat(history, tools=tools))
        result = await server.prompt(shape.result_tokens, _RESULT_SEED + turn)
        history += [_call(turn), pb.Message(role="tool", content=result, tool_call_id=_id(turn))]
    return requests


async def branching_turns(
    server: Served, *, openings: int, endings: int
) -> list[pb.PredictOptions]:
    """Return the requests of `openings` x `endings` conversations of two turns, one after another.

    All share the system prompt, and those of one opening also the first turn.
    """
    system = pb.Message(role="system", content=await server.prompt(500, _SYSTEM_SEED))
    requests = []
    for opening in range(openings):
        question = await server.prompt(150, _QUESTION_SEED + opening)
        answer = await server.prompt(100, _ANSWER_SEED + opening)
        first = [system, pb.Message(role="user", content=question)]
        for ending in range(endings):
            other = await server.prompt(150, _RESULT_SEED + opening * endings + ending)
            second = pb.Message(role="user", content=other)
            reply = pb.Message(role="assistant", content=answer)
            requests += [chat(first), chat([*first, reply, second])]
    return requests


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of common first tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def unique_tokens(prompts: Sequence[list[int]]) -> int:
    """Return the total tokens of prompts, with shared prefixes counted once."""
    # Among sorted sequences, the previous one shares the longest prefix.
    ordered = sorted(prompts)
    shared = (shared_tokens(*pair) for pair in pairwise(ordered))
    return sum(map(len, ordered)) - sum(shared)


def _call(turn: int) -> pb.Message:
    function = {"name": "look_up", "arguments": json.dumps({"word": f"w{turn}"})}
    calls = [{"id": _id(turn), "type": "function", "function": function}]
    return pb.Message(role="assistant", tool_calls=json.dumps(calls))


def _id(turn: int) -> str:
    return f"call{turn:05}"
