"""Compiled grammars: cached by content, copied for every request."""

import contextlib
import os
import queue
import re
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from backend.config import (
    MAX_COMPILE_MEMORY_BYTES,
    MAX_COMPILE_S,
    MAX_KEPT_GRAMMAR_CHARS,
    MAX_KEPT_GRAMMARS,
)
from backend.core.guide import GrammarParts
from backend.errors import GrammarError
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import LarkGrammar
from common.last_used import LastUsed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Return the tokenizer for llguidance, the same each time.

    Takes one to two seconds for 150,000 tokens, the first time.
    """
    return vocabulary.once(LLTokenizer, lambda: _made(vocabulary))


def _made(vocabulary: Vocabulary) -> LLTokenizer:
    eos_ids = sorted(vocabulary.eos_ids)
    special_ids = sorted({*vocabulary.markers.values(), *eos_ids})
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary.pieces, special_ids, eos_ids[0])),
        n_vocab=len(vocabulary.pieces),
        eos_token=eos_ids,
    )


class _Tokens:
    """Implements the tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, _text: bytes | str) -> list[int]:
        """Tokenize nothing: llguidance needs it only for forced text, which no grammar here has."""
        return []


# Where the text is forced, few tokens can begin it.
_MAX_FORCED_CHOICES = 64


# More than those of any double; a decimal may have 38.
_MAX_DIGITS = 40
# Those of an exponent: doubles end at 308.
_LAST_DIGITS = 2
_BEFORE_EXPONENT = _MAX_DIGITS - _LAST_DIGITS
# One of these may follow a digit of a text, also in hexadecimal; none follows that of a number.
_AFTER_TEXT = b'"abcdfABCDFxyz'
_JSON_RULE = "%json "


class _EndOfNumbers:
    """Ends numbers of JSON, which weak models go on with until the context is full.

    llguidance bounds the digits of a number only together with its value.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import numpy as np

        pieces = vocabulary.pieces
        self._pieces = pieces
        found = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}
        self._after_text = [found[bytes([b])] for b in _AFTER_TEXT if bytes([b]) in found]
        bits = np.ones((_LAST_DIGITS + 1, vocabulary.mask_words * 32), np.uint8)
        for token_id, piece in enumerate(pieces):
            digits = len(piece) - len(piece.lstrip(b"0123456789"))
            bits[:digits, token_id] = 0
        # Of tokens that begin with so many digits at most.
        self._masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def digits_after(self, digits: int, token_id: int) -> int:
        """Return how many digits of a number a token ends with, or has used up with its exponent.

        Args:
            digits: The same for the text before it.
        """
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        for byte in piece:
            if byte in b"0123456789":
                digits += 1
            elif byte in b"eE" and digits:
                digits = _BEFORE_EXPONENT
            elif byte not in b"+-" or digits != _BEFORE_EXPONENT:
                digits = 0
        return digits

    def apply(self, row: "NDArray[np.int32]", digits: int) -> None:
        """Forbid more digits than are left in a mask, if a number could end here."""
        if digits < _BEFORE_EXPONENT:
            return
        in_text = any(row[i // 32] >> (i % 32) & 1 for i in self._after_text)
        others = row & self._masks[max(_MAX_DIGITS - digits, 0)]
        if self._after_text and not in_text and others.any():
            row[:] = others


class GrammarMatcher:
    """Tells which tokens may come next in one reply; used by one thread at a time.

    Methods never raise: `error` reports a failure, and the request should end with it.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, end_of_numbers: _EndOfNumbers | None
    ) -> None:
        """Take over a matcher at the start of a reply, which has no other users."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_of_numbers = end_of_numbers
        # Digits at the end of the text, after each token.
        self._digits = [0]
        self._latest_mask: NDArray[np.int32] | None = None

    def consume(self, token_id: int) -> bool:
        """Advance by a token; return whether the grammar allowed it.

        A token that is not allowed sets `error` for good.
        """
        if self._end_of_numbers:
            digits = self._end_of_numbers.digits_after(self._digits[-1], token_id)
            self._digits.append(digits)
        return self._matcher.consume_token(token_id)

    def fill_mask(self, row: "NDArray[np.int32]") -> None:
        """Write one bit per token: 1 if it may come next, the lowest bit first.

        After an error, or at the end of the grammar, only tokens that end the reply are allowed.
        The row is contiguous, of `Vocabulary.mask_words` words.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._end_of_numbers:
            self._end_of_numbers.apply(row, self._digits[-1])
        self._latest_mask = row

    @property
    def may_force(self) -> bool:
        """Whether the latest mask leaves as few choices as forced text does."""
        mask = self._latest_mask
        return mask is None or int.from_bytes(mask.tobytes()).bit_count() <= _MAX_FORCED_CHOICES

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next, or none if there is a choice.

        Other tokens may spell the same text; markers that are single tokens end it.
        """
        # On a copy: llguidance counts forced text as read, and then rejects other spellings of it.
        text = self._matcher.deep_copy().compute_ff_bytes()
        if not text:
            return []
        return self._tokenizer.greedy_tokenize(_whole_characters(text))

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may come next."""
        return self._matcher.validate_tokens(list(token_ids))

    def step_back(self, count: int) -> None:
        """Undo the latest `count` tokens, none of which ended the reply."""
        self._matcher.rollback(count)
        if self._end_of_numbers and count:
            del self._digits[-count:]

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether only the end may follow, or the reply has already ended."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """The failure, or `None`."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().partition("\n")[0]


