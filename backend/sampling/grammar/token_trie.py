"""A vocabulary in llguidance's form."""

from llguidance import LLTokenizer, TokenizerWrapper

from backend.sampling.grammar.vocabulary import Vocabulary


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Return the tokenizer for llguidance, the same each time.

    Takes one to two seconds for 150,000 tokens, the first time.
    """
    return vocabulary.once(LLTokenizer, lambda: _made(vocabulary))


def _made(vocabulary: Vocabulary) -> LLTokenizer:
    eos_ids = sorted(vocabulary.eos_ids)
    special_ids = sorted({*vocabulary.markers.values(), *eos_ids})
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary.pieces, special_ids, eos_ids[0])),
        n_vocab=len(vocabulary.pieces),
        eos_token=eos_ids,
    )


class _Tokens:
    """Implements the tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, _text: bytes | str) -> list[int]:
        """Tokenize nothing: llguidance needs it only for forced text, which no grammar here has."""
        return []
