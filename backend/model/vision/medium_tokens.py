"""Tokens of a medium, as a processor writes them and as a prompt of this backend has them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from backend.model.vision.processor_call import NO_TOKEN

# Marks the pixels that are no padding; without it all are of the picture.
_MASK = "pixel_attention_mask"


def shown_pixels(inputs: Mapping[str, Any]) -> int:
    """Return the number of pixel values, or of marked ones; 0 for a medium without pixels."""
    mask = inputs.get(_MASK)
    return int(getattr(inputs.get("pixel_values"), "size", 0) if mask is None else mask.sum())


def known_ids(ids: Sequence[int]) -> list[int]:
    """Return ids with `NO_TOKEN` for each that the vocabulary does not have."""
    return [max(token_id, NO_TOKEN) for token_id in ids]


def longest_run(ids: Sequence[int]) -> tuple[int, int]:
    """Return the range of the longest run of one id; of equals the first."""
    start, longest = 0, (0, 0)
    for _, equal in groupby(ids):
        stop = start + len(list(equal))
        longest = max(longest, (start, stop), key=lambda run: run[1] - run[0])
        start = stop
    return longest


def with_run(ids: Sequence[int], token_id: int, count: int) -> list[int]:
    """Return ids with `count` times a token in place of their longest run."""
    start, stop = longest_run(ids)
    return [*ids[:start], *[token_id] * count, *ids[stop:]]
