"""Tries the patterns of a checkpoint's tokenizer before it serves anybody.

A pattern that backtracks without end on a short text is refused. One that is slow on long texts,
or whose form allows no promise, reads texts in a process that can be ended.
"""

import json
import logging
import re
import subprocess
import time
from functools import lru_cache
from pathlib import Path

from backend.errors import LoadError
from backend.model.text.reading import MAX_DIRECT_CHARS
from common.helper import (
    HelperError,
    HelperProcess,
    start_python,
)

TOKENIZER_FILE = "tokenizer.json"

log = logging.getLogger(__name__)

# A process of lower priority has to share the machine.
_WAIT_S = 120.0
_MAX_ANSWER_BYTES = 2**26
_SHOWN_CHARS = 200
# A part of the content of a group: a set, an escape, a letter.
_ATOM = re.compile(r"\\.|\[(?:\\.|\[[^\]]*\]|[^\]\\])*\]|\(\??|.", re.DOTALL)
# The same in a group without groups, with properties and counts whole.
_ATOM_OF_SET = re.compile(r"\\[pP]\{\^?\w+\}|\{\d*,?\d*\}|" + _ATOM.pattern, re.DOTALL)
_COUNT = re.compile(r"\{\d*,?\d*\}")
_REPEATED = re.compile(r"[*+]|\{\d+,\}|\{\d*,\d{2,}\}")
_VARIABLE = re.compile(r"[*+?]|\{\d*,\d*\}")
# The key of a pattern, which may be written with escapes of letters.
_MAY_HAVE_PATTERNS = re.compile(rb'"Regex"|\\u00[4-7]')
_REFERENCE = re.compile(r"\\(?:[1-9]|k<|g<)")


def direct_chars(directory: Path) -> int:
    """Return the length of texts that a tokenizer reads fast, whatever they are.

    Args:
        directory: Of the tokenizer; nothing is tried if it has no `tokenizer.json` with patterns.

    Raises:
        LoadError: A pattern takes too long for short texts; the message quotes it.
    """
    path = directory / TOKENIZER_FILE
    try:
        status = path.stat()
        if not _MAY_HAVE_PATTERNS.search(path.read_bytes()):
            return MAX_DIRECT_CHARS
    except OSError:
        return MAX_DIRECT_CHARS
    return _tried(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _tried(path: Path, size: int, modified_ns: int) -> int:  # noqa: ARG001 (tell files apart)
    least = MAX_DIRECT_CHARS
    for pattern, length in _trials(path).items():
        if length == 0:
            problem = "is malformed, or takes too long for a short text"
            raise LoadError(f"{path}: its pattern {pattern[:_SHOWN_CHARS]!r} {problem}")
        is_known = length is not None and not may_explode(pattern)
        least = min(least, length or 0) if is_known else 0
    if least < MAX_DIRECT_CHARS:
        reason = "its patterns may take long"
        log.info("%s: texts of over %d characters are tokenised apart: %s", path, least, reason)
    return least


def _trials(path: Path) -> dict[str, int | None]:
    """Return the patterns of a file, with the length of text that each reads fast.

    Those after one that took all of the trial's time or memory have none.
    """
    process = HelperProcess(start_process, max_answer_bytes=_MAX_ANSWER_BYTES)
    deadline, pattern = time.monotonic() + _WAIT_S, ""
    found: dict[str, int | None] = {pattern: None}
    try:
        process.await_start()
        process.send(str(path).encode(), deadline)
        found = dict.fromkeys(json.loads(process.receive(deadline))["patterns"])
        while answer := json.loads(process.receive(deadline)):
            pattern = answer.get("pattern", pattern)
            found[pattern] = answer.get("length", 0)
    except HelperError:
        log.info("%s: the trial of a pattern took all of its time or memory", path)
    finally:
        process.kill()
    return found


def start_process(number: int) -> subprocess.Popen[bytes]:
    """Start a process that takes its jobs from a file descriptor."""
    return start_python("backend.model.text.isolated.backtracking", number)


def may_explode(pattern: str) -> bool:
    """Tell whether a pattern repeats a group whose content may match in several ways.

    Without one, its time grows at most with a power of the text's length, which trials show.
    """
    if _REFERENCE.search(pattern):
        return True
    # Of each open group: its start, and whether it has a choice.
    groups = [(0, False)]
    place = 0
    while match := _ATOM.match(pattern, place):
        atom, begin, place = match.group(), place, match.end()
        has_choice = atom == "|" or _VARIABLE.match(pattern, place) is not None
        if atom.startswith("("):
            groups.append((place, False))
            continue
        if atom == ")" and len(groups) > 1:
            start, is_ambiguous = groups.pop()
            is_repeated = is_ambiguous and _REPEATED.match(pattern, place) is not None
            if is_repeated and not _is_separated(pattern[start:begin]):
                return True
            has_choice |= is_ambiguous
        groups[-1] = (groups[-1][0], groups[-1][1] or has_choice)
    return False


def _is_separated(content: str) -> bool:
    """Tell whether a group begins with a letter that is nowhere else in its matches."""
    atoms = _ATOM.findall(content.removeprefix(":"))
    rest = content.removeprefix(":").removeprefix(first := atoms[0] if atoms else "")
    is_letter = len(first) == 1 and first not in "(|.^$" and not _VARIABLE.match(rest)
    return is_letter and not any(_may_match(atom, first) for atom in _ATOM_OF_SET.findall(rest))


def _may_match(atom: str, letter: str) -> bool:
    from tokenizers import Regex, pre_tokenizers

    if atom in {"*", "+", "?"} or _COUNT.fullmatch(atom):
        return False
    if atom in {"(", "(?", ")", "|"}:
        return True
    split = pre_tokenizers.Split(Regex(atom), "removed")
    return not split.pre_tokenize_str(letter)
