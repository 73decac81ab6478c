"""Tokenizer files as checkpoints publish them: a class of transformers, and rules of their own."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|pad|>"
UNKNOWN, _UNKNOWN_WORD = "<unk>", "[UNK]"
SPECIAL = (PADDING, TURN_START, TURN_END)
_TEXT = (
    "Rules: 1. Only 12345 tokens, 2. No more than 2024 of them!\n\n  two   spaces\t- yaml: [1, 2]\n"
    "def walk(x_1):\n    return {'a': x**2}\n für Größe, naïve 日本語 中文 العربية 123 456 "
    "hello world "
)
TEXTS = (
    "Rules\n\n1. Only 12345",
    "",
    " ",
    "  two   spaces\t\ttabs\r\n \n\n\n",
    "3.14e-10 (½, ², Ⅳ, ١٢٣, १२३, 𝟏𝟐) 0x1F 1,000,000",
    "def f(x_1):\n    return {'a': [x**2]}  # don't, WE'LL\n\n\n\tpass",
    '- key: "value"\n  list:\n    - 1\n    - two: 22\n',
    "Größe naïve ﬁn Å e\u0301 ЁЛКА ΑΒΓ ΐ İstanbul ß",
    "עברית العربية ١٢ हिन्दी १२ বাংলা ไทย ລາວ 한국어 日本語とカナ12 中文34。",
    "🎉👩‍👩‍👧 🇩🇪 ❤️ 1️⃣",
    "\u00a0\u200b\u3000end... ?! <b>&amp;</b> <0x41> ▁ Ġ",
    f"{TURN_START}user\n1 22{TURN_END}\n {TURN_END}x{PADDING} ",
)


def _byte_level_bpe(size: int = 400) -> Tokenizer:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([_TEXT * 3], trainer)
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return fast


def _byte_level(*rules: pre_tokenizers.PreTokenizer, use_regex: bool = True) -> Tokenizer:
    fast = _byte_level_bpe()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*rules, last])
    return fast


def _digits() -> Tokenizer:
    return _byte_level(pre_tokenizers.Digits(individual_digits=True))


def _digits_in_threes() -> Tokenizer:
    pattern = Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+(?!\S)|\s+")
    fast = _byte_level(pre_tokenizers.Split(pattern, "isolated"), use_regex=False)
    fast.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            _begins_with(fast, TURN_START),
        ]
    )
    return fast


def _runs_of_spaces() -> Tokenizer:
    """As GPT-NeoX has it: a normaliser, and runs of spaces that are added tokens."""
    fast = _byte_level()
    fast.normalizer = normalizers.NFC()
    fast.add_tokens([AddedToken(" " * length, normalized=True) for length in range(2, 6)])
    fast.add_tokens([AddedToken("<fold>", normalized=True, lstrip=True, rstrip=True)])
    return fast


def _folded_width() -> Tokenizer:
    fast = _byte_level(pre_tokenizers.Punctuation("contiguous"))
    fast.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Replace("ß", "ss"),
            normalizers.Replace(Regex(" {3,}"), " "),
        ]
    )
    fast.post_processor = processors.TemplateProcessing(
        single=f"{TURN_START} {TURN_START} $A",
        special_tokens=[(TURN_START, fast.token_to_id(TURN_START))],
    )
    return fast


def _begins_with(fast: Tokenizer, token: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, fast.token_to_id(token))]
    )


def _sentencepiece_bpe(*, prepends: bool) -> Tokenizer:
    """As Llama 2 or Gemma have it: no pre-tokenizer, bytes of unknown characters."""
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([_TEXT], trainer)
    learnt = json.loads(trained.to_str())["model"]
    vocabulary = dict(learnt["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in learnt["merges"]]
    fast = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *steps] if prepends else [*steps]
    )
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(
        [*decoding, decoders.Strip(" ", 1, 0)] if prepends else [*decoding]
    )
    fast.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    fast.post_processor = _begins_with(fast, "<s>")
    return fast


def _unigram() -> Tokenizer:
    letters = sorted(set(_TEXT.replace(" ", "▁")))
    words = ["▁Rules", "▁Only", "12", "345", "▁2", "▁the", "▁two", "hello", "▁world", "ü", "日本語"]
    scored = [("<unk>", 0.0), *((letter, -9.0) for letter in letters if letter.strip())]
    scored += [(word, -3.0) for word in words if word not in letters]
    fast = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False))
    fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return fast


def _word_piece() -> Tokenizer:
    letters = sorted(set(_TEXT) - set(" \n\t"))
    pieces = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    pieces += ["Rules", "Only", "hello", "##les", "12", "##34"]
    fast = Tokenizer(
        models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token=_UNKNOWN_WORD)
    )
    # Neither lower case nor without accents, as the class would have it.
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return fast


# The class that tokenizer_config.json names, and the tokenizer of tokenizer.json.
KINDS: Mapping[str, tuple[str, Callable[[], Tokenizer]]] = {
    "single digits": ("GPT2Tokenizer", _digits),
    "single digits, fast": ("GPT2TokenizerFast", _digits),
    "digits in threes": ("Qwen2Tokenizer", _digits_in_threes),
    "runs of spaces": ("GPTNeoXTokenizer", _runs_of_spaces),
    "folded width": ("CodeGenTokenizer", _folded_width),
    "folded width, Cohere": ("CohereTokenizer", _folded_width),
    "sentencepiece": ("LlamaTokenizer", lambda: _sentencepiece_bpe(prepends=True)),
    "sentencepiece, bare": ("LlamaTokenizer", lambda: _sentencepiece_bpe(prepends=False)),
    "sentencepiece, Gemma": ("GemmaTokenizer", lambda: _sentencepiece_bpe(prepends=True)),
    "unigram": ("T5Tokenizer", _unigram),
    "unigram, XLM": ("XLMRobertaTokenizer", _unigram),
    "word piece": ("BertTokenizer", _word_piece),
    "no class": ("PreTrainedTokenizerFast", _digits),
    "an unknown class": ("NoSuchTokenizer", _digits),
}


def write(kind: str, directory: Path, **config: Any) -> Tokenizer:
    """Write both files of a kind to a checkpoint, and return the tokenizer of the first."""
    name, make = KINDS[kind]
    make().save(str(directory / "tokenizer.json"))
    named = {
        "tokenizer_class": name,
        "eos_token": TURN_END,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": True,
    }
    path = directory / "tokenizer_config.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {key: old[key] for key in ("chat_template",) if key in old}
    path.write_text(json.dumps(kept | named | config), encoding="utf-8")
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
