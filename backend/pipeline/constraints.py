"""Constraints on a reply: a grammar, a JSON schema, tool calls, a thinking budget.

The caller's grammar wins; without one the tool choice decides. The engine makes grammars of these
rules.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.core.guide import Guide, OfferedTool, ReplyRule, Thought, ThoughtBudget
from backend.core.prompt import ToolMode
from backend.errors import GrammarError, InvalidRequestError
from backend.output.reply_format import opens_after_thought, opens_in_reasoning, thought_texts
from backend.output.tool_names import can_carry
from backend.sampling.grammar.thought_marks import ThoughtMarks
from backend.sampling.grammar.tool_parameters import MAX_PARALLEL_CALLS, Parameters, PerSchema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from backend.core.guide import ThoughtTexts
    from backend.core.model import ModelCard
    from backend.core.prompt import JsonValue, Prompt, Tool, ToolSchemas
    from backend.core.request import GenerationCall
    from backend.model.text.tokenizer import Tokenizer
    from backend.output.reply_format import OutputFormat

log = logging.getLogger(__name__)


class Constraints:
    """Knows the possible constraints of one model's replies; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard, output_format: OutputFormat) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._format = output_format
        self._parameters = PerSchema(Parameters.of)

    def schemas(self, tools: Iterable[Tool]) -> ToolSchemas:
        """Return the schemas of tools by name, for the readers of their arguments.

        They have the meaning of the grammar: types are spelled as in JSON, and there is no `allOf`.
        """
        return {tool.name: self._schema(tool) for tool in tools}

    def _schema(self, tool: Tool) -> Mapping[str, JsonValue]:
        try:
            return self._parameters.of(tool).schema
        except GrammarError:
            return tool.parameters

    def require_callable(self, call: GenerationCall) -> None:
        """Refuse a tool whose name a call cannot state.

        Raises:
            InvalidRequestError: The format cannot tell the name from its own syntax.
        """
        tools = call.shown_tools if call.offers_calls else ()
        for tool in tools:
            if not can_carry(self._format.tools, tool.name):
                problem = "this model's format of calls cannot carry the name"
                raise InvalidRequestError(
                    "Tools", f"{problem} {tool.name!r} ({self._format.tools.name})"
                )

    def guide(self, call: GenerationCall, prompt: Prompt) -> Guide | None:
        """Return the guide of the reply, or `None` if it is free.

        Raises:
            GrammarError: A requirement cannot be enforced for this model.
        """
        rule, budget = self._rule(call, prompt), self._budget(call, prompt)
        return Guide(rule=rule, budget=budget, is_told=call.debug) if rule or budget else None

    def _rule(self, call: GenerationCall, prompt: Prompt) -> ReplyRule | None:
        """Return the rule of the reply, or `None` without one."""
        if not (call.is_ruled or call.shown_tools):
            return None
        if not self._card.eos_token_ids and (call.is_ruled or call.demands_calls):
            raise GrammarError("no token ends a reply of this model")
        rule = ReplyRule(
            most_calls=MAX_PARALLEL_CALLS if call.parallel_tool_calls else 1,
            format=self._format.tools.name,
            marks=self._format.tools.own_marks,
            thought=_thought(prompt, self._format),
        )
        if call.is_ruled:
            tools = call.tools if call.offers_calls else ()
            triggers = tuple(self._card.grammar_triggers)
            return replace(rule, text=call.grammar, triggers=triggers, tools=_offered(tools))
        if call.demands_calls:
            return self._required(call, rule)
        return replace(rule, tools=_offered(call.tools)) if self._holds_calls(call) else None

    def _holds_calls(self, call: GenerationCall) -> bool:
        """Tell whether calls of the model's own choice are held to their schemas.

        Without a token that announces a call, every step of the text would have to watch for the
        first letters of one. And a grammar would end a reply that must not end of its own accord.
        """
        is_announced = self._format.tools.opener in self._tokenizer.added_texts.values()
        may_end = bool(self._card.eos_token_ids) and not call.ignore_eos
        return is_announced and may_end and call.constrains_calls

    def _required(self, call: GenerationCall, rule: ReplyRule) -> ReplyRule:
        choice, tools = call.tool_choice, self._format.tools
        if not tools.frames:
            raise GrammarError(
                f"tool_choice {choice.mode.value!r} cannot be enforced for this model: its "
                f"tool-call format ({tools.name}) has no grammar"
            )
        if choice.mode is ToolMode.NAMED:
            named = [tool for tool in call.tools if tool.name == choice.name]
            return replace(rule, tools=_offered(named), must_call=True, most_calls=1)
        return replace(rule, tools=_offered(call.tools), must_call=True)

    def _budget(self, call: GenerationCall, prompt: Prompt) -> ThoughtBudget | None:
        if call.thinking_budget is None or (texts := self._thought_texts(call)) is None:
            return None
        has_grammar = bool(call.grammar) and not self._card.grammar_triggers
        return ThoughtBudget(
            tokens=call.thinking_budget,
            texts=texts,
            is_open=opens_in_reasoning(self._format, prompt.tail),
            is_first=has_grammar or bool(call.shown_tools and call.demands_calls),
        )

    def _thought_texts(self, call: GenerationCall) -> ThoughtTexts | None:
        """Return the marks of thoughts; `None` without any or if their end would end the reply."""
        texts = thought_texts(self._format, has_tools=bool(call.shown_tools))
        if texts is None:
            text = "request id=%s: thinking_budget is ignored: no format of thoughts is known"
            log.info(text, call.request_id)
            return None
        end = ThoughtMarks(texts, self._tokenizer, self._card.vocab_size).end
        if end and self._card.eos_token_ids.isdisjoint(end):
            return texts
        text = "request id=%s: thinking_budget is ignored: %r cannot be written, or ends the reply"
        log.warning(text, call.request_id, texts.ends[0])
        return None


def _offered(tools: Sequence[Tool]) -> tuple[OfferedTool, ...]:
    return tuple(OfferedTool(tool.name, json.dumps(tool.parameters)) for tool in tools)


def _thought(prompt: Prompt, output_format: OutputFormat) -> Thought | None:
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
        answer=reasoning.answer,
    )
