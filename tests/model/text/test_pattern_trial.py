"""Patterns of a tokenizer that backtrack: refused, or kept for a process that can be ended."""

import json
from contextlib import suppress

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from backend.errors import LoadError
from backend.model.text.pattern_trial import direct_chars, may_explode
from backend.model.text.reading import MAX_DIRECT_CHARS

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = [
    (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+",
    " {3,}",
]
ENDLESS = [
    r"(a+)+$",
    r"(?:q|q)+z",
    r"(\w+\s?)*$",
    r"foo(x+x+)+y",
    r"(?:a\w+)+;",
    r"(?=(\p{N}+)+;)1",
]
GROWING = [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"q*q*q*z"]
SEPARATED = [r" ?[^\s\p{L}]+(?: [^\s\p{L}]+)*", r"(?:_\p{L}{1,3}[a-z]*)+", r"(-\d+)*"]
AMBIGUOUS = [
    r"(?:\p{L}+ )*;",
    r"(?>\s|[a-z]){2,}",
    r"(a)\1",
    r"(?<r>a\g<r>?b)",
    r"((a?){3}b)+",
    r"(?: [^x]+)*;",
]


def directory_of(tmp_path, pattern, name="pre_tokenizer"):
    fast = FastTokenizer(models.BPE())
    if name == "pre_tokenizer":
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    else:
        fast.normalizer = normalizers.Replace(Regex(pattern), "x")
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_read_long_texts_here(tmp_path, pattern):
    assert direct_chars(directory_of(tmp_path, pattern)) == MAX_DIRECT_CHARS


@pytest.mark.parametrize("name", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_does_not_end_is_refused_by_name(tmp_path, pattern, name):
    with pytest.raises(LoadError) as caught:
        direct_chars(directory_of(tmp_path, pattern, name))
    assert str(caught.value) == (
        f"{tmp_path}/tokenizer.json: its pattern {pattern!r} is malformed, or takes too long "
        "for a short text"
    )


@pytest.mark.slow
@pytest.mark.parametrize("pattern", GROWING)
@pytest.mark.one_in(2)
def test_a_pattern_whose_time_grows_reads_short_texts_here(tmp_path, pattern):
    assert 0 < direct_chars(directory_of(tmp_path, pattern)) < MAX_DIRECT_CHARS


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_a_pattern_of_which_nothing_is_known_reads_nothing_here(tmp_path, pattern):
    assert direct_chars(directory_of(tmp_path, pattern)) == 0


@pytest.mark.parametrize("pattern", [*ENDLESS, *AMBIGUOUS])
def test_endless_patterns_look_so(pattern):
    assert may_explode(pattern)


@pytest.mark.parametrize(
    "pattern",
    [*PUBLISHED, *GROWING, r"(?:\d{3})*", r"[(+|]*", r"\(a+\)+", r"(?:a+b*)?", "(a+", *SEPARATED],
)
def test_simple_patterns_do_not(pattern):
    assert not may_explode(pattern)


def test_a_key_in_escapes_is_one(tmp_path):
    path = directory_of(tmp_path, ENDLESS[0]) / "tokenizer.json"
    path.write_text(path.read_text().replace('"Regex"', '"\\u0052egex"'))
    assert json.loads(path.read_text())["pre_tokenizer"]["pattern"] == {"Regex": ENDLESS[0]}
    with pytest.raises(LoadError, match="takes too long"):
        direct_chars(tmp_path)


def test_texts_are_read_apart_if_a_pattern_leaves_no_time_for_the_trial_of_others(tmp_path):
    fast = FastTokenizer(models.BPE())
    slow, untried = r"\s*\s*\s*\s*x|a", r"(a+)+$|\s+"
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in (slow, untried)]
    fast.pre_tokenizer = pre_tokenizers.Sequence(splits)
    fast.save(str(tmp_path / "tokenizer.json"))
    # A fast machine comes to the other one, and refuses it.
    with suppress(LoadError):
        assert direct_chars(tmp_path) == 0


def test_a_malformed_pattern_is_refused(tmp_path):
    path = directory_of(tmp_path, "XYZ") / "tokenizer.json"
    path.write_text(path.read_text().replace("XYZ", "(XYZ"))
    with pytest.raises(LoadError, match=r"its pattern '\(XYZ' is malformed"):
        direct_chars(tmp_path)


def test_without_patterns_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("backend.model.text.pattern_trial.start_process", None)
    assert direct_chars(tmp_path) == MAX_DIRECT_CHARS
    FastTokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert direct_chars(tmp_path) == MAX_DIRECT_CHARS
