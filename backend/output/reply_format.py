"""The format of a reply: its thought format and its tool format."""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from backend.core.guide import ThoughtTexts
from backend.formats.dialects import Citations
from backend.formats.format import ReasoningFormat, ToolFormat, with_bare_calls
from backend.formats.objects import OTHER_MARKERS
from backend.formats.registry import TURN_STARTS

# The model's name in headers that a template may leave open.
_MODEL = "assistant"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes thoughts and tool calls."""

    reasoning: ReasoningFormat
    tools: ToolFormat

    @property
    def name(self) -> str:
        """The names of both halves."""
        return f"{self.tools.name}+{self.reasoning.name}"

    @property
    def citations(self) -> Citations | None:
        """The tags of citations, in families that cite."""
        return self.reasoning.citations or self.tools.citations

    @property
    def boxes(self) -> tuple[str, ...]:
        """Marks of boxes around parts of answers."""
        return self.reasoning.boxes or self.tools.boxes

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must stay visible even if the tokenizer treats them as special."""
        reasoning, tools = self.reasoning, self.tools
        thoughts = (*reasoning.marks, *reasoning.tokens, *self.boxes)
        return frozenset((*thoughts, *tools.openers, *tools.closers, *tools.leaks, *tools.tokens))

    def with_bare_calls(self) -> Self:
        """Return the format in which calls may lack its markers, at the start of an answer."""
        return replace(self, tools=with_bare_calls(self.tools, OTHER_MARKERS))

    def without_drafts(self) -> Self:
        """Return the format in which every call inside a thought is real and ends the thought."""
        return replace(self, tools=replace(self.tools, has_drafts=False))


def opens_in_reasoning(output_format: OutputFormat, prompt_tail: str) -> bool:
    """Tell whether the prompt ends inside a thought, so that the reply begins in one.

    In a prompt with unknown turn markers, a thought marker counts only at the very end.
    """
    starts = tuple(start.rstrip() for start in output_format.reasoning.starts)
    if not starts:
        return False
    turn_start = max(prompt_tail.rfind(text) for text in TURN_STARTS)
    if turn_start < 0:
        return prompt_tail.rstrip().endswith(starts)
    turn = prompt_tail[turn_start:]
    return _last(starts, turn) > _last(output_format.reasoning.ends, turn)


def opens_in_header(prompt_tail: str) -> bool:
    """Tell whether the prompt ends at the model's name, so that the reply ends the line of it."""
    turn_start = max(TURN_STARTS, key=prompt_tail.rfind)
    _, found, header = prompt_tail.rpartition(turn_start)
    return bool(found) and header in ("", _MODEL)


def opens_after_thought(output_format: OutputFormat, prompt_tail: str) -> bool:
    """Tell whether the prompt ends after a closed thought, the way templates disable thinking."""
    return prompt_tail.rstrip().endswith(output_format.reasoning.ends)


def thought_texts(output_format: OutputFormat, *, has_tools: bool) -> ThoughtTexts | None:
    """Return the texts that delimit thoughts, or `None` for a model without thoughts."""
    reasoning, tools = output_format.reasoning, output_format.tools
    if not (reasoning.starts and reasoning.ends):
        return None
    ends_at_call = has_tools and tools.ends_thought and not tools.has_drafts
    return ThoughtTexts(
        starts=reasoning.starts,
        ends=(*reasoning.ends, *(tools.openers if ends_at_call else ())),
        parting=reasoning.parting,
        rivals=(reasoning.answer, *tools.openers) if reasoning.answer else (),
        is_quotable=not tools.owns_reply,
        reopens=tools.owns_reply or _ends_like_a_sentence(output_format),
        later_starts=reasoning.later_starts,
    )


def _ends_like_a_sentence(output_format: OutputFormat) -> bool:
    """Tell whether a mark after which a thought may open ends like text of an answer."""
    reasoning, tools = output_format.reasoning, output_format.tools
    marks = (*reasoning.ends, *reasoning.frames, *tools.closers, *tools.leaks)
    return any(mark[-1].isalnum() or mark[-1] in ".,:;!?" for mark in marks)


def _last(markers: tuple[str, ...], text: str) -> int:
    return max((text.rfind(marker) for marker in markers), default=-1)


@lru_cache
def warn_once(message: str) -> None:
    """Warn, once per message: formats are examined for every request."""
    log.warning("%s", message)
