"""Compiles the finished texts of grammars for the vocabulary of this process."""

import threading
from typing import TYPE_CHECKING

from backend.core.guide import GrammarParts, ReplyGrammar, ReplyMatcher, ThoughtTexts
from backend.core.model import ModelCard
from backend.errors import GrammarError
from backend.model.text.tokenizer import Tokenizer
from backend.sampling.grammar.writer import LarkGrammar

if TYPE_CHECKING:
    from backend.sampling.grammar.compiler import GrammarCompiler
    from backend.sampling.grammar.thought_marks import ThoughtMarks


class SentGrammar:
    """A grammar from rank 0 that is compiled on first use; safe from any thread.

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
        self._made_compiler: GrammarCompiler | None = None

    def read(self, parts: GrammarParts) -> SentGrammar:
        """Return a grammar from its parts; nothing is compiled yet."""
        return SentGrammar(parts, self)

    def is_ready(self, parts: GrammarParts | None) -> bool:
        """Tell whether these parts were compiled before, so that they are at hand."""
        if parts is None:
            return True
        if parts.budget and parts.budget.texts not in self._marks:
            return False
        if not parts.rules:
            return True
        compiler = self._made_compiler
        return compiler is not None and compiler.known(_lark(parts)) is not None

    def compile(self, parts: GrammarParts) -> ReplyGrammar:
        """Return a compiled grammar from its parts; the first takes a second or two.

        Raises:
            GrammarError: The model cannot follow it.
        """
        from backend.sampling.grammar.thought_budget import BudgetedGrammar

        grammar: ReplyGrammar | None = None
        if parts.rules:
            grammar = self.compiler.compile(_lark(parts))
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
            if self._made_compiler is None:
                self._made_compiler = self._make_compiler()
            return self._made_compiler

    def _make_compiler(self) -> "GrammarCompiler":
        from backend.sampling.grammar.compiler import GrammarCompiler, tokenizer_of
        from backend.sampling.grammar.vocabulary import Vocabulary

        vocabulary = Vocabulary.of(self._tokenizer, self._card)
        # Made here, because other threads share it.
        tokenizer_of(vocabulary)
        return GrammarCompiler(vocabulary)


def _lark(parts: GrammarParts) -> LarkGrammar:
    start, *definitions = parts.rules
    return LarkGrammar(start, tuple(definitions))
