"""Repairs of the order of turns: system turns, results without calls, roles that must alternate.

All of them keep every text in its place. A repair of a turn depends on that turn and its
neighbours, never on what comes later: the prompt before it stays the same in the next request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from backend.core.prompt import JsonValue
from backend.model.text.turns import Turn, calls_of

Repair: TypeAlias = Callable[[Sequence[Turn]], Sequence[Turn]]

PARAGRAPH = "\n\n"
# Some templates refuse a user right after results. Mistral's own agent answers in these words.
ACKNOWLEDGEMENT = "Understood."

_Content: TypeAlias = JsonValue


def marked(tag: str, content: _Content) -> _Content:
    """Return a content between tags of their own lines, which tell who wrote it."""
    if isinstance(content, str):
        return f"<{tag}>\n{content}\n</{tag}>"
    return joined(joined(f"<{tag}>", content, "\n"), f"</{tag}>", "\n")


def joined(one: _Content, other: _Content, between: str = PARAGRAPH) -> _Content:
    """Return two contents as one; parts stay parts."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{between}{other}"
    return [*_parts(one, "", between), *_parts(other, between, "")]


def merge_leading(turns: Sequence[Turn]) -> list[Turn]:
    """Merge the system turns at the start, for templates that take one."""
    count = leading(turns)
    if count < 2:
        return list(turns)
    return [_as_one(turns[:count]), *turns[count:]]


