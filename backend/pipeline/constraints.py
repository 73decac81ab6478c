"""Constraints on a reply: a grammar, a JSON schema, a tool call, a thinking budget.

The caller's grammar wins; without one the tool choice decides. Everything here may take a
second, so it runs on a worker thread.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from backend.core.guide import ThoughtBudget
from backend.core.prompt import ToolMode
from backend.errors import GrammarError
from backend.output.format import opens_after_thought, opens_in_reasoning, thought_texts
from backend.sampling.grammar.tools.parameters import Parameters, PerSchema
from backend.sampling.grammar.tools.rule import MAX_PARALLEL_CALLS, CallRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backend.core.guide import ReplyGrammar
    from backend.core.model import ModelCard
    from backend.core.prompt import JsonValue, Prompt, Tool, ToolSchemas
    from backend.core.request import GenerationCall
    from backend.model.text.tokenizer import Tokenizer
    from backend.output.format import OutputFormat
    from backend.sampling.grammar.compiler import GrammarCompiler
    from backend.sampling.grammar.lark import LarkGrammar
    from backend.sampling.grammar.thought import Thought
    from backend.sampling.grammar.thought_marks import ThoughtMarks
    from backend.sampling.grammar.tools.held import HeldTools

log = logging.getLogger(__name__)


class Constraints:
    """Builds the grammars of one model's replies; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard, output_format: OutputFormat) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._format = output_format
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._held: HeldTools | None = None
        self._parameters = PerSchema(Parameters.of)

    def warm_up(self) -> None:
        """Prepare in advance, so that the first grammar does not wait."""
        try:
            self.prepare()
        except GrammarError as error:
            log.warning("this model cannot follow a grammar: %s", error.problem)

    def prepare(self) -> GrammarCompiler:
        """Return the compiler; the first call reads the vocabulary: 1 to 2 s for 150,000 tokens.

        Raises:
            GrammarError: The model has no token that ends a reply.
        """
        # llguidance takes a tenth of a second to import; keep that out of startup.
        from backend.sampling.grammar.compiler import GrammarCompiler
        from backend.sampling.grammar.vocabulary import Vocabulary

        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(Vocabulary.of(self._tokenizer, self._card))
            return self._compiler

    def schemas(self, tools: Iterable[Tool]) -> ToolSchemas:
        """Return the schemas of tools by name, for the readers of their arguments.

        They mean what the grammar means: types are spelled as in JSON, and there is no `allOf`.
        """
        return dict(map(self._schema, tools))

    def _schema(self, tool: Tool) -> tuple[str, Mapping[str, JsonValue]]:
        try:
            return tool.name, self._parameters.of(tool).schema
        except GrammarError:
            return tool.name, tool.parameters

    def guide(self, call: GenerationCall, prompt: Prompt) -> ReplyGrammar | None:
        """Return the reply's grammar and thinking budget, or `None` without both.

        Args:
            call: The call with its requirements.
            prompt: Shows whether the reply begins inside a thought.

        Raises:
            GrammarError: A requirement is malformed or cannot be enforced.
        """
        grammar = self.grammar(call, prompt)
        marks = None if call.thinking_budget is None else self._thought_marks(call)
        if call.thinking_budget is None or marks is None:
            return grammar
        from backend.sampling.grammar.thought_budget import BudgetedGrammar

        budget = ThoughtBudget(
            tokens=call.thinking_budget,
            texts=marks.texts,
            is_open=opens_in_reasoning(self._format, prompt.tail),
            is_first=self._rules_all_but_thought(call),
        )
        return BudgetedGrammar(budget, marks, grammar)

    def _rules_all_but_thought(self, call: GenerationCall) -> bool:
        has_grammar = bool(call.grammar) and not self._card.grammar_triggers
        return has_grammar or bool(call.shown_tools and call.demands_calls)

    def _thought_marks(self, call: GenerationCall) -> ThoughtMarks | None:
        """Return the thought marks, or `None` without any or if their end would end the reply."""
        from backend.sampling.grammar.thought_marks import ThoughtMarks

        texts = thought_texts(self._format, has_tools=bool(call.shown_tools))
        if texts is None:
            text = "request id=%s: thinking_budget is ignored: no format of thoughts is known"
            log.info(text, call.request_id)
            return None
        marks = ThoughtMarks(texts, self._tokenizer, self._card.vocab_size)
        if marks.end and self._card.eos_token_ids.isdisjoint(marks.end):
            return marks
        text = "request id=%s: thinking_budget is ignored: %r cannot be written, or ends the reply"
        log.warning(text, call.request_id, texts.ends[0])
        return None

    def grammar(self, call: GenerationCall, prompt: Prompt) -> ReplyGrammar | None:
        """Return the grammar of the reply, or `None` if the reply is free.

        Raises:
            GrammarError: A requirement is malformed or cannot be enforced.
        """
        if call.is_ruled:
            return self._text_grammar(call, prompt, offers_calls=call.offers_calls)
        if not call.shown_tools:
            return None
        if call.demands_calls:
            return self._forced_grammar(call, prompt)
        # A grammar would end a reply that must not end of its own accord.
        is_free = call.ignore_eos or not call.constrains_calls
        return None if is_free else self._auto_grammar(call, prompt)

    def _auto_grammar(self, call: GenerationCall, prompt: Prompt) -> ReplyGrammar | None:
        """Return the grammar of free text and valid calls, if a token announces a call.

        Without such a token, every step of the text would have to watch for the first letters of a
        call, so the reply stays free. So it does if there is no tool that could be called.
        """
        if self._format.tools.opener not in self.prepare().vocabulary.markers:
            return None
        rule = CallRule(most=_most_calls(call))
        try:
            return self._compiled_calls(call.tools, rule, lambda calls: self._all(calls, prompt))
        except GrammarError as error:
            _tell_unconstrained(call, error)
            return None

    def _forced_grammar(self, call: GenerationCall, prompt: Prompt) -> ReplyGrammar:
        choice = call.tool_choice
        is_named = choice.mode is ToolMode.NAMED
        offered = [tool for tool in call.tools if not is_named or tool.name == choice.name]
        rule = CallRule(least=1, most=1 if is_named else _most_calls(call), has_text=False)
        found = self._compiled_calls(offered, rule, lambda calls: self._all(calls, prompt))
        if found is None:
            raise GrammarError(
                f"tool_choice {choice.mode.value!r} cannot be enforced for this model: its "
                f"tool-call format ({self._format.tools.name}) has no grammar"
            )
        return found

    def _compiled_calls(
        self,
        offered: Sequence[Tool],
        rule: CallRule,
        whole: Callable[[LarkGrammar], LarkGrammar],
    ) -> ReplyGrammar | None:
        """Return the compiled grammar of a reply with calls; `None` for a format without one.

        Args:
            offered: Tools that may be called.
            rule: The number of calls.
            whole: Returns the grammar of the reply from that of the calls.

        Raises:
            GrammarError: No tool can be called, or the rest of the reply cannot be enforced.
        """
        compiler, held = self.prepare(), self._held_tools().offered(offered)
        while (calls := held.grammar(rule)) is not None:
            try:
                compiled = compiler.compile(whole(calls))
            except GrammarError:
                if not held.weaken():
                    raise
            else:
                held.tell()
                return compiled
        return None

    def _held_tools(self) -> HeldTools:
        from backend.sampling.grammar.tools.held import HeldTools

        compiler = self.prepare()
        with self._lock:
            if self._held is None:
                self._held = HeldTools(self._format.tools, compiler, self._parameters)
            return self._held

    def _text_grammar(
        self, call: GenerationCall, prompt: Prompt, *, offers_calls: bool
    ) -> ReplyGrammar:
        """Return the caller's grammar; with tools, calls are allowed in its place."""
        from backend.sampling.grammar.either import either
        from backend.sampling.grammar.thought import after_trigger

        compiler = self.prepare()
        grammar = compiler.translate(call.grammar)
        if triggers := self._card.grammar_triggers:
            return compiler.compile(after_trigger(grammar, triggers, compiler.vocabulary))
        answer = self._format.reasoning.answer
        alone = self._all(grammar, prompt, answer)
        if offers_calls:
            rule = CallRule(least=1, most=_most_calls(call), has_text=False)

            def whole(calls: LarkGrammar) -> LarkGrammar:
                return self._all(either(calls, grammar, answer, compiler.vocabulary), prompt)

            try:
                if (found := self._compiled_calls(call.tools, rule, whole)) is not None:
                    return found
            except GrammarError as error:
                # If the answer's grammar is at fault, it says so below.
                _tell_unconstrained(call, error)
        return compiler.compile(alone)

    def _all(self, grammar: LarkGrammar, prompt: Prompt, answer: str = "") -> LarkGrammar:
        """Return a grammar that starts after the thought, if the model writes one."""
        from backend.sampling.grammar.thought import after_thought

        if thought := _thought(prompt, self._format, answer):
            return after_thought(grammar, thought, self.prepare().vocabulary)
        return grammar


def _tell_unconstrained(call: GenerationCall, error: GrammarError) -> None:
    # The problem may quote a schema, which is the caller's data.
    problem = str(error) if call.debug else "no grammar can hold them"
    log.info("request id=%s: calls are not constrained: %s", call.request_id, problem)


def _most_calls(call: GenerationCall) -> int:
    return MAX_PARALLEL_CALLS if call.parallel_tool_calls else 1


def _thought(prompt: Prompt, output_format: OutputFormat, answer: str) -> Thought | None:
    from backend.sampling.grammar.thought import Thought

    reasoning = output_format.reasoning
    if not reasoning.starts:
        return None
    is_done = opens_after_thought(output_format, prompt.tail)
    return Thought(
        starts=() if is_done else (reasoning.start,),
        ends=(reasoning.end,),
        is_open=opens_in_reasoning(output_format, prompt.tail),
        forbidden=output_format.tools.openers,
        bridge=reasoning.bridge,
        answer=answer,
    )
