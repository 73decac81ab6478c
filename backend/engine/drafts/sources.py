"""The sources of drafts."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Source(Enum):
    """The origin of a draft.

    Attributes:
        FORCED: The grammar of the reply allows only one text.
        MATCH: The latest few tokens occurred earlier in the row's text.
        LONG_MATCH: Many of the latest tokens did.
        MODEL: A draft model or a head wrote it.
    """

    FORCED = "forced"
    MATCH = "match"
    LONG_MATCH = "long match"
    MODEL = "model"


SOURCES: Mapping[str, Sequence[Source]] = {
    "auto": tuple(Source),
    "lookup": (Source.MATCH, Source.LONG_MATCH),
    "draft": (Source.MODEL,),
    "mtp": (Source.MODEL,),
    "off": (),
}
"""The sources that draft, by the option `speculation`."""

FIRST_CHANCES = {
    Source.FORCED: 0.9,
    Source.MATCH: 0.5,
    Source.LONG_MATCH: 0.8,
    Source.MODEL: 0.7,
}
"""The assumed chance that a drafted token is right, until the source has been measured."""


class Leave(NamedTuple):
    """What the sources may spend time on in a step.

    Attributes:
        drafts: Those that may draft where it is likely to pay.
        trials: Those that may also draft to measure whether it pays.
    """

    drafts: Collection[Source]
    trials: Collection[Source]
