"""Renders a chat template in a separate process, which is killed if it exceeds its limits.

All templates share the processes, which are restarted as needed: a job contains everything that
a process has to know.
"""

import atexit
import json
import logging
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from backend.config import (
    HELPER_GRACE_S,
    LONG_JOB_BYTES,
    LONG_JOB_MESSAGES,
    LONG_TEXT_NICENESS,
    MAX_RENDER_BYTES,
    MAX_RENDER_S,
    TEMPLATE_PROCESSES,
)
from backend.core.prompt import Message, Tool
from backend.errors import BackendError, HelperLostError, InvalidRequestError
from backend.model.text.isolated.rendering_process import TEXT, Job
from backend.model.text.jinja_renderer import JinjaSource
from backend.model.text.probe import Abilities, Form
from backend.model.text.renderer import Options
from backend.model.text.template import BRANCHES_BUDGET_S, ChatTemplate
from backend.model.text.tool_forms import with_written_tools
from common.helper import (
    HelperError,
    HelperPool,
    HelperProcess,
    TooLateError,
    no_reader_required,
    start_python,
)
from common.rpc import require_caller

_KILLED = "the process that renders chat templates was killed twice, or none can start: try again"
_ENDED = "the chat template ended its process: it takes too much memory, or time"
# A machine may be too busy once.
_EXAMINATIONS = 2
# JSON takes six or twelve bytes for some characters.
_MAX_ANSWER_BYTES = 16 * MAX_RENDER_BYTES

log = logging.getLogger(__name__)


def start_process(number: int, niceness: int = 0) -> subprocess.Popen[bytes]:
    """Start a process that takes its jobs from a file descriptor."""
    module = "backend.model.text.isolated.rendering_process"
    return start_python(module, number, niceness=niceness)


class TemplateProcess(HelperProcess):
    """One process that renders templates; used by one thread at a time."""

    def __init__(self, niceness: int = 0) -> None:
        start = partial(start_process, niceness=niceness)
        super().__init__(start, max_answer_bytes=_MAX_ANSWER_BYTES)

    def answer(
        self, deadline: float, require_reader: Callable[[], None] = require_caller
    ) -> dict[str, Any] | str:
        """Return the next answer; see `HelperProcess.receive`."""
        data = self.receive(deadline, require_reader)
        text = data[1:].decode("utf-8", "surrogatepass")
        if data[:1] == TEXT:
            return text
        answer: dict[str, Any] = json.loads(text)
        return answer


