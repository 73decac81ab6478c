"""Entities in a text: tokens are labelled by the model, words and neighbours joined here."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import groupby

from backend.core.classification import (
    ClassifyCall,
    ClassifyRequest,
    Entity,
    PlacedToken,
    TokenLabel,
)
from backend.core.model import ModelKind
from backend.errors import UnsupportedError
from backend.pipeline import worker_pool
from backend.pipeline.engines import ComputeEngine
from backend.pipeline.served_model import ServedModel

_OUTSIDE = "O"
_BEGINS, _INSIDE = frozenset("BS"), frozenset("IE")

log = logging.getLogger(__name__)


async def classify(
    call: ClassifyCall, model: ServedModel, engine: ComputeEngine
) -> tuple[Entity, ...]:
    """Return the entities of a text in their order; cancel to leave.

    A text beyond the model's context is read in parts.

    Raises:
        UnsupportedError: The loaded model labels no tokens.
    """
    started = time.monotonic()
    if model.card.kind is not ModelKind.TAGGER:
        problem = (
            f"TokenClassify: {model.card.name} is a {model.card.kind.value}: it labels no tokens"
        )
        raise UnsupportedError(problem)
    tokens = await worker_pool.run(
        lambda: model.tokenizer.placed(call.text), size_bytes=len(call.text)
    )
    before, after = model.tokenizer.added_ids
    room = (model.card.context_length or len(tokens) or 1) - len(before) - len(after)
    parts = [tokens[start : start + room] for start in range(0, len(tokens), room)]
    labelled = await asyncio.gather(
        *(
            engine.compute(
                model,
                ClassifyRequest((*before, *(token.token_id for token in part), *after)),
            )
            for part in parts
        )
    )
    labels = [
        label
        for part, found in zip(parts, labelled, strict=True)
        for label in found[len(before) : len(before) + len(part)]
    ]
    entities = tuple(
        entity
        for entity in entities_of(call.text, tokens, labels, model.card.labels)
        if entity.probability >= call.threshold
    )
    seconds = time.monotonic() - started
    log.info(
        "classification tokens=%d entities=%d ms=%.0f",
        *(len(tokens), len(entities), seconds * 1000.0),
    )
    return entities


def entities_of(
    text: str, tokens: Sequence[PlacedToken], labels: Sequence[TokenLabel], names: Sequence[str]
) -> Iterator[Entity]:
    """Yield the entities of a labelled text.

    A word has the label of its first token that has one. Words of one group are one entity unless
    the later one begins anew; labels are BIO, BIOES, or groups alone.

    Args:
        text: Where the tokens stand.
        tokens: In order.
        labels: One for each.
        names: Of the labels, by their numbers.
    """
    open_entity: list[_Word] = []
    for _, pieces in groupby(zip(tokens, labels, strict=True), key=lambda pair: pair[0].word):
        word = _Word.of(list(pieces), names)
        if open_entity and (word.begins or word.group != open_entity[-1].group):
            yield _entity(text, open_entity)
            open_entity = []
        if word.group:
            open_entity.append(word)
    if open_entity:
        yield _entity(text, open_entity)


class _Word:
    """A word: where it stands, its group if it has one, and whether an entity begins with it."""

    def __init__(self, start: int, stop: int, label: str, probabilities: Sequence[float]) -> None:
        prefix, dash, group = label.partition("-")
        is_tagged = bool(dash) and prefix in _BEGINS | _INSIDE
        self.start, self.stop, self.probabilities = start, stop, probabilities
        self.group = "" if label == _OUTSIDE else group if is_tagged else label
        self.begins = is_tagged and prefix in _BEGINS

    @classmethod
    def of(cls, pieces: Sequence[tuple[PlacedToken, TokenLabel]], names: Sequence[str]) -> "_Word":
        """Return the word of its tokens."""
        tagged = [label for _, label in pieces if names[label.label] != _OUTSIDE]
        label = names[tagged[0].label] if tagged else _OUTSIDE
        probabilities = [each.probability for each in tagged]
        return cls(pieces[0][0].start, pieces[-1][0].stop, label, probabilities)


def _entity(text: str, words: Sequence[_Word]) -> Entity:
    start, stop = words[0].start, words[-1].stop
    while start < stop and text[start].isspace():
        start += 1
    probabilities = [each for word in words for each in word.probabilities]
    return Entity(
        group=words[0].group,
        start=len(text[:start].encode()),
        end=len(text[:stop].encode()),
        probability=sum(probabilities) / len(probabilities),
        text=text[start:stop],
    )
