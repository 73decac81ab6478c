"""The pipeline of TokenClassify: the model labels tokens, which are joined into entities here."""

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from itertools import groupby

from backend.config import MAX_TOKEN_IDS
from backend.core.classification import (
    ClassifyCall,
    ClassifyRequest,
    Entity,
    PlacedToken,
    TokenLabel,
)
from backend.core.model import ModelKind
from backend.errors import ContextLengthError, UnsupportedError
from backend.pipeline import worker_pool
from backend.pipeline.served_model import ComputeEngine, ServedModel
from backend.pipeline.validation import require_bounded

_OUTSIDE = "O"
_BEGINS, _INSIDE = frozenset("BS"), frozenset("IE")

log = logging.getLogger(__name__)


async def classify(
    call: ClassifyCall, model: ServedModel, engine: ComputeEngine
) -> tuple[Entity, ...]:
    """Return the entities of a text in order; cancel to abandon the work.

    A text beyond the model's context is read in consecutive parts.

    Raises:
        InvalidRequestError: The text is too long, or the context leaves no room for text.
        RequestCancelledError: Another model has replaced this one.
        UnsupportedError: The loaded model does not label tokens.
    """
    started = time.monotonic()
    if model.card.kind is not ModelKind.TAGGER:
        kind = model.card.kind.value
        problem = f"TokenClassify: {model.card.name} is a {kind}: it does not label tokens"
        raise UnsupportedError(problem)
    size_bytes = len(call.text)
    tokens = await worker_pool.run(partial(_tokens, call.text, model), size_bytes=size_bytes)
    labels = [label async for label in _labels(tokens, model, engine)]
    entities = await worker_pool.run(
        partial(_likely, call, tokens, labels, model.card.labels), size_bytes=size_bytes
    )
    seconds = time.monotonic() - started
    log.info(
        "classification tokens=%d entities=%d ms=%.0f",
        *(len(tokens), len(entities), seconds * 1000.0),
    )
    return entities


def _tokens(text: str, model: ServedModel) -> list[PlacedToken]:
    require_bounded("text", text, model)
    return model.tokenizer.placed(text)


async def _labels(
    tokens: Sequence[PlacedToken], model: ServedModel, engine: ComputeEngine
) -> AsyncGenerator[TokenLabel, None]:
    """Yield the label of each token; the parts of a text occupy one place in the engine's queue."""
    before, after = model.tokenizer.added_ids
    limit = model.card.context_length or MAX_TOKEN_IDS
    room = limit - len(before) - len(after)
    if room < 1:
        problem = f"the context of {limit} tokens leaves no room for text"
        raise ContextLengthError("text", problem)
    for start in range(0, len(tokens), room):
        part = [token.token_id for token in tokens[start : start + room]]
        found = await engine.compute(model, ClassifyRequest((*before, *part, *after)))
        for label in found.labels[len(before) : len(before) + len(part)]:
            yield label


def _likely(
    call: ClassifyCall,
    tokens: Sequence[PlacedToken],
    labels: Sequence[TokenLabel],
    names: Sequence[str],
) -> tuple[Entity, ...]:
    found = entities_of(call.text, tokens, labels, names)
    return tuple(entity for entity in found if entity.probability >= call.threshold)


def entities_of(
    text: str, tokens: Sequence[PlacedToken], labels: Sequence[TokenLabel], names: Sequence[str]
) -> Iterator[Entity]:
    """Yield the entities of a labelled text.

    A word has the first label among its tokens. Adjacent words of one group form one entity
    unless the later one starts a new entity; labels are BIO, BIOES, or bare groups.

    Args:
        tokens: Its tokens, in order.
        labels: One per token.
        names: Label names, by index.
    """
    places = _BytePlaces(text)
    open_entity: list[_Word] = []
    for _, pieces in groupby(zip(tokens, labels, strict=True), key=lambda pair: pair[0].word):
        word = _Word.of(list(pieces), names)
        if open_entity and (word.begins or word.group != open_entity[-1].group):
            yield _entity(text, open_entity, places)
            open_entity = []
        if word.group:
            open_entity.append(word)
    if open_entity:
        yield _entity(text, open_entity, places)


class _Word:
    """A word: its position, its group if any, and whether it starts an entity."""

    def __init__(self, start: int, stop: int, label: str, probabilities: Sequence[float]) -> None:
        prefix, dash, group = label.partition("-")
        is_tagged = bool(dash) and prefix in _BEGINS | _INSIDE
        self.start, self.stop, self.probabilities = start, stop, probabilities
        self.group = "" if label == _OUTSIDE else group if is_tagged else label
        self.begins = is_tagged and prefix in _BEGINS

    @classmethod
    def of(cls, pieces: Sequence[tuple[PlacedToken, TokenLabel]], names: Sequence[str]) -> "_Word":
        """Return the word made of these tokens."""
        tagged = [label for _, label in pieces if names[label.label] != _OUTSIDE]
        label = names[tagged[0].label] if tagged else _OUTSIDE
        probabilities = [each.probability for each in tagged]
        return cls(pieces[0][0].start, pieces[-1][0].stop, label, probabilities)


class _BytePlaces:
    """Byte offsets of characters in UTF-8, counted onwards from the previous lookup."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._chars = self._bytes = 0

    def of(self, chars: int) -> int:
        """Return the number of bytes before a character."""
        first, last = sorted((self._chars, chars))
        step = len(self._text[first:last].encode())
        self._bytes += step if chars == last else -step
        self._chars = chars
        return self._bytes


def _entity(text: str, words: Sequence[_Word], places: _BytePlaces) -> Entity:
    start, stop = words[0].start, words[-1].stop
    while start < stop and text[start].isspace():
        start += 1
    probabilities = [each for word in words for each in word.probabilities]
    return Entity(
        group=words[0].group,
        start=places.of(start),
        end=places.of(stop),
        probability=sum(probabilities) / len(probabilities),
        text=text[start:stop],
    )
