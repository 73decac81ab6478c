"""Runs a chat template: first on the original input, then on repaired input if it is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from backend.core.prompt import JsonValue
from backend.model.text.conversation import Repair
from backend.model.text.repairs import ALL_REPAIRS, forms_of
from backend.model.text.shown import Text, missing, stand_in, with_stand_ins
from backend.model.text.turns import Turn

Schema: TypeAlias = Mapping[str, JsonValue]
Options: TypeAlias = Mapping[str, JsonValue]
Renderer: TypeAlias = Callable[[Sequence[Turn], Sequence[Schema] | None, Options], str]
_LOST = "the chat template does not show the text of Messages[{}]"
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
    texts: Sequence[Text] = (),
) -> str:
    """Render a conversation, repairing it only if the template refuses it or loses a text.

    Some templates iterate over the tools without checking for `None`: they get an empty list
    instead.

    Args:
        renderer: Renderer of the template.
        turns: The conversation.
        schemas: The tools.
        options: Template variables.
        repairs: Repairs to try, one after another.
        texts: Sequence[Text] that the prompt has to show, with the indices of their messages.

    Raises:
        RenderError: The template refuses every form of it, or loses a text in each; the message is
            from the first failure.
    """
    failures: list[RenderError] = []
    for form in forms_of(turns, repairs):
        for tools in (None, ()) if schemas is None else (schemas,):
            try:
                return _whole(renderer, form, tools, options, texts)
            except RenderError as error:
                failures.append(error)
    raise failures[0]


def _whole(
    renderer: Renderer,
    form: Sequence[Turn],
    tools: Sequence[Schema] | None,
    options: Options,
    texts: Sequence[Text],
) -> str:
    """Render one form of a conversation.

    Raises:
        RenderError: The template refuses it, or does not show one of the texts.
    """
    written = renderer(form, tools, options)
    if absent := missing(texts, written):
        # A template may change a text that it shows: a word in its place tells.
        try:
            shown = renderer(with_stand_ins(form, absent), tools, options)
        except RenderError:
            return written
        if lost := [text for text in absent if stand_in(text) not in shown]:
            raise RenderError(_LOST.format(lost[0].place))
    return written


def render_with_tools(
    renderer: Renderer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema],
    options: Options,
    *,
    texts: Sequence[Text] = (),
) -> str | None:
    """Render with the tools in the text, or return `None` if they would be lost.

    Some templates write tools only into a system message; they get an empty one.

    Raises:
        RenderError: The template refuses the conversation.
    """
    text = render(renderer, turns, schemas, options, texts=texts)
    if text != render(renderer, turns, None, options):
        return text
    if not turns or turns[0]["role"] == "system":
        return None
    with_system = [_EMPTY_SYSTEM, *turns]
    text = render(renderer, with_system, schemas, options, texts=texts)
    return text if text != render(renderer, with_system, None, options) else None
