"""Locates media among the tokens of a prompt."""

from collections.abc import Sequence

from backend.core.media import PreparedMedium
from backend.core.prompt import MediaSpan
from backend.model.vision.joins import joined
from backend.model.vision.medium_tokens import known_ids


class LostMediumError(Exception):
    """The tokens of a medium are not in the prompt.

    Attributes:
        number: Index of the medium, from 0.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"the tokens of medium {number} are not in the prompt")
        self.number = number


def find_spans(token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
    """Locate the tokens of media in a prompt; both are in text order.

    Raises:
        LostMediumError: The tokens of a medium are missing.
    """
    spans: list[MediaSpan] = []
    start = 0
    for number, medium in enumerate(media):
        start = _find(token_ids, medium.token_ids, start)
        if start < 0:
            raise LostMediumError(number)
        stop = start + len(medium.token_ids)
        spans.append(MediaSpan(start, stop, medium.digest, medium.inputs))
        start = stop
    return tuple(spans)


def with_own_tokens(upstream_ids: Sequence[int], media: Sequence[PreparedMedium]) -> list[int]:
    """Return mlx-vlm's tokens of a prompt with this backend's own tokens for its media.

    Raises:
        LostMediumError: The tokens of a medium are missing.
    """
    ids, shown, start = known_ids(upstream_ids), list[int](), 0
    for number, medium in enumerate(media):
        found = _find(ids, medium.upstream_ids, start)
        if found < 0:
            raise LostMediumError(number)
        shown += [*ids[start:found], *medium.token_ids]
        start = found + len(medium.upstream_ids)
    return shown + ids[start:]


def as_processed(text: str, media: Sequence[PreparedMedium]) -> str:
    """Return a prompt's text with the BOS token and the joins that its media require."""
    if not media:
        return text
    text = joined(text, media[0].rules)
    return text if text.startswith(media[0].lead) else media[0].lead + text


def _find(token_ids: Sequence[int], wanted: Sequence[int], start: int) -> int:
    """Return the start of a run of tokens, or -1."""
    last = len(token_ids) - len(wanted)
    while start <= last:
        try:
            start = token_ids.index(wanted[0], start, last + 1)
        except ValueError:
            return -1
        if tuple(token_ids[start : start + len(wanted)]) == tuple(wanted):
            return start
        start += 1
    return -1
