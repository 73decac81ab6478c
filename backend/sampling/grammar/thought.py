"""Grammars that apply only after a thought, or from a trigger on."""

from collections.abc import Sequence
from itertools import product

from backend.core.guide import Thought
from backend.sampling.grammar.free_text import FreeText, other_token
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain, escaped

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
    """Return the grammar of free text up to a trigger, where the given grammar takes over.

    A spelled-out trigger cannot be abandoned at its last character. The grammar must read it as
    one terminal, as all do except GBNF that had to be split into characters.

    Args:
        grammar: The grammar, which begins with the triggers.
        triggers: At least one text.
        vocabulary: Tells which of them are tokens.
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
