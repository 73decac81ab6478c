"""Grammars that came from the server: compiled anew for the vocabulary of this process."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from backend.core.model import ModelCard
from backend.engine.messages.codec import GrammarParts
from backend.errors import GrammarError
from backend.model.text.tokenizer import Tokenizer
from backend.sampling.grammar.lark import LarkGrammar

if TYPE_CHECKING:
    from backend.sampling.grammar.compiler import CompiledGrammar, GrammarCompiler
    from backend.sampling.grammar.matcher import GrammarMatcher

# The server has compiled it in time: a rank that gave up would draw other tokens.
_COMPILE_TIMEOUT_S = 60.0


class SentGrammar:
    """A grammar that is compiled when it is first needed; safe from any thread.

    Attributes:
        source: What it is compiled from.
    """

    def __init__(self, source: LarkGrammar, workshop: "GrammarWorkshop") -> None:
        self.source = source
        self._workshop = workshop

    def compile(self) -> "CompiledGrammar":
        """Return it compiled.

        Raises:
            GrammarError: The model cannot follow it.
        """
        return self._workshop.compiler.compile(self.source)

    def matcher(self) -> "GrammarMatcher":
        """Return a matcher for one reply."""
        return self.compile().matcher()


class GrammarWorkshop:
    """Compiles the grammars of one loaded model; reads its vocabulary for the first one."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._lock = threading.Lock()

    def read(self, parts: GrammarParts) -> SentGrammar:
        """Return a grammar of its parts; nothing is compiled yet."""
        start, *definitions = parts
        return SentGrammar(LarkGrammar(start, tuple(definitions)), self)

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
