"""Golden replies: a model's text and the completion that it must give, one JSON object per line."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

from hypothesis import settings

from backend.core.step import Delta, Finish, FinishReason
from backend.formats.format import FormatEvidence, ToolFormat
from backend.formats.registry import TOOL_FORMATS
from backend.output import replay
from backend.output.collect import Completion
from backend.output.detection import detect
from backend.output.replay import ChunkDetokenizer as ChunkDetokenizer
from backend.output.reply import ReplySpec
from backend.output.reply_format import OutputFormat

GOLDEN = Path(__file__).parent.parent / "golden"
LONG_EXAMPLES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class GoldenCase:
    """One line of a golden file; `tool_calls` are names and arguments."""

    case_id: str
    spec: ReplySpec
    text: str
    stop: FinishReason
    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    finish_reason: FinishReason

    def __str__(self) -> str:
        return self.case_id


@cache
def cases(name: str = "*") -> Sequence[GoldenCase]:
    """Read the cases of all files, or of one, once."""
    return tuple(
        _case(line)
        for path in sorted(GOLDEN.glob(f"{name}.jsonl"))
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    )


def named_format(tools: str, reasoning: str) -> OutputFormat:
    return detect(FormatEvidence((), "", tool_parser=tools, reasoning_parser=reasoning))


def tool_format(name: str) -> ToolFormat:
    return next(candidate for candidate in TOOL_FORMATS if candidate.is_called(name))


def _case(line: str) -> GoldenCase:
    recording, expected = replay.read_recording(line), json.loads(line)
    return GoldenCase(
        case_id=expected["id"],
        spec=recording.spec,
        text="".join(recording.chunks),
        stop=recording.stop,
        content=expected["content"],
        reasoning=expected["reasoning"],
        tool_calls=tuple((call["name"], call["arguments"]) for call in expected["tool_calls"]),
        finish_reason=FinishReason(expected["finish_reason"]),
    )


def stream(
    spec: ReplySpec, chunks: Sequence[str], stop: FinishReason = FinishReason.STOP
) -> Iterator[tuple[tuple[Delta, ...], Finish | None]]:
    """Feed a reply chunk by chunk, each as one token; a stop token follows, or the limit cuts."""
    return replay.stream(spec, tuple(chunks), stop)


def play(
    spec: ReplySpec, chunks: Sequence[str], stop: FinishReason = FinishReason.STOP
) -> Completion:
    """Feed a reply chunk by chunk and fold the deltas."""
    return replay.fold(stream(spec, chunks, stop))


def is_long() -> bool:
    """Tell whether this is a run with `--hypothesis-profile=long`."""
    return settings.default.max_examples > LONG_EXAMPLES


def is_sampled(*text: str) -> bool:
    """Tell whether a costly look at a text is due: at one in eight, in a long run at all."""
    return is_long() or crc32("\0".join(text).encode("utf-8", "surrogatepass")) % 8 == 0


def named_calls(completion: Completion) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, call.arguments) for call in completion.tool_calls)
