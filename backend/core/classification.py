"""Entities in a text, found by an encoder with a token classification head."""

from dataclasses import dataclass

from msgspec import Struct

from backend.core.request import ComputeRequest


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """A text to search for entities.

    Attributes:
        threshold: Entities below this probability are left out.
    """

    text: str
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of text that belongs to a group, such as a person's name.

    Attributes:
        start: Offset of its first byte in the UTF-8 text.
        end: Offset after its last byte.
        probability: Mean over its tokens.
    """

    group: str
    start: int
    end: int
    probability: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """The most likely label of a token, as an index, and its probability."""

    label: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and its position: a character range, and the index of its word."""

    token_id: int
    start: int
    stop: int
    word: int


class Labels(Struct, frozen=True, tag=True, array_like=True):
    """One label per token."""

    labels: tuple[TokenLabel, ...]


class ClassifyRequest(ComputeRequest[Labels], frozen=True, tag=True, array_like=True):
    """A text, or a part of one, as token ids."""

    token_ids: tuple[int, ...]
