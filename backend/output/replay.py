"""Replays recorded replies without their model.

A recording is one line of JSON, as used in bug reports and tests.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never

from backend.core.prompt import JsonValue
from backend.core.step import (
    ContentDelta,
    Delta,
    Finish,
    FinishReason,
    Increment,
    ReasoningDelta,
    Steps,
    ToolCallDelta,
    Usage,
)
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.output.collect import Collector, Completion
from backend.output.readers.typed_values import JsonSchema
from backend.output.reply import ReplyCursor, ReplySpec
from backend.output.reply_format import OutputFormat

_STOPS = {reason.value: reason for reason in (FinishReason.STOP, FinishReason.LENGTH)}
_LONGEST_RANDOM_CHUNK = 8

FormatT = TypeVar("FormatT", ReasoningFormat, ToolFormat)


class RecordingError(ValueError):
    """A line is not a valid recording."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The text of a reply, and its end.

    Attributes:
        stop: `STOP` if a stop token followed, `LENGTH` if the limit cut the text off.
    """

    recording_id: JsonValue
    spec: ReplySpec
    chunks: tuple[str, ...]
    stop: FinishReason


def read_recording(line: str | bytes) -> Recording:
    """Read one line.

    Raises:
        RecordingError: It is not a recording; the message says why.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RecordingError("not a JSON object")
    stop = _text(fields, "stop", FinishReason.STOP.value)
    if stop not in _STOPS:
        raise RecordingError(f'"stop" is {stop!r}, not one of {", ".join(_STOPS)}')
    spec = ReplySpec(
        format=OutputFormat(
            _named(
                REASONING_FORMATS, "reasoning_format", _text(fields, "reasoning_format", "none")
            ),
            _named(TOOL_FORMATS, "format", _text(fields, "format")),
        ),
        tools=_tools(fields.get("tools")),
        prompt_tail=_text(fields, "prompt_tail", ""),
        is_ruled=_flag(fields, "ruled"),
    )
    return Recording(fields.get("id"), spec, _chunks(fields.get("chunks")), _STOPS[stop])


def stream(
    spec: ReplySpec, chunks: Sequence[str], stop: FinishReason
) -> Iterator[tuple[tuple[Delta, ...], Finish | None]]:
    """Replay a reply, one step per chunk; the last step has the stop token, or no text."""
    yield from _played(_cursor(spec, chunks), len(chunks), stop)


def _cursor(spec: ReplySpec, chunks: Sequence[str]) -> ReplyCursor:
    texts = (*chunks, "")
    return ReplyCursor(spec, ChunkDetokenizer(texts), lambda token_id: texts[token_id].encode())


def _played(
    cursor: ReplyCursor, chunks: int, stop: FinishReason
) -> Iterator[tuple[tuple[Delta, ...], Finish | None]]:
    for token_id in range(chunks + 1):
        is_last = token_id == chunks
        yield cursor.advance(Steps(token_ids=[token_id], finish_reason=stop if is_last else None))


def fold(outputs: Iterable[tuple[tuple[Delta, ...], Finish | None]]) -> Completion:
    """Return the complete reply."""
    collector = Collector()
    for deltas, finish in outputs:
        collector.add(Increment(deltas, Usage(), finish))
    return collector.completion


def report(recording: Recording, chunks: Sequence[str]) -> dict[str, JsonValue]:
    """Replay a recording split into these chunks, and return the reply that a client gets."""
    cursor = _cursor(recording.spec, chunks)
    outputs = list(_played(cursor, len(chunks), recording.stop))
    completion = fold(outputs)
    return {
        "id": recording.recording_id,
        "content": completion.content,
        "reasoning": completion.reasoning,
        "tool_calls": [
            {
                "id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                **_state(cursor, call.index),
            }
            for call in completion.tool_calls
        ],
        "finish_reason": completion.finish.reason.value,
        "deltas": [_delta_fields(delta) for deltas, _ in outputs for delta in deltas],
    }


def _state(cursor: ReplyCursor, index: int) -> dict[str, JsonValue]:
    """Return the repairs made to a call, or that it was not completed."""
    if index not in cursor.completed_calls:
        return {"unfinished": True}
    repairs = cursor.repairs.get(index)
    return {"repairs": list(repairs)} if repairs else {}


def cut_evenly(text: str, chars: int) -> list[str]:
    """Split a text into chunks of equal length."""
    return [text[start : start + chars] for start in range(0, len(text), chars)]


def cut_randomly(text: str, seed: str) -> list[str]:
    """Split a text into short chunks, always the same for a seed."""
    lengths = random.Random(seed)  # noqa: S311 - not used for secrets
    chunks = []
    start = 0
    while start < len(text):
        end = start + lengths.randint(1, _LONGEST_RANDOM_CHUNK)
        chunks.append(text[start:end])
        start = end
    return chunks


class ChunkDetokenizer:
    """Decodes token id i to chunk i."""

    def __init__(self, chunks: Sequence[str]) -> None:
        self._chunks = chunks

    def decode(self, token_id: int) -> str:
        """Return the chunk."""
        return self._chunks[token_id]

    def flush(self) -> str:
        """Return nothing: no text is held back."""
        return ""


def _text(fields: Mapping[str, JsonValue], name: str, default: str | None = None) -> str:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise RecordingError(f'"{name}" is missing' if value is None else f'"{name}" is not text')
    return value


def _flag(fields: Mapping[str, JsonValue], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise RecordingError(f'"{name}" is neither true nor false')
    return bool(value)


def _named(formats: Sequence[FormatT], field: str, name: str) -> FormatT:
    for candidate in formats:
        if candidate.is_called(name):
            return candidate
    known = ", ".join(candidate.name for candidate in formats)
    raise RecordingError(f'"{field}" is {name!r}, which is unknown; known are {known}')


def _tools(value: JsonValue) -> Mapping[str, JsonSchema] | None:
    """Return the offered tools; without any, every name counts: reporters may omit them."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RecordingError('"tools" is not an array')
    return dict(_tool(tool) for tool in value)


def _tool(value: JsonValue) -> tuple[str, JsonSchema]:
    """Return the name and schema of a tool in the OpenAI API's shape, or of its inner object."""
    tool = value.get("function", value) if isinstance(value, dict) else None
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(name, str):
        raise RecordingError('"tools" has a tool without a name')
    schema = tool.get("parameters")
    return name, schema if isinstance(schema, dict) else {}


def _chunks(value: JsonValue) -> tuple[str, ...]:
    chunks = [value] if isinstance(value, str) else value
    if isinstance(chunks, list):
        texts = tuple(chunk for chunk in chunks if isinstance(chunk, str))
        if len(texts) == len(chunks):
            return texts
    raise RecordingError('"chunks" is neither text nor an array of texts')


def _delta_fields(delta: Delta) -> dict[str, JsonValue]:
    match delta:
        case ContentDelta():
            return {"content": delta.text}
        case ReasoningDelta():
            return {"reasoning": delta.text}
        case ToolCallDelta():
            call = {"id": delta.call_id, "name": delta.name, "arguments": delta.arguments}
            return {"tool_call": {"index": delta.index, **call}}
        case _:
            assert_never(delta)
