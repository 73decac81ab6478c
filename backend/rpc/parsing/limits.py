"""Limits of single fields; errors name the field."""

from collections.abc import Sized

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from backend.config import MAX_NAME_BYTES, MAX_PATH_BYTES
from backend.errors import InvalidRequestError


def require_at_most(field: str, values: Sized, limit: int) -> None:
    """Refuse more values than the limit."""
    if len(values) > limit:
        problem = f"holds {len(values)} values, at most {limit} are allowed"
        raise InvalidRequestError(field, problem)


def require_printable(field: str, text: str, max_chars: int) -> str:
    """Return a text that is safe in a log line, or refuse it."""
    if len(text) > max_chars or not text.isprintable():
        raise InvalidRequestError(field, f"must be at most {max_chars} printable characters")
    return text


def require_path(field: str, text: str) -> str:
    """Return a text that could be the path of a file, or refuse it."""
    if "\0" in text:
        raise InvalidRequestError(field, "is not a path: it contains a null character")
    if len(text.encode()) > MAX_PATH_BYTES:
        raise InvalidRequestError(field, f"is a path of more than {MAX_PATH_BYTES} bytes")
    if max(len(name.encode()) for name in text.split("/")) > MAX_NAME_BYTES:
        raise InvalidRequestError(field, f"holds a name of more than {MAX_NAME_BYTES} bytes")
    return text


def refuse_unserved(request: Message, field: str, why: str) -> None:
    """Refuse a request with a field that must not be ignored, in whatever type a host sends it.

    Raises:
        InvalidRequestError: It has the field.
    """
    number = request.DESCRIPTOR.fields_by_name[field].number
    others = UnknownFieldSet(request)
    unknown = {others[index].field_number for index in range(len(others))}
    if number in unknown or any(each.number == number for each, _ in request.ListFields()):
        raise InvalidRequestError(field, why)