def lead_with_user(turns: Sequence[Turn]) -> list[Turn]:
    """Move the system turns at the start into the first user turn: some templates take none."""
    count = leading(turns)
    if not count:
        return list(turns)
    system, rest = _as_one(turns[:count]), turns[count:]
    if rest and rest[0]["role"] == "user":
        content = joined(system["content"], rest[0]["content"])
        return [{**rest[0], "content": content}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def mark_later(turns: Sequence[Turn]) -> list[Turn]:
    """Write system turns after the start as parts of other turns, for templates without them."""
    count = leading(turns)
    notes = {place for place in range(count, len(turns)) if turns[place]["role"] == "system"}
    return _place_notes(turns, notes, "system")


def mark_between(turns: Sequence[Turn]) -> list[Turn]:
    """Do so only between calls and their results, where some templates lose the results."""
    notes = {
        place
        for place, turn in enumerate(turns)
        if turn["role"] == "system" and _awaits_results(turns, place)
    }
    return _place_notes(turns, notes, "system")


def orphans_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Write results without a call before them as user text."""
    notes = {
        place
        for place, turn in enumerate(turns)
        if turn["role"] == "tool" and _caller_of(turns, place) is None
    }
    return _place_notes(turns, notes, "tool_result")


def strangers_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Write results as text if their id is not that of a call before them."""
    notes = {
        place
        for place, turn in enumerate(turns)
        if turn["role"] == "tool" and _is_stranger(turns, place)
    }
    return _place_notes(turns, notes, "tool_result")


def drop_silent(turns: Sequence[Turn]) -> list[Turn]:
    """Drop assistant turns that only think, or not even that, for templates that refuse them."""
    return [turn for turn in turns if turn["role"] != "assistant" or _says_something(turn)]


def answer_results(turns: Sequence[Turn]) -> list[Turn]:
    """Answer results that a user turn follows, for templates that demand an answer."""
    answered: list[Turn] = []
    has_answer = True
    for place, turn in enumerate(turns):
        if turn["role"] == "user":
            if place and turns[place - 1]["role"] == "tool" and not has_answer:
                answered.append({"role": "assistant", "content": ACKNOWLEDGEMENT})
            has_answer = False
        elif turn["role"] == "assistant" and not calls_of(turn):
            has_answer = True
        answered.append(turn)
    return answered


def open_with_user(turns: Sequence[Turn]) -> list[Turn]:
    """Begin with an empty user turn if there is none, for templates that demand one."""
    count = leading(turns)
    if count < len(turns) and turns[count]["role"] == "user":
        return list(turns)
    return [*turns[:count], {"role": "user", "content": ""}, *turns[count:]]


def have_a_user(turns: Sequence[Turn]) -> list[Turn]:
    """Do so only if no user turn follows either."""
    if any(turn["role"] == "user" for turn in turns):
        return list(turns)
    return open_with_user(turns)


def open_with_system(turns: Sequence[Turn]) -> list[Turn]:
    """Begin with an empty system turn if there is none, for templates that demand one."""
    return list(turns) if leading(turns) else [{"role": "system", "content": ""}, *turns]


def merge_users(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent user turns, for templates in which roles must alternate."""
    return _merge_role(turns, "user")


def merge_assistants(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent assistant turns without calls, for the same templates."""
    return _merge_role(turns, "assistant")


# In the order in which they are applied: first those before the form of calls is decided.
BEFORE_CALLS: Mapping[str, Repair] = {
    repair.__name__: repair
    for repair in (
        strangers_as_text,
        orphans_as_text,
        lead_with_user,
        merge_leading,
        mark_between,
        mark_later,
        drop_silent,
    )
}
AFTER_CALLS: Mapping[str, Repair] = {
    repair.__name__: repair
    for repair in (answer_results, have_a_user, open_with_user, merge_users, merge_assistants)
}


def apply(repairs: Mapping[str, Repair], names: Iterable[str], turns: Sequence[Turn]) -> list[Turn]:
    """Apply the named ones of some repairs, in their order."""
    wanted = set(names)
    repaired = list(turns)
    for name, repair in repairs.items():
        if name in wanted:
            repaired = list(repair(repaired))
    return repaired


def leading(turns: Sequence[Turn]) -> int:
    """Return the number of system turns at the start."""
    roles = (place for place, turn in enumerate(turns) if turn["role"] != "system")
    return next(roles, len(turns))


def _place_notes(turns: Sequence[Turn], notes: set[int], tag: str) -> list[Turn]:
    """Write some turns as marked text in a neighbour: the user turn or result that follows.

    A result also takes what follows it. Elsewhere the text becomes a user turn of its own.
    """
    placed: list[Turn] = []
    waiting: _Content = ""
    for place, turn in enumerate(turns):
        if place in notes:
            waiting = joined(waiting, marked(tag, turn["content"]) if turn["content"] else "")
        else:
            _settle(placed, waiting, turn)
            waiting = ""
    _settle(placed, waiting, None)
    return placed


def _settle(placed: list[Turn], waiting: _Content, after: Turn | None) -> None:
    """Place the waiting text between what is placed and the turn after it, and that turn too."""
    before = placed[-1] if placed else None
    role = after["role"] if after else ""
    if waiting and after and (role == "user" or (role == "tool" and before and calls_of(before))):
        after = {**after, "content": joined(waiting, after["content"])}
    elif waiting and before and before["role"] == "tool":
        placed[-1] = {**before, "content": joined(before["content"], waiting)}
    elif waiting:
        placed.append({"role": "user", "content": waiting})
    if after:
        placed.append(after)


def _merge_role(turns: Sequence[Turn], role: str) -> list[Turn]:
    merged: list[Turn] = []
    for turn in turns:
        if merged and all(
            each["role"] == role and not calls_of(each) for each in (merged[-1], turn)
        ):
            merged[-1] = _merged(merged[-1], turn)
        else:
            merged.append(turn)
    return merged


def _merged(one: Turn, other: Turn) -> Turn:
    """Return two turns of one role as one; their contents and thoughts become paragraphs."""
    both = {"content", "reasoning_content"} & (one.keys() | other.keys())
    texts = {key: joined(one.get(key, ""), other.get(key, "")) for key in both}
    return {**one, **other, **texts}


def _as_one(system: Sequence[Turn]) -> Turn:
    content: _Content = ""
    for turn in system:
        content = joined(content, turn["content"])
    return {**system[0], "content": content}


def _parts(content: _Content, before: str, after: str) -> list[JsonValue]:
    """Return a content as parts; text that becomes one gets its separator."""
    if isinstance(content, str):
        return [{"type": "text", "text": f"{before}{content}{after}"}] if content else []
    return list(content) if isinstance(content, Sequence) else []


def _says_something(turn: Turn) -> bool:
    return bool(turn["content"] or calls_of(turn))


def _caller_of(turns: Sequence[Turn], place: int) -> Turn | None:
    """Return the assistant turn with calls whose results a turn is among."""
    for turn in reversed(turns[:place]):
        if turn["role"] not in ("tool", "system"):
            return turn if calls_of(turn) else None
    return None


def _awaits_results(turns: Sequence[Turn], place: int) -> bool:
    """Return whether results follow a turn that is not the last before the next reply."""
    after = (turn["role"] for turn in turns[place:] if turn["role"] != "system")
    return next(after, "") == "tool" and _caller_of(turns, place) is not None


def _is_stranger(turns: Sequence[Turn], place: int) -> bool:
    caller = _caller_of(turns, place)
    if caller is None:
        return False
    ids = [call.get("id", "") for call in calls_of(caller) if isinstance(call, Mapping)]
    return all(ids) and turns[place].get("tool_call_id", "") not in ids
