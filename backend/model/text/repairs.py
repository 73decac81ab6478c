"""Repairs of a conversation that a chat template refuses. All of them keep the content."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from backend.core.prompt import JsonValue
from backend.model.text.conversation import (
    PARAGRAPH,
    Repair,
    answer_results,
    drop_silent,
    have_a_user,
    lead_with_user,
    mark_between,
    mark_later,
    merge_assistants,
    merge_leading,
    merge_users,
    open_with_system,
    open_with_user,
    orphans_as_text,
    strangers_as_text,
)
from backend.model.text.turns import CallStyle, Turn, calls_of

CALL_ID_CHARS = 9


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join adjacent text turns of one role, as paragraphs."""
    merged: list[Turn] = []
    for turn in turns:
        if (
            merged
            and _is_text(turn)
            and _is_text(merged[-1])
            and turn["role"] == merged[-1]["role"]
        ):
            text = f"{merged[-1]['content']}{PARAGRAPH}{turn['content']}"
            merged[-1] = {"role": turn["role"], "content": text}
        else:
            merged.append(turn)
    return merged


def shorten_call_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Give calls and results ids of nine letters and digits, which some templates require."""
    return [_with_short_ids(turn) for turn in turns]


def in_style(turns: Sequence[Turn], style: CallStyle) -> Sequence[Turn]:
    """Return a conversation in the form that a template renders completely."""
    if style.content_apart:
        turns = part_content(turns, style.empty_content)
    if style.one_call:
        turns = split_calls(turns)
    if style.results_as_text:
        return spell_calls_and_results(turns)
    return spell_calls(turns) if style.calls_as_text else turns


def part_content(turns: Sequence[Turn], empty: str | None) -> list[Turn]:
    """Move text next to calls to a separate turn: some templates render only one of the two.

    Args:
        turns: The conversation.
        empty: The content of a turn with only calls.
    """
    parted: list[Turn] = []
    for turn in turns:
        if calls_of(turn) and turn["content"]:
            parted.append({key: value for key, value in turn.items() if key != "tool_calls"})
            parted.append({"role": turn["role"], "content": empty, "tool_calls": calls_of(turn)})
        else:
            parted.append(turn)
    return parted


def split_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Give every call its own turn, followed by its result: some templates allow only one call."""
    split: list[Turn] = []
    position = 0
    while position < len(turns):
        turn = turns[position]
        end = position = position + 1
        if len(calls := calls_of(turn)) < 2:
            split.append(turn)
            continue
        while end < len(turns) and turns[end]["role"] == "tool":
            end += 1
        split += _one_by_one(turn, calls, turns[position:end])
        position = end
    return split


def join_replies(turns: Sequence[Turn]) -> list[Turn]:
    """Move text before calls to the answer after the results: some templates keep one text."""
    joined = dict(enumerate(turns))
    for place, after in enumerate(turns[1:]):
        if _is_answer(turns[place]) and calls_of(after):
            answer = _next_answer(turns, place + 2)
            if answer is not None:
                text = f"{joined.pop(place)['content']}{PARAGRAPH}{turns[answer]['content']}"
                joined[answer] = {**turns[answer], "content": text}
    return list(joined.values())


def spell_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Write calls as text, for templates that only support results."""
    return [_spelled(turn) for turn in turns]


def spell_calls_and_results(turns: Sequence[Turn]) -> list[Turn]:
    """Write calls and results as text, for templates without tool support."""
    results = [
        {"role": "user", "content": turn["content"]} if turn["role"] == "tool" else turn
        for turn in turns
    ]
    return merge_turns(spell_calls(results))


# From those that change least to the last resort.
ALL_REPAIRS: tuple[Repair, ...] = (
    *(merge_turns, shorten_call_ids, drop_silent, have_a_user, open_with_user),
    *(merge_leading, mark_between, mark_later, strangers_as_text, orphans_as_text),
    *(merge_users, merge_assistants, split_calls, join_replies, answer_results),
    *(open_with_system, lead_with_user, spell_calls_and_results, merge_users, merge_assistants),
)


def forms_of(turns: Sequence[Turn], repairs: Sequence[Repair]) -> Iterator[Sequence[Turn]]:
    """Yield a conversation unchanged, then after each repair that changes it."""
    yield turns
    for repair in repairs:
        repaired = repair(turns)
        if list(repaired) != list(turns):
            turns = repaired
            yield turns


def _one_by_one(turn: Turn, calls: Sequence[JsonValue], results: Sequence[Turn]) -> Iterator[Turn]:
    """Yield a turn for each call, followed by its result; unmatched results come last."""
    rest = list(results)
    for number, call in enumerate(calls):
        yield {**(_silent(turn) if number else turn), "tool_calls": [call]}
        if result := _result_of(call, rest):
            rest.remove(result)
            yield result
    yield from rest


def _next_answer(turns: Sequence[Turn], start: int) -> int | None:
    """Return the index of the assistant's next text before the user speaks, if any."""
    for place in range(start, len(turns)):
        if _is_answer(turns[place]):
            return place
        if turns[place]["role"] == "user":
            return None
    return None


def _is_answer(turn: Turn) -> bool:
    return turn["role"] == "assistant" and _is_text(turn)


def _silent(turn: Turn) -> Turn:
    """Return a turn without its text and reasoning."""
    silent = {key: value for key, value in turn.items() if key != "reasoning_content"}
    return {**silent, "content": "" if turn["content"] else turn["content"]}


def _result_of(call: JsonValue, results: Sequence[Turn]) -> Turn | None:
    """Return the result with the id of a call, or the first one without an id."""
    call_id = call.get("id") if isinstance(call, Mapping) else None
    named = [result for result in results if result.get("tool_call_id") == call_id]
    nameless = [result for result in results if "tool_call_id" not in result]
    return next(iter(named or nameless), None)


def _spelled(turn: Turn) -> Turn:
    if not (calls := calls_of(turn)):
        return turn
    functions = [call["function"] for call in calls if isinstance(call, Mapping)]
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    content = turn["content"]
    text = [content] if isinstance(content, str) and content else []
    others = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**others, "content": PARAGRAPH.join([*text, "\n".join(lines)])}


def _is_text(turn: Turn) -> bool:
    content = turn["content"]
    return turn.keys() == {"role", "content"} and isinstance(content, str) and content != ""


def _with_short_ids(turn: Turn) -> Turn:
    short = dict(turn)
    if isinstance(call_id := turn.get("tool_call_id"), str):
        short["tool_call_id"] = _short_id(call_id)
    calls = turn.get("tool_calls")
    if isinstance(calls, list):
        short["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in calls]
    return short


def _short_id(call_id: str) -> str:
    if len(call_id) == CALL_ID_CHARS and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="replace"), digest_size=CALL_ID_CHARS)
    return digest.hexdigest()[:CALL_ID_CHARS]
