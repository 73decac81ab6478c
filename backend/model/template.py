"""Messages, tools and options to the text that the model reads."""

from collections.abc import Sequence

from backend.core.prompt import Message, Tool
from backend.errors import InvalidRequestError
from backend.model.conversation import check_roles, to_turns
from backend.model.probe import Abilities, probe
from backend.model.renderer import (
    Options,
    Renderer,
    RenderError,
    RenderTimeoutError,
    render,
    render_with_tools,
)

_NO_TEMPLATE = "this model has no chat template: send a Prompt, or set the option chat_template"
_NO_TOOLS = "this model's chat template does not support tools"
_LOST_TOOLS = "this model's chat template has no place for tools in this conversation"
_RESERVED_OPTIONS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    }
)


class ChatTemplate:
    """A model's chat template; safe from any thread.

    Attributes:
        text: The Jinja source; empty when there is none, or when the template is Python code.
        supports_tools: Whether tools appear in what it writes.
        supports_thinking: Whether it writes thoughts, or switches them on and off.
    """

    def __init__(self, renderer: Renderer | None, text: str = "") -> None:
        """Find out what the template can do.

        Args:
            renderer: Writes the text, or raises `RenderError`; `None` for a model without a
                template.
            text: The Jinja source.
        """
        self.text = text
        self._renderer = renderer
        abilities = probe(renderer, text) if renderer else Abilities()
        self._call_style = abilities.call_style
        self.supports_tools = abilities.supports_tools
        self.supports_thinking = abilities.supports_thinking

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> str:
        """Return the prompt up to where the reply begins, whoever spoke last.

        Args:
            messages: At least one.
            tools: What the model may call: the text holds them all.
            options: Variables of the template; one that is not given stays undefined there.

        Raises:
            InvalidRequestError: The template refuses the conversation, with its own words, or
                would lose the tools, or an option would replace a part of the request.
        """
        if self._renderer is None:
            raise InvalidRequestError("Messages", _NO_TEMPLATE)
        if not messages:
            raise InvalidRequestError("Messages", "is empty")
        check_roles(messages, self.text)
        _check_options(options)
        if tools and not self.supports_tools:
            raise InvalidRequestError("Tools", _NO_TOOLS)
        turns = to_turns(messages, self._call_style)
        try:
            if not tools:
                return render(self._renderer, turns, None, options)
            schemas = [dict(tool.schema) for tool in tools]
            text = render_with_tools(self._renderer, turns, schemas, options)
        except (RenderError, RenderTimeoutError) as error:
            raise InvalidRequestError("Messages", str(error)) from error
        if text is None:
            raise InvalidRequestError("Tools", _LOST_TOOLS)
        return text


def _check_options(options: Options) -> None:
    if reserved := sorted(_RESERVED_OPTIONS.intersection(options)):
        raise InvalidRequestError("chat_template_kwargs", f"may not set {reserved[0]!r}")
