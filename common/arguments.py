"""Suggestions for misspelt options on command lines that may also hold foreign arguments."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

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
        known: Options that exist.
        synonyms: Other programs' names of options, mapped to the names here.
    """
    if name in synonyms:
        return synonyms[name]
    return next(iter(get_close_matches(name, known, n=1)), None)


def described(names: Sequence[str], known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """Return the names as a list, each with the option that was probably meant."""
    hints = ((name, nearest(name, known, synonyms)) for name in names)
    return ", ".join(f"{name} (did you mean {hint}?)" if hint else name for name, hint in hints)
