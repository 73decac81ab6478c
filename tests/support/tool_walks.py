"""Replies of a model that knows nothing but a grammar: random walks over its masks."""

from random import Random

import numpy as np

from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import GrammarWriter

END = 256
# Ends of strings, numbers and lists: without them, a walk would not come to an end.
_CLOSERS = (b'"', b"'", b"}", b"]", b")", b"</", b'"}', b'", "', b"\n</", b"']")
_WEIGHTS = (2, 3, 3)


class TinyVocabulary(Vocabulary):
    """Single bytes, an end, markers, and words that cross terminals."""

    def __init__(self, markers=(), words=(), ends=()):
        spelled = [word.encode() for word in (*markers, *words)]
        self.pieces = [*(bytes([byte]) for byte in range(256)), b"<eos>", *spelled, *_CLOSERS]
        ids = {marker: END + 1 + index for index, marker in enumerate(markers)}
        super().__init__(
            self.pieces,
            markers=ids,
            eos_ids=[END, *(ids[marker] for marker in ends)],
            size=len(self.pieces),
        )


def tokens_of(text, vocabulary):
    """Return the tokens of a text: markers, and single bytes."""
    tokens = []
    for piece in GrammarWriter("unused", vocabulary).pieces(text):
        tokens += [piece] if isinstance(piece, int) else piece.encode()
    return tokens


def is_whole(compiled, text, vocabulary):
    """Tell whether a text is a whole reply."""
    matcher = compiled.matcher()
    return all(map(matcher.consume, tokens_of(text, vocabulary))) and matcher.is_accepting


def is_next(matcher, tokens):
    """Tell whether all of these tokens may come next."""
    return matcher.count_allowed(tokens) == len(tokens)


def walk(
    compiled, vocabulary: TinyVocabulary, random: Random, *, prefix="", tails=(), max_steps=900
):
    """Return a random reply that begins with the prefix, or nothing if it did not end in time.

    Tokens are drawn from markers, from tokens that lead to an end, or from all that may come. Now
    and then a whole text of the tails is taken, which ends a value.
    """
    known = [tokens_of(tail, vocabulary) for tail in tails]
    matcher, text = compiled.matcher(), prefix.encode()
    assert all(map(matcher.consume, tokens_of(prefix, vocabulary)))
    row = np.zeros(vocabulary.mask_words, np.int32)
    for _ in range(max_steps):
        tail = random.choice(known or [[]])
        if tail and not random.randrange(8) and is_next(matcher, tail):
            assert all(map(matcher.consume, tail))
            text += b"".join(vocabulary.pieces[token] for token in tail)
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        marks = [token for token in allowed if END <= token <= END + len(vocabulary.markers)]
        ends = [token for token in allowed if token >= END or bytes([token]) in _CLOSERS]
        wanted = random.choices([marks, ends, allowed], _WEIGHTS)[0]
        token = random.choice(wanted or ends or allowed)
        assert matcher.consume(token), matcher.error
        if token in vocabulary.eos_ids:
            return text.decode()
        text += vocabulary.pieces[token]
    return None
