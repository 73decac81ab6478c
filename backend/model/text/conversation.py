"""Repairs of a conversation for a template: the order of turns, calls, results, contents.

All of them keep every text in its place. A repair of a turn depends on that turn and its
neighbours, never on later turns: the prompt before it stays the same in the next request.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

from backend.core.prompt import JsonValue, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.formats.spelling import PARAGRAPH, PLAIN, Spelling, escape_marks
from backend.formats.thoughts import THINK

Turn: TypeAlias = Mapping[str, JsonValue]

# Older and newer names of the same roles, which few templates know.
_ROLE_OF_TURN = {"developer": "system", "function": "tool"}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form that a template needs for an assistant message with tool calls.

    Attributes:
        arguments_as_text: Whether arguments are JSON text rather than an object.
        empty_content: The value for no content: some templates lose the calls on "".
        content_apart: Whether content next to calls must be a separate turn.
        one_call: Whether every call must be a separate turn.
        names_apart: Whether every call must be a turn with its name as `metadata`, as in GLM 4.
        calls_as_text: Whether calls must be text.
        results_as_text: Whether results must be text too.
        result_role: The role of results.
        text_as_parts: Whether every text must be a list of parts: some templates iterate it.
        spelling: How calls are written if they must be text.
    """

    arguments_as_text: bool = False
    empty_content: str | None = ""
    content_apart: bool = False
    one_call: bool = False
    names_apart: bool = False
    calls_as_text: bool = False
    results_as_text: bool = False
    result_role: str = "tool"
    text_as_parts: bool = False
    spelling: Spelling | None = None


def check_roles(messages: Sequence[Message], template_text: str) -> None:
    """Refuse a role that is unknown both to chat templates in general and to this one.

    Raises:
        InvalidRequestError: The message names the message with that role.
    """
    for index, message in enumerate(messages):
        quoted = (f"'{message.role}'", f'"{message.role}"')
        if message.role not in _ROLES and not any(name in template_text for name in quoted):
            raise InvalidRequestError(
                f"Messages[{index}].role", f"{message.role!r} is not a role that this model knows"
            )


def to_turns(messages: Sequence[Message], style: CallStyle) -> list[Turn]:
    """Return the turns of messages; a turn has only the keys that its message sets.

    A result without an id gets that of the call that it answers.
    """
    return list(_linked([_turn(message, style) for message in messages]))


def calls_of(turn: Turn) -> Sequence[JsonValue]:
    """Return the calls of a turn."""
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _turn(message: Message, style: CallStyle) -> Turn:
    turn: dict[str, JsonValue] = {
        "role": _ROLE_OF_TURN.get(message.role, message.role),
        "content": _turn_parts(message) if message.media else message.content,
    }
    if message.tool_calls:
        turn["content"] = message.content or style.empty_content
        turn["tool_calls"] = [_call(call, style) for call in message.tool_calls]
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return turn | {key: value for key, value in optional.items() if value}


def _linked(turns: Sequence[Turn]) -> Iterator[Turn]:
    waiting: list[Mapping[str, JsonValue]] = []
    for turn in turns:
        if turn["role"] == "tool":
            call = _answered(turn, waiting)
            waiting = [each for each in waiting if each is not call]
            call_id = call.get("id") if call else None
            yield {"tool_call_id": call_id, **turn} if call_id else turn
        else:
            if turn["role"] != "system":
                waiting = [call for call in calls_of(turn) if isinstance(call, Mapping)]
            yield turn


def _answered(
    result: Turn, waiting: Sequence[Mapping[str, JsonValue]]
) -> Mapping[str, JsonValue] | None:
    """Return the call that a result answers: by its id, else its name, else the next."""
    if call_id := result.get("tool_call_id"):
        return next((call for call in waiting if call.get("id") == call_id), None)
    named = (call for call in waiting if _name(call) == result.get("name"))
    return next(named, waiting[0] if waiting and "name" not in result else None)


def _name(call: Mapping[str, JsonValue]) -> JsonValue:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _turn_parts(message: Message) -> list[Turn]:
    parts: list[Turn] = []
    start = 0
    for placement in message.media:
        parts += _text_parts(message.content[start : placement.offset])
        parts.append({"type": placement.kind.value})
        start = placement.offset
    return parts + _text_parts(message.content[start:])


def _text_parts(text: str) -> list[Turn]:
    return [{"type": "text", "text": text}] if text else []


def _call(call: ToolCall, style: CallStyle) -> Turn:
    arguments = call.arguments if call.arguments.strip() else "{}"
    function = {
        "name": call.name,
        "arguments": arguments if style.arguments_as_text else _object_or_text(arguments),
    }
    identity = {"id": call.call_id} if call.call_id else {}
    return {**identity, "type": "function", "function": function}


