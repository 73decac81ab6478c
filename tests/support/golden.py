"""Golden replies: what a model wrote, and what a reader must get, one JSON object per line."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.core.delta import Delta, Finish, FinishReason, Increment, Usage
from backend.core.step import TokenStep
from backend.output.collect import Collector, Completion
from backend.output.detection import detect
from backend.output.evidence import FormatEvidence
from backend.output.format import OutputFormat
from backend.output.reply import ReplyCursor, ReplySpec

GOLDEN = Path(__file__).parent.parent / "golden"


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


def cases(name: str = "*") -> Iterator[GoldenCase]:
    for path in sorted(GOLDEN.glob(f"{name}.jsonl")):
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
            yield _case(json.loads(line))


def named_format(tools: str, reasoning: str) -> OutputFormat:
    return detect(FormatEvidence((), "", tool_parser=tools, reasoning_parser=reasoning))


def _case(line: dict) -> GoldenCase:
    spec = ReplySpec(
        format=named_format(line["format"], line["reasoning_format"]),
        tools={
            tool["function"]["name"]: tool["function"].get("parameters", {})
            for tool in line["tools"]
        },
        prompt_tail=line["prompt_tail"],
    )
    return GoldenCase(
        case_id=line["id"],
        spec=spec,
        text="".join(line["chunks"]),
        stop=FinishReason(line["stop"]),
        content=line["content"],
        reasoning=line["reasoning"],
        tool_calls=tuple((call["name"], call["arguments"]) for call in line["tool_calls"]),
        finish_reason=FinishReason(line["finish_reason"]),
    )


class ChunkDetokenizer:
    """Token id i stands for chunk i."""

    def __init__(self, chunks: Sequence[str]) -> None:
        self._chunks = chunks

    def feed(self, token_id: int) -> str:
        return self._chunks[token_id]

    def finish(self) -> str:
        return ""


def stream(
    spec: ReplySpec, chunks: Sequence[str], stop: FinishReason = FinishReason.STOP
) -> Iterator[tuple[tuple[Delta, ...], Finish | None]]:
    """Feed a reply chunk by chunk, each as one token; a stop token follows, or the limit cuts."""
    chunks = [*chunks, ""]
    cursor = ReplyCursor(spec, ChunkDetokenizer(chunks), lambda token_id: chunks[token_id].encode())
    for token_id in range(len(chunks)):
        reason = stop if token_id == len(chunks) - 1 else None
        yield cursor.feed([TokenStep(token_id, reason)])


def play(
    spec: ReplySpec, chunks: Sequence[str], stop: FinishReason = FinishReason.STOP
) -> Completion:
    """Feed a reply chunk by chunk and fold what comes out."""
    collector = Collector()
    for deltas, finish in stream(spec, chunks, stop):
        collector.add(Increment(deltas, Usage(), finish))
    return collector.completion


def named_calls(completion: Completion) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, call.arguments) for call in completion.tool_calls)
