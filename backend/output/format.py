"""How models write: a family is a row of a table here, found from its own evidence.

The two halves of a format, the thought and the tool calls, are found independently.
"""

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.wire import WireFactory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a thought; empty for models without thoughts."""

    name: str
    start: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool-call wire.

    Attributes:
        openers: Texts at which the router hands over to the wire.
        markers: All texts of the wire that the tokenizer may know as special tokens.
        make_cursor: Makes the wire's cursor at an opener; `None` for models without calls.
    """

    name: str
    openers: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    make_cursor: WireFactory | None = None


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
    def markers(self) -> frozenset[str]:
        """Texts that must stay visible although the tokenizer may know them as special."""
        return frozenset((self.reasoning.start, self.reasoning.end, *self.tools.markers)) - {""}


@dataclass(frozen=True, slots=True)
class FormatEvidence:
    """What tells the format of a model.

    Attributes:
        vocabulary: All tokens, added ones included.
        tool_parser: A name that overrides the evidence.
        reasoning_parser: A name that overrides the evidence.
    """

    vocabulary: Container[str]
    chat_template: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class _Clue:
    """Texts that must all be there, in the template and as tokens."""

    template: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    def fits(self, evidence: FormatEvidence) -> bool:
        return all(text in evidence.chat_template for text in self.template) and all(
            token in evidence.vocabulary for token in self.vocabulary
        )


_Format = TypeVar("_Format", ReasoningFormat, ToolFormat)


@dataclass(frozen=True, slots=True)
class _Row(Generic[_Format]):
    """A format, the names that hosts have for it, and the clues of which one must fit."""

    format: _Format
    aliases: tuple[str, ...] = ()
    clues: tuple[_Clue, ...] = ()

    def is_called(self, name: str) -> bool:
        normal = name.strip().lower().replace("-", "_")
        return normal in (self.format.name, *self.aliases)

    def fits(self, evidence: FormatEvidence) -> bool:
        return any(clue.fits(evidence) for clue in self.clues)


NO_REASONING = ReasoningFormat("none")
THINK = ReasoningFormat("think", "<think>", "</think>")

NO_TOOLS = ToolFormat("none")
HERMES_JSON = ToolFormat(
    "hermes_json",
    openers=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
    make_cursor=partial(JsonBlockCursor, closer="</tool_call>"),
)

# The first row that fits wins. Every table ends with the row that always fits.
_REASONING_ROWS = (
    _Row(
        THINK,
        aliases=("deepseek_r1", "qwen3", "qwen", "glm45", "olmo3", "step3", "nemotron"),
        clues=(_Clue(vocabulary=("<think>", "</think>")),),
    ),
    _Row(NO_REASONING, clues=(_Clue(),)),
)
_TOOL_ROWS = (
    # Families whose wire is not built yet. Some share a marker with Hermes.
    _Row(
        NO_TOOLS,
        clues=(
            _Clue(template=("<minimax:tool_call>",)),
            _Clue(template=("<|tool_call>", "<tool_call|>")),
            _Clue(template=("<start_function_call>",)),
            _Clue(template=("<longcat_tool_call>",)),
            _Clue(template=("<tool_sep>",)),
            _Clue(template=("<arg_key>",)),
            _Clue(template=("<|tool_call_start|>",)),
            _Clue(template=("<tool_call>\n<function=",)),
            _Clue(template=(r"<tool_call>\n<function=",)),
            _Clue(template=("<|tool_calls_section_begin|>",)),
            _Clue(template=('<function name="', '<param name="')),
            _Clue(template=("[TOOL_CALLS]",)),
            _Clue(template=("<atem:function_calls>",)),
        ),
    ),
    _Row(
        HERMES_JSON,
        aliases=("hermes", "json_tools", "qwen", "qwen25", "qwen3", "granite4"),
        clues=(_Clue(template=("<tool_call>", "tool_call.name")),),
    ),
    _Row(NO_TOOLS, clues=(_Clue(),)),
)

# A marker in an earlier turn is somebody's text. What follows the last of these is the reply.
_TURN_STARTS = (
    "<|im_start|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|start_of_role|>",
    "<|assistant|>",
    "<｜Assistant｜>",
    "[|assistant|]",
    "[/INST]",
)


def detect(evidence: FormatEvidence) -> OutputFormat:
    """Find the format of a model; what nothing tells is plain content."""
    return OutputFormat(
        _find(_REASONING_ROWS, evidence.reasoning_parser, evidence),
        _find(_TOOL_ROWS, evidence.tool_parser, evidence),
    )


def opens_in_reasoning(output_format: OutputFormat, prompt_tail: str) -> bool:
    """Tell whether the prompt ends inside a thought, so that the reply begins in one.

    In a prompt of unknown turns a marker counts only at the very end.
    """
    start, end = output_format.reasoning.start.rstrip(), output_format.reasoning.end
    if not start:
        return False
    turn_start = max(prompt_tail.rfind(text) for text in _TURN_STARTS)
    if turn_start < 0:
        return prompt_tail.rstrip().endswith(start)
    turn = prompt_tail[turn_start:]
    return turn.rfind(start) > turn.rfind(end)


def _find(rows: Sequence[_Row[_Format]], override: str | None, evidence: FormatEvidence) -> _Format:
    if override is not None:
        if named := [row for row in rows if row.is_called(override)]:
            return named[0].format
        _warn_of_unknown(override)
    return next(row.format for row in rows if row.fits(evidence))


@lru_cache
def _warn_of_unknown(name: str) -> None:
    """Warn, once per name: detection runs for every request."""
    log.warning("unknown parser %r: looking at the model's own evidence", name)
