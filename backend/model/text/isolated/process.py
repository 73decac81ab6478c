"""The process that renders chat templates, which come with checkpoints and are programs.

`isolated.template` starts it. It serves one job after another and holds no secrets: only the
template, the conversation and a socket. A template that uses too much memory fails here.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from backend.config import MAX_RENDER_BYTES, MAX_RENDER_MEMORY_BYTES
from backend.core.prompt import Message, Tool
from backend.errors import InvalidRequestError
from backend.model.text.jinja_renderer import JinjaSource, make_jinja_renderer
from backend.model.text.probe import Abilities, probe
from backend.model.text.renderer import Options
from backend.model.text.template import ChatTemplate
from common.process.lifecycle import STOP_SIGNALS

LENGTH = struct.Struct("<Q")
JSON, TEXT = b"J", b"T"
# Limit per job, in case no one is left to kill it.
MAX_CPU_S = 60
# Templates that a process keeps between jobs.
MAX_TEMPLATES = 4


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to render, or without abilities a template to examine.

    Attributes:
        branches: Other conversations with the same tools and options.
    """

    source: JinjaSource
    abilities: Abilities | None = None
    messages: Sequence[Message] = ()
    branches: Sequence[Sequence[Message]] = ()
    tools: Sequence[Tool] = ()
    options: Options = field(default_factory=dict)


def main(descriptor: int) -> None:
    """Serve jobs until the other end of the socket is closed."""
    # The parent handles signals to the process group: it closes the socket when it ends.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _limit_memory()
    connection = socket.socket(fileno=descriptor)
    with connection, connection.makefile("rb") as reader:
        _send(connection, {})
        while head := reader.read(LENGTH.size):
            (length,) = LENGTH.unpack(head)
            # Sent by the parent, which is trusted; answers are JSON.
            job: Job = pickle.loads(reader.read(length))  # noqa: S301
            _limit_time()
            for answer in _answers(job):
                _send(connection, answer)
    # At once: nothing here needs to be finished, and unloading the libraries takes a while.
    os._exit(0)


def _send(connection: socket.socket, answer: Mapping[str, Any] | str) -> None:
    """Send text unencoded: encoding it as JSON takes longer than rendering it."""
    kind, text = (TEXT, answer) if isinstance(answer, str) else (JSON, json.dumps(answer))
    data = kind + text.encode("utf-8", "surrogatepass")
    connection.sendall(LENGTH.pack(len(data)) + data)


def _answers(job: Job) -> Iterator[Mapping[str, Any] | str]:
    if job.abilities is None:
        yield asdict(probe(make_jinja_renderer(job.source), job.source.with_tools))
        return
    template = _template(job.source, job.abilities)
    try:
        text = _bounded(template.render(job.messages, job.tools, job.options))
    except InvalidRequestError as error:
        yield {"field": error.field, "problem": str(error).removeprefix(f"{error.field}: ")}
        return
    yield text
    if job.branches:
        texts = template.render_branches(job.branches, job.tools, job.options)
        bounded = [each if len(each) <= MAX_RENDER_BYTES else "" for each in texts]
        yield {"branches": [_difference(text, each) for each in bounded]}


@lru_cache(maxsize=MAX_TEMPLATES)
def _template(source: JinjaSource, abilities: Abilities) -> ChatTemplate:
    """Return a template, which remembers the forms of tools that it takes."""
    return ChatTemplate(make_jinja_renderer(source), source.with_tools, abilities)


def _difference(text: str, other: str) -> tuple[int, str]:
    """Return the length of the prefix shared with the first text, and the rest of the other."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low, other[low:]


def _bounded(text: str) -> str:
    if len(text) > MAX_RENDER_BYTES:
        raise InvalidRequestError(
            "Messages", f"the chat template writes more than {MAX_RENDER_BYTES} characters"
        )
    return text


def _limit_memory() -> None:
    """Limit the address space to some margin above its present size; macOS has no such limit."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
            pages = int(statm.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_RENDER_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + MAX_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
