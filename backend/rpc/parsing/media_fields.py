"""`Images`, `Videos` and `Audios` of a request to media, checked without decoding."""

from backend.config import MediaLimits
from backend.core.media import MediaKind, Medium
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb


def media(request: pb.PredictOptions, limits: MediaLimits) -> tuple[Medium, ...]:
    """Return the audios, images and videos of a request, each kind in its own order.

    The kinds come in the order in which the host's template puts their markers.

    Raises:
        InvalidRequestError: One is empty or too long, or there are more than the limits allow.
    """
    given = (
        ("Audios", MediaKind.AUDIO, request.Audios, limits.audios),
        ("Images", MediaKind.IMAGE, request.Images, limits.images),
        ("Videos", MediaKind.VIDEO, request.Videos, limits.videos),
    )
    for field, _, payloads, limit in given:
        if len(payloads) > limit:
            problem = f"holds {len(payloads)}, at most {limit} per request are allowed"
            raise InvalidRequestError(field, problem)
    return tuple(
        _medium(kind, f"{field}[{index}]", payload)
        for field, kind, payloads, _ in given
        for index, payload in enumerate(payloads)
    )


def _medium(kind: MediaKind, field: str, payload: str) -> Medium:
    if not payload or payload.isspace():
        raise InvalidRequestError(field, "is empty")
    # Base64 takes four characters for three bytes; the rest is room for line breaks.
    max_chars = kind.max_bytes * 3 // 2
    if len(payload) > max_chars:
        problem = f"has {len(payload):,} characters, at most {max_chars:,} are read"
        raise InvalidRequestError(field, problem)
    return Medium(kind, field, payload)
