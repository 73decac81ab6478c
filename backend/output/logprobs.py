"""Logprobs in the JSON shape that the host expects (host contract, 2.9)."""

import json
import math
from collections.abc import Sequence

from backend.core.delta import AlternativeLogprob, TokenLogprob

FLOOR = -9999.0
"""Represents minus infinity, which JSON lacks."""


def to_json(tokens: Sequence[TokenLogprob]) -> bytes:
    """Return `{"content": [...]}`: one entry per token, with its most likely alternatives."""
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