def _whole_characters(text: bytes) -> str:
    """Return the valid UTF-8 at the start of bytes; llguidance writes markers as invalid bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


# llguidance needs some 5 KB of stack per level of references; other threads may have little.
_STACK_BYTES = 64 << 20
# Grammars split into characters need more items than the defaults; no step takes over 0.2 s.
# A step may build many states of the lexer at the beginning of a raw value; it takes milliseconds.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_max_items=1_000_000,
    step_lexer_fuel=2_000_000,
    verbose_errors=False,
)
_stack_lock = threading.Lock()


class CompiledGrammar:
    """A grammar compiled for one vocabulary; thread-safe."""

    def __init__(self, source: LarkGrammar, template: LLMatcher, vocabulary: Vocabulary) -> None:
        self.parts = GrammarParts(rules=(source.start, *source.definitions))
        self._template = template
        self._tokenizer = tokenizer_of(vocabulary)
        self._end_of_numbers = (
            vocabulary.once(_EndOfNumbers, lambda: _EndOfNumbers(vocabulary))
            if _JSON_RULE in source.text
            else None
        )
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for one reply, in microseconds."""
        with self._lock:
            copy = self._template.deep_copy()
        return GrammarMatcher(copy, self._tokenizer, self._end_of_numbers)


class GrammarCompiler:
    """Compiles grammars for one vocabulary; thread-safe.

    A compilation cannot be interrupted: of requests, only grammars that have passed a trial come
    here.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_kept: int = MAX_KEPT_GRAMMARS) -> None:
        self.vocabulary = vocabulary
        self._compiled: LastUsed[LarkGrammar, CompiledGrammar] = LastUsed(
            max_kept, MAX_KEPT_GRAMMAR_CHARS, lambda grammar, _: len(grammar.text)
        )

    def known(self, grammar: LarkGrammar) -> CompiledGrammar | None:
        """Return a grammar that was compiled before, if it is still kept."""
        return self._compiled.find(grammar)

    def compile(self, grammar: LarkGrammar) -> CompiledGrammar:
        """Compile a grammar, or return a cached equal one.

        Raises:
            GrammarError: It cannot be enforced.
        """
        return self.known(grammar) or self._compiled.keep(grammar, self._compile(grammar))

    def check(self, grammar: LarkGrammar) -> None:
        """Compile a grammar that is a part of others, and keep nothing.

        Raises:
            GrammarError: It cannot be enforced.
        """
        self._compile(grammar)

    def _compile(self, grammar: LarkGrammar) -> CompiledGrammar:
        template, problem = _compiled(grammar, self.vocabulary)
        if problem:
            raise GrammarError(problem)
        return CompiledGrammar(grammar, template, self.vocabulary)


def _problem_of(grammar: LarkGrammar, vocabulary: Vocabulary) -> str:
    """Compile a grammar, and return its problem; empty if it has none."""
    return _compiled(grammar, vocabulary)[1]


def _compiled(grammar: LarkGrammar, vocabulary: Vocabulary) -> tuple[LLMatcher, str]:
    made: queue.SimpleQueue[tuple[LLMatcher, str]] = queue.SimpleQueue()

    def make() -> None:
        template = LLMatcher(tokenizer_of(vocabulary), grammar.text, log_level=0, limits=_LIMITS)
        first_step = template.deep_copy()
        first_step.compute_bitmask()
        made.put((template, first_step.get_error()))

    _start_deep(make)
    template, error = made.get()
    return template, _reason(error) if error else ""


def _start_deep(work: Callable[[], None]) -> None:
    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)


# In place of reasons that tell how llguidance works.
_WORDS = {
    "Regex is empty": "no text meets its pattern, format and lengths at once",
    "Failed to generate regex for float range": "its bounds are too large or too small",
}


def _reason(error: str) -> str:
    """Return the part of an llguidance error that is useful to callers."""
    lines = error.splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    if reason.startswith("panic"):
        return "is too large"
    if reason == "NoExtensionBias":
        return "no text can complete it"
    reason = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?(error: )?", "", reason)
    return next((words for part, words in _WORDS.items() if part in reason), reason[:300])


# The limit is in processor time, and this many times as much may pass on a busy machine.
_PATIENCE = 10
_TIMERS = frozenset({signal.SIGPROF, signal.SIGALRM})


class Checker(Protocol):
    """Tells whether grammars compile."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that they are for."""

    def check(self, grammar: LarkGrammar) -> None:
        """Require that a grammar compiles.

        Raises:
            GrammarError: It does not; the message says why.
        """