def _object_or_text(arguments: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


Repair: TypeAlias = Callable[[Sequence[Turn]], Sequence[Turn]]

# Some templates refuse a user right after results. Mistral's own agent answers in these words.
ACKNOWLEDGEMENT = "Understood."

_Content: TypeAlias = JsonValue

# Of texts that stand in another's turn, by the role of their own.
_TAGS = {"system": "system", "tool": "tool_result"}


def marked(tag: str, content: _Content) -> _Content:
    """Return a content between tags of their own lines, which tell who wrote it."""
    if isinstance(content, str):
        return f"<{tag}>\n{content}\n</{tag}>"
    return joined(joined(f"<{tag}>", content, "\n"), f"</{tag}>", "\n")


def joined(one: _Content, other: _Content, between: str = PARAGRAPH) -> _Content:
    """Return two contents as one; parts stay parts, and two media have nothing between them."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{between}{other}"
    (*first, last), (following, *rest) = _parts(one), _parts(other)
    if "text" in last:
        last = {**last, "text": f"{last['text']}{between}"}
    elif "text" in following:
        following = {**following, "text": f"{between}{following['text']}"}
    return [*first, last, following, *rest]


def merge_leading(turns: Sequence[Turn]) -> list[Turn]:
    """Merge the system turns at the start, for templates that take one."""
    count = leading(turns)
    return [_as_one(turns[:count]), *turns[count:]] if count > 1 else list(turns)


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
    first = leading(turns)
    return _place_notes(turns, "system", lambda place: place >= first)


def mark_between(turns: Sequence[Turn]) -> list[Turn]:
    """Do so only between calls and their results, where some templates lose the results."""
    return _place_notes(turns, "system", lambda place: _awaits_results(turns, place))


def remarks_in_results(turns: Sequence[Turn]) -> list[Turn]:
    """Write text next to calls as marked text in the result: some templates take one reply each."""
    placed = list(turns)
    for place, turn in enumerate(turns[:-1]):
        if calls_of(turn) and turn["content"] and turns[place + 1]["role"] == "tool":
            remark, result = marked("assistant", turn["content"]), turns[place + 1]
            placed[place] = {**placed[place], "content": ""}
            placed[place + 1] = {**result, "content": joined(remark, result["content"])}
    return placed


def orphans_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Write results without a call before them as user text."""
    return _place_notes(turns, "tool", lambda place: _caller_of(turns, place) is None)


def strangers_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Write results as text if their id is not that of a call before them."""
    return _place_notes(turns, "tool", lambda place: _is_stranger(turns, place))


def drop_silent(turns: Sequence[Turn]) -> list[Turn]:
    """Drop assistant turns that only think, or not even that, for templates that refuse them."""
    return [
        turn for turn in turns if turn["role"] != "assistant" or turn["content"] or calls_of(turn)
    ]


def drop_thoughts(turns: Sequence[Turn]) -> list[Turn]:
    """Drop earlier thoughts, for templates that refuse them."""
    return [{key: turn[key] for key in turn if key != "reasoning_content"} for turn in turns]


def with_empty_thoughts(turns: Sequence[Turn]) -> list[Turn]:
    """Begin texts of assistants with an empty thought: some templates cut it off unasked."""
    return [
        {**turn, "content": joined(f"{THINK.start}{THINK.end}", turn["content"], "")}
        if turn["role"] == "assistant" and turn["content"]
        else turn
        for turn in turns
    ]


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
    return _merge(turns, lambda turn: turn["role"] == "user" and not calls_of(turn))


def merge_assistants(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent assistant turns without calls, for the same templates."""
    return _merge(turns, lambda turn: turn["role"] == "assistant" and not calls_of(turn))


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
        remarks_in_results,
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


def _place_notes(turns: Sequence[Turn], role: str, is_note: Callable[[int], bool]) -> list[Turn]:
    """Write some turns of a role as marked text in a neighbour: the user turn or result after it.

    A result also takes such turns after it. Elsewhere the text becomes a user turn of its own.
    """
    placed: list[Turn] = []
    waiting: _Content = ""
    for place, turn in enumerate(turns):
        if turn["role"] == role and is_note(place):
            content = turn["content"]
            waiting = joined(waiting, marked(_TAGS[role], content) if content else "")
        else:
            _settle(placed, waiting, turn)
            waiting = ""
    _settle(placed, waiting, None)
    return placed


def _settle(placed: list[Turn], waiting: _Content, after: Turn | None) -> None:
    """Place the waiting text between the placed turns and the turn after it, and that turn too."""
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


def _merge(turns: Sequence[Turn], may_merge: Callable[[Turn], bool]) -> list[Turn]:
    """Merge adjacent turns of one role that may be merged."""
    merged: list[Turn] = []
    for turn in turns:
        is_same = merged and merged[-1]["role"] == turn["role"]
        if is_same and may_merge(merged[-1]) and may_merge(turn):
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
    return {**system[0], "content": reduce(joined, (turn["content"] for turn in system))}


def _parts(content: _Content) -> list[Mapping[str, JsonValue]]:
    """Return a content that is not empty as parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = content if isinstance(content, Sequence) else ()
    return [part for part in parts if isinstance(part, Mapping)]


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


CALL_ID_CHARS = 9


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join adjacent text turns of one role, as paragraphs."""
    return _merge(turns, _is_text)


def shorten_call_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Give calls and results ids of nine letters and digits, which some templates require."""
    return [_with_short_ids(turn) for turn in turns]


def in_style(turns: Sequence[Turn], style: CallStyle) -> Sequence[Turn]:
    """Return a conversation in the form that a template renders completely."""
    if style.content_apart:
        turns = part_content(turns, style.empty_content)
    if style.one_call:
        turns = split_calls(turns)
    spelling = style.spelling or PLAIN
    if style.names_apart:
        turns = [each for turn in turns for each in _with_names_apart(turn)]
    elif style.results_as_text:
        turns = spell_calls_and_results(turns, spelling)
    elif style.calls_as_text:
        turns = spell_calls(turns, spelling)
    return turns


def in_words(turns: Sequence[Turn], style: CallStyle) -> Sequence[Turn]:
    """Return a conversation in the style's words: the role of results, and texts as parts or not.

    It is the last change: repairs know results by their usual role.
    """
    if style.result_role != "tool":
        role = {"role": style.result_role}
        turns = [{**turn, **role} if turn["role"] == "tool" else turn for turn in turns]
    if not style.text_as_parts:
        return turns
    return [{**turn, "content": _only_parts(turn["content"])} for turn in turns]


def _only_parts(content: JsonValue) -> JsonValue:
    # One that is empty too: templates look at the first part.
    return list(_parts(content)) if content else [{"type": "text", "text": ""}]


def part_content(turns: Sequence[Turn], empty: str | None) -> list[Turn]:
    """Move text next to calls to a separate turn: some templates render only one of the two.

    Args:
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


def spell_calls(turns: Sequence[Turn], spelling: Spelling = PLAIN) -> list[Turn]:
    """Write calls as text, for templates that only support results."""
    return [_spelled(turn, spelling) for turn in turns]


def spell_calls_and_results(turns: Sequence[Turn], spelling: Spelling = PLAIN) -> list[Turn]:
    """Write calls and results as text, for templates without tool support."""
    results = [
        {"role": "user", "content": turn["content"]} if turn["role"] == "tool" else turn
        for turn in turns
    ]
    return merge_turns(spell_calls(results, spelling))


def _with_names_apart(turn: Turn) -> Iterator[Turn]:
    """Yield the text of a turn, then its calls, whose arguments are texts of their own."""
    calls = calls_of(turn)
    text = {key: value for key, value in turn.items() if key != "tool_calls"}
    if text["content"] or not calls:
        yield text
    for call in calls:
        function = call["function"] if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = escape_marks(json.dumps(function["arguments"], ensure_ascii=False))
            yield {"role": turn["role"], "metadata": function["name"], "content": arguments}


def wrap_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """Put arguments that are no object into one, for templates that iterate over them.

    An agent sends back arguments that the token limit cut off, and its own words as the result.
    """
    return [_with_objects(turn) for turn in turns]


# From those that change least to the last resort.
ALL_REPAIRS: tuple[Repair, ...] = (
    *(wrap_arguments, merge_turns, shorten_call_ids, drop_silent, have_a_user, open_with_user),
    *(merge_leading, mark_between, mark_later, strangers_as_text, orphans_as_text),
    *(merge_users, merge_assistants, split_calls, answer_results, drop_thoughts),
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


def all_forms_of(turns: Sequence[Turn], repairs: Sequence[Repair]) -> Iterator[Sequence[Turn]]:
    """Yield the same, and last those with empty thoughts, which are text to most templates."""
    yield from forms_of(turns, repairs)
    if repairs and (begun := with_empty_thoughts(turns)) != list(turns):
        yield from forms_of(begun, repairs)


def _one_by_one(turn: Turn, calls: Sequence[JsonValue], results: Sequence[Turn]) -> Iterator[Turn]:
    """Yield a turn for each call, followed by its result; unmatched results come last."""
    rest = list(results)
    for number, call in enumerate(calls):
        yield {**(_silent(turn) if number else turn), "tool_calls": [call]}
        if result := _result_of(call, rest):
            rest.remove(result)
            yield result
    yield from rest


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


def _spelled(turn: Turn, spelling: Spelling) -> Turn:
    if not (calls := calls_of(turn)):
        return turn
    functions = [call["function"] for call in calls if isinstance(call, Mapping)]
    written = spelling.written([each for each in functions if isinstance(each, Mapping)])
    others = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**others, "content": joined(turn["content"], written, spelling.after_content)}


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


def _with_objects(turn: Turn) -> Turn:
    calls = [_with_object(call) for call in calls_of(turn) if isinstance(call, Mapping)]
    return {**turn, "tool_calls": calls} if calls else turn


def _with_object(call: Mapping[str, JsonValue]) -> JsonValue:
    function = call["function"]
    if not isinstance(function, Mapping) or isinstance(function["arguments"], Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _short_id(call_id: str) -> str:
    if len(call_id) == CALL_ID_CHARS and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="replace"), digest_size=CALL_ID_CHARS)
    return digest.hexdigest()[:CALL_ID_CHARS]
