"""Guards a prompt against control tokens in a caller's text, such as a quoted "<|im_end|>".

A guard, a number that no text has, is put inside the mark before the template is rendered. The
template carries it along; the tokenizer finds no added token there, and removes it.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from msgspec.structs import replace
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from backend.core.prompt import JsonValue, Message, Placement, Tool, ToolCall

_texts = attrgetter("content", "name", "tool_call_id", "reasoning_content")


class Disarmer(ABC):
    """Changes marks in a caller's text that would mean something to the model."""

    @abstractmethod
    def disarmed(self, text: str) -> str:
        """Return a text without the marks that the model would misread."""

    def disarmed_message(self, message: Message) -> Message:
        """Return the message with all of its text disarmed; its media stay in place."""
        # Most are harmless; there may be thousands.
        is_plain = not (message.media or message.tool_calls)
        if is_plain and all(not text or self.disarmed(text) == text for text in _texts(message)):
            return message
        content, media, start = "", [], 0
        for placed in message.media:
            content += self.disarmed(message.content[start : placed.offset])
            media.append(Placement(len(content), placed.kind))
            start = placed.offset
        return replace(
            message,
            content=content + self.disarmed(message.content[start:]),
            media=tuple(media),
            name=self.disarmed(message.name),
            tool_call_id=self.disarmed(message.tool_call_id),
            reasoning_content=self.disarmed(message.reasoning_content),
            tool_calls=tuple(map(self._disarmed_call, message.tool_calls)),
        )

    def disarmed_tool(self, tool: Tool) -> Tool:
        """Return the tool with its schema disarmed."""
        schema = {self.disarmed(key): self.disarmed_json(tool.schema[key]) for key in tool.schema}
        return Tool(name=tool.name, schema=schema)

    def disarmed_json(self, value: JsonValue) -> JsonValue:
        """Return a value with all of its texts disarmed, keys too."""
        match value:
            case str():
                return self.disarmed(value)
            case Mapping():
                return {self.disarmed(key): self.disarmed_json(value[key]) for key in value}
            case Sequence():
                return [self.disarmed_json(each) for each in value]
            case _:
                return value

    def _disarmed_call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            call_id=self.disarmed(call.call_id),
            name=self.disarmed(call.name),
            arguments=self._disarmed_arguments(call.arguments),
        )

    def _disarmed_arguments(self, text: str) -> str:
        """Return JSON text with its texts disarmed, formatted as before where that is possible."""
        spelled = self.disarmed(text)
        try:
            value = json.loads(text)
            safe = self.disarmed_json(value)
            if safe == value:
                return text
            if json.loads(spelled) == safe:
                return spelled
        except (ValueError, RecursionError):
            return spelled
        # Escapes such as \u003c hid something.
        return json.dumps(safe, ensure_ascii=False)


# Digits pass through any filter of a template, and through JSON.
GUARD = str(10**15 + secrets.randbelow(9 * 10**15))
# The model's own texts, and its instructions: their marks of thoughts and calls mean something.
_OWN_ROLES = frozenset({"assistant", "system", "developer"})
_PREFIX_CHARS = 2


def unguarded(text: str) -> str:
    """Return a prompt's text as a reader sees it."""
    return text.replace(GUARD, "")


class Marks(Disarmer):
    """Texts that are control tokens, at least two characters each."""

    def __init__(
        self, texts: Iterable[str], normalized: Callable[[str], str] | None = None
    ) -> None:
        """Index the texts.

        Args:
            normalized: The tokenizer's normaliser, if it looks for marks in its result.
        """
        self._texts = frozenset(texts)
        self._normalized = normalized
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:_PREFIX_CHARS], set()).add(len(text))
        self._lengths = {prefix: sorted(each) for prefix, each in lengths.items()}
        first = "".join(re.escape(letter) for letter in {text[0] for text in self._texts})
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._texts)

    def disarmed(self, text: str) -> str:
        """Return a text with a guard in each of its marks."""
        places = self._places(text)
        if not places:
            # A mark in wide letters, say, is one after the normaliser: the guard is a hint.
            hides_mark = self._normalized and self._places(self._normalized(text))
            return text + GUARD if hides_mark else text
        ends = [*places, len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        return text[: places[0]] + "".join(GUARD + piece for piece in pieces)

    def _places(self, text: str) -> list[int]:
        """Return the places after the first letter of each mark; marks may overlap."""
        return [
            match.end()
            for match in self._first.finditer(text)
            if self._has_mark(text, match.start())
        ]

    def _has_mark(self, text: str, start: int) -> bool:
        lengths = self._lengths.get(text[start : start + _PREFIX_CHARS], ())
        return any(text[start : start + length] in self._texts for length in lengths)


@dataclass(frozen=True, slots=True)
class Guard:
    """Puts guards into the texts of a request.

    Attributes:
        marks: Of texts that are data: those of users, tools and their definitions.
        own_marks: Of texts of the assistant and the system, which may mark thoughts and calls.
    """

    marks: Marks
    own_marks: Marks

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose marks are text."""
        return [self._message(message) for message in messages] if self.marks else messages

    def tools(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return tools whose marks are text."""
        return [self.marks.disarmed_tool(tool) for tool in tools] if self.marks else tools

    def options(self, options: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        """Return variables for a template, whose marks are text."""
        return {name: self.marks.disarmed_json(value) for name, value in options.items()}

    def text(self, text: str) -> str:
        """Return a text whose marks are text."""
        return self.marks.disarmed(text)

    def _message(self, message: Message) -> Message:
        if message.role not in _OWN_ROLES:
            return self.marks.disarmed_message(message)
        rest = self.marks.disarmed_message(replace(message, content="", media=()))
        own = self.own_marks.disarmed_message(message)
        return replace(rest, content=own.content, media=own.media)


NO_GUARD = Guard(Marks(()), Marks(()))


def guarded(tokenizer: FastTokenizer, guard: str) -> FastTokenizer:
    """Return a tokenizer with the same tokens that removes guards; it shares the model's memory.

    The guard is removed before a text is split into words, so that its surroundings have their
    usual tokens. A model that spells marks itself, as unigram ones may, gets two words.
    """
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    reader = _copy(tokenizer, added)
    own = [tokenizer.normalizer] if tokenizer.normalizer else []
    reader.normalizer = normalizers.Sequence([normalizers.Replace(guard, ""), *own])
    if not any(token.special and _spells(reader, token.content, guard) for token in added):
        return reader
    splitting = _copy(tokenizer, added)
    if tokenizer.normalizer:
        splitting.normalizer = tokenizer.normalizer
    rules = [tokenizer.pre_tokenizer] if tokenizer.pre_tokenizer else []
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(guard, "removed"), *rules]
    )
    return splitting


def _copy(tokenizer: FastTokenizer, added: Sequence[AddedToken]) -> FastTokenizer:
    copy = FastTokenizer(tokenizer.model)
    if tokenizer.pre_tokenizer:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.post_processor:
        copy.post_processor = tokenizer.post_processor
    # The normaliser's result has no guard any more.
    copy.add_tokens([_raw(token) for token in added])
    return copy


def _raw(token: AddedToken) -> AddedToken:
    if not token.normalized or token.content.isspace():
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _spells(reader: FastTokenizer, mark: str, guard: str) -> bool:
    ids = reader.encode(mark[:1] + guard + mark[1:], add_special_tokens=False).ids
    return reader.token_to_id(mark) in ids
