"""Renderers from transformers and mlx-lm: Jinja, or a model's own Python code."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from backend.config import MAX_RENDER_S
from backend.model.checkpoint.upstream import HfTokenizer, mlx_lm_part
from backend.model.text import jinja_renderer
from backend.model.text.jinja_renderer import FAILURES, JinjaSource, failed
from backend.model.text.renderer import (
    Options,
    Renderer,
    RenderTimeoutError,
    Schema,
)
from backend.model.text.time_limit import TimeLimit, TimeLimitError
from backend.model.text.turns import Turn

TIME_LIMIT = TimeLimit(MAX_RENDER_S)


def make_renderer(
    tokenizer: HfTokenizer, defaults: Mapping[str, Any], time_limit: TimeLimit = TIME_LIMIT
) -> Renderer | None:
    """Return the renderer of a checkpoint, or `None` if it has no template.

    Args:
        tokenizer: The Hugging Face tokenizer, with the chat template to use.
        defaults: `TOKENIZER_DEFAULTS` of the model's module in mlx-lm.
        time_limit: Limit of each rendering.
    """
    if function := _mlx_lm_template(tokenizer, defaults):
        return _reporting(functools.partial(_call_function, function), time_limit)
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return _reporting(functools.partial(_call_method, tokenizer), time_limit)
    return make_jinja_renderer(tokenizer, time_limit) if tokenizer.chat_template else None


def is_jinja(tokenizer: HfTokenizer, defaults: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has a template that is Jinja, not Python code."""
    method = type(tokenizer).apply_chat_template
    return (
        bool(tokenizer.chat_template)
        and method is PreTrainedTokenizerBase.apply_chat_template
        and _mlx_lm_template(tokenizer, defaults) is None
    )


def make_jinja_renderer(tokenizer: HfTokenizer, time_limit: TimeLimit = TIME_LIMIT) -> Renderer:
    """Return the renderer of a tokenizer's Jinja source, ignoring Python templates."""
    return _reporting(jinja_renderer.make_jinja_renderer(jinja_source(tokenizer)), time_limit)


def jinja_source(tokenizer: HfTokenizer) -> JinjaSource:
    """Return a tokenizer's template, with everything it reads from the tokenizer."""
    return JinjaSource(
        plain=str(tokenizer.get_chat_template(tools=None)),
        with_tools=template_text(tokenizer),
        special_tokens=json.dumps(tokenizer.special_tokens_map),
    )


def template_text(tokenizer: HfTokenizer) -> str:
    """Return the Jinja source used with tools, or "" if there is none."""
    return str(tokenizer.get_chat_template(tools=[])) if tokenizer.chat_template else ""


def _mlx_lm_template(
    tokenizer: HfTokenizer, defaults: Mapping[str, Any]
) -> Callable[..., str] | None:
    """Find mlx-lm's Python template; the one in the model's module is a fallback."""
    kind = tokenizer.init_kwargs.get("chat_template_type")
    if kind is None and tokenizer.chat_template is None:
        kind = defaults.get("chat_template_type")
    if kind is None:
        return None
    module = mlx_lm_part(f"chat_templates.{kind}")
    function: Callable[..., str] | None = getattr(module, "apply_chat_template", None)
    return function


def _call_function(
    function: Callable[..., str],
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
) -> str:
    call = functools.partial(function, list(turns), tools=schemas, add_generation_prompt=True)
    try:
        return call(**options)
    except TypeError:
        # Unlike Jinja, a function rejects unknown variables.
        return call(**{k: v for k, v in options.items() if k == "enable_thinking"})


def _call_method(
    tokenizer: HfTokenizer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
) -> str:
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    renames = "thinking" in parameters and "enable_thinking" not in parameters
    names = {"enable_thinking": "thinking"} if renames else {}
    variables = {names.get(name, name): value for name, value in options.items()}
    rendered = tokenizer.apply_chat_template(
        list(turns), tools=schemas, add_generation_prompt=True, tokenize=False, **variables
    )
    return str(rendered)


def _reporting(renderer: Renderer, time_limit: TimeLimit) -> Renderer:
    """Convert errors of template code to `RenderError`, and limit its time."""

    def reporting(turns: Sequence[Turn], schemas: Sequence[Schema] | None, options: Options) -> str:
        try:
            return time_limit.run(lambda: renderer(turns, schemas, options))
        except TimeLimitError:
            problem = f"the chat template takes longer than {time_limit.seconds:g} s"
            raise RenderTimeoutError(problem) from None
        except FAILURES as error:
            raise failed(error) from error

    return reporting
