"""How a chat template is called: once as asked, and mended where it refuses."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from backend.core.prompt import JsonValue
from backend.model.conversation import Turn, merge_turns, shorten_call_ids

Schema: TypeAlias = Mapping[str, JsonValue]
Options: TypeAlias = Mapping[str, JsonValue]
Renderer: TypeAlias = Callable[[Sequence[Turn], Sequence[Schema] | None, Options], str]
Mend: TypeAlias = Callable[[Sequence[Turn]], Sequence[Turn]]

_MENDS: tuple[Mend, ...] = (merge_turns, shorten_call_ids)
_EMPTY_SYSTEM: Turn = {"role": "system", "content": ""}


class RenderError(Exception):
    """A chat template refused a conversation, or failed on it; the message is its own."""


class RenderTimeoutError(Exception):
    """A chat template did not come to an end: no other attempt is worth its time."""


def render(
    renderer: Renderer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
    *,
    mends: Sequence[Mend] = _MENDS,
) -> str:
    """Render a conversation as it is; only when the template refuses it, mend and try again.

    Raises:
        RenderError: What the template said to the last attempt.
    """
    try:
        return renderer(turns, schemas, options)
    except RenderError:
        if not mends:
            raise
    mended = mends[0](turns)
    return render(renderer, mended, schemas, options, mends=mends[1:])


def render_with_tools(
    renderer: Renderer, turns: Sequence[Turn], schemas: Sequence[Schema], options: Options
) -> str | None:
    """Render so that the tools are in the text, or return `None` where they would be lost.

    Some templates write tools into a system message only: they are given an empty one.

    Raises:
        RenderError: The template refuses the conversation.
    """
    text = render(renderer, turns, schemas, options)
    if text != render(renderer, turns, None, options):
        return text
    if not turns or turns[0]["role"] == "system":
        return None
    with_system = [_EMPTY_SYSTEM, *turns]
    text = render(renderer, with_system, schemas, options)
    return text if text != render(renderer, with_system, None, options) else None
