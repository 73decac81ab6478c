"""What a request demands of the form of its reply: a grammar or a JSON schema.

Everything here may take a
second, so it runs on a pool of threads.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from backend.errors import GrammarError
from backend.output.format import opens_in_reasoning

if TYPE_CHECKING:
    from backend.core.guide import ReplyGrammar
    from backend.core.model import ModelCard
    from backend.core.prompt import Prompt
    from backend.core.request import GenerationCall
    from backend.model.loaded import LoadedModel
    from backend.model.tokenizer import Tokenizer
    from backend.output.format import OutputFormat
    from backend.sampling.grammar.compiled import GrammarCompiler
    from backend.sampling.grammar.lark import LarkGrammar
    from backend.sampling.grammar.thought import Thought

log = logging.getLogger(__name__)

_structures: WeakKeyDictionary[LoadedModel, Structures] = WeakKeyDictionary()


def structures_of(model: LoadedModel) -> Structures:
    """Return the one that belongs to a loaded model."""
    return _structures.setdefault(model, Structures(model.tokenizer, model.card))


class Structures:
    """Makes the grammars of replies of one loaded model; safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard) -> None:
        """Do nothing yet: see `prepare`."""
        self._tokenizer = tokenizer
        self._card = card
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def warm_up(self) -> None:
        """Do what every grammar of this model needs, so that the first one need not wait."""
        try:
            self.prepare()
        except GrammarError as error:
            log.warning("no grammar can be followed by this model: %s", error.problem)

    def prepare(self) -> GrammarCompiler:
        """Read the vocabulary, once: a second or two for 150,000 tokens.

        Raises:
            GrammarError: No token ends a reply of this model.
        """
        # llguidance takes a tenth of a second to import: nobody waits for it at the start.
        from backend.sampling.grammar.compiled import GrammarCompiler
        from backend.sampling.grammar.vocabulary import Vocabulary

        with self._lock:
            if self._compiler is None:
                tokenizer, card = self._tokenizer, self._card
                if not card.eos_token_ids:
                    raise GrammarError("no token ends a reply of this model")
                pieces = [tokenizer.token_bytes(i) for i in range(card.vocab_size)]
                markers = {text: i for i, text in tokenizer.added_texts.items()}
                vocabulary = Vocabulary(
                    pieces, markers=markers, eos_ids=card.eos_token_ids, size=card.vocab_size
                )
                self._compiler = GrammarCompiler(vocabulary)
            return self._compiler

    def grammar(
        self, call: GenerationCall, prompt: Prompt, wire: OutputFormat
    ) -> ReplyGrammar | None:
        """Return what the reply must follow, or `None` when it is free.

        Args:
            call: Its grammar, its tools and its choice of them.
            prompt: Tells whether the reply begins inside a thought.
            wire: How the model writes thoughts and calls.

        Raises:
            GrammarError: What is demanded is malformed, or cannot be enforced.
        """
        if call.grammar:
            return self._text_grammar(call.grammar, prompt, wire)
        return None

    def _text_grammar(self, text: str, prompt: Prompt, wire: OutputFormat) -> ReplyGrammar:
        from backend.sampling.grammar.thought import after_trigger

        compiler = self.prepare()
        grammar = compiler.translate(text)
        if triggers := self._card.grammar_triggers:
            return compiler.compile(after_trigger(grammar, triggers, compiler.vocabulary))
        return self._compiled(grammar, prompt, wire, answer=wire.reasoning.answer)

    def _compiled(
        self, grammar: LarkGrammar, prompt: Prompt, wire: OutputFormat, answer: str = ""
    ) -> ReplyGrammar:
        """Compile a grammar that begins behind the thought, if the model writes one."""
        from backend.sampling.grammar.thought import behind_thought

        compiler = self.prepare()
        if thought := _thought(prompt, wire, answer):
            grammar = behind_thought(grammar, thought, compiler.vocabulary)
        return compiler.compile(grammar)


def _thought(prompt: Prompt, wire: OutputFormat, answer: str) -> Thought | None:
    from backend.sampling.grammar.thought import Thought

    reasoning = wire.reasoning
    if not reasoning.starts:
        return None
    return Thought(
        starts=(reasoning.start,),
        ends=(reasoning.end,),
        is_open=opens_in_reasoning(wire, prompt.tail),
        bridge=reasoning.bridge,
        answer=answer,
    )
