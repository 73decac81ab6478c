"""Rows without a model, for tests of policy."""

from typing import Any

from backend.core.prompt import Prompt
from backend.core.request import GenerationRequest, SamplingParams
from backend.engine.rows.row import Row


def make_row(name: str, prompt_tokens: int = 2, *, max_tokens: int = 4, **options: Any) -> Row:
    request = GenerationRequest(
        request_id=name,
        prompt=Prompt(tuple(range(prompt_tokens))),
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        **options,
    )
    return Row(request)
