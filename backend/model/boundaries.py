"""Where later prompts will branch off from this one.

Nothing is known of templates here. A conversation is rendered as a later request could be, with
another question or with a next turn, and what both prompts begin with is counted in tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backend.core.prompt import Message, Tool, ToolCall
from backend.errors import InvalidRequestError
from backend.model.prefix import TokenizedText

MAX_USER_TURNS = 8
# A conversation that takes so long to render is answered without further boundaries.
BUDGET_S = 2.0

Render: TypeAlias = Callable[[Sequence[Message]], str]

_SYSTEM_ROLES = frozenset({"system", "developer"})
_CALL_ID = "call00000"  # nine letters and digits: some templates insist
_REPLY = Message(role="assistant", content="Yes.")
_QUESTION = Message(role="user", content="Why?")
_OTHER_QUESTION = Message(role="user", content="How?")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where later prompts branch off from one prompt, counted in its tokens.

    Attributes:
        system_tokens: What other conversations with the same system prompt and tools share.
        positions: All boundaries, that one included; ascending, and inside the prompt.
    """

    system_tokens: int = 0
    positions: tuple[int, ...] = ()


def find_boundaries(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    render: Render,
    prompt: TokenizedText,
    *,
    system_only: bool = False,
) -> Boundaries:
    """Return the places at which a prompt can be worth keeping.

    Beside the system prompt's end these are the starts of the last user turns, and how far the
    next turn of this conversation will begin with this prompt: a template may drop thoughts
    then, or may have ended this prompt in a thought that is not repeated.

    Args:
        messages: The conversation.
        tools: What the model may call.
        render: Writes other conversations as this one was written, with the same tools and
            options, or raises `InvalidRequestError`: then that boundary is left out.
        prompt: What it wrote for `messages`.
        system_only: Whether to look for the end of the system prompt alone, which takes one
            rendering.
    """
    deadline = time.monotonic() + BUDGET_S

    def shared_with(later: Sequence[Message]) -> int:
        if time.monotonic() > deadline:
            return 0
        try:
            shared = prompt.shared_tokens(render(later))
        except InvalidRequestError:
            return 0
        return shared if shared < len(prompt.token_ids) else 0

    first = _first_turn(messages)
    system_tokens = shared_with(_asked_otherwise(messages, first))
    found = {system_tokens}
    if not system_only:
        turns = _user_turns(messages, first + 1)[-MAX_USER_TURNS:]
        found |= {shared_with(_asked_otherwise(messages, turn)) for turn in turns}
        found |= {shared_with(later) for later in _next_requests(messages, tools)}
    return Boundaries(system_tokens, tuple(sorted(found - {0})))


def _first_turn(messages: Sequence[Message]) -> int:
    """Return the index of the first message that is no part of the system prompt."""
    turns = (n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    return next(turns, len(messages))


def _user_turns(messages: Sequence[Message], start: int) -> list[int]:
    return [n for n in range(start, len(messages)) if messages[n].role == "user"]


def _asked_otherwise(messages: Sequence[Message], turn: int) -> list[Message]:
    """Return the conversation before a turn, and a question unlike it from its first letter on."""
    replaced = messages[turn].content if turn < len(messages) else ""
    begins_alike = replaced.lstrip()[:1].casefold() == _QUESTION.content[0].casefold()
    return [*messages[:turn], _OTHER_QUESTION if begins_alike else _QUESTION]


def _next_requests(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[list[Message]]:
    """Yield what may come after the reply: another question, and a tool's result."""
    yield [*messages, _REPLY, _QUESTION]
    if tools:
        call = ToolCall(call_id=_CALL_ID, name=tools[0].name, arguments="{}")
        result = Message(role="tool", content="1", name=call.name, tool_call_id=call.call_id)
        yield [*messages, Message(role="assistant", tool_calls=(call,)), result]
