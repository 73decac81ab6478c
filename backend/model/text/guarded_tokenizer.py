"""A tokenizer that reads marks with guards as plain text."""

from collections.abc import Sequence

from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer


def guarded(tokenizer: FastTokenizer, guard: str) -> FastTokenizer:
    """Return a tokenizer with the same tokens that removes guards; it shares the model's memory.

    The guard is removed before a text is split into words, so that its surroundings have their
    usual tokens. A model that spells marks itself, as unigram ones may, gets two words.

    Args:
        tokenizer: Stays as it is.
        guard: The number in marks.
    """
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    reader = _copy(tokenizer, added)
    own = [tokenizer.normalizer] if tokenizer.normalizer else []
    reader.normalizer = normalizers.Sequence([normalizers.Replace(guard, ""), *own])
    if not any(token.special and _spells(reader, token.content, guard) for token in added):
        return reader
    splitting = _copy(tokenizer, added)
    if tokenizer.normalizer:
        splitting.normalizer = tokenizer.normalizer
    rules = [tokenizer.pre_tokenizer] if tokenizer.pre_tokenizer else []
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(guard, "removed"), *rules]
    )
    return splitting


def _copy(tokenizer: FastTokenizer, added: Sequence[AddedToken]) -> FastTokenizer:
    copy = FastTokenizer(tokenizer.model)
    if tokenizer.pre_tokenizer:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.post_processor:
        copy.post_processor = tokenizer.post_processor
    # In what the normaliser returns there is no guard any more.
    copy.add_tokens([_raw(token) for token in added])
    return copy


def _raw(token: AddedToken) -> AddedToken:
    if not token.normalized or token.content.isspace():
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _spells(reader: FastTokenizer, mark: str, guard: str) -> bool:
    ids = reader.encode(mark[:1] + guard + mark[1:], add_special_tokens=False).ids
    return reader.token_to_id(mark) in ids
