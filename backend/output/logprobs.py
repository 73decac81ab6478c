"""Logprobs in the JSON shape that the host reads (host contract, 2.9)."""

import json
import math
from collections.abc import Sequence

from backend.core.delta import AlternativeLogprob, TokenLogprob

FLOOR = -9999.0
"""Stands for minus infinity, which JSON has not."""


def to_json(tokens: Sequence[TokenLogprob]) -> bytes:
    """Return `{"content": [...]}`: an entry per token, each with its likeliest alternatives."""
    content = [
        _entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens
    ]
    return json.dumps({"content": content}, ensure_ascii=False, allow_nan=False).encode()


def _entry(token: TokenLogprob | AlternativeLogprob) -> dict[str, object]:
    return {
        "id": token.token_id,
        "token": token.token.decode(errors="replace"),
        "bytes": list(token.token),
        "logprob": token.logprob if math.isfinite(token.logprob) else FLOOR,
    }
