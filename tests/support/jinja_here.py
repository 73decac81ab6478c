"""Jinja templates of tokenizers, rendered in this process."""

from typing import Any

from backend.model.text.hf_renderer import jinja_source
from backend.model.text.jinja_renderer import make_jinja_renderer
from backend.model.text.template import ChatTemplate


def jinja_here(tokenizer: Any) -> ChatTemplate:
    source = jinja_source(tokenizer)
    return ChatTemplate(make_jinja_renderer(source), source.with_tools)
