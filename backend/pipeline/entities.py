"""The pipeline of TokenClassify: a model's probabilities to entities of the text."""

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from backend.config import MAX_PART_TOKENS, MAX_TOKEN_IDS
from backend.core.model import ModelKind
from backend.core.scoring import (
    ClassifyCall,
    ClassifyRequest,
    Entity,
    PathBiases,
    PlacedToken,
    TagProfile,
    TokenLabel,
)
from backend.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from backend.pipeline import worker_pool
from backend.pipeline.extraction import PlacedSpan, extract
from backend.pipeline.served_model import (
    ServedEngine,
    ServedModel,
    require_bounded,
    require_ids,
    tokenised_as,
)
from common.rpc import require_caller

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_OUTSIDE = "O"
_BEGINS, _INSIDE = frozenset("BS"), frozenset("IE")
_OPEN = frozenset("BI")
_TOKENS_PER_LOOK = 4096
_FLOAT_BYTES = 4

log = logging.getLogger(__name__)


async def classify(
    call: ClassifyCall, model: ServedModel, engine: ServedEngine
) -> tuple[Entity, ...]:
    """Return the entities of a text in order; cancel to abandon the work.

    A text beyond the model's context is read in parts.
    """
    started = time.monotonic()
    match kind := model.card.kind:
        case ModelKind.TAGGER:
            entities = await _classified(call, model, engine)
        case ModelKind.EXTRACTOR:
            entities = _entities(call.text, await extract(call, model, engine))
        case _:
            article = "an" if kind is ModelKind.ENCODER else "a"
            nature = f"is {article} {kind.value}: it does not label tokens"
            raise UnsupportedError(f"TokenClassify: {model.card.name} {nature}")
    spent_ms = (time.monotonic() - started) * 1000.0
    log.info("classification chars=%d entities=%d ms=%.0f", len(call.text), len(entities), spent_ms)
    return entities


def _entities(text: str, spans: Sequence[PlacedSpan]) -> tuple[Entity, ...]:
    places = _BytePlaces(text)
    return tuple(
        Entity(
            group=span.label,
            start=places.of(span.start),
            end=places.of(span.stop),
            probability=span.probability,
            text=text[span.start : span.stop],
        )
        for span in spans
    )


async def _classified(
    call: ClassifyCall, model: ServedModel, engine: ServedEngine
) -> tuple[Entity, ...]:
    profile = model.card.tagging
    _require_known(call.labels, profile)
    tokens = await worker_pool.run(partial(_tokens, call.text, model), size_bytes=len(call.text))
    parts = [part async for part in _logprobs(tokens, model, engine)]
    return await worker_pool.run(
        partial(_found, call, tokens, b"".join(parts), profile),
        size_bytes=len(call.text) + sum(map(len, parts)),
    )


def _require_known(labels: Sequence[str], profile: TagProfile) -> None:
    """Refuse a group that the model was not trained to find."""
    groups = dict.fromkeys(_parted(label)[1] for label in profile.labels if label != _OUTSIDE)
    for i, label in enumerate(labels):
        if label not in groups:
            known = ", ".join(groups)
            problem = f"is not found by this model: its labels are {known}"
            raise InvalidRequestError(f"labels[{i}]", problem)


def _tokens(text: str, model: ServedModel) -> list[PlacedToken]:
    require_bounded("text", text, model)
    with tokenised_as("text"):
        tokens = model.tokenizer.placed(text)
    require_ids("text", [token.token_id for token in tokens], model)
    return tokens


