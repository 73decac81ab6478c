"""How messages are framed that make up a reply, and who each of them is for."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from backend.output.tool_calls.markup import after, after_space, either
from backend.output.tool_calls.wire import WireContext, WireCursor, WireFactory

START, MESSAGE = "<|start|>", "<|message|>"
ROLE = "assistant"

_MAX_HEADER_CHARS = 256
_MAX_HEADER_WORDS = 4
_TO = "to="
_RECIPIENT = re.compile(r"to=[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Who a message is for: the user, unless it is a thought or names a tool.

    Attributes:
        tools: The names that the tool may have, the likeliest first.
    """

    is_thought: bool = False
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDialect:
    """How messages are framed.

    Attributes:
        read: Tells who a message is for from what stands between `START` and `MESSAGE`.
        header_tokens: Special tokens in headers.
        header_words: The words that mean something in a header, recipients aside.
        heads: Texts that begin a message even inside another one, whose end is missing then.
        ends: Texts that end a message.
        last_ends: Those of them that end the turn too: in the midst of text they are text.
        make_call: Makes a cursor for the body of a message to an offered tool, from its first
            brace on; `None` for wires whose calls have an opener.
        call_openers: Texts in a body at which `make_block` takes over.
    """

    read: Callable[[str], Address]
    header_tokens: tuple[str, ...] = ()
    header_words: frozenset[str]
    heads: tuple[str, ...]
    ends: tuple[str, ...]
    last_ends: tuple[str, ...]
    make_call: Callable[[WireContext, str], WireCursor] | None = None
    call_openers: tuple[str, ...] = ()
    make_block: WireFactory | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special tokens of the frames."""
        return (START, MESSAGE, *self.header_tokens, *self.ends)

    @property
    def frames(self) -> tuple[str, ...]:
        """All that a message may end with, be it the beginning of the next one."""
        return (*self.heads, *self.ends)

    def may_be_header(self, beginning: str) -> bool:
        """Tell whether a header may begin so; if not, none that goes on from there may."""
        after_role = beginning.removeprefix(ROLE)
        is_role_alone = after_role == beginning or not after_role[:1].strip()
        if not is_role_alone and not after_role.startswith(self.header_tokens):
            return False
        words = [word for word in self._words(beginning) if not _may_be_recipient(word)]
        return len(beginning) <= _MAX_HEADER_CHARS and len(words) <= _MAX_HEADER_WORDS

    def stray_text(self, header: str) -> str:
        """Return what a header without a message holds, if it is more than a header."""
        words = self._words(header.removeprefix(ROLE))
        known = self.header_words
        is_known = all(word in known or _RECIPIENT.fullmatch(word) for word in words)
        return "" if is_known else self.text_behind(header)

    def text_behind(self, header: str) -> str:
        """Return what is left of a header that is none without its role or its first token."""
        text = header.removeprefix(ROLE)
        first = next(filter(text.startswith, self.header_tokens), "")
        return text.removeprefix(first)

    def frame_after(self, text: str, position: int) -> int:
        """Return where a frame ends that follows a position, whitespace aside."""
        begin = after_space(text, position)
        found = (after(text, begin, frame) for frame in self.frames)
        return begin if begin < 0 else either(*found)

    def _words(self, header: str) -> list[str]:
        for token in self.header_tokens:
            header = header.replace(token, " ")
        return header.split()


def _may_be_recipient(beginning: str) -> bool:
    return beginning.startswith(_TO) or _TO.startswith(beginning)
