"""From the rule of a reply to its grammar: the text translated, the calls written, and all tried.

The caller's text wins; without one the tools decide. May take seconds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from backend.config import MAX_GRAMMAR_BYTES
from backend.core.guide import ReplyRule
from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.formats.format import ToolFormat
from backend.formats.registry import tool_format
from backend.sampling.grammar.either import either
from backend.sampling.grammar.gbnf.translation import gbnf_to_lark
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.schema.translation import schema_to_lark
from backend.sampling.grammar.thought import after_thought, after_trigger
from backend.sampling.grammar.tools.held import HeldTools
from backend.sampling.grammar.tools.parameters import Parameters, PerSchema
from backend.sampling.grammar.tools.rule import CallRule
from backend.sampling.grammar.trial import Checker
from backend.sampling.grammar.vocabulary import Vocabulary

# A schema too, and not a rule of a grammar.
_BOOLEANS = ("true", "false")


def translated(text: str, vocabulary: Vocabulary) -> LarkGrammar:
    """Translate GBNF or a JSON schema.

    Raises:
        GrammarError: The text is malformed, too large, or cannot be enforced.
    """
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"is larger than {MAX_GRAMMAR_BYTES // 1024} KiB")
    if text.lstrip().startswith("{") or text.strip() in _BOOLEANS:
        return schema_to_lark(text)
    return gbnf_to_lark(text, vocabulary)


class Composer:
    """Makes the grammars of one model's replies; on one thread.

    Attributes:
        objection: Why the calls of the last rule are free; empty if they are not.
    """

    def __init__(self, checker: Checker) -> None:
        """Start without knowledge of any tool.

        Args:
            checker: Tells whether a grammar compiles; has the model's vocabulary.
        """
        self._checker = checker
        self._vocabulary = checker.vocabulary
        self._parameters = PerSchema(Parameters.of)
        self._held: dict[ToolFormat, HeldTools] = {}
        self.objection = ""

    def composed(self, rule: ReplyRule) -> LarkGrammar | None:
        """Return a grammar that compiles; `None` if the reply is free.

        Raises:
            GrammarError: The rule is malformed or cannot be enforced.
        """
        self.objection = ""
        if rule.text:
            return self._answer(rule)
        calls = self._required if rule.must_call else self._possible
        return calls(rule)

    def _answer(self, rule: ReplyRule) -> LarkGrammar:
        """Return the grammar of the caller's text; with tools, calls are allowed in its place."""
        answer = translated(rule.text, self._vocabulary)
        if rule.triggers:
            return self._tried(after_trigger(answer, rule.triggers, self._vocabulary))
        if rule.tools:
            lead = rule.thought.answer if rule.thought else ""

            def whole(calls: LarkGrammar) -> LarkGrammar:
                ways = either(calls, answer, lead, self._vocabulary)
                return self._with_thought(ways, rule)

            try:
                if (found := self._calls(rule, _only(rule), whole)) is not None:
                    return found
            except GrammarError as error:
                # If the answer's grammar is at fault, it says so below.
                self.objection = str(error)
        return self._tried(self._with_thought(answer, rule, is_answer=True))

    def _required(self, rule: ReplyRule) -> LarkGrammar | None:
        return self._calls(rule, _only(rule), lambda calls: self._with_thought(calls, rule))

    def _possible(self, rule: ReplyRule) -> LarkGrammar | None:
        """Return the grammar of free text and valid calls, if a tool can be called."""
        among_text = CallRule(most=rule.most_calls)
        try:
            return self._calls(rule, among_text, lambda calls: self._with_thought(calls, rule))
        except GrammarError as error:
            self.objection = str(error)
            return None

    def _calls(
        self, rule: ReplyRule, calls: CallRule, whole: Callable[[LarkGrammar], LarkGrammar]
    ) -> LarkGrammar | None:
        """Return the grammar of a reply with calls; `None` for a format without one.

        Args:
            rule: Has the tools.
            calls: The number of calls.
            whole: Returns the grammar of the reply from that of the calls.

        Raises:
            GrammarError: No tool can be called, or the rest of the reply cannot be enforced.
        """
        held = self._held_tools(rule).offered(_tools(rule))
        while (found := held.grammar(calls)) is not None:
            try:
                grammar = self._tried(whole(found))
            except GrammarError:
                if not held.weaken():
                    raise
            else:
                held.tell()
                return grammar
        return None

    def _held_tools(self, rule: ReplyRule) -> HeldTools:
        form = tool_format(rule.format, rule.marks)
        if form not in self._held:
            self._held[form] = HeldTools(form, self._checker, self._parameters)
        return self._held[form]

    def _with_thought(
        self, grammar: LarkGrammar, rule: ReplyRule, *, is_answer: bool = False
    ) -> LarkGrammar:
        """Return a grammar that starts after the thought, if the model writes one."""
        if rule.thought is None:
            return grammar
        thought = rule.thought if is_answer else replace(rule.thought, answer="")
        return after_thought(grammar, thought, self._vocabulary)

    def _tried(self, grammar: LarkGrammar) -> LarkGrammar:
        self._checker.check(grammar)
        return grammar


def _only(rule: ReplyRule) -> CallRule:
    """Return the rule of a reply, or a part of one, that is nothing but calls."""
    return CallRule(least=1, most=rule.most_calls, has_text=False)


def _tools(rule: ReplyRule) -> Sequence[Tool]:
    return [
        Tool(name=each.name, schema={"function": {"parameters": json.loads(each.parameters)}})
        for each in rule.tools
    ]
