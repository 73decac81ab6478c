"""How a tokenizer of a library is called: directly by any thread at once, or by one at a time.

A text that is not Unicode, or on which the library fails, raises `InvalidRequestError`.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from backend.errors import TEXT_FIELD, InvalidRequestError, UnsupportedError
from backend.model.checkpoint.upstream import HfTokenizer
from backend.model.text.guard import GUARD

if TYPE_CHECKING:
    from backend.model.text.isolated.long_texts import LongTexts

PIECE_CHARS = 32 * 1024
# Of ids and other numbers of many tokens, in arrays.
NUMBER_TYPE = "i"
# A search for a place holds Python's lock for so many characters.
_SEARCH_CHARS = 256 * 1024

_PLACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SPANNING = re.compile(rb"[A-Za-z] [A-Za-z]")
_SAMPLE = (
    "The harbour was quiet before dawn. Three boats, two of them painted blue, lay side by side\n"
    "    and a gull's cry: def walk(self, wall) counted every stone, 1250 of Them ALL\n\nhere and "
    "now it is not"
)


class Joint(Enum):
    """Whether the space between two parts is kept; `NONE` means that no place is safe."""

    KEPT = 0
    DROPPED = 1
    NONE = -1


def find_joint(encode: Callable[[str], Sequence[int]], pieces: Iterable[bytes] | None) -> Joint:
    """Return how texts can be divided.

    Args:
        pieces: The bytes of all its tokens; `None` if unknown.
    """
    if pieces is None or any(_SPANNING.search(piece) for piece in pieces):
        return Joint.NONE
    whole = list(encode(_SAMPLE))
    for joint in (Joint.KEPT, Joint.DROPPED):
        ends = [match.start() for match in _PLACE.finditer(_SAMPLE)]
        if all(_divided(encode, end, joint) == whole for end in ends):
            return joint
    return Joint.NONE


def divide(
    text: str,
    joint: Joint,
    *,
    piece_chars: int = PIECE_CHARS,
    max_chars: int,
) -> Iterator[str]:
    """Yield the parts of a text.

    Args:
        text: Text of any length.
        piece_chars: Target length of a part.
        max_chars: Maximum length if there is no safe place: it is divided anyway, and may get other
            tokens there.
    """
    start = 0
    while len(text) - start > piece_chars:
        end = None if joint is Joint.NONE else _place(text, start, piece_chars, max_chars)
        if end is None:
            if len(text) - start <= max_chars:
                break
            yield text[start : start + max_chars]
            start += max_chars
        else:
            yield text[start:end]
            start = end + joint.value
    yield text[start:]


def _place(text: str, start: int, piece_chars: int, max_chars: int) -> int | None:
    """Return the last safe place within the target length, or the first one after it."""
    stop = start + piece_chars
    places = [match.start() for match in _PLACE.finditer(text, start + piece_chars // 2, stop)]
    if places:
        return places[-1]
    end = min(len(text), start + max_chars)
    for first in range(stop, end, _SEARCH_CHARS):
        # A place begins one character before, and ends one after.
        match = _PLACE.search(text, first - 1, min(first + _SEARCH_CHARS + 1, end))
        if match:
            return match.start()
    return None


def _divided(encode: Callable[[str], Sequence[int]], end: int, joint: Joint) -> list[int]:
    return [*encode(_SAMPLE[:end]), *encode(_SAMPLE[end + joint.value :])]


# Longer ones that cannot be divided are read in another process.
MAX_DIRECT_CHARS = 2 * PIECE_CHARS
# Python's lock, or this class's, is held for so many characters at most: there may be other
# tokens where such a text is divided.
MAX_LOCKED_CHARS = 1024 * 1024

# Untyped as all of the library.
FastTokenizer: TypeAlias = Any

Result = TypeVar("Result")


class Reading(Enum):
    """The numbers to find for each token of a text, and how many they are."""

    PLAIN = 1  # ids
    SPECIAL = (1, "with the tokenizer's own")  # ids
    PAIR = 3  # ids, their types, and which of the texts they are of, or -1
    PLACES = 4  # ids, starts, stops, words or -1

    @property
    def count(self) -> int:
        """Numbers of each token."""
        return self.value if isinstance(self.value, int) else self.value[0]


class Reader(ABC):
    """Turns text to ids and back; thread-safe.

    Attributes:
        max_chars: Maximum length of a text for `encode`; longer ones have to be divided.
        direct_chars: Longer texts are read in another process, where the reader has one.
    """

    max_chars: int | None = None
    direct_chars = MAX_DIRECT_CHARS

    @abstractmethod
    def encode(self, text: str, *, adds_special: bool) -> Sequence[int]:
        """Return the ids of a text, perhaps with guards in its marks."""

    @abstractmethod
    def encode_pair(
        self, first: str, second: str, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts and the index of each token's text; see `Tokenizer`."""

    @abstractmethod
    def placed(self, text: str) -> Sequence[tuple[int, tuple[int, int], int]]:
        """Return the ids of a text with their places and words.

        Raises:
            UnsupportedError: The tokenizer does not report them.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of known ids."""


