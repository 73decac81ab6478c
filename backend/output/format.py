"""How models write thoughts and tool calls: the types of a format, apart from the families."""

from collections.abc import Callable
from dataclasses import dataclass

from backend.output.tool_calls.wire import WireFactory, new_call_id


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a thought; empty for models without thoughts.

    Attributes:
        starts: Texts that open a thought; the first is the usual one.
        ends: Texts that close it.
        frames: Texts around answers, or inside of thoughts, that are left out.
        tokens: Parts of these that a tokenizer may know as special tokens.
        bridge: What stands behind a thought, where messages frame a reply.
        answer: What stands before an answer, thought or not, where messages frame a reply.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    bridge: str = ""
    answer: str = ""

    @property
    def start(self) -> str:
        """The usual text that opens a thought, or nothing."""
        return self.starts[0] if self.starts else ""

    @property
    def end(self) -> str:
        """The usual text that closes a thought, or nothing."""
        return self.ends[0] if self.ends else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A tool-call wire.

    Attributes:
        openers: Texts at which the router hands over to the wire, wherever they stand.
        leads: Texts at which it does so only where content begins, whitespace aside.
        closers: Texts that end a call or a block of them; the first is the usual one.
        tokens: Further texts of the wire that a tokenizer may know as special tokens.
        make_cursor: Makes the wire's cursor at an opener; `None` for models without calls.
        make_call_id: Makes an id for a call whose wire carries none.
        ends_thought: Whether a call may begin inside a thought, and so end it; else an opener
            there is text.
        is_quotable: Whether a model can write the openers without calling, so that they are
            text in code. Special tokens cannot be quoted.
        owns_reply: Whether the wire frames the whole reply, thoughts and answers too: its
            cursor then begins with the reply, without an opener, and hands out every delta.
            One that ends leaves the rest of the reply to the router.
    """

    name: str
    openers: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    make_cursor: WireFactory | None = None
    make_call_id: Callable[[], str] = new_call_id
    ends_thought: bool = True
    is_quotable: bool = True
    owns_reply: bool = False

    @property
    def opener(self) -> str:
        """The usual text that opens a call, or nothing."""
        return next(iter((*self.openers, *self.leads)), "")

    @property
    def closer(self) -> str:
        """The usual text that closes a call, or nothing."""
        return self.closers[0] if self.closers else ""


NO_REASONING = ReasoningFormat("none")
NO_TOOLS = ToolFormat(name="none")


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
        reasoning, tools = self.reasoning, self.tools
        thoughts = (*reasoning.starts, *reasoning.ends, *reasoning.frames, *reasoning.tokens)
        return frozenset((*thoughts, *tools.openers, *tools.closers, *tools.tokens))


# A marker in an earlier turn is somebody's text. What follows the last of these is the reply.
_TURN_STARTS = (
    "<|im_start|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|header_start|>",
    "<|start_of_role|>",
    "<|start|>",
    "<|assistant|>",
    "<|assistant_start|>",
    "<｜Assistant｜>",
    "<｜hy_Assistant",
    "<|turn>",
    "<start_of_turn>",
    "<|CHATBOT_TOKEN|>",
    "<|open|>message",
    "<seed:bos>",
    "<longcat_assistant>",
    "<SPECIAL_11>",
    "[|assistant|]",
    "]~b]ai",
    "[/INST]",
)


def opens_in_reasoning(output_format: OutputFormat, prompt_tail: str) -> bool:
    """Tell whether the prompt ends inside a thought, so that the reply begins in one.

    In a prompt of unknown turns a marker counts only at the very end.
    """
    starts = tuple(start.rstrip() for start in output_format.reasoning.starts)
    if not starts:
        return False
    turn_start = max(prompt_tail.rfind(text) for text in _TURN_STARTS)
    if turn_start < 0:
        return prompt_tail.rstrip().endswith(starts)
    turn = prompt_tail[turn_start:]
    return _last(starts, turn) > _last(output_format.reasoning.ends, turn)


def opens_behind_thought(output_format: OutputFormat, prompt_tail: str) -> bool:
    """Tell whether the prompt ends behind a closed thought: templates switch thinking off so."""
    return prompt_tail.rstrip().endswith(output_format.reasoning.ends)


def _last(markers: tuple[str, ...], text: str) -> int:
    return max((text.rfind(marker) for marker in markers), default=-1)
