"""The process that renders chat templates, which come with checkpoints and are programs.

`template_pool` starts it. It serves one job after another and holds no secrets: only the
template, the conversation and a socket. A template that uses too much memory fails here.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from backend.config import MAX_RENDER_BYTES, MAX_RENDER_MEMORY_BYTES
from backend.core.prompt import Message, Tool
from backend.errors import InvalidRequestError
from backend.model.text.jinja_renderer import JinjaSource, make_jinja_renderer, upstream_render
from backend.model.text.prefix import common_length
from backend.model.text.probe import Abilities, probe
from backend.model.text.renderer import Options
from backend.model.text.template import ChatTemplate
from common.child import limit_memory, limit_time, serve

JSON, TEXT = b"J", b"T"
# Limit per job, in case no one is left to kill it.
MAX_CPU_S = 60
# Templates that a process keeps between jobs.
MAX_TEMPLATES = 4


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to render, or without abilities a template to examine."""

    source: JinjaSource
    abilities: Abilities | None = None
    messages: Sequence[Message] = ()
    branches: Sequence[Sequence[Message]] = ()
    tools: Sequence[Tool] = ()
    options: Options = field(default_factory=dict)


def main(descriptor: int) -> None:
    """Serve jobs until the other end of the socket is closed."""
    upstream_render()
    limit_memory(MAX_RENDER_MEMORY_BYTES)
    serve(descriptor, _frames)


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the answers to a job; text as it is, as JSON takes longer than rendering it."""
    # Sent by the parent, which is trusted; answers are JSON.
    job: Job = pickle.loads(data)  # noqa: S301
    limit_time(MAX_CPU_S)
    for answer in _answers(job):
        kind, text = (TEXT, answer) if isinstance(answer, str) else (JSON, json.dumps(answer))
        yield kind + text.encode("utf-8", "surrogatepass")


def _answers(job: Job) -> Iterator[Mapping[str, Any] | str]:
    if job.abilities is None:
        yield asdict(probe(make_jinja_renderer(job.source), job.source.with_tools))
        return
    template = _template(job.source, job.abilities)
    try:
        text = _bounded(template.render(job.messages, job.tools, job.options))
    except InvalidRequestError as error:
        yield {"field": error.field, "problem": error.problem}
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
    shared = common_length(text, other)
    return shared, other[shared:]


def _bounded(text: str) -> str:
    if len(text) > MAX_RENDER_BYTES:
        raise InvalidRequestError(
            "Messages", f"the chat template writes more than {MAX_RENDER_BYTES} characters"
        )
    return text