class Trial:
    """Compiles grammars to see whether they do, and keeps nothing of them.

    A compilation that exceeds the limits ends this process, unless trials are made in forks, which
    cost some milliseconds.

    Attributes:
        forks: Whether they are.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        forks: bool = False,
        cpu_s: float = MAX_COMPILE_S,
        memory_bytes: int = MAX_COMPILE_MEMORY_BYTES,
    ) -> None:
        """Set the limits of a trial; that of memory holds for this process from now on.

        Args:
            cpu_s: Processor time, in seconds.
            memory_bytes: Memory on top of this process's; macOS does not limit it.
        """
        self.vocabulary = vocabulary
        self.forks = forks
        self._cpu_s = cpu_s
        tokenizer_of(vocabulary)
        _limit_memory(memory_bytes)

    def check(self, grammar: LarkGrammar) -> None:
        """Require that a grammar compiles, and that some text begins it.

        Raises:
            GrammarError: It does not, or in a fork takes too much time or memory.
        """
        if problem := self._forked(grammar) if self.forks else self._timed(grammar):
            raise GrammarError(problem)

    def _timed(self, grammar: LarkGrammar) -> str:
        """Return the problem of a grammar; the kernel ends the process if it takes too long."""
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * self._cpu_s)
        try:
            return _problem_of(grammar, self.vocabulary)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _forked(self, grammar: LarkGrammar) -> str:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._try(grammar, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            problem = answer.read().decode()
        return self._ending(os.waitpid(child, 0)[1]) or problem

    def _ending(self, status: int) -> str:
        """Return the problem that a fork's end shows; empty if it ended as it should."""
        code = os.waitstatus_to_exitcode(status)
        if -code in _TIMERS:
            return f"takes longer than {self._cpu_s} s to compile"
        return "is too large" if code else ""

    def _try(self, grammar: LarkGrammar, writer: int) -> NoReturn:
        """Compile in the fork, and write the problem."""
        try:
            # Rust has last words when the stack is full.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, self._timed(grammar).encode())
            os._exit(0)
        finally:
            os._exit(1)


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space to its present size and some more; write no dump of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
