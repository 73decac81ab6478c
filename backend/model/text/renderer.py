"""Runs a chat template: first on the original input, then on repaired input if it is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from backend.core.prompt import JsonValue
from backend.model.text.repairs import ALL_REPAIRS, Repair, forms_of
from backend.model.text.turns import Turn

Schema: TypeAlias = Mapping[str, JsonValue]
Options: TypeAlias = Mapping[str, JsonValue]
Renderer: TypeAlias = Callable[[Sequence[Turn], Sequence[Schema] | None, Options], str]
_EMPTY_SYSTEM: Turn = {"role": "system", "content": ""}


class RenderError(Exception):
    """A chat template refused a conversation, or failed on it; carries the template's message."""


class RenderTimeoutError(Exception):
    """A chat template took too long; another attempt would too."""


def render(
    renderer: Renderer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
    *,
    repairs: Sequence[Repair] = ALL_REPAIRS,
) -> str:
    """Render a conversation, repairing it only if the template refuses it.

    Some templates iterate over the tools without checking for `None`: they get an empty list
    instead.

    Raises:
        RenderError: The template refuses every form of it; the message is from the first refusal.
    """
    refusals: list[RenderError] = []
    for tools in (None, ()) if schemas is None else (schemas,):
        for form in forms_of(turns, repairs):
            try:
                return renderer(form, tools, options)
            except RenderError as error:
                refusals.append(error)
    raise refusals[0]


def render_with_tools(
    renderer: Renderer, turns: Sequence[Turn], schemas: Sequence[Schema], options: Options
) -> str | None:
    """Render with the tools in the text, or return `None` if they would be lost.

    Some templates write tools only into a system message; they get an empty one.

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
