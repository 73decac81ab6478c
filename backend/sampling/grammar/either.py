"""The grammar of replies that are either tool calls or an answer."""

from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain


def either(
    calls: LarkGrammar, answer: LarkGrammar, lead: str, vocabulary: Vocabulary
) -> LarkGrammar:
    """Return the grammar of either; only an answer follows the answer's own grammar.

    Args:
        calls: At least one call, and nothing else.
        answer: The answer.
        lead: The text that a model writes before an answer; empty for none.
        vocabulary: Tells which texts are tokens.
    """
    writer = GrammarWriter("either", vocabulary)
    ways = writer.rule(calls.start), chain(writer.text(lead), writer.rule(answer.start))
    return writer.grammar(alternatives(ways), (*calls.definitions, *answer.definitions))
