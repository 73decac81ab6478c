"""Walk a text through a compiled grammar, byte by byte."""

from backend.sampling.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from backend.sampling.grammar.composition import translated
from backend.sampling.grammar.tool_calls import call_grammar, writable
from backend.sampling.grammar.tool_parameters import Parameters


def compile_text(compiler: GrammarCompiler, text: str) -> CompiledGrammar:
    return compiler.compile(translated(text, compiler.vocabulary))


def walk(matcher: GrammarMatcher, text: str) -> int:
    """Return how many characters the matcher takes; its tokens are single bytes."""
    for count, character in enumerate(text):
        if not all(matcher.consume(byte) for byte in character.encode()):
            return count
    return len(text)


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Return whether the text is a whole reply."""
    matcher = compiled.matcher()
    return walk(matcher, text) == len(text) and matcher.is_accepting


def tool_grammar(tool_format, tools, rule, vocabulary):
    """Return the grammar of replies that call these tools; `None` for a format without one."""
    held = [writable(tool_format, Parameters.of(tool), vocabulary) for tool in tools]
    return call_grammar(tool_format, held, rule, vocabulary)
