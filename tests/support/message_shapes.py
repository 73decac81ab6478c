"""Conversations of every shape that clients send; each text in them is one word of its own."""

from collections.abc import Sequence

from hypothesis import strategies as st

from backend.core.prompt import Message, ToolCall


def said(role: str, text: str, **fields: str) -> Message:
    return Message(role=role, content=text, **fields)


def calling(text: str = "", *, number: int = 1, count: int = 1) -> Message:
    calls = [
        ToolCall(call_id=f"call0000{n}", name="weather", arguments=f'{{"city": "city{n}x"}}')
        for n in range(number, number + count)
    ]
    return Message(role="assistant", content=text, tool_calls=tuple(calls))


def result(number: int = 1) -> Message:
    return said("tool", f"weather{number}x", tool_call_id=f"call0000{number}", name="weather")


S = said("system", "systemx")
U, U2 = said("user", "askx"), said("user", "gox")
A, A2 = said("assistant", "replyx"), said("assistant", "answerx")
MID, MID2 = said("system", "midx"), said("system", "midtwox")
DEVELOPER = said("developer", "developerx")
FUNCTION = said("function", "functionx", name="weather")
SILENT = Message(role="assistant")
STRANGER = said("tool", "strangerx", tool_call_id="callother")
NAMELESS = said("tool", "namelessx")

SHAPES: dict[str, Sequence[Message]] = {
    "after a user": (S, U, MID, U2),
    "after a user, no system": (U, MID, U2),
    "after an assistant": (S, U, A, MID, U2),
    "before an assistant": (S, U, MID, A, U2),
    "between assistants": (S, U, A, MID, A2, U2),
    "last": (S, U, A, U2, MID),
    "last, after the first question": (U, MID),
    "last, after an assistant": (S, U, A, MID),
    "two later": (S, U, A, MID, MID2, U2),
    "several later": (S, U, MID, A, MID2, U2, A2, DEVELOPER),
    "two at the start": (S, said("system", "othersystemx"), U),
    "developer first": (DEVELOPER, U),
    "system and developer": (S, DEVELOPER, U),
    "developer later": (S, U, A, DEVELOPER, U2),
    "after a result": (S, U, calling(), result(), MID),
    "after a result, answered": (S, U, calling(), result(), MID, A, U2),
    "after a result, before a user": (S, U, calling(), result(), MID, U2),
    "after one of two results": (S, U, calling(count=2), result(1), MID, result(2)),
    "between a call and its result": (S, U, calling(), MID, result()),
    "in a loop": (S, U, calling(), result(), MID, calling(number=2), result(2), MID2),
    "empty assistant": (S, U, SILENT, U2),
    "only thoughts": (S, U, Message(role="assistant", reasoning_content="hmx"), U2),
    "thoughts": (S, U, said("assistant", "replyx", reasoning_content="hmx"), U2),
    "function": (U, FUNCTION),
    "function without a name": (U, said("function", "functionx")),
    "function after a call": (S, U, calling(), FUNCTION, A, U2),
    "orphan": (U, STRANGER),
    "orphan without an id": (U, NAMELESS),
    "orphan first": (S, STRANGER, U),
    "orphan after an answer": (S, U, A, STRANGER, U2),
    "unknown id": (S, U, calling(), result(), STRANGER, U2),
    "without an id": (S, U, calling(), NAMELESS, A, U2),
    "user after a result": (S, U, calling(), result(), U2),
    "call without a result": (S, U, calling(), U2),
    "assistant first": (A, U),
    "system, assistant": (S, A, U),
    "two users": (S, U, U2),
    "two assistants": (S, U, A, A2, U2),
    "system only": (S,),
    "two systems only": (S, DEVELOPER),
    "no user": (S, A),
    "assistant only": (A,),
    "ends with an assistant": (S, U, A),
    "spaces": (said("system", "\n systemx \n"), said("user", "  askx\n"), said("system", " midx")),
}


def of_roles(roles: Sequence[str]) -> list[Message]:
    """A conversation of these roles in this order, whatever it is; results follow calls by id."""
    messages = []
    for n, role in enumerate(roles):
        word = f"word{n}x"
        if role == "call":
            messages.append(calling(word if n % 2 else "", number=n))
        elif role == "tool":
            messages.append(said(role, word, tool_call_id=f"call0000{n - 1}", name="weather"))
        elif role == "silent":
            messages.append(SILENT)
        else:
            messages.append(said(role, word))
    return messages


CONVERSATIONS = st.lists(
    st.sampled_from(
        ["system", "developer", "user", "assistant", "silent", "call", "tool", "function"]
    ),
    min_size=1,
    max_size=8,
).map(of_roles)
