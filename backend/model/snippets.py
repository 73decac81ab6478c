"""What a chat template writes in the place of a picture, a sound or a video."""

from collections.abc import Mapping
from dataclasses import dataclass

from backend.core.media import MediaKind
from backend.core.prompt import Message, Placement
from backend.errors import InvalidRequestError
from backend.model.template import ChatTemplate

_LEFT, _RIGHT = "Qx7", "Zk9"


@dataclass(frozen=True, slots=True)
class Snippets:
    """What stands for a medium of each kind in a prompt's text.

    Attributes:
        texts: By kind; one that is not there cannot be shown.
        takes_parts: Whether the template writes them; else they are put into its messages.
    """

    texts: Mapping[MediaKind, str]
    takes_parts: bool


def find_snippets(template: ChatTemplate, own_tokens: Mapping[MediaKind, str]) -> Snippets:
    """Find the snippets by giving the template small conversations.

    Args:
        template: The model's.
        own_tokens: What its processor replaces, for a template that takes text only.
    """
    written = {kind: _written(template, kind) for kind in MediaKind}
    texts = {kind: text for kind, text in written.items() if text}
    return Snippets(texts, takes_parts=True) if texts else Snippets(own_tokens, takes_parts=False)


def _written(template: ChatTemplate, kind: MediaKind) -> str:
    """Return what a medium between two texts adds to them, or "" when that is nothing."""
    question = Message(role="user", content=_LEFT + _RIGHT)
    shown = Message(role="user", content=_LEFT + _RIGHT, media=(Placement(len(_LEFT), kind),))
    try:
        plain = template.render([question], (), {})
        text = template.render([shown], (), {})
    except InvalidRequestError:
        return ""
    start = _common_start(plain, text)
    stop = len(text) - _common_start(plain[start:][::-1], text[start:][::-1])
    added = text[start:stop].strip()
    # A template that knows no parts may write the list itself.
    return "" if "'type'" in added else added


def _common_start(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
