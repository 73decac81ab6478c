"""The frames of a reply's messages, and the meaning of their headers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from backend.formats.dialects import Messages
from backend.output.readers.markup import after, after_space, either
from backend.output.readers.reader import MakeReader

_MAX_HEADER_CHARS = 256
_MAX_HEADER_WORDS = 4
_LIKENESS = 0.8
_TO = "to="
_RECIPIENT = re.compile(r"to=[\w.-]*", re.ASCII)
_RECIPIENTS = re.compile(r"\bto=\s*([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Address:
    """The recipient of a message: the user, unless it is a thought or names a tool.

    Attributes:
        is_prose: Whether the user is the recipient: a call between text is a quotation there.
        tools: Possible names of the tool, most likely first.
    """

    is_thought: bool = False
    is_prose: bool = False
    tools: tuple[str, ...] = ()


class MessageFrames:
    """The frames of one dialect of messages."""

    def __init__(
        self,
        messages: Messages,
        make_block: MakeReader | None,
        warn: Callable[[str], None],
    ) -> None:
        """Compile the texts and patterns.

        Args:
            messages: The dialect.
            make_block: Makes a reader of calls inside a body, if calls have openers.
            warn: Receives warnings.
        """
        self._messages = messages
        self._warn = warn
        self._channel = re.compile(re.escape(messages.channel) + r"[^\w<]*(\w*)")
        self.make_block = make_block
        self.start, self.message = messages.start, messages.message
        self.tokens, self.ends = messages.tokens, messages.ends
        self.header_tokens, self.last_ends = messages.header_tokens, messages.last_ends
        self.role = messages.roles[0]
        self.call_openers = messages.calls.openers if messages.calls else ()
        self.call_closer = messages.calls.end if messages.calls else ""
        self.frames = (
            *(messages.start + role for role in messages.roles),
            *(messages.channel + name for name in messages.channels),
            *messages.ends,
        )
        self._words_known = messages.words | {*messages.channels}

    @property
    def takes_bodies(self) -> bool:
        """Whether the body of a message to a tool is its arguments in JSON."""
        return self.make_block is None

    def read(self, header: str) -> Address:
        """Return the recipient named in a header; the first known one of the channels counts."""
        messages = self._messages
        recipients = [name for name in _RECIPIENTS.findall(header) if name not in messages.people]
        if not self.takes_bodies:
            is_prose = any(name in messages.people for name in _RECIPIENTS.findall(header))
            return Address(is_thought=messages.self_name in recipients, is_prose=is_prose)
        if recipients:
            name = recipients[-1]
            return Address(tools=(name.removeprefix(messages.namespace), name))
        channels = self._channel.findall(header) or self._bare_channels(header)
        close = (get_close_matches(name, messages.channels, 1, _LIKENESS) for name in channels)
        known = [names[0] for names in close if names]
        if channels and not known:
            self._warn(f"unknown channel {channels[0][:32]!r}: its text passes as content")
        return Address(is_thought=bool(known) and messages.channels[known[0]])

    def _bare_channels(self, header: str) -> list[str]:
        """Return the channel of a header that lacks the token before it."""
        word = header.removeprefix(self.role).strip().partition(" ")[0]
        return [word] if word in self._messages.channels else []

    def salvaged(self, header: str) -> tuple[Address, str] | None:
        """Return the recipient and the text of a header that runs into its text."""
        messages = self._messages
        before, brace, body = header.partition("{")
        is_header = brace and self.takes_bodies and self.may_be_header(before)
        if is_header and (address := self.read(before)).tools:
            return address, brace + body
        _, token, rest = header.rpartition(messages.channel or "\0")
        name = rest.split(maxsplit=1)[0] if rest.strip() else ""
        if not token or name not in messages.channels:
            return None
        return Address(is_thought=messages.channels[name]), rest.partition(name)[2].lstrip()

    def is_role(self, text: str) -> bool:
        """Tell whether text outside messages is, or may become, the role of the next one."""
        return bool(text.strip()) and self.role.startswith(text.strip())

    def may_be_header(self, beginning: str) -> bool:
        """Tell whether a header may begin like this; if not, no longer text may either."""
        after_role = beginning.removeprefix(self.role)
        is_role_alone = after_role == beginning or not after_role[:1].strip()
        channel = after_role.partition(" ")[0].partition(_TO)[0]
        is_channel = any(name.startswith(channel) for name in self._messages.channels)
        if not (is_role_alone or is_channel or after_role.startswith(self.header_tokens)):
            return False
        words = [word for word in self._words(beginning) if not _may_be_recipient(word)]
        return len(beginning) <= _MAX_HEADER_CHARS and len(words) <= _MAX_HEADER_WORDS

    def stray_text(self, header: str) -> str:
        """Return the text of a header without a message, if it is more than a header."""
        words = self._words(header.removeprefix(self.role))
        is_known = all(word in self._words_known or _RECIPIENT.fullmatch(word) for word in words)
        return "" if is_known else self.text_of(header)

    def text_of(self, header: str) -> str:
        """Return the text of an invalid header without its role or its first token."""
        text = header.removeprefix(self.role)
        first = next(filter(text.startswith, self.header_tokens), "")
        return text.removeprefix(first)

    def frame_after(self, text: str, position: int) -> int:
        """Return the end of a frame that follows a position, ignoring whitespace."""
        begin = after_space(text, position)
        found = (after(text, begin, frame) for frame in self.frames)
        return begin if begin < 0 else either(*found)

    def _words(self, header: str) -> list[str]:
        for token in self.header_tokens:
            header = header.replace(token, " ")
        return header.split()


def _may_be_recipient(beginning: str) -> bool:
    return beginning.startswith(_TO) or _TO.startswith(beginning)
