"""Spans of any labels, found by a model that reads the labels with the text: GLiNER 2.5.

The labels are written before the text, each after a mark. A word is one place, whatever its number
of tokens: the network looks at its first.
"""

import re
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from backend.config import MAX_CHARS_PER_TOKEN, MAX_TOKEN_IDS
from backend.core.scoring import ClassifyCall, ExtractRequest, Span
from backend.errors import InvalidRequestError
from backend.pipeline import worker_pool
from backend.pipeline.served_model import (
    ServedEngine,
    ServedModel,
    require_bounded,
    require_ids,
    tokenised_as,
)
from common.rpc import require_caller

# The parts of a schema, and the share of the context that it may take.
_TASK, _LABEL, _TEXT = "[P]", "[E]", "[SEP_TEXT]"
_OPENING, _CLOSING = ("(", _TASK, "entities", "("), (")", ")", _TEXT)
_SCHEMA_SHARE = 2
# Of a part of a text, to be read in the next one too.
_OVERLAP_SHARE = 4
_WORDS_PER_LOOK = 4096
DEFAULT_THRESHOLD = 0.5
# As the model was trained: links, addresses of at most 64 characters before the "@", names with
# one, words with their hyphens, and single signs.
WORD = re.compile(
    r"(?:https?://|www\.)\S+"
    r"|[a-z0-9._%+-]{1,64}@[a-z0-9.-]+\.[a-z]{2,}"
    r"|@[a-z0-9_]+"
    r"|\w+(?:-\w+)*"
    r"|\S",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Characters of a text, and the label that they have."""

    label: str
    start: int
    stop: int
    probability: float


@dataclass(frozen=True, slots=True)
class _Word:
    """A range of characters, and its tokens."""

    start: int
    stop: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Schema:
    """The tokens before the text, and the places of the marks of labels."""

    token_ids: Sequence[int]
    marks: Sequence[int]


async def extract(call: ClassifyCall, model: ServedModel, engine: ServedEngine) -> list[PlacedSpan]:
    """Return the spans of a text that have one of the call's labels, in order.

    Spans of one label never overlap. A text beyond the context is read in parts, which do.
    """
    run = partial(worker_pool.run, size_bytes=len(call.text))
    schema = await run(partial(_schema, call.labels, model))
    words = await run(partial(_words, call.text, schema, model))
    found = [span async for span in _spans(call, schema, words, model, engine)]
    return await run(partial(_placed, call.labels, words, found))


def _schema(labels: Sequence[str], model: ServedModel) -> _Schema:
    """Return the schema of labels, or refuse them."""
    if not labels:
        raise InvalidRequestError("labels", "is empty: this model finds those that a call names")
    tokenizer = model.tokenizer
    for i, label in enumerate(labels):
        if mark := next((text for text in tokenizer.added_texts.values() if text in label), None):
            raise InvalidRequestError(f"labels[{i}]", f"contains {mark!r}, a token of the model")
    token_ids: list[int] = []
    marks = []
    for text in (*_OPENING, *(part for label in labels for part in (_LABEL, label)), *_CLOSING):
        if text == _LABEL:
            marks.append(len(token_ids))
        token_ids += tokenizer.encode(text, adds_special=False)
    require_ids("labels", token_ids, model)
    limit = _context(model) // _SCHEMA_SHARE
    if len(token_ids) > limit:
        problem = f"takes {len(token_ids)} tokens, at most {limit} of the context may be used"
        raise InvalidRequestError("labels", problem)
    return _Schema(token_ids, marks)


def _context(model: ServedModel) -> int:
    return model.card.context_length or MAX_TOKEN_IDS


def _words(text: str, schema: _Schema, model: ServedModel) -> list[_Word]:
    """Return the words of a text; of one that exceeds a part only the beginning is read."""
    require_bounded("text", text, model)
    room = _context(model) - len(schema.token_ids)
    known: dict[str, Sequence[int]] = {}
    words = []
    for number, match in enumerate(WORD.finditer(text)):
        if number % _WORDS_PER_LOOK == 0:
            require_caller()
        word = match.group()[: MAX_CHARS_PER_TOKEN * room].lower()
        if word not in known:
            unknown = [model.tokenizer.hf.unk_token_id]
            with tokenised_as("text"):
                token_ids = model.tokenizer.encode(word, adds_special=False) or unknown
            require_ids("text", token_ids, model)
            known[word] = token_ids[:room]
        words.append(_Word(match.start(), match.end(), known[word]))
    return words


async def _spans(
    call: ClassifyCall,
    schema: _Schema,
    words: Sequence[_Word],
    model: ServedModel,
    engine: ServedEngine,
) -> AsyncGenerator[Span, None]:
    """Yield the spans of words in all parts; the parts occupy one place in the engine's queue."""
    for first, last in _parts(words, _context(model) - len(schema.token_ids)):
        request = _request(call, schema, words[first:last])
        for span in (await engine.compute(model, request)).spans:
            yield Span(span.label, span.start + first, span.stop + first, span.probability)


def _request(call: ClassifyCall, schema: _Schema, words: Sequence[_Word]) -> ExtractRequest:
    token_ids, places = list(schema.token_ids), []
    for word in words:
        places.append(len(token_ids))
        token_ids += word.token_ids
    return ExtractRequest(
        token_ids=tuple(token_ids),
        words=tuple(places),
        labels=tuple(schema.marks),
        threshold=call.threshold or DEFAULT_THRESHOLD,
    )


def _parts(words: Sequence[_Word], room: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of words of at most `room` tokens, each of which repeats the last one's end."""
    first = last = 0
    while last < len(words):
        used = 0
        while last < len(words) and used + len(words[last].token_ids) <= room:
            used += len(words[last].token_ids)
            last += 1
        yield first, last
        if last == len(words):
            return
        start, repeated = last, 0
        while start - 1 > first:
            repeated += len(words[start - 1].token_ids)
            if repeated > room // _OVERLAP_SHARE:
                break
            start -= 1
        first = last = start


def _placed(
    labels: Sequence[str], words: Sequence[_Word], found: Sequence[Span]
) -> list[PlacedSpan]:
    """Return the characters of spans of words, without those that overlap others."""
    by_label: dict[int, dict[tuple[int, int], float]] = {}
    for span in found:
        ranges = by_label.setdefault(span.label, {})
        at = span.start, span.stop
        ranges[at] = max(span.probability, ranges.get(at, 0.0))
    placed = [
        PlacedSpan(labels[label], words[start].start, words[stop - 1].stop, ranges[start, stop])
        for label, ranges in by_label.items()
        for start, stop in apart(ranges)
    ]
    return sorted(placed, key=lambda each: (each.start, each.stop, labels.index(each.label)))


def apart(ranges: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Return ranges, of which none overlap, with the highest sum of their values."""
    ordered = sorted(ranges, key=lambda each: (each[1], each[0]))
    stops = [stop for _, stop in ordered]
    before = [bisect_right(stops, start, 0, i) for i, (start, _) in enumerate(ordered)]
    sums = [0.0]
    for i, each in enumerate(ordered):
        sums.append(max(sums[i], sums[before[i]] + ranges[each]))
    kept, left = [], len(ordered)
    while left:
        if sums[left] > sums[left - 1]:
            kept.append(ordered[left - 1])
            left = before[left - 1]
        else:
            left -= 1
    return kept[::-1]
