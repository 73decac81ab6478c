"""Grammars from the server, compiled again for the vocabulary of this process."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from backend.core.guide import GrammarParts, ReplyGrammar, ReplyMatcher, ThoughtTexts
from backend.core.model import ModelCard
from backend.errors import GrammarError
from backend.model.text.tokenizer import Tokenizer
from backend.sampling.grammar.lark import LarkGrammar

if TYPE_CHECKING:
    from backend.sampling.grammar.compiler import GrammarCompiler
    from backend.sampling.grammar.thought_marks import ThoughtMarks

# The server compiled it in time; a rank that gave up would draw other tokens.
_COMPILE_TIMEOUT_S = 60.0


class SentGrammar:
    """A grammar that is compiled on first use; safe from any thread.

    Attributes:
        parts: Its source.
    """

    def __init__(self, parts: GrammarParts, workshop: "GrammarWorkshop") -> None:
        self.parts = parts
        self._workshop = workshop

    def compile(self) -> ReplyGrammar:
        """Return the compiled grammar.

        Raises:
            GrammarError: The model cannot follow it.
        """
        return self._workshop.compile(self.parts)

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply."""
        return self.compile().matcher()


class GrammarWorkshop:
    """Compiles the grammars of one loaded model; the first one reads its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._lock = threading.Lock()
        self._marks: dict[ThoughtTexts, ThoughtMarks] = {}

    def read(self, parts: GrammarParts) -> SentGrammar:
        """Return a grammar from its parts; nothing is compiled yet."""
        return SentGrammar(parts, self)

    def compile(self, parts: GrammarParts) -> ReplyGrammar:
        """Return a compiled grammar from its parts; the first takes a second or two.

        Raises:
            GrammarError: The model cannot follow it.
        """
        from backend.sampling.grammar.thought_budget import BudgetedGrammar

        grammar: ReplyGrammar | None = None
        if parts.rules:
            start, *definitions = parts.rules
            grammar = self.compiler.compile(LarkGrammar(start, tuple(definitions)))
        if parts.budget:
            return BudgetedGrammar(parts.budget, self._marks_of(parts.budget.texts), grammar)
        if grammar is None:
            raise GrammarError("a grammar without rules")
        return grammar

    def _marks_of(self, texts: ThoughtTexts) -> "ThoughtMarks":
        from backend.sampling.grammar.thought_marks import ThoughtMarks

        with self._lock:
            if texts not in self._marks:
                marks = ThoughtMarks(texts, self._tokenizer, self._card.vocab_size)
                marks.prepare()
                self._marks[texts] = marks
            return self._marks[texts]

    @property
    def compiler(self) -> "GrammarCompiler":
        """The compiler; the first use takes a second or two.

        Raises:
            GrammarError: No token ends a reply of this model.
        """
        with self._lock:
            return self._compiler

    @cached_property
    def _compiler(self) -> "GrammarCompiler":
        from backend.sampling.grammar.compiler import GrammarCompiler
        from backend.sampling.grammar.vocabulary import Vocabulary

        if not self._card.eos_token_ids:
            raise GrammarError("no token ends a reply of this model")
        vocabulary = Vocabulary.of(self._tokenizer, self._card)
        return GrammarCompiler(vocabulary, timeout_s=_COMPILE_TIMEOUT_S)
