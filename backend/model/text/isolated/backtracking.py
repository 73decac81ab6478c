"""The process that tries a tokenizer's patterns: one that goes back and forth may never end.

The libraries' engine of regular expressions backtracks. Texts that make a pattern do so repeat a
few letters and end with another one.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from backend.config import MAX_RENDER_MEMORY_BYTES
from backend.errors import InvalidRequestError
from backend.model.text.reading import checked
from common.child import limit_memory, limit_time, serve

# For each pattern; a usual one takes half a second.
MAX_CPU_S = 5
# Lengths of texts, in characters, with the number of texts that go on to the next length: those
# that took longest.
LEVELS = ((64, 200), (1024, 20), (8192, 3), (32 * 1024, 2), (64 * 1024, 0))
# A usual pattern takes a fifth of it for the longest text.
MAX_TEXT_S = 0.25
_LETTERS = ("a", "A", "1", " ", "\n", "\t", "-", "'", ".", "_", "é", "你", "🙂", "\u0301")
_ENDS = ("", "!", "\n", "1", "a")
_MAX_WORDS, _MAX_OWN_LETTERS = 8, 12
_WORD = re.compile(r"[A-Za-z0-9]{2,}")


@dataclass(frozen=True, slots=True)
class Shape:
    """A text that begins with a word, repeats another, and ends."""

    start: str
    pump: str
    end: str

    def text(self, length: int) -> str:
        """Return it with about so many characters."""
        count = length - len(self.start) - len(self.end)
        return self.start + (self.pump * count)[:count] + self.end


def main(descriptor: int) -> None:
    """Answer with the trial of each pattern in a `tokenizer.json`."""
    limit_memory(MAX_RENDER_MEMORY_BYTES)
    serve(descriptor, _answers)


def _answers(path: bytes) -> Iterator[bytes]:
    """Yield all patterns, then each again, and lengths that it reads fast, the longest last."""
    definition = json.loads(Path(path.decode()).read_bytes())
    parts = [definition.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    patterns = list(dict.fromkeys(_patterns(parts)))
    yield json.dumps({"patterns": patterns}).encode()
    for pattern in patterns:
        yield json.dumps({"pattern": pattern}).encode()
        limit_time(MAX_CPU_S)
        for length in fast_lengths(pattern):
            yield json.dumps({"length": length}).encode()
    yield b"{}"


def _patterns(value: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _patterns(each)


def fast_lengths(pattern: str) -> Iterator[int]:
    """Yield lengths, as they are found, of texts that a pattern reads in little time.

    There is none if even a short text takes long.
    """
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    shapes = list(_shapes(pattern))
    for length, kept in LEVELS:
        taken = []
        for shape in shapes:
            taken.append((_seconds(tokenizer, shape.text(length)), shape))
            if taken[-1][0] > MAX_TEXT_S:
                return
        yield length
        taken.sort(key=lambda each: -each[0])
        shapes = [shape for _, shape in taken[:kept]]


def _seconds(tokenizer: FastTokenizer, text: str) -> float:
    start = time.process_time()
    try:
        checked(lambda: tokenizer.encode_batch_fast([text], add_special_tokens=False))
    except InvalidRequestError:
        # The engine has a limit of its own.
        return float("inf")
    return time.process_time() - start


def _shapes(pattern: str) -> Iterator[Shape]:
    words = list(dict.fromkeys(_WORD.findall(pattern)))[:_MAX_WORDS]
    own = _own_letters(pattern)
    letters = list(dict.fromkeys((*_LETTERS, *own)))
    # The engine looks for a letter that must come before it begins.
    ends = (*_ENDS, *("!" + letter for letter in own))
    for start, pump, end in product(("", *words), (*letters, *words), ends):
        yield Shape(start, pump, end)
    for one, other, end in product(letters, letters, _ENDS):
        if one != other:
            yield Shape("", one + other, end)


def _own_letters(pattern: str) -> Sequence[str]:
    """Return letters that the pattern names, which may mean something to it."""
    named = dict.fromkeys(letter for letter in pattern if letter.isprintable())
    return [letter for letter in named if letter not in "\\()[]{}?*+^$|pLNsSu"][:_MAX_OWN_LETTERS]