async def _logprobs(
    tokens: Sequence[PlacedToken], model: ServedModel, engine: ServedEngine
) -> AsyncGenerator[bytes, None]:
    """Yield the log-probabilities of all tokens in turn, as float32 [T, labels].

    The parts of a text occupy one place in the engine's queue. They overlap by the distance that
    the network looks ahead and back, so that no token sees where a part ends, or by a quarter.
    """
    before, after = model.tokenizer.added_ids
    profile = model.card.tagging
    room = _part_tokens(model) - len(before) - len(after)
    reach = 0 if len(tokens) <= room else min(profile.reach or room // 8, room // 4)
    step = room - 2 * reach
    row_bytes = _FLOAT_BYTES * len(profile.labels)
    for start in range(0, len(tokens), step):
        first = max(start - reach, 0)
        part = [token.token_id for token in tokens[first : start + step + reach]]
        found = await engine.compute(model, ClassifyRequest((*before, *part, *after)))
        skipped = len(before) + start - first
        kept = min(step, len(tokens) - start)
        yield found.logprobs[skipped * row_bytes : (skipped + kept) * row_bytes]


def _part_tokens(model: ServedModel) -> int:
    """Return how many tokens the network reads at once, the tokenizer's own included."""
    before, after = model.tokenizer.added_ids
    widest = max(MAX_PART_TOKENS, 4 * model.card.tagging.reach)
    limit = min(model.card.context_length or MAX_TOKEN_IDS, widest)
    if limit <= len(before) + len(after):
        problem = f"the context of {limit} tokens leaves no room for text"
        raise ContextLengthError("text", problem)
    return limit


def _found(
    call: ClassifyCall, tokens: Sequence[PlacedToken], logprobs: bytes, profile: TagProfile
) -> tuple[Entity, ...]:
    if not tokens:
        return ()
    labels = token_labels(logprobs, profile)
    by_word = profile.biases is None
    found = list(entities_of(call.text, tokens, labels, profile.labels, by_word=by_word))
    wanted = frozenset(call.labels)
    return tuple(
        entity
        for entity in (found if by_word else _apart(found))
        if entity.probability >= call.threshold and (not wanted or entity.group in wanted)
    )


def token_labels(logprobs: bytes, profile: TagProfile) -> list[TokenLabel]:
    """Return the label of each token: the likeliest, or that of the likeliest allowed path.

    Args:
        logprobs: float32 [T, labels], at least one token.

    Raises:
        AbandonedError: The caller has gone.
    """
    import numpy as np

    scores = np.frombuffer(logprobs, np.float32).reshape(-1, len(profile.labels))
    if profile.biases is None:
        path = scores.argmax(axis=1)
    else:
        path = np.array(_best_path(scores, profile.labels, profile.biases))
    chosen = np.exp(scores[np.arange(len(scores)), path].astype(np.float64))
    return list(map(TokenLabel, path.tolist(), chosen.tolist()))


def _best_path(
    scores: "NDArray[np.float32]", labels: Sequence[str], biases: PathBiases
) -> list[int]:
    """Return the labels [T] of the path with the highest sum of scores [T, L] and biases."""
    import numpy as np

    steps = np.array([[_bias(one, other, biases) for other in labels] for one in labels])
    is_open = np.array([_parted(label)[0] in _OPEN for label in labels])
    begins = np.array([_bias(_OUTSIDE, label, biases) > -np.inf for label in labels])
    best = np.where(begins, scores[0], -np.inf).astype(np.float64)
    came_from = np.empty(scores.shape, np.int16)
    for at in range(1, len(scores)):
        if at % _TOKENS_PER_LOOK == 0:
            require_caller()
        sums = best[:, None] + steps
        came_from[at] = sums.argmax(axis=0)
        best = sums.max(axis=0) + scores[at]
    path = [int(np.where(is_open, -np.inf, best).argmax())]
    for at in range(len(scores) - 1, 0, -1):
        path.append(int(came_from[at, path[-1]]))
    return path[::-1]


def _bias(one: str, other: str, biases: PathBiases) -> float:
    """Return the bias of a step from a BIOES label to another, -infinity if none is allowed."""
    (at, group), (to, next_group) = _parted(one), _parted(other)
    if at in _OPEN:
        if group != next_group or to not in _INSIDE:
            return -float("inf")
        return biases.inside_to_continue if to == "I" else biases.inside_to_end
    if to in _INSIDE:
        return -float("inf")
    if one == _OUTSIDE:
        return biases.background_stay if other == _OUTSIDE else biases.background_to_start
    return biases.end_to_background if other == _OUTSIDE else biases.end_to_start


def _parted(label: str) -> tuple[str, str]:
    """Return the prefix of a BIOES label, empty if it has none, and its group."""
    prefix, dash, group = label.partition("-")
    return (prefix, group) if dash and prefix in _BEGINS | _INSIDE else ("", label)


def _apart(entities: Sequence[Entity]) -> Iterator[Entity]:
    """Yield entities in order; of those that share a character the first, longest, least group."""
    reached = 0
    for entity in sorted(entities, key=lambda each: (each.start, -each.end, each.group)):
        if entity.start >= reached:
            reached = entity.end
            yield entity


def entities_of(
    text: str,
    tokens: Sequence[PlacedToken],
    labels: Sequence[TokenLabel],
    names: Sequence[str],
    *,
    by_word: bool = True,
) -> Iterator[Entity]:
    """Yield the entities of a labelled text.

    A word has the first label among its tokens. Adjacent words of one group form one entity
    unless the later one starts a new entity; labels are BIO, BIOES, or bare groups.

    Args:
        labels: One per token.
        by_word: Whether tokens of one word belong together; else each counts as a word.
    """
    places = _BytePlaces(text)
    open_entity: list[_Word] = []
    pairs = enumerate(zip(tokens, labels, strict=True))
    for _, pieces in groupby(pairs, key=lambda pair: pair[1][0].word if by_word else pair[0]):
        word = _Word([piece for _, piece in pieces], names)
        if open_entity and (word.begins or word.group != open_entity[-1].group):
            yield from _entity(text, open_entity, places)
            open_entity = []
        if word.group:
            open_entity.append(word)
    if open_entity:
        yield from _entity(text, open_entity, places)


class _Word:
    """A word: its position, its group if any, and whether it starts an entity."""

    def __init__(
        self, pieces: Sequence[tuple[PlacedToken, TokenLabel]], names: Sequence[str]
    ) -> None:
        tagged = [label for _, label in pieces if names[label.label] != _OUTSIDE]
        prefix, self.group = _parted(names[tagged[0].label]) if tagged else ("", "")
        self.begins = prefix in _BEGINS
        self.start, self.stop = pieces[0][0].start, pieces[-1][0].stop
        self.probabilities = [each.probability for each in tagged]


class _BytePlaces:
    """Byte offsets of characters in UTF-8, counted onwards from the previous lookup."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._chars = self._bytes = 0

    def of(self, chars: int) -> int:
        first, last = sorted((self._chars, chars))
        step = len(self._text[first:last].encode())
        self._bytes += step if chars == last else -step
        self._chars = chars
        return self._bytes


def _entity(text: str, words: Sequence[_Word], places: _BytePlaces) -> Iterator[Entity]:
    """Yield the entity of some words, without spaces around it; none if it holds no others."""
    start, stop = words[0].start, words[-1].stop
    while start < stop and text[start].isspace():
        start += 1
    while start < stop and text[stop - 1].isspace():
        stop -= 1
    if start == stop:
        return
    probabilities = [each for word in words for each in word.probabilities]
    yield Entity(
        group=words[0].group,
        start=places.of(start),
        end=places.of(stop),
        probability=sum(probabilities) / len(probabilities),
        text=text[start:stop],
    )
