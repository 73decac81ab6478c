"""Trains the demo model's tokenizer: byte-level BPE that never glues a space to a name."""

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)

# Capitalised words and pairs of digits are separate: they have the same tokens in a question
# as in JSON. Punctuation runs over single spaces, so `": "` is one piece.
_PIECES = (
    r"\p{Lu}+[\p{Ll}\p{M}]*"
    r"| ?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}][\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*"
    r"|\s*[\r\n]+|\s+"
)
_DIGIT_PAIRS = [f"{number:02}" for number in range(100)] * 1000


def _bpe(corpus: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    markers = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKERS))))
    parts = (part for text in corpus for part in markers.split(text))
    tokenizer.train_from_iterator(chain(_DIGIT_PAIRS, parts), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def untrained_tokenizer(template: Path) -> PreTrainedTokenizerFast:
    """Make a tokenizer that can only render the chat template."""
    text = template.read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=text)


def train_tokenizer(corpus: Iterable[str], template: Path) -> PreTrainedTokenizerFast:
    """Train on `corpus` and attach the chat template.

    Raises:
        ValueError: The corpus is too small to fill the vocabulary.
    """
    bpe = _bpe(corpus)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        msg = f"vocabulary has {bpe.get_vocab_size()} tokens, not {VOCAB_SIZE}"
        raise ValueError(msg)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text(encoding="utf-8"),
    )
