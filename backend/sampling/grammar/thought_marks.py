"""The marks around a model's thoughts, as tokens of its vocabulary."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from backend.sampling.grammar.vocabulary import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from backend.core.guide import ThoughtTexts


_CONTINUATION, _LEAD = 0x80, 0xC0
# Bytes per character, by its first byte.
_LEADS = ((4, 0xF0), (3, 0xE0), (2, 0xC0))
_MOST_MISSING = 3
# Bytes with which no call ends, in addition to letters and digits.
_SENTENCE = frozenset(bytes([byte]) for byte in b".,:;!?")


class _SpellingTokenizer(TokenTexts, Protocol):
    """A tokenizer that knows the bytes of its tokens."""

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the tokens of a text."""


class ThoughtMarks:
    """How a model's tokens spell the starts and ends of thoughts; thread-safe.

    Attributes:
        later_starts: Starts that open a thought after any content, in bytes.
    """

    def __init__(self, texts: ThoughtTexts, tokenizer: _SpellingTokenizer, vocab_size: int) -> None:
        """Store texts with a start and an end at least; `vocab_size` is the logits' width."""
        self.starts = tuple(text.encode() for text in texts.starts)
        self.ends = tuple(text.encode() for text in texts.ends)
        self.later_starts = tuple(text.encode() for text in texts.later_starts)
        self.texts = texts
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._rests: dict[int, tuple[int, ...]] = {}
        self._barred: dict[bytes, tuple[int, ...]] = {}

    def may_follow(self, last: bytes) -> bool:
        """Tell whether a thought may open after content with this last byte; empty for none."""
        return self.texts.reopens or not (last.isalnum() or last in _SENTENCE)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.token_bytes(token_id)

    @cached_property
    def end(self) -> tuple[int, ...]:
        """Tokens of the default end; empty if the vocabulary cannot write it."""
        return self._spelled(self.ends[0])

    @cached_property
    def parting(self) -> tuple[int, ...]:
        """Tokens of the words before an early end; empty if there are none."""
        return self._spelled(self.texts.parting.encode())

    def rest_of_end(self, thought: bytes) -> tuple[int, ...]:
        """Return the tokens that complete an end whose beginning concludes the thought.

        An end that is a single token is not completed but written in full.
        """
        end = self.ends[0]
        begun = next((n for n in range(len(end) - 1, 0, -1) if thought.endswith(end[:n])), 0)
        if begun and begun not in self._rests:
            self._rests[begun] = self._rest(begun)
        return self._rests.get(begun, ()) or self.end

    def barred(self, content: bytes) -> tuple[int, ...]:
        """Return the tokens that certainly begin a thought after this content.

        These are starts that are one token and, in formats that announce every part of a reply, the
        first token that sets a thought apart from other parts.
        """
        if content not in self._barred:
            self._barred[content] = tuple(sorted(set(self._beginnings(content))))
        return self._barred[content]

    def prepare(self) -> None:
        """Read the vocabulary; takes 0.1 s for 150,000 tokens."""
        _ = self._ids, self._cutting, self.end, self.parting

    def cutting(self, left: int) -> tuple[int, ...]:
        """Return the tokens that end in a character with more than `left` bytes missing."""
        return self._cutting[left] if left < len(self._cutting) else ()

    def _beginnings(self, content: bytes) -> Iterator[int]:
        for start in self.starts:
            shared = max((_shared(start, text.encode()) for text in self.texts.rivals), default=-1)
            for written in range(shared + 1 if shared >= 0 else 1):
                if not content.endswith(start[:written]):
                    continue
                for piece, token_id in self._ids.items():
                    reached = written + len(piece)
                    is_certain = 0 <= shared < reached or (written == 0 and reached == len(start))
                    if is_certain and start.startswith(piece, written):
                        yield token_id

    def _rest(self, begun: int) -> tuple[int, ...]:
        """Return the tokens of the end without its first bytes; none if that cuts a marker."""
        stop = 0
        for index, token_id in enumerate(self.end):
            if stop == begun:
                return self.end[index:]
            stop += len(self.token_bytes(token_id))
            if begun < stop and token_id in self._tokenizer.added_texts:
                return ()
        return self._spelled(self.ends[0][begun:])

    def _spelled(self, text: bytes) -> tuple[int, ...]:
        """Return the tokenizer's tokens for a text, or failing that the longest tokens."""
        try:
            ids = self._tokenizer.encode(text.decode(), adds_special=False)
        except UnicodeDecodeError:
            ids = []
        if b"".join(map(self.token_bytes, ids)) == text:
            return tuple(ids)
        return self._longest(text)

    def _longest(self, text: bytes) -> tuple[int, ...]:
        found = []
        while text:
            stop = next((n for n in range(len(text), 0, -1) if text[:n] in self._ids), 0)
            if not stop:
                return ()
            found.append(self._ids[text[:stop]])
            text = text[stop:]
        return tuple(found)

    @cached_property
    def _cutting(self) -> tuple[tuple[int, ...], ...]:
        missing = [
            (token_id, count)
            for token_id in range(self._vocab_size)
            if (count := _missing(self.token_bytes(token_id)))
        ]
        return tuple(
            tuple(token_id for token_id, count in missing if count > left)
            for left in range(_MOST_MISSING)
        )

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        """Ids of the tokens that occur in any of the texts, by their bytes."""
        texts = b"\0".join((*self.starts, *self.ends[:1], self.texts.parting.encode()))
        longest = max(map(len, texts.split(b"\0")))
        ids: dict[bytes, int] = {}
        for token_id in range(self._vocab_size):
            piece = self.token_bytes(token_id)
            if piece and len(piece) <= longest and piece in texts:
                ids[piece] = token_id
        return ids


def _missing(text: bytes) -> int:
    """Return how many bytes the last character of a text lacks in UTF-8."""
    for present, byte in enumerate(reversed(text[-_MOST_MISSING:]), start=1):
        if byte >= _LEAD:
            size = next((n for n, least in _LEADS if byte >= least), 0)
            return max(size - present, 0)
        if byte < _CONTINUATION:
            break
    return 0


def _shared(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix of two texts, in bytes."""
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
