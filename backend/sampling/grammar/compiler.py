"""Compiled grammars: cached by content, copied for every request."""

import queue
import re
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from backend.config import MAX_KEPT_GRAMMAR_CHARS, MAX_KEPT_GRAMMARS
from backend.core.guide import GrammarParts
from backend.errors import GrammarError
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.last_used import LastUsed
from backend.sampling.grammar.matcher import GrammarMatcher
from backend.sampling.grammar.token_trie import tokenizer_of
from backend.sampling.grammar.vocabulary import Vocabulary

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

    def __init__(self, source: LarkGrammar, template: LLMatcher, tokenizer: LLTokenizer) -> None:
        self.parts = GrammarParts(rules=(source.start, *source.definitions))
        self._template = template
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for one reply, in microseconds."""
        with self._lock:
            return GrammarMatcher(self._template.deep_copy(), self._tokenizer)


class GrammarCompiler:
    """Compiles grammars for one vocabulary; thread-safe.

    A compilation cannot be interrupted: of requests, only grammars that have passed a trial come
    here.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_kept: int = MAX_KEPT_GRAMMARS) -> None:
        """Start with an empty cache.

        Args:
            vocabulary: The loaded model's.
            max_kept: Number of compiled grammars to keep.
        """
        self.vocabulary = vocabulary
        self._compiled: LastUsed[LarkGrammar, CompiledGrammar] = LastUsed(
            max_kept, MAX_KEPT_GRAMMAR_CHARS, lambda grammar: len(grammar.text)
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
        return CompiledGrammar(grammar, template, tokenizer_of(self.vocabulary))


def problem_of(grammar: LarkGrammar, vocabulary: Vocabulary) -> str:
    """Compile a grammar, and return what is wrong with it; empty if nothing is."""
    return _compiled(grammar, vocabulary)[1]


def _compiled(grammar: LarkGrammar, vocabulary: Vocabulary) -> tuple[LLMatcher, str]:
    """Return a matcher at the beginning, and what is wrong with it."""
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


def _reason(error: str) -> str:
    """Return the part of an llguidance error that is useful to callers."""
    lines = error.splitlines()
    told = next((line for line in lines if line.startswith("error: ")), lines[0])
    if told.startswith("panic"):
        return "is too large"
    if told == "NoExtensionBias":
        return "no text can complete it"
    return re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", told)[:300]
