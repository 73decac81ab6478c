import pytest

from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.vocabulary import Vocabulary

END, TOOL_CALL = 256, 257


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Tokens that are single bytes, an end, and a marker."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"<eos>", b"<tool_call>"]
    return Vocabulary(pieces, markers={"<tool_call>": TOOL_CALL}, eos_ids=[END], size=258)


@pytest.fixture(scope="session")
def compiler(vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)