class TemplateProcesses:
    """A few processes, started on demand from any thread."""

    def __init__(self, count: int) -> None:
        """Start with no process.

        Args:
            count: Maximum number of processes, besides the one for long conversations.
        """
        self._pool, self._long_pool = _pool(count), _pool(1)
        self.idle, self.long_idle = self._pool.idle, self._long_pool.idle
        self._has_started = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start a process in the background, unless one exists."""
        with self._lock:
            if not self._has_started:
                self._has_started = True
                self._pool.prepare(TemplateProcess)

    def run(self, job: Job, seconds: float) -> tuple[Any, Any]:
        """Return the answer to a job, and the answer to its branches, which may be empty.

        Args:
            seconds: Time limit for the first answer.

        Raises:
            TooLateError: The limit was exceeded.
            ProcessEndedError: The process ended, and then a fresh one.
            AbandonedError: The caller has gone.
        """
        data, has_branches = pickle.dumps(job), bool(job.branches)
        is_long = len(data) > LONG_JOB_BYTES or len(job.messages) > LONG_JOB_MESSAGES
        pool, niceness = (self._long_pool, LONG_TEXT_NICENESS) if is_long else (self._pool, 0)
        return pool.run(
            lambda: TemplateProcess(niceness),
            lambda process: _Rendering(process, data, seconds, has_branches=has_branches),
        )

    def close(self) -> None:
        """Kill the idle processes."""
        self._pool.close()
        self._long_pool.close()


def _pool(count: int) -> HelperPool[TemplateProcess]:
    # Earlier templates may be the reason for an end.
    return HelperPool(count, grace_s=HELPER_GRACE_S, retries_ended=True, replaces_idle=True)


class _Rendering:
    """The conversation about a prompt and its branches."""

    def __init__(
        self, process: TemplateProcess, data: bytes, seconds: float, *, has_branches: bool
    ) -> None:
        self.process = process
        self._data = data
        self._seconds = seconds
        self._answers = 2 if has_branches else 1
        self.owed = 0

    def held(self) -> tuple[Any, Any]:
        """Send the job; return its answer and that to its branches, which may be empty."""
        require_caller()
        deadline = time.monotonic() + self._seconds
        self.owed = self._answers
        self.process.send(self._data, deadline)
        answer = self.process.answer(deadline)
        self._note(answer)
        if not self.owed:
            return answer, {}
        try:
            branches = self.process.answer(time.monotonic() + BRANCHES_BUDGET_S + 1.0)
        except HelperError:
            log.info(
                "the chat template is too slow to render the prompts that later requests may send"
            )
            return answer, {}
        self._note(branches)
        return answer, branches

    def finish(self, deadline: float) -> None:
        with suppress(HelperError):
            while self.owed:
                self._note(self.process.answer(deadline, no_reader_required))

    def _note(self, answer: dict[str, Any] | str) -> None:
        """Count an answer; a refusal is the only one."""
        is_refusal = self.owed == 2 and not isinstance(answer, str)
        self.owed = 0 if is_refusal else self.owed - 1


PROCESSES = TemplateProcesses(TEMPLATE_PROCESSES)
atexit.register(PROCESSES.close)


class IsolatedTemplate(ChatTemplate):
    """A checkpoint's chat template, rendered in another process."""

    def __init__(
        self,
        source: JinjaSource,
        *,
        writes_tools: bool = False,
        seconds: float = MAX_RENDER_S,
        processes: TemplateProcesses = PROCESSES,
    ) -> None:
        """Find the template's abilities.

        Args:
            writes_tools: Whether to write tools as text if the template knows none.
        """
        self._source = source
        self.seconds = seconds
        self._processes = processes
        super().__init__(None, source.with_tools, self._found(), writes_tools=writes_tools)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> str:
        """Return the prompt up to the start of the reply; see `ChatTemplate`."""
        text, _ = self.render_with_branches(messages, (), tools, options)
        return text

    def render_with_branches(
        self,
        messages: Sequence[Message],
        branches: Iterable[Sequence[Message]],
        tools: Sequence[Tool],
        options: Options,
    ) -> tuple[str, list[str]]:
        """Return a prompt, and those of other conversations; see `ChatTemplate`."""
        if not messages:
            raise InvalidRequestError("Messages", "is empty")
        later = tuple(map(tuple, branches))
        if tools and self.writes_tools:
            messages = with_written_tools(messages, tools)
            later = tuple(tuple(with_written_tools(each, tools)) for each in later)
            tools = ()
        job = Job(
            self._source, self._abilities, tuple(messages), later, tuple(tools), dict(options)
        )
        try:
            answer, others = self._processes.run(job, self.seconds)
        except HelperError as error:
            raise self._error(error) from error
        if not isinstance(answer, str):
            raise InvalidRequestError(answer["field"], answer["problem"])
        differences = others.get("branches", [(0, "")] * len(later))
        return answer, [answer[:shared] + rest for shared, rest in differences]

    def _found(self) -> Abilities:
        """Return the abilities; of a template that exceeds the limits, none.

        Raises:
            HelperLostError: Processes were killed from outside, or none can start.
        """
        error: HelperError | None = None
        for _ in range(_EXAMINATIONS):
            try:
                found, _ = self._processes.run(Job(self._source), self.seconds)
            except HelperError as failure:
                error = failure
            else:
                return Abilities(**{**found, "form": Form.of_json(found["form"])})
        if error is not None and error.was_killed:
            raise HelperLostError(_KILLED) from error
        if error is not None:
            log.warning("%s", self._problem(error))
        return Abilities()

    def _error(self, error: HelperError) -> BackendError:
        """Return the error for the caller: a refusal, unless the template is not the reason."""
        if error.was_killed:
            return HelperLostError(_KILLED)
        return InvalidRequestError("Messages", self._problem(error))

    def _problem(self, error: HelperError) -> str:
        if isinstance(error, TooLateError):
            return f"the chat template takes longer than {self.seconds:g} s"
        return _ENDED
