"""The kernel ends a trial: in too much time or memory, or with too deep a stack."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend.sampling.grammar.compiler import tokenizer_of
from backend.sampling.grammar.vocabulary import Vocabulary

ROOT = Path(__file__).parents[3]
# A trial forks, which is for a process with one thread.
PROGRAM = """
import json, sys
from backend.errors import GrammarError
from backend.sampling.grammar.writer import LarkGrammar
from backend.sampling.grammar.compiler import Trial
from backend.sampling.grammar.compiler import tokenizer_of
from backend.sampling.grammar.vocabulary import Vocabulary

vocabulary = Vocabulary.spelling(bytes(range(128)), {"<call>": 500}, [501], 600)
limits, grammars = json.load(sys.stdin)
trial = Trial(vocabulary, **{"forks": True, **limits})
for start, *definitions in grammars:
    try:
        trial.check(LarkGrammar(start, tuple(definitions)))
        print("passed")
    except GrammarError as error:
        print(error.problem)
"""
FINE = ['"a" <[500]>']
DOUBLING = ["T0", *(f"T{n}: T{n + 1} T{n + 1}" for n in range(400)), 'T400: "a"']
DEEP = ["r0", *(f'r{n}: r{n + 1} "a"' for n in range(60_000)), 'r60000: "b"']
WIDE = [" | ".join(f"r{n}" for n in range(40_000)), *(f'r{n}: "{n}" r0' for n in range(40_000))]


def tried(grammars, *, check=True, **limits):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([limits, grammars]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )
    assert not done.stderr
    return done.stdout.splitlines() if check else done.returncode


def test_what_takes_too_long_is_ended_and_others_pass_after_it():
    begun = time.monotonic()
    assert tried([FINE, DOUBLING, FINE], cpu_s=0.3) == [
        "passed",
        "takes longer than 0.3 s to compile",
        "passed",
    ]
    assert time.monotonic() < begun + 60


def test_without_forks_it_ends_the_process():
    assert tried([FINE] * 3, forks=False) == ["passed"] * 3
    code = tried([FINE, DOUBLING], forks=False, cpu_s=0.3, check=False)
    assert code == -signal.SIGPROF


def test_what_ends_the_process_costs_only_itself():
    assert tried([DEEP, FINE], cpu_s=30.0) == ["is too large", "passed"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit memory")
def test_what_takes_too_much_memory_is_ended():
    assert tried([WIDE, FINE], cpu_s=60.0, memory_bytes=80 << 20) == ["is too large", "passed"]


def test_what_is_wrong_with_a_grammar_is_told():
    assert tried([["nobody"], ["T", "T: /a/ & /b/"]]) == [
        'unknown name: "nobody"',
        "no text can complete it",
    ]


def test_a_vocabulary_that_spells_keeps_the_ids_of_marks():
    spelling = Vocabulary.spelling(bytes(range(256)), {"<call>": 3}, [1, 700], 600)
    assert spelling.markers == {"<call>": 3}
    assert spelling.eos_ids == {1, 700}
    assert spelling.alphabet == bytes(range(256))
    assert (spelling.token_id(599), spelling.token_id(600)) == (599, None)
    assert tokenizer_of(spelling).vocab_size == 701
