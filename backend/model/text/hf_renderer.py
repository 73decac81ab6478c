"""Renderers that are Python code: a template of mlx-lm's, or a tokenizer's own method."""

import ctypes
import functools
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from backend.config import MAX_RENDER_S
from backend.model.checkpoint.upstream import HfTokenizer, mlx_lm_part
from backend.model.text.conversation import Turn
from backend.model.text.jinja_renderer import FAILURES, JinjaSource, failed
from backend.model.text.renderer import Options, Renderer, RenderTimeoutError, Schema

POLL_INTERVAL_S = 0.1
# Any pending exception is raised in one of the first steps.
ARRIVAL_STEPS = 100

Result = TypeVar("Result")


class TimeLimitError(BaseException):
    """The time is up. Not an `Exception`, so that the interrupted code does not catch it."""


class TimeLimit:
    """Limits the time of calls from any thread; a watcher thread runs while there are calls.

    It uses only plain locks, which an asynchronous exception cannot leave locked.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._is_watching = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of the work, which must not use the same limit recursively.

        Raises:
            TimeLimitError: It takes too long.
        """
        thread_id = threading.get_ident()
        self._begin(thread_id)
        try:
            return work()
        finally:
            with self._lock:
                is_due = self._deadlines.pop(thread_id, None) is None
            if is_due:
                # The error is pending: it gets time to arrive here, where it is expected.
                for _ in range(ARRIVAL_STEPS):
                    time.sleep(0)

    def _begin(self, thread_id: int) -> None:
        with self._lock:
            if not self._is_watching:
                threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
                self._is_watching = True
            self._deadlines[thread_id] = time.monotonic() + self.seconds

    def _watch(self) -> None:
        while self._enforce():
            time.sleep(POLL_INTERVAL_S)

    def _enforce(self) -> bool:
        """Interrupt the calls whose time is up; return whether any remain."""
        with self._lock:
            now = time.monotonic()
            for thread_id in [each for each, due in self._deadlines.items() if due <= now]:
                # Only once: the first exception ends a call.
                del self._deadlines[thread_id]
                _raise_in(thread_id)
            self._is_watching = bool(self._deadlines)
            return self._is_watching


def _raise_in(thread_id: int) -> None:
    """Raise a `TimeLimitError` in a thread at its next bytecode.

    Must not be revoked: CPython 3.11 would check for it forever, and hang under a tracer.
    """
    error = ctypes.py_object(TimeLimitError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)


TIME_LIMIT = TimeLimit(MAX_RENDER_S)


def make_renderer(tokenizer: HfTokenizer, defaults: Mapping[str, Any]) -> Renderer | None:
    """Return the renderer of a checkpoint whose template is Python code, or `None`.

    Args:
        defaults: `TOKENIZER_DEFAULTS` of the model's module in mlx-lm.
    """
    if function := _mlx_lm_template(tokenizer, defaults):
        return _reporting(functools.partial(_call_function, function))
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return _reporting(functools.partial(_call_method, tokenizer))
    return None


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


def _reporting(renderer: Renderer) -> Renderer:
    """Convert errors of template code to `RenderError`, and limit its time."""

    def reporting(turns: Sequence[Turn], schemas: Sequence[Schema] | None, options: Options) -> str:
        try:
            return TIME_LIMIT.run(lambda: renderer(turns, schemas, options))
        except TimeLimitError:
            problem = f"the chat template takes longer than {TIME_LIMIT.seconds:g} s"
            raise RenderTimeoutError(problem) from None
        except FAILURES as error:
            raise failed(error) from error

    return reporting