def reader_of(hf_tokenizer: HfTokenizer) -> Reader:
    """Return the reader of a tokenizer."""
    if hf_tokenizer.is_fast and is_plain(type(hf_tokenizer)):
        return DirectReader(hf_tokenizer)
    return LockedReader(hf_tokenizer)


def is_plain(kind: type) -> bool:
    """Tell whether a class of transformers only passes texts on to its Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast

    names = ("encode", "__call__", "_encode_plus", "_batch_encode_plus")
    return all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )


class DirectReader(Reader):
    """Calls the Rust tokenizer, which lets other threads run meanwhile.

    Nothing changes its state, so that no thread waits for another.
    """

    def __init__(self, hf_tokenizer: HfTokenizer) -> None:
        """Fix the state of a tokenizer, which this object owns from now on."""
        self.hf = hf_tokenizer
        self.fast: FastTokenizer = hf_tokenizer.backend_tokenizer
        self.fast.no_truncation()
        self.fast.no_padding()
        self.fast.encode_special_tokens = hf_tokenizer.split_special_tokens
        self._has_types = "token_type_ids" in hf_tokenizer.model_input_names
        self._guarding = threading.Lock()

    def encode(self, text: str, *, adds_special: bool) -> Sequence[int]:
        """Return the ids of a text; a long one is read elsewhere, if it gets no others."""
        if adds_special:
            fast = self._guarded_reader() if GUARD in text else self.fast
            return columns(fast, Reading.SPECIAL, text)[0]
        return self._columns(Reading.PLAIN, text)[0]

    def encode_pair(
        self, first: str, second: str, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts, the second of which is cut where it is too long."""
        ids, types, texts = self._columns(Reading.PAIR, first, second)
        kept: Sequence[int] = range(len(ids))
        if limit is not None and len(kept) > limit:
            kept = self._within(limit, texts)
        return [ids[index] for index in kept], [types[i] for i in kept if self._has_types]

    def placed(self, text: str) -> Sequence[tuple[int, tuple[int, int], int]]:
        """Return the ids of a text with their places and words."""
        ids, starts, stops, words = self._columns(Reading.PLACES, text)
        return list(zip(ids, zip(starts, stops, strict=True), words, strict=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of known ids."""
        return _decoded(self.hf, ids)

    def _columns(self, reading: "Reading", text: str, second: str = "") -> Sequence[Sequence[int]]:
        if len(text) + len(second) > self.direct_chars:
            return self.elsewhere.columns(reading, text, second)
        is_guarded = reading is Reading.PLAIN and GUARD in text
        fast = self._guarded_reader() if is_guarded else self.fast
        return columns(fast, reading, text, second)

    def _within(self, limit: int, texts: Sequence[int]) -> list[int]:
        """Return the indices of tokens to keep: those of the second text give way."""
        second = [index for index, text in enumerate(texts) if text == 1]
        excess = len(texts) - limit
        cut = second[:excess] if self.hf.truncation_side == "left" else second[-excess:]
        return sorted(set(range(len(texts))).difference(cut))

    def _guarded_reader(self) -> FastTokenizer:
        with self._guarding:
            return self._guarded

    @cached_property
    def _guarded(self) -> FastTokenizer:
        from backend.model.text.guard import guarded

        reader = guarded(self.fast, GUARD)
        reader.encode_special_tokens = self.fast.encode_special_tokens
        return reader

    @cached_property
    def elsewhere(self) -> "LongTexts":
        """The processes that read long texts."""
        from backend.model.text.isolated.long_texts import LongTexts
        from backend.model.text.tokenizer_file import TOKENIZER_FILE

        path = Path(self.hf.name_or_path or "") / TOKENIZER_FILE
        return LongTexts(self.fast, str(path) if path.is_file() else "")


class LockedReader(Reader):
    """Calls a tokenizer in Python, or one whose class does more, on one thread at a time."""

    max_chars = MAX_LOCKED_CHARS

    def __init__(self, hf_tokenizer: HfTokenizer) -> None:
        """Use a tokenizer, which this object owns from now on."""
        self.hf = hf_tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the ids of a text."""
        with self._lock:
            if GUARD in text:
                return self._encode_guarded(text, adds_special=adds_special)
            return self._encode_whole(text, adds_special=adds_special)

    def encode_pair(
        self, first: str, second: str, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts, the second of which is cut where it is too long."""
        truncation = False if limit is None else "only_second"
        with self._lock:
            # By itself, a pair whose second text is empty would be the first text alone.
            encoded = checked(
                lambda: self.hf(
                    [first], [second], max_length=limit, truncation=truncation, verbose=False
                )
            )
        return encoded["input_ids"][0], encoded.get("token_type_ids", [[]])[0]

    def placed(self, text: str) -> Sequence[tuple[int, tuple[int, int], int]]:
        """Return the ids of a text with their places and words."""
        if not self.hf.is_fast:
            problem = "this model's tokenizer does not report the positions of tokens"
            raise UnsupportedError(f"TokenClassify: {problem}")
        arguments = {"add_special_tokens": False, "return_offsets_mapping": True}
        with self._lock:
            found = checked(lambda: self.hf(text, verbose=False, **arguments))
        return list(zip(found["input_ids"], found["offset_mapping"], found.word_ids(), strict=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of known ids."""
        with self._lock:
            return _decoded(self.hf, ids)

    def _encode_whole(self, text: str, *, adds_special: bool) -> list[int]:
        ids: list[int] = checked(
            lambda: self.hf.encode(text, add_special_tokens=adds_special, verbose=False)
        )
        return ids

    def _encode_guarded(self, text: str, *, adds_special: bool) -> list[int]:
        """Encode a text with guards, as `backend.model.text.guard` explains."""
        if not self.hf.is_fast:
            parts = [self._encode_whole(part, adds_special=False) for part in text.split(GUARD)]
            before, after = added_ids(self._encode_whole) if adds_special else ((), ())
            return [*before, *chain.from_iterable(parts), *after]
        own, self.hf._tokenizer = self.hf.backend_tokenizer, self._guarded  # noqa: SLF001
        try:
            return self._encode_whole(text, adds_special=adds_special)
        finally:
            self.hf._tokenizer = own  # noqa: SLF001

    @cached_property
    def _guarded(self) -> FastTokenizer:
        from backend.model.text.guard import guarded

        return guarded(self.hf.backend_tokenizer, GUARD)


def added_ids(encode: Callable[..., Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids that a tokenizer adds before and after a text.

    Args:
        encode: As `Reader.encode`.
    """
    bare = list(encode("a", adds_special=False))
    full = list(encode("a", adds_special=True))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def columns(
    tokenizer: FastTokenizer, reading: Reading, text: str, second: str = ""
) -> list[list[int]]:
    """Return the numbers that a Rust tokenizer finds, one list for each number of a token."""
    encode = tokenizer.encode_batch if reading is Reading.PLACES else tokenizer.encode_batch_fast
    adds = reading in (Reading.PAIR, Reading.SPECIAL)
    given = (text, second) if reading is Reading.PAIR else text
    (encoded,) = checked(lambda: encode([given], add_special_tokens=adds))
    if reading is Reading.PAIR:
        return [encoded.ids, encoded.type_ids, _or_minus_one(encoded.sequence_ids)]
    if reading is Reading.PLACES:
        starts, stops = ([place[side] for place in encoded.offsets] for side in (0, 1))
        return [encoded.ids, starts, stops, _or_minus_one(encoded.word_ids)]
    return [encoded.ids]


def _or_minus_one(numbers: Sequence[int | None]) -> list[int]:
    return [-1 if number is None else number for number in numbers]


def _decoded(hf_tokenizer: HfTokenizer, ids: Sequence[int]) -> str:
    text: str = hf_tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def checked(work: Callable[[], Result]) -> Result:
    """Return the result of a call of a library."""
    try:
        return work()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(TEXT_FIELD, "holds a lone surrogate") from error
    except BaseException as error:
        # Rust's own, which no `except Exception` catches: a pattern that goes back too often.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequestError(TEXT_FIELD, f"cannot be tokenised: {error}") from error
