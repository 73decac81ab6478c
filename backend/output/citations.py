"""Removes the tags of citations, `<co>words</co: 0:[1]>`, from text."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache

from backend.core.step import ContentDelta, Delta, ReasoningDelta
from backend.formats.dialects import Citations
from backend.formats.format import ToolFormat
from backend.output.readers.build import make_reader
from backend.output.readers.patterns import (
    REFUTED,
    UNDECIDED,
    Piece,
    choice,
    fixed,
    sequence,
)
from backend.output.readers.reader import Reader, ReaderContext
from backend.output.readers.typed_values import JsonSchema
from backend.output.reply_format import OutputFormat
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
    """The text of one channel; a citation waits for its end, which tells it from other markup.

    Attributes:
        held: Text that waits.
    """

    def __init__(self, tags: _Tags) -> None:
        self._tags = tags
        self.held = ""

    def pass_text(self, text: str) -> str:
        """Return the text that is certain, without tags; on an error nothing changes."""
        *passing, self.held = self._pieces(self.held + text)
        return "".join(passing)

    def pass_last(self, *, truncated: bool) -> str:
        """Return the text held back, because the text ends here; a citation need not end."""
        text = ""
        while self.held.startswith(self._tags.bare):
            held, self.held = self.held.removeprefix(self._tags.bare), ""
            text += self.pass_text(held)
        rest, self.held = self.held, ""
        return text if truncated and rest.startswith(self._tags.heads) else text + rest

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces without tags; the last one waits."""
        position = 0
        while (begin := text.find("<", position)) >= 0:
            yield text[position:begin]
            position = self._tag_end(text, begin)
            if position == UNDECIDED:
                yield text[begin:]
                return
            if position == REFUTED:
                position = begin + 1
                yield text[begin:position]
        yield text[position:]
        yield ""

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


class CitedRouter(Router):
    """Routes a reply whose content and thoughts may have citations.

    If a tag cannot be read, routing ends as in `Router`: later tags are text.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        citations: Citations,
        tools: Mapping[str, JsonSchema] | None,
        prompt_tail: str = "",
        used_ids: Collection[str] = (),
        make_reader: Callable[[ToolFormat, ReaderContext], Reader] = make_reader,
    ) -> None:
        """Begin a reply; `tools` as in `Router`."""
        super().__init__(
            output_format,
            tools=tools,
            prompt_tail=prompt_tail,
            used_ids=used_ids,
            make_reader=make_reader,
        )
        self._content, self._reasoning = (_CitedText(_tags(citations)) for _ in range(2))
        self._shown: list[Delta] = []

    @property
    def held(self) -> str:
        """Text that would be content if routing ended here; not whitespace around a thought."""
        return self._content.held + super().held

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that this text makes certain."""
        self._rest += text
        return self._guarded(lambda: self._cite(self._route))

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Return the deltas that were held back; an open call of a truncated reply just ends."""
        return self._guarded(
            lambda: self._cite(lambda: self._finish(truncated=truncated), truncated=truncated)
        )

    def _cite(self, route: Callable[[], None], *, truncated: bool | None = None) -> None:
        """Route, and drop tags; `truncated` tells how the reply ends here, `None` that it goes on.

        Deltas already shown precede waiting text, which precedes the deltas with their tags.
        """
        route()
        while self._deltas:
            self._shown += filter(_is_any, self._without_tags(self._deltas[0]))
            del self._deltas[0]
        if truncated is not None:
            self._shown += filter(_is_any, self._left(truncated=truncated))
        self._deltas, self._shown = self._shown, []

    def _switch_off(self) -> None:
        """Treat everything held back as content to come; text waiting for a tag's end passes."""
        super()._switch_off()
        waiting: tuple[Delta, ...] = (
            ReasoningDelta(self._reasoning.held),
            ContentDelta(self._content.held),
        )
        self._deltas = [*self._shown, *filter(_is_any, waiting), *self._deltas]

    def _without_tags(self, delta: Delta) -> Iterator[Delta]:
        """Yield a delta without tags, perhaps empty. Text that waits leaves before other deltas."""
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
