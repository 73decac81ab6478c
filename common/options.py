"""Option values from `key:value` text or JSON, typed by the fields of a dataclass."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import TypeAlias, get_args, get_type_hints

# Names that other servers have for the address.
ADDRESS_SYNONYMS = dict.fromkeys(
    ("--port", "--host", "--listen", "--bind", "-p"), "--addr HOST:PORT"
)


def unknown_options(arguments: Sequence[str]) -> list[str]:
    """Return the names of the options among the arguments, without their values."""
    names = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    return list(dict.fromkeys(name for name in names if name.strip("-")))


def nearest(name: str, known: Collection[str], synonyms: Mapping[str, str]) -> str | None:
    """Return the known option that a name most likely means, or `None`.

    Args:
        name: As written, such as `--adr`.
    """
    if name in synonyms:
        return synonyms[name]
    return next(iter(get_close_matches(name, known, n=1)), None)


def described(names: Sequence[str], known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """Return the names as a list, each with the option that was probably meant."""
    hints = ((name, nearest(name, known, synonyms)) for name in names)
    return ", ".join(f"{name} (did you mean {hint}?)" if hint else name for name, hint in hints)


OptionValue: TypeAlias = bool | int | float | str | None

_TRUTHS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# Floats hold integers exactly up to this one: other programs and waiting times take no more.
_MAX_INTEGER = 2**53
_EXPECTATIONS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "text",
}


@dataclass(frozen=True, slots=True)
class OptionField:
    """The type of an option: bool, int, float or str, and whether it accepts JSON's `null`."""

    kind: type
    is_optional: bool = False

    def from_text(self, text: str) -> OptionValue:
        """Parse a value from text.

        Raises:
            ValueError: The text is not a value of this type.
        """
        if self.kind is bool:
            value: OptionValue = _TRUTHS.get(text.lower())
        else:
            try:
                value = self.kind(text)
            except ValueError:
                value = None
        return self._checked(value, text)

    def from_json(self, value: object) -> OptionValue:
        """Check a JSON value; only an integer given for a float is converted.

        Raises:
            ValueError: It is of another type.
        """
        if value is None and self.is_optional:
            return None
        if self.kind is float and type(value) is int:
            return self._checked(_as_float(value), value)
        return self._checked(value, value)

    def _checked(self, value: object, given: object) -> OptionValue:
        if type(value) is int and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
            raise ValueError(f"expected an integer of at most {_MAX_INTEGER}, got a larger one")
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        fits = type(value) is self.kind and not is_infinite
        if fits and isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"expected {_EXPECTATIONS[self.kind]}, got {given!r}")


def option_fields(target: type) -> dict[str, OptionField]:
    """Return the options defined by a dataclass, in field order.

    Its fields are plain values, or dataclasses that group options by subject.
    """
    hints = get_type_hints(target)
    options: dict[str, OptionField] = {}
    for field in fields(target):
        hint = hints[field.name]
        is_group = isinstance(hint, type) and is_dataclass(hint)
        options |= option_fields(hint) if is_group else {field.name: _option_field(hint)}
    return options


def split_entry(entry: str) -> tuple[str, str | None]:
    """Split `name:text`; the text may contain colons, and is `None` for a bare name."""
    name, colon, text = entry.partition(":")
    return name.strip(), text.strip() if colon else None


def _option_field(hint: type) -> OptionField:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return OptionField(kinds[0], is_optional=True) if kinds else OptionField(hint)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
