"""Command lines that may hold arguments of others, and still name the ones that were misspelt."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches


def unknown_options(arguments: Sequence[str]) -> list[str]:
    """Return the names of options among arguments, without the values that may follow them."""
    names = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    return list(dict.fromkeys(name for name in names if name.strip("-")))


def nearest(name: str, known: Collection[str], synonyms: Mapping[str, str]) -> str | None:
    """Return the known option that a name was meant for, or `None`.

    Args:
        name: As it was written, such as `--adr`.
        known: Options that exist.
        synonyms: What others call an option, and its name here.
    """
    if name in synonyms:
        return synonyms[name]
    return next(iter(get_close_matches(name, known, n=1)), None)


def described(names: Sequence[str], known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """Return names as a list, each with the option that it may have been meant for."""
    hints = ((name, nearest(name, known, synonyms)) for name in names)
    return ", ".join(f"{name} (did you mean {hint}?)" if hint else name for name, hint in hints)
