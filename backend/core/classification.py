"""Entities in a text, as an encoder with a head for tokens finds them."""

from dataclasses import dataclass

from backend.core.compute import ComputeRequest


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """A text to look for entities in.

    Attributes:
        threshold: Entities below this probability are left out.
    """

    text: str
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text that belongs to a group, such as a person's name.

    Attributes:
        start: Its first byte in the UTF-8 text.
        end: The first byte after it.
        probability: The mean of its tokens'.
    """

    group: str
    start: int
    end: int
    probability: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """The likeliest label of a token, by its number, and its probability."""

    label: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where it stands: characters of the text, and the number of its word."""

    token_id: int
    start: int
    stop: int
    word: int


class ClassifyRequest(
    ComputeRequest[tuple[TokenLabel, ...]], frozen=True, tag=True, array_like=True
):
    """A text, or a part of one, as the model reads it; the result has a label for every token."""

    token_ids: tuple[int, ...]
