"""Small tokenizers of both common kinds, with the special tokens that a template writes."""

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from backend.model.text.tokenizer import Tokenizer

_TRAINING_TEXT = "hello hello world, you are helpful; is it raining\n\nin the town? it is\n"


def byte_level(special: Sequence[str]) -> Tokenizer:
    """Return byte-level BPE: neighbouring line feeds are one token."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([_TRAINING_TEXT], trainer)
    return _with_special(fast, special)


def sentencepiece(special: Sequence[str]) -> Tokenizer:
    """Return a unigram model that puts a space before each text between special tokens."""
    words = ["▁", "▁▁", "▁hello", "▁world", "▁Is", "▁it", "▁rain", "ing", "lo", "he"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(token, -10.0) for token in ["<unk>", *byte_tokens]]
    scores += [(word, -1.0) for word in words]
    fast = FastTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_special(fast, special)


def _with_special(fast: FastTokenizer, special: Sequence[str]) -> Tokenizer:
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
