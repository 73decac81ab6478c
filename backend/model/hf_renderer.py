"""Renderers over what transformers and mlx-lm bring: Jinja, or Python code of a model's own."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from backend.config import MAX_RENDER_S
from backend.model.conversation import Turn
from backend.model.renderer import (
    Options,
    Renderer,
    RenderError,
    RenderTimeoutError,
    Schema,
)
from backend.model.time_limit import TimeLimit, TimeLimitError
from backend.model.upstream import HfTokenizer

TIME_LIMIT = TimeLimit(MAX_RENDER_S)
_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
    *(TypeError, ValueError),
)


def make_renderer(
    tokenizer: HfTokenizer, defaults: Mapping[str, Any], time_limit: TimeLimit = TIME_LIMIT
) -> Renderer | None:
    """Return the renderer that a checkpoint names, or `None` when it has no template.

    Args:
        tokenizer: The Hugging Face tokenizer, with the chat template to use.
        defaults: `TOKENIZER_DEFAULTS` of the model's module in mlx-lm.
        time_limit: Of each rendering.
    """
    if function := _mlx_lm_template(tokenizer, defaults):
        return _reporting(functools.partial(_call_function, function), time_limit)
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return _reporting(functools.partial(_call_method, tokenizer), time_limit)
    return make_jinja_renderer(tokenizer, time_limit) if tokenizer.chat_template else None


def make_jinja_renderer(tokenizer: HfTokenizer, time_limit: TimeLimit = TIME_LIMIT) -> Renderer:
    """Return the renderer of a tokenizer's Jinja source, whatever else the checkpoint names."""
    return _reporting(functools.partial(_call_jinja, tokenizer), time_limit)


def template_text(tokenizer: HfTokenizer) -> str:
    """Return the Jinja source that is used with tools, or "" when there is none."""
    return str(tokenizer.get_chat_template(tools=[])) if tokenizer.chat_template else ""


def _mlx_lm_template(
    tokenizer: HfTokenizer, defaults: Mapping[str, Any]
) -> Callable[..., str] | None:
    """Find the Python template of mlx-lm; one that only the model's module names is a fallback."""
    kind = tokenizer.init_kwargs.get("chat_template_type")
    if kind is None and tokenizer.chat_template is None:
        kind = defaults.get("chat_template_type")
    if kind is None:
        return None
    module = importlib.import_module(f"mlx_lm.chat_templates.{kind}")
    function: Callable[..., str] | None = getattr(module, "apply_chat_template", None)
    return function


def _call_jinja(
    tokenizer: HfTokenizer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
) -> str:
    """Render without `apply_chat_template`, which drops a content of `None`: some need it."""
    variables = {**tokenizer.special_tokens_map, **_with_thinking_alias(options)}
    rendered, _ = render_jinja_template(
        conversations=[list(turns)],
        tools=schemas,
        chat_template=tokenizer.get_chat_template(tools=schemas),
        add_generation_prompt=True,
        **variables,
    )
    return str(rendered[0])


def _with_thinking_alias(options: Options) -> dict[str, Any]:
    """Give the switch its other name too: templates ignore the one that they do not read."""
    if "enable_thinking" not in options:
        return dict(options)
    return {"thinking": options["enable_thinking"], **options}


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
        # Unlike Jinja, a function refuses the variables that it does not know.
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
    """Turn whatever template code raises into its own words, and end what does not end."""

    def reporting(turns: Sequence[Turn], schemas: Sequence[Schema] | None, options: Options) -> str:
        try:
            return time_limit.run(lambda: renderer(turns, schemas, options))
        except TimeLimitError:
            problem = f"the chat template takes longer than {time_limit.seconds:g} s"
            raise RenderTimeoutError(problem) from None
        except jinja2.TemplateError as error:
            raise RenderError(str(error)) from error
        except _FAILURES as error:
            raise RenderError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error

    return reporting
