"""Feeds prompts that may contain media: text in chunks, and tower outputs in place of media.

The latest outputs of towers are remembered, within a budget of bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from backend.config import MEDIA_MEMO_BYTES
from backend.core.prompt import MediaSpan
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.plan import BatchPlan, Decoder, FreshCaches
from backend.engine.rows.row import Row
from backend.model.vision.vision_network import (
    MediaFeatures,
    MediaPart,
    RopePositions,
    VisionNetwork,
)
from common.last_used import LastUsed

MAX_LENGTHS = 65_536


class MediaMemo:
    """Runs the towers, once for each medium while it is remembered.

    Belongs to the main thread.
    """

    def __init__(self, network: VisionNetwork, budget_bytes: int) -> None:
        """Start empty.

        Args:
            budget_bytes: The maximum size of all features; the latest stay even above it.
        """
        self._network = network
        self._features: LastUsed[bytes, MediaFeatures] = LastUsed(
            math.inf, budget_bytes, lambda _, features: features.nbytes
        )
        self._rope_lengths: LastUsed[bytes, int] = LastUsed(MAX_LENGTHS)
        self.runs = 0

    @property
    def nbytes(self) -> int:
        """The size of all features."""
        return self._features.size

    def features(self, span: MediaSpan, token_ids: Sequence[int]) -> MediaFeatures:
        """Return the language model's input for a medium."""
        if (known := self._features.find(span.digest)) is not None:
            return known
        made = self._network.embed_media(token_ids, span.inputs)
        self.runs += 1
        self._rope_lengths.keep(span.digest, _rope_length(span, made))
        return self._features.keep(span.digest, made)

    def rope_length(self, span: MediaSpan, token_ids: Sequence[int]) -> int:
        """Return the advance of the position by a medium.

        It is known without a tower run for a medium seen before.
        """
        known = self._rope_lengths.find(span.digest)
        return _rope_length(span, self.features(span, token_ids)) if known is None else known


def _rope_length(span: MediaSpan, features: MediaFeatures) -> int:
    length = features.rope_length
    return span.stop - span.start if length is None else length


def prefill_chunk(network: Decoder, fresh_caches: FreshCaches, row: Row, count: int) -> None:
    """Feed the next `count` of the row's tokens, at most `row.prefill_left`.

    The chunk is computed on return: a cancel takes effect before the next one.

    Args:
        fresh_caches: Creates caches for a row without any.
    """
    caches = row.own_caches(fresh_caches)
    chunk = row.token_ids[row.fed : row.fed + count]
    # The logits stay lazy: no product with the vocabulary is computed.
    network(mx.array([chunk]), cache=caches)
    mx.eval([cache.state for cache in caches])
    row.count_fed(count)


class Feeder:
    """Feeds prompts to a network that reads text only; belongs to the main thread."""

    media: MediaMemo | None = None

    def __init__(self, network: Decoder, fresh_caches: FreshCaches) -> None:
        self._network = network
        self._fresh_caches = fresh_caches

    def feed(self, row: Row, count: int) -> None:
        """Feed the next `count` tokens of a row, at most `row.prefill_left`; computed on return."""
        prefill_chunk(self._network, self._fresh_caches, row, count)

    def feed_together(self, rows: Sequence[Row], plan: BatchPlan) -> None:
        """Feed the rest of two or more text prompts in one pass; computed on return.

        The shorter ones are padded on the right; the padding is dropped.

        Args:
            plan: Of the model, whose rows may take different numbers of tokens.
        """
        lefts = [row.prefill_left for row in rows]
        batch = BatchCaches(replace(plan, packs=False))
        batch.regroup([], [row.own_caches(self._fresh_caches) for row in rows])
        batch.take(self._network, [row.token_ids[row.fed : -1] for row in rows])
        batch.keep(lefts)
        for place, (row, left) in enumerate(zip(rows, lefts, strict=True)):
            row.hold(batch.extract(place))
            row.count_fed(left)
        mx.eval([cache.state for row in rows for cache in row.cache or ()])
        for row in rows:
            self.align(row)

    def align(self, row: Row) -> None:
        """Set the position of the next token; in text, positions count tokens anyway."""


class MediaFeeder(Feeder):
    """Feeds prompts to a network with towers; belongs to the main thread."""

    _network: VisionNetwork
    media: MediaMemo

    def __init__(self, network: VisionNetwork, fresh_caches: FreshCaches) -> None:
        super().__init__(network, fresh_caches)
        self.media = MediaMemo(network, MEDIA_MEMO_BYTES)

    def feed(self, row: Row, count: int) -> None:
        """Feed the next tokens of a row: text, or tokens of one medium; computed on return.

        Args:
            count: The maximum tokens; an indivisible medium is fed as a whole.
        """
        span = row.media_at(row.fed)
        if span is None:
            super().feed(row, min(count, row.next_media_start - row.fed))
        else:
            self._feed_medium(row, span, count)
        self.align(row)

    def align(self, row: Row) -> None:
        """Set the position of the next token by the media before it."""
        counter = row.cache[-1] if row.cache else None
        if isinstance(counter, RopePositions):
            counter.upcoming = [self._position(row, row.fed)]

    def _feed_medium(self, row: Row, span: MediaSpan, count: int) -> None:
        caches = row.own_caches(self._fresh_caches)
        features = self.media.features(span, row.token_ids[span.start : span.stop])
        may_split = self._network.may_split_media(features)
        stop = min(row.fed + count, span.stop) if may_split else span.stop
        part = MediaPart(features, row.fed - span.start, stop - span.start)
        tokens = mx.array([row.token_ids[row.fed : stop]])
        self._network.feed_media(tokens, caches, part, self._position(row, span.start))
        mx.eval([cache.state for cache in caches])
        row.count_fed(stop - row.fed)

    def _position(self, row: Row, count: int) -> int:
        """Return the position of the token after the first `count`."""
        before = (span for span in row.request.prompt.media if span.stop <= count)
        return count + sum(self._advance(row, span) for span in before)

    def _advance(self, row: Row, span: MediaSpan) -> int:
        """Return the advance of the position by a medium beyond its tokens."""
        token_ids = row.token_ids[span.start : span.stop]
        return self.media.rope_length(span, token_ids) - len(token_ids)


def make_feeder(network: Decoder, fresh_caches: FreshCaches) -> Feeder:
    """Return the feeder of a network."""
    if isinstance(network, VisionNetwork):
        return MediaFeeder(network, fresh_caches)
    return Feeder(network, fresh_caches)
