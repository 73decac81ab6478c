"""What a request demands of the form of its reply: a grammar, a JSON schema, a tool call.

A grammar of the caller's wins; else the choice of tools decides. Everything here may take a
second, so it runs on a pool of threads.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from backend.core.prompt import ToolMode
from backend.errors import GrammarError
from backend.output.format import opens_behind_thought, opens_in_reasoning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backend.core.guide import ReplyGrammar
    from backend.core.model import ModelCard
    from backend.core.prompt import Prompt, Tool
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
                self._compiler = GrammarCompiler(Vocabulary.of(self._tokenizer, self._card))
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
        mode = call.tool_choice.mode
        if not call.tools or mode is ToolMode.NONE:
            return None
        if mode is ToolMode.AUTO:
            # A reply that shall not end by itself has no grammar: that would end it.
            is_free = call.ignore_eos or not call.constrains_calls
            return None if is_free else self._auto_grammar(call, prompt, wire)
        return self._forced_grammar(call, prompt, wire)

    def _auto_grammar(
        self, call: GenerationCall, prompt: Prompt, wire: OutputFormat
    ) -> ReplyGrammar | None:
        """Return the grammar of free text and valid calls, where a token begins a call.

        Without such a token every step of the text would have to watch for the call's first
        letters: the reply stays free. So it does when a tool's schema cannot be enforced.
        """
        if wire.tools.opener not in self.prepare().vocabulary.markers:
            return None
        try:
            return self._tool_grammar(call, call.tools, prompt, wire)
        except GrammarError as error:
            # The problem may quote a schema, which is the caller's.
            problem = str(error) if call.debug else "a tool's schema cannot be enforced"
            log.info("request id=%s: calls are not constrained: %s", call.request_id, problem)
            return None

    def _forced_grammar(
        self, call: GenerationCall, prompt: Prompt, wire: OutputFormat
    ) -> ReplyGrammar:
        choice = call.tool_choice
        is_named = choice.mode is ToolMode.NAMED
        offered = [tool for tool in call.tools if not is_named or tool.name == choice.name]
        grammar = self._tool_grammar(call, offered, prompt, wire)
        if grammar is None:
            raise GrammarError(
                f"tool_choice {choice.mode.value!r} cannot be enforced for this model: how it "
                f"calls tools ({wire.tools.name}) has no grammar"
            )
        return grammar

    def _tool_grammar(
        self, call: GenerationCall, offered: Sequence[Tool], prompt: Prompt, wire: OutputFormat
    ) -> ReplyGrammar | None:
        from backend.sampling.grammar.tools import MAX_PARALLEL_CALLS, CallRule, tool_grammar

        is_single = call.tool_choice.mode is ToolMode.NAMED or not call.parallel_tool_calls
        rule = CallRule.of(call.tool_choice, 1 if is_single else MAX_PARALLEL_CALLS)
        grammar = tool_grammar(wire.tools.name, offered, rule, self.prepare().vocabulary)
        return None if grammar is None else self._compiled(grammar, prompt, wire)

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
    is_done = opens_behind_thought(wire, prompt.tail)
    return Thought(
        starts=() if is_done else (reasoning.start,),
        ends=(reasoning.end,),
        is_open=opens_in_reasoning(wire, prompt.tail),
        taboos=wire.tools.openers,
        bridge=reasoning.bridge,
        answer=answer,
    )
