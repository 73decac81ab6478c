"""Branches: conversations that later requests may send, to find where their prompts diverge.

This needs no knowledge of templates: a conversation is varied as a client might vary it, with
another question or a next turn, and rendering both reveals the common part of the prompts.
"""

from collections.abc import Iterator, Sequence

from backend.core.model import Reuse
from backend.core.prompt import Message, Tool, ToolCall

MAX_USER_TURNS = 8

_SYSTEM_ROLES = frozenset({"system", "developer"})
_CALL_ID = "call00000"  # nine letters and digits, as some templates require
_REPLY = Message(role="assistant", content="Yes.")
_QUESTION = Message(role="user", content="Why?")
_OTHER_QUESTION = Message(role="user", content="How?")


def branches(
    messages: Sequence[Message], tools: Sequence[Tool], reuse: Reuse
) -> list[list[Message]]:
    """Return conversations that begin like this one.

    The first shares only the system prompt. The second asks something after the reply: a template
    may then drop earlier thoughts, or the start of a thought at the end of this prompt. The
    others replace one of the last user turns, or add a tool's result.

    Args:
        messages: The conversation.
        tools: The tools that the model may call.
        reuse: Where a stored prefix can be reused. `ANYWHERE` needs only the first, `WITH_WINDOWS`
            only the first two.
    """
    first = _first_turn(messages)
    found = [_asked_otherwise(messages, first)]
    if reuse is not Reuse.ANYWHERE:
        found.append([*messages, _REPLY, _QUESTION])
    if reuse is Reuse.AT_SNAPSHOTS:
        turns = _user_turns(messages, first + 1)[-MAX_USER_TURNS:]
        found += [_asked_otherwise(messages, turn) for turn in turns]
        found += _results(messages, tools)
    return found


def _first_turn(messages: Sequence[Message]) -> int:
    """Return the index of the first message after the system prompt."""
    turns = (n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    return next(turns, len(messages))


def _user_turns(messages: Sequence[Message], start: int) -> list[int]:
    return [n for n in range(start, len(messages)) if messages[n].role == "user"]


def _asked_otherwise(messages: Sequence[Message], turn: int) -> list[Message]:
    """Return the conversation before a turn, plus a question that differs in its first letter."""
    replaced = messages[turn].content if turn < len(messages) else ""
    begins_alike = replaced.lstrip()[:1].casefold() == _QUESTION.content[0].casefold()
    return [*messages[:turn], _OTHER_QUESTION if begins_alike else _QUESTION]


def _results(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[list[Message]]:
    """Yield continuations for a reply that calls a tool: the tool's result."""
    if tools:
        call = ToolCall(call_id=_CALL_ID, name=tools[0].name, arguments="{}")
        result = Message(role="tool", content="1", name=call.name, tool_call_id=call.call_id)
        yield [*messages, Message(role="assistant", tool_calls=(call,)), result]
