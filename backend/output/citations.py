"""Removes the tags of citations, `<co>words</co: 0:[1]>`, from text."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import lru_cache

from backend.core.step import ContentDelta, Delta, ReasoningDelta
from backend.formats.dialects import Citations
from backend.output.readers.patterns import (
    REFUTED,
    UNDECIDED,
    Piece,
    choice,
    fixed,
    sequence,
)
from backend.output.router import Router

# A citation is a phrase, so its end is sought within so many characters.
_MAX_CHARS = 2000
_SOURCE = r"[\w ,:\[\]-]"
_SOURCES = Piece(rf"{_SOURCE}{{1,200}}", rf"{_SOURCE}{{0,200}}")


class _Tags:
    """The tags of one way to cite.

    Attributes:
        bare: A beginning without sources, which other markup may have as well.
        named: A tag with sources.
        begun: A text that may become one of these.
        ends: An end, with or without sources.
        heads: Beginnings of tags, long enough to tell.
    """

    def __init__(self, citations: Citations) -> None:
        self.heads = (citations.begin, citations.end)
        self.bare = f"{citations.begin}>"
        named = choice(*(sequence(fixed(f"{head}: "), _SOURCES, fixed(">")) for head in self.heads))
        self.named = re.compile(named.whole)
        self.begun = re.compile(choice(named, fixed(self.bare)).begun)
        self.ends = re.compile(rf"{re.escape(citations.end)}(: {_SOURCES.whole})?>")


@lru_cache
def _tags(citations: Citations) -> _Tags:
    return _Tags(citations)


class _CitedText:
    """The text of one channel; a citation waits for its end, which tells it from other markup."""

    def __init__(self, tags: _Tags) -> None:
        self._tags = tags
        self._held = ""

    def pass_text(self, text: str) -> str:
        """Return the text that is certain, without tags."""
        text, self._held = self._held + text, ""
        return "".join(self._pieces(text))

    def pass_last(self, *, truncated: bool) -> str:
        """Return the text held back, because the text ends here; a citation need not end."""
        text = ""
        while self._held.startswith(self._tags.bare):
            held, self._held = self._held.removeprefix(self._tags.bare), ""
            text += self.pass_text(held)
        rest, self._held = self._held, ""
        return text if truncated and rest.startswith(self._tags.heads) else text + rest

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        while (begin := text.find("<", position)) >= 0:
            yield text[position:begin]
            position = self._tag_end(text, begin)
            if position == UNDECIDED:
                self._held = text[begin:]
                return
            if position == REFUTED:
                position = begin + 1
                yield text[begin:position]
        yield text[position:]

    def _tag_end(self, text: str, begin: int) -> int:
        """Return the position after a tag; a negative number as in `patterns` without one."""
        if named := self._tags.named.match(text, begin):
            return named.end()
        if not text.startswith(self._tags.bare, begin):
            return UNDECIDED if self._tags.begun.fullmatch(text, begin) else REFUTED
        position = begin + len(self._tags.bare)
        if found := self._tags.ends.search(text, position, position + _MAX_CHARS):
            return position if found[1] else REFUTED
        return UNDECIDED if len(text) < position + _MAX_CHARS else REFUTED


class CitedRouter:
    """Routes a reply whose content and thoughts may have citations."""

    def __init__(self, router: Router, citations: Citations) -> None:
        self._router = router
        self._content, self._reasoning = (_CitedText(_tags(citations)) for _ in range(2))

    @property
    def completed_calls(self) -> Set[int]:
        """Indexes of the calls that were emitted in full."""
        return self._router.completed_calls

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs made to calls, by call index."""
        return self._router.repairs

    @property
    def ended_mid_call(self) -> bool:
        """Whether the reply ended inside a call."""
        return self._router.ended_mid_call

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that this text makes certain."""
        return list(filter(_is_any, self._cleared(self._router.feed(text))))

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Return the deltas that were held back; an open call of a truncated reply just ends."""
        cleared = [*self._cleared(self._router.finish(truncated=truncated))]
        return list(filter(_is_any, [*cleared, *self._left(truncated=truncated)]))

    def _cleared(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yield deltas without tags; some are empty. Text that waits leaves before other deltas."""
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    yield ReasoningDelta(self._reasoning.pass_last(truncated=False))
                    yield ContentDelta(self._content.pass_text(text))
                case ReasoningDelta(text):
                    yield ContentDelta(self._content.pass_last(truncated=False))
                    yield ReasoningDelta(self._reasoning.pass_text(text))
                case _:
                    yield from self._left(truncated=False)
                    yield delta

    def _left(self, *, truncated: bool) -> Iterator[Delta]:
        yield ReasoningDelta(self._reasoning.pass_last(truncated=truncated))
        yield ContentDelta(self._content.pass_last(truncated=truncated))


def _is_any(delta: Delta) -> bool:
    return not isinstance(delta, ContentDelta | ReasoningDelta) or bool(delta.text)
