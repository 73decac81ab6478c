"""Walk a text through a compiled grammar, byte by byte."""

from backend.sampling.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from backend.sampling.grammar.composition import translated


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
