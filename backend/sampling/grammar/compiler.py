"""Compiled grammars: cached by content, copied for every request."""

import queue
import re
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from backend.config import MAX_GRAMMAR_BYTES
from backend.core.guide import GrammarParts
from backend.errors import GrammarError
from backend.sampling.grammar.gbnf.translation import gbnf_to_lark
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.last_used import LastUsed
from backend.sampling.grammar.matcher import GrammarMatcher
from backend.sampling.grammar.schema.translation import schema_to_lark
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
# A schema too, and not a rule of a grammar.
_BOOLEANS = ("true", "false")
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

    Requests' grammars are limited in size and time.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, max_kept: int = 64, timeout_s: float = 0.9
    ) -> None:
        """Start with empty caches.

        Args:
            vocabulary: The loaded model's.
            max_kept: Number of texts, and of compiled grammars, to keep.
            timeout_s: Limit per compilation; a grammar that takes longer is refused.
        """
        self.vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._translated: LastUsed[str, LarkGrammar] = LastUsed(max_kept)
        self._compiled: LastUsed[LarkGrammar, CompiledGrammar] = LastUsed(max_kept)

    def translate(self, text: str) -> LarkGrammar:
        """Translate a text to a grammar, which is compiled alone or as part of another.

        Raises:
            GrammarError: The text is malformed, too large, or cannot be enforced.
        """
        return self._translated.find(text) or self._translated.keep(text, self._translate(text))

    def compile(self, grammar: LarkGrammar) -> CompiledGrammar:
        """Compile a grammar, or return a cached equal one.

        Raises:
            GrammarError: It cannot be enforced.
        """
        return self._compiled.find(grammar) or self._compiled.keep(grammar, self._compile(grammar))

    def check(self, grammar: LarkGrammar) -> None:
        """Compile a grammar that is a part of others, and keep nothing.

        Raises:
            GrammarError: It cannot be enforced.
        """
        self._compile(grammar)

    def _translate(self, text: str) -> LarkGrammar:
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"is larger than {MAX_GRAMMAR_BYTES // 1024} KiB")
        if text.lstrip().startswith("{") or text.strip() in _BOOLEANS:
            return schema_to_lark(text)
        return gbnf_to_lark(text, self.vocabulary)

    def _compile(self, grammar: LarkGrammar) -> CompiledGrammar:
        """Compile on a thread with a deep stack, waiting at most `timeout_s`."""
        made: queue.SimpleQueue[tuple[LLMatcher, str]] = queue.SimpleQueue()

        def make() -> None:
            tokenizer = self.vocabulary.tokenizer
            template = LLMatcher(tokenizer, grammar.text, log_level=0, limits=_LIMITS)
            first_step = template.deep_copy()
            first_step.compute_bitmask()
            made.put((template, first_step.get_error()))

        _start_deep(make)
        try:
            template, error = made.get(timeout=self._timeout_s)
        except queue.Empty:
            raise GrammarError(f"takes longer than {self._timeout_s} s to compile") from None
        if error:
            raise GrammarError(_reason(error))
        return CompiledGrammar(grammar, template, self.vocabulary.tokenizer)


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
