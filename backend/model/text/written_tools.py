"""Tools, calls and results as text, for a chat template that knows no tools.

The tools go to the end of the system prompt, where they are the same in every request of a
conversation. Calls have the marks of Hermes, which many models have seen, and are read back by its
format.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from backend.core.prompt import Message, Placement, Tool, ToolCall
from backend.formats.objects import HERMES_CLOSER, HERMES_OPENER

_SYSTEM_ROLES = frozenset({"system", "developer"})
_RESULT_ROLES = frozenset({"tool", "function"})
_PARAGRAPH = "\n\n"
_INTRODUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one in JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as one JSON object between these marks:
{opener}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{closer}

Repeat this for every call you need, and stop after the last one: the results follow between \
<tool_response> and </tool_response>. If no function helps, answer without these marks."""


def with_written_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation that shows tools, calls and results to any template, as text.

    Results are in the order of their calls: the text has no ids.
    """
    first = next((n for n, each in enumerate(messages) if each.role not in _SYSTEM_ROLES), None)
    leading = list(messages[:first])
    system = leading.pop() if leading else Message(role="system")
    between = _PARAGRAPH if system.content else ""
    shown = replace(system, content=f"{system.content}{between}{_introduction(tools)}")
    rest = () if first is None else messages[first:]
    return [*leading, shown, *_spelled(rest)]


def written_call(call: ToolCall) -> str:
    """Return a call as text, with its arguments unchanged if they are an object."""
    arguments = call.arguments if call.arguments.strip() else "{}"
    if not _is_object(arguments):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{HERMES_OPENER}\n{{"name": {name}, "arguments": {arguments}}}\n{HERMES_CLOSER}'


def _introduction(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(tools=lines, opener=HERMES_OPENER, closer=HERMES_CLOSER)


def _spelled(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with calls and results as text; adjacent results are one user message."""
    results: list[Message] = []
    order: Mapping[str, int] = {}
    for message in messages:
        if message.role in _RESULT_ROLES:
            results.append(message)
            continue
        if results:
            yield _joined(results, order)
            results = []
        order = {call.call_id: number for number, call in enumerate(message.tool_calls)}
        yield _with_calls(message)
    if results:
        yield _joined(results, order)


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    texts = [message.content] if message.content else []
    content = "\n".join([*texts, *map(written_call, message.tool_calls)])
    return replace(message, content=content, tool_calls=())


def _joined(results: Sequence[Message], order: Mapping[str, int]) -> Message:
    """Return results as one user message, in the order of their calls."""
    content, media = "", []
    for result in sorted(results, key=lambda each: order.get(each.tool_call_id, len(order))):
        content += "\n<tool_response>\n" if content else "<tool_response>\n"
        start = len(content)
        media += [Placement(start + placed.offset, placed.kind) for placed in result.media]
        content += f"{result.content}\n</tool_response>"
    return Message(role="user", content=content, media=tuple(media))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
