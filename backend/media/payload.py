"""Decodes the text of a medium to the bytes of its file. Opens and fetches nothing."""

import binascii
import re
from urllib.parse import unquote

from backend.core.media import Medium
from backend.errors import InvalidRequestError

_ONLY = "only base64 or a data URI is read"
# Base64 beginning with a slash is a JPEG (`/9j/`) or an MP3 (`//`, `/+`); anything else is a path.
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:|[a-z]:\\|~|\.{1,2}/|/(?!9j/|[/+])", re.IGNORECASE)
_DATA_URI = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_MAX_HEADER_CHARS = 1024
_STANDARD = bytes.maketrans(b"-_", b"+/")
_WHITESPACE = b" \t\r\n\v\f"


def decode_payload(medium: Medium) -> bytes:
    """Return the file in a medium: standard or URL-safe base64, bare or in a data URI.

    Padding may be missing, and whitespace may occur anywhere. The type stated in a data URI is
    ignored: the file itself decides.

    Raises:
        InvalidRequestError: It is not base64, is empty, or too long.
    """
    data = _from_base64(medium.field, _base64_part(medium.field, medium.payload.lstrip()))
    if not data:
        raise InvalidRequestError(medium.field, "is empty")
    if len(data) > medium.kind.max_bytes:
        problem = f"has {len(data):,} bytes, at most {medium.kind.max_bytes:,} are read"
        raise InvalidRequestError(medium.field, problem)
    return data


def _base64_part(field: str, payload: str) -> str:
    header = _DATA_URI.match(payload, 0, _MAX_HEADER_CHARS)
    if header:
        if not header[1]:
            raise InvalidRequestError(field, "is a data URI without `;base64`")
        body = payload[header.end() :]
        return unquote(body) if "%" in body else body
    if _ADDRESS.match(payload):
        raise InvalidRequestError(field, f"is a path or an address: {_ONLY}")
    return payload


def _from_base64(field: str, text: str) -> bytes:
    try:
        digits = text.encode("ascii").translate(_STANDARD, _WHITESPACE).rstrip(b"=")
        return binascii.a2b_base64(digits + b"=" * (-len(digits) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidRequestError(field, f"is not base64: {_ONLY}") from None
