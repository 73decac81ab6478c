"""The chat template: renders messages, tools and options to the text of a prompt."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from backend.core.prompt import EXAMPLE_CALL, MediaKind, Message, Placement, Tool
from backend.errors import InvalidRequestError
from backend.formats.spelling import Spelling
from backend.model.text.conversation import check_roles, to_turns
from backend.model.text.prefix import common_length
from backend.model.text.probe import Abilities, probe
from backend.model.text.renderer import (
    Efforts,
    Options,
    Renderer,
    RenderError,
    RenderTimeoutError,
    render,
    render_with_tools,
    said,
)
from backend.model.text.tool_forms import ToolForms, with_written_tools, written_call

# Branches not rendered within this time are left out.
BRANCHES_BUDGET_S = 2.0

_NO_TEMPLATE = "this model has no chat template: send a Prompt, or set the option chat_template"
_NO_TOOLS = "this model's chat template does not support tools, and the option write_tools is false"
_LOST_TOOLS = "this model's chat template shows no tools in this conversation"
_OPTIONS = "chat_template_kwargs"
RESERVED_OPTIONS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        # Jinja's own.
        "self",
    }
)


class ChatTemplate:
    """A model's chat template; thread-safe.

    Attributes:
        text: Jinja source; empty if there is none or the template is Python code.
        supports_tools: Whether tools appear in its output, or are written into it.
        writes_tools: Whether it knows no tools, and they are written into the system prompt.
        supports_thinking: Whether it writes thoughts, or switches them on and off.
        written_call: The text of `EXAMPLE_CALL` in a prompt, if calls are rendered.
    """

    def __init__(
        self,
        renderer: Renderer | None,
        text: str = "",
        abilities: Abilities | None = None,
        *,
        writes_tools: bool = False,
    ) -> None:
        """Probe the template, unless its abilities are given.

        Args:
            renderer: Returns the text or raises `RenderError`; `None` without a template.
            text: The Jinja source.
            writes_tools: Whether to write tools as text if the template knows none.
        """
        self.text = text
        self.renderer = renderer
        if abilities is None:
            abilities = probe(renderer, text) if renderer else Abilities()
        self._renderer = renderer or _refuse
        self.tool_forms = ToolForms(self._renderer)
        self._efforts = Efforts(self._renderer)
        self._abilities = abilities
        self.writes_tools = writes_tools and not abilities.supports_tools
        self.supports_tools = abilities.supports_tools or writes_tools
        self.supports_thinking = abilities.supports_thinking
        self.written_call = (
            written_call(EXAMPLE_CALL) if self.writes_tools else abilities.written_call
        )

    def spell_calls(self, spelling: Spelling) -> None:
        """Write earlier calls in this way if the template writes none; call it before `render`."""
        form = self._abilities.form
        if form.calls.calls_as_text or form.calls.results_as_text:
            calls = replace(form.calls, spelling=spelling)
            self._abilities = replace(self._abilities, form=replace(form, calls=calls))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> str:
        """Return the prompt, up to the start of the reply.

        Args:
            messages: At least one.
            tools: Tools, all of which appear in the text.
            options: Template variables; others stay undefined.

        Raises:
            InvalidRequestError: The template refuses the conversation, with its own message, or
                would lose a text or the tools, or an option would replace a part of the request.
        """
        if self.renderer is None:
            raise InvalidRequestError("Messages", _NO_TEMPLATE)
        if not messages:
            raise InvalidRequestError("Messages", "is empty")
        check_roles(messages, self.text)
        if reserved := sorted(RESERVED_OPTIONS.intersection(options)):
            raise InvalidRequestError(_OPTIONS, f"may not set {reserved[0]!r}")
        if tools and not self.supports_tools:
            raise InvalidRequestError("Tools", _NO_TOOLS)
        if tools and self.writes_tools:
            messages, tools = with_written_tools(messages, tools), ()
        try:
            text = self._rendered(messages, tools, options)
        except RenderTimeoutError as error:
            raise InvalidRequestError("Messages", str(error)) from error
        except RenderError as error:
            is_of_options = bool(options) and self._can_render(messages, tools)
            field = _OPTIONS if is_of_options else "Messages"
            raise InvalidRequestError(field, str(error)) from error
        if text is None:
            raise InvalidRequestError("Tools", _LOST_TOOLS)
        return text

    def _can_render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Tell whether a prompt can be rendered without options."""
        try:
            return self._rendered(messages, tools, {}) is not None
        except (RenderError, RenderTimeoutError):
            return False

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options
    ) -> str | None:
        """Return the prompt, or `None` if it lacks the tools."""
        form = self._abilities.form
        given = to_turns(messages, form.calls)
        texts = said(given) if form.shows_text else ()
        turns = form.of(given)
        options = self._efforts.fitted(options)
        if not tools:
            return render(self._renderer, turns, None, options, texts=texts)
        schemas = self.tool_forms.fitted([dict(tool.schema) for tool in tools])
        return render_with_tools(self._renderer, turns, schemas, options, texts=texts)

    def render_with_branches(
        self,
        messages: Sequence[Message],
        branches: Iterable[Sequence[Message]],
        tools: Sequence[Tool],
        options: Options,
    ) -> tuple[str, list[str]]:
        """Return a prompt, and those of its branches, with the same tools and options.

        A branch is empty if the template refuses it, or if earlier branches took too long.

        Raises:
            InvalidRequestError: As in `render`, for `messages`.
        """
        text = self.render(messages, tools, options)
        return text, self.render_branches(branches, tools, options)

    def render_branches(
        self, branches: Iterable[Sequence[Message]], tools: Sequence[Tool], options: Options
    ) -> list[str]:
        """Return prompts; one is empty if the template refuses it, or if time has run out."""
        deadline = time.monotonic() + BRANCHES_BUDGET_S
        return [self._branch(branch, tools, options, deadline) for branch in branches]

    def _branch(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, deadline: float
    ) -> str:
        if time.monotonic() > deadline:
            return ""
        try:
            return self.render(messages, tools, options)
        except InvalidRequestError:
            return ""


def _refuse(*_: object) -> str:
    """Stand for the template of a model without one."""
    raise RenderError(_NO_TEMPLATE)


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
    return structs.replace(message, content="".join(pieces) + message.content[start:], media=())


def _written(template: ChatTemplate, kind: MediaKind) -> str:
    """Return the text that a medium adds between two texts, or "" if it adds none."""
    question = Message(role="user", content=_LEFT + _RIGHT)
    shown = Message(role="user", content=_LEFT + _RIGHT, media=(Placement(len(_LEFT), kind),))
    try:
        plain = template.render([question], (), {})
        text = template.render([shown], (), {})
    except InvalidRequestError:
        return ""
    start = common_length(plain, text)
    stop = len(text) - common_length(plain[start:][::-1], text[start:][::-1])
    added = text[start:stop].strip()
    # A template without support for parts may print the list, or write it as JSON.
    return "" if "'type'" in added or '"type"' in added else added


# No caller can know it, and no template changes a word.
_OPEN_END = f"x{secrets.token_hex(8)}x"


def with_open_end(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with a mark where its last message ends: a reply goes on there."""
    *before, last = messages
    return [*before, structs.replace(last, content=last.content + _OPEN_END)]


def up_to_open_end(text: str) -> str:
    """Return the prompt of such a conversation up to the mark.

    Raises:
        InvalidRequestError: The template does not show the last message.
    """
    before, mark, _ = text.rpartition(_OPEN_END)
    if not mark:
        problem = "end with a message that this model's chat template does not show"
        raise InvalidRequestError("Messages", problem)
    return before
