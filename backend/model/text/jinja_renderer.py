"""Renders the Jinja source of a chat template in transformers' sandbox."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from backend.model.checkpoint.upstream import transformers_part
from backend.model.text.conversation import Turn, joined
from backend.model.text.renderer import (
    SWITCH,
    Options,
    Renderer,
    RenderError,
    Schema,
    with_all_names,
)

# A word that switches thoughts off in Nemotron Nano 2, whose template reads no variable for it.
_NO_THOUGHTS = "/no_think"
_QUESTION = "q?"
# Of templates that read tools from a message.
_OF_MESSAGE = re.compile(r"""\[\s*["']tools["']\s*\]""")
# Exceptions of template code of any origin.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


@dataclass(frozen=True, slots=True)
class JinjaSource:
    """A chat template, with everything it reads from its tokenizer.

    Attributes:
        with_tools: The source for a conversation with tools, often the same.
        special_tokens: JSON object from names of special tokens to their texts.
    """

    plain: str
    with_tools: str
    special_tokens: str


@cache
def upstream_render() -> Callable[..., tuple[Sequence[str], Any]]:
    """Return transformers' `render_jinja_template`; the first call imports it."""
    render: Callable[..., tuple[Sequence[str], Any]] = transformers_part(
        "utils.chat_template_utils"
    ).render_jinja_template
    return render


def make_jinja_renderer(source: JinjaSource) -> Renderer:
    """Return the renderer of a template."""
    special_tokens: dict[str, Any] = json.loads(source.special_tokens)
    may_be_in_turn = _OF_MESSAGE.search(source.with_tools)
    render_any = _rendered_with_tools_in_turn if may_be_in_turn else _rendered

    def render(turns: Sequence[Turn], schemas: Sequence[Schema] | None, options: Options) -> str:
        variables = {**special_tokens, **with_all_names(options)}
        try:
            if options.get(SWITCH) is False and _reads_word(source, variables):
                turns = _led(turns, {}, _NO_THOUGHTS)
            try:
                return render_any(source, turns, schemas, variables)
            except jinja2.UndefinedError:
                return render_any(source, turns, schemas, _demanded(schemas) | variables)
        except jinja2.TemplateError as error:
            raise RenderError(str(error)) from error
        except FAILURES as error:
            raise failed(error) from error

    return render


def _rendered(
    source: JinjaSource,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    variables: Mapping[str, Any],
) -> str:
    # `apply_chat_template` drops a content of `None` that some templates need.
    rendered, _ = upstream_render()(
        conversations=[list(turns)],
        tools=schemas,
        chat_template=source.with_tools if schemas else source.plain,
        add_generation_prompt=True,
        **variables,
    )
    return rendered[0]


def _rendered_with_tools_in_turn(
    source: JinjaSource,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    variables: Mapping[str, Any],
) -> str:
    """Render with tools in a system turn at the start, if the template shows none otherwise.

    They are a list there, or the text of their functions.
    """
    text = _rendered(source, turns, schemas, variables)
    if not schemas or text != _rendered(source, turns, None, variables):
        return text
    functions = [schema.get("function", schema) for schema in schemas]
    in_text = json.dumps(functions, ensure_ascii=False)
    try:
        return _rendered(source, _led(turns, {"tools": list(schemas)}), None, variables)
    except TypeError:
        return _rendered(source, _led(turns, {"tools": in_text}), None, variables)


def _reads_word(source: JinjaSource, variables: Mapping[str, Any]) -> bool:
    """Tell whether a word in a system turn switches thoughts off, and no variable does."""
    if _NO_THOUGHTS not in source.plain:
        return False
    question = [{"role": "user", "content": _QUESTION}]
    told = _led(question, {}, _NO_THOUGHTS)
    others = {**variables, **with_all_names({SWITCH: True})}
    # The end alone tells: the word may be shown too.
    off, on, last = (
        _rendered(source, turns, None, each).rpartition(_QUESTION)[2]
        for turns, each in ((question, variables), (question, others), (told, variables))
    )
    return off == on != last


def _led(turns: Sequence[Turn], fields: Turn, text: str = "") -> list[Turn]:
    """Return turns with fields, and a text at its end, in a system turn at the start."""
    is_led = bool(turns) and turns[0]["role"] == "system"
    first = turns[0] if is_led else {"role": "system", "content": ""}
    first = {**first, **fields, "content": joined(first["content"], text, "\n")}
    return [first, *turns[is_led:]]


def _demanded(schemas: Sequence[Schema] | None) -> dict[str, Any]:
    """Return variables that some older templates read without asking whether they are there."""
    functions = [schema.get("function", schema) for schema in schemas or ()]
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return {"functions": json.dumps(functions, ensure_ascii=False), "datetime": today.isoformat()}


def failed(error: BaseException) -> RenderError:
    """Return the error to report for an exception that a template did not raise on purpose."""
    return RenderError(f"the chat template failed: {type(error).__name__}: {error}")
