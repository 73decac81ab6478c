"""Grammars on the wire: what they were compiled from, to be compiled anew on every rank."""

from collections.abc import Sequence

from backend.core.model import ModelCard
from backend.engine.distributed.wire import Codec
from backend.errors import GrammarError
from backend.model.tokenizer import Tokenizer
from backend.sampling.grammar.compiled import CompiledGrammar, GrammarCompiler
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.vocabulary import Vocabulary

# The server has compiled it in time: a rank that gave up would draw other tokens.
_COMPILE_TIMEOUT_S = 60.0


def teach_sending(codec: Codec) -> None:
    """Let grammars be sent."""
    codec.teach(CompiledGrammar, _pack, _refuse)


def teach_receiving(codec: Codec, tokenizer: Tokenizer, card: ModelCard) -> None:
    """Let grammars be sent and received by a rank that has loaded its model."""
    if not card.eos_token_ids:
        return  # no grammar can be followed, so none comes
    compiler = GrammarCompiler(Vocabulary.of(tokenizer, card), timeout_s=_COMPILE_TIMEOUT_S)

    def unpack(parts: Sequence[str]) -> CompiledGrammar:
        start, *definitions = parts
        return compiler.compile(LarkGrammar(start, tuple(definitions)))

    codec.teach(CompiledGrammar, _pack, unpack)


def _pack(grammar: CompiledGrammar) -> Sequence[str]:
    return [grammar.source.start, *grammar.source.definitions]


def _refuse(_parts: object) -> CompiledGrammar:
    raise GrammarError("no model is loaded that could follow it")
