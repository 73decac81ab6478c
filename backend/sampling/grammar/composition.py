"""From the rule of a reply to its grammar: the text translated, the calls written, and all tried.

The caller's text wins; without one the tools decide. May take seconds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from backend.config import MAX_GRAMMAR_BYTES
from backend.core.guide import ReplyRule, Thought
from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.formats.format import ToolFormat
from backend.formats.registry import tool_format
from backend.sampling.grammar.compiler import Checker
from backend.sampling.grammar.gbnf import gbnf_to_lark
from backend.sampling.grammar.schema import placed, require_texts, schema_to_lark
from backend.sampling.grammar.tool_calls import HeldTools
from backend.sampling.grammar.tool_parameters import CallRule, Parameters, PerSchema
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    FreeText,
    GrammarWriter,
    LarkGrammar,
    alternatives,
    chain,
    either,
    escaped,
    other_token,
)

_SPACE = r"/\n{1,2}/"


def after_thought(grammar: LarkGrammar, thought: Thought, vocabulary: Vocabulary) -> LarkGrammar:
    """Return the grammar of replies that may start with a thought, or must finish an open one."""
    writer = GrammarWriter("thought", vocabulary)
    after = writer.text(thought.bridge) or f"{writer.terminal(_SPACE)}?"
    inside = FreeText(writer, (*thought.ends, *thought.forbidden))
    if thought.is_open:
        begin = chain(alternatives(map(inside.before, thought.ends)), after)
    elif thought.starts:
        marks = product(thought.starts, thought.ends)
        thoughts = [_whole(start, end, inside, writer) for start, end in marks]
        begin = f"({chain(alternatives(thoughts), after)})?"
    else:
        begin = ""
    body = writer.rule(grammar.start)
    return writer.grammar(chain(begin, writer.text(thought.answer), body), grammar.definitions)


def _whole(start: str, end: str, inside: FreeText, writer: GrammarWriter) -> str:
    """Return the expression of a thought from its start to its end.

    If both are spelled out it is a single terminal, because the text after it could begin with
    a thought as well.
    """
    pieces = *writer.pieces(start), *writer.pieces(end)
    if any(isinstance(piece, int) for piece in pieces):
        return chain(writer.text(start), inside.before(end))
    spelled = f"/{escaped(start)}/ {inside.characters}? /{escaped(end)}/"
    return writer.lazy_rule(writer.terminal(spelled))


def after_trigger(
    grammar: LarkGrammar, triggers: Sequence[str], vocabulary: Vocabulary
) -> LarkGrammar:
    """Return the grammar of free text up to a trigger, with which the given grammar begins.

    A spelled-out trigger cannot be abandoned at its last character. The grammar must read it as one
    terminal, as all do except GBNF that had to be split into characters.
    """
    writer = GrammarWriter("lazy", vocabulary)
    words = [trigger for trigger in triggers if writer.pieces(trigger) == (trigger,)]
    free = _without(words, triggers, writer) if words else FreeText(writer, triggers).alone
    return writer.grammar(f"{free} {writer.rule(grammar.start)}?", grammar.definitions)


def _without(words: Sequence[str], triggers: Sequence[str], writer: GrammarWriter) -> str:
    """Return the expression of text without these words, split wherever one may begin."""
    firsts = "".join(escaped(word[0]) for word in words)
    stems = {word[:length] for word in words for length in range(1, len(word) - 1)}
    almost = (*(word[:-1] for word in words if len(word) > 1), *words)
    false_starts = sorted(stem for stem in stems if not stem.startswith(almost))
    parts = [writer.terminal(f"/[^{firsts}]+/"), other_token(triggers, writer)]
    if false_starts:
        parts.append(writer.terminal(f"/{'|'.join(map(escaped, false_starts))}/"))
    return f"{alternatives(filter(None, parts))}*"


# A schema too, and not a rule of a grammar.
_BOOLEANS = ("true", "false")


def translated(text: str, vocabulary: Vocabulary) -> LarkGrammar:
    """Translate GBNF or a JSON schema.

    Raises:
        GrammarError: The text is malformed, too large, or cannot be enforced.
    """
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"is larger than {MAX_GRAMMAR_BYTES // 1024} KiB")
    return schema_to_lark(text) if _is_schema(text) else gbnf_to_lark(text, vocabulary)


def _is_schema(text: str) -> bool:
    return text.lstrip().startswith("{") or text.strip() in _BOOLEANS


class Composer:
    """Makes the grammars of one model's replies; on one thread.

    Attributes:
        objection: Why the calls of the last rule are free; empty if they are not.
    """

    def __init__(self, checker: Checker) -> None:
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
        try:
            if _is_schema(rule.text):
                require_texts(rule.text, self._checker.check)
            return self._tried(self._with_thought(answer, rule, is_answer=True))
        except GrammarError as error:
            if not _is_schema(rule.text) or error.problem.startswith("#"):
                raise
            raise placed(rule.text, error, self._checker.check) from error

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
                held.log_notes()
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
