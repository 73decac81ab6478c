"""Rows without a model, for tests of policy."""

from typing import Any

from backend.core.prompt import Prompt
from backend.core.request import GenerationParams, GenerationRequest
from backend.engine.rows.row import Row


def make_row(
    name: str,
    prompt_tokens: int = 2,
    *,
    max_tokens: int = 4,
    is_open_ended: bool = False,
    **options: Any,
) -> Row:
    limit = None if is_open_ended else max_tokens
    request = GenerationRequest(
        params=GenerationParams(request_id=name, max_tokens=limit, **options),
        prompt=Prompt(tuple(range(prompt_tokens))),
        room=max_tokens,
    )
    return Row(request)
