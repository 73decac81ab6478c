"""Snippets: the text that a chat template writes for an image, a sound or a video."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backend.core.media import MediaKind
from backend.core.prompt import Message, Placement
from backend.errors import InvalidRequestError
from backend.model.text.template import ChatTemplate

_LEFT, _RIGHT = "Qx7", "Zk9"


@dataclass(frozen=True, slots=True)
class Snippets:
    """The text that represents a medium in a prompt, by kind.

    Attributes:
        texts: Snippets by kind; media of other kinds cannot be shown.
        takes_parts: Whether the template writes them; otherwise they are part of the messages.
    """

    texts: Mapping[MediaKind, str]
    takes_parts: bool


def find_snippets(template: ChatTemplate, own_tokens: Mapping[MediaKind, str]) -> Snippets:
    """Find the snippets by rendering small conversations.

    Args:
        template: The model's template.
        own_tokens: Texts replaced by its processor, for a template that takes only text.
    """
    written = {kind: _written(template, kind) for kind in MediaKind}
    texts = {kind: text for kind, text in written.items() if text}
    return Snippets(texts, takes_parts=True) if texts else Snippets(own_tokens, takes_parts=False)


def written_out(message: Message, texts: Mapping[MediaKind, str]) -> Message:
    """Return a message with snippets in its content in place of its media."""
    pieces, start = [], 0
    for placed in message.media:
        pieces += [message.content[start : placed.offset], texts[placed.kind]]
        start = placed.offset
    return replace(message, content="".join(pieces) + message.content[start:], media=())


def _written(template: ChatTemplate, kind: MediaKind) -> str:
    """Return the text that a medium adds between two texts, or "" if it adds none."""
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
    # A template without support for parts may print the list, or write it as JSON.
    return "" if "'type'" in added or '"type"' in added else added


def _common_start(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
