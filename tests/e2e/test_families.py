"""A twentieth of all families, another one every day: `make sweep` tries them all."""

import datetime

import pytest
from grpc import StatusCode
from serving import code_of, served

from scripts.sweep.__main__ import merge
from scripts.sweep.families import PARTS, all_families, due, from_json, to_json
from scripts.sweep.table import HEADER, Row, page, rows_of
from scripts.sweep.text_check import check_text
from scripts.sweep.verdict import TIE, Expected, Outcome, Verdict, worst
from scripts.sweep.vision_check import check_vision

# Even their text reaches them in ways that this engine does not have.
REFUSED = {"florence2", "mllama", "paligemma"}
# Those take minutes, end their process, or need a hub.
SLOW_OR_NOT_AT_ALL = 7
RIGHT = {Outcome.EQUAL, Outcome.TIE, Outcome.REFUSED}


@pytest.mark.mlx
@pytest.mark.filterwarnings("default")  # The libraries' own code warns.
@pytest.mark.parametrize(
    "family", due(datetime.datetime.now(datetime.UTC).date()), ids=lambda family: family.name
)
@pytest.mark.one_in(6)
async def test_a_family_replies_as_its_library_does(family, tmp_path):
    try:
        directory = family.build(tmp_path)
        expected = family.reference(directory)
    # Upstream's own models raise anything, and some exit where a package is missing.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        pytest.skip(f"{family.library} by itself: {error!r:.200}")
    async with served() as backend:
        if family.name in REFUSED:
            code, details = await code_of(backend.load(directory))
            assert code is StatusCode.INVALID_ARGUMENT
            assert "cannot serve" in details
            return
        adapters = [str(path) for path in family.adapters(directory)]
        options = {"LoraAdapters": adapters, "TrustRemoteCode": family.has_code}
        assert (await backend.load(directory, **options)).success
        check = check_vision if family.sees else check_text
        found = await check(backend.stub, expected)
    for verdict in found if family.sees else [found]:
        assert verdict.outcome in RIGHT, verdict


def test_every_family_is_due_in_a_month():
    start = datetime.date(2026, 1, 1)
    days = [due(start + datetime.timedelta(n)) for n in range(PARTS)]
    seen = [family for day in days for family in day]
    assert len(seen) == len(set(seen)) >= len(all_families()) - SLOW_OR_NOT_AT_ALL
    assert max(map(len, days)) - min(map(len, days)) <= 1


def test_the_first_difference_is_judged_by_what_the_library_itself_preferred():
    expected = Expected([1, 2, 3], [0.5, TIE / 2, 0.5])
    assert expected.compared("x", [1, 2, 3]).outcome is Outcome.EQUAL
    assert expected.compared("x", [1, 9, 3]).outcome is Outcome.TIE
    assert expected.compared("x", [1, 2, 9]).outcome is Outcome.WRONG
    assert expected.compared("x", [1, 2]).outcome is Outcome.WRONG
    assert expected.compared("x", []).outcome is Outcome.WRONG


def test_a_reply_is_like_another_that_is_as_sure():
    reply = Expected([1, 2], [0.5, 0.25])
    assert reply.is_like(Expected([1, 2], [0.5, 0.25 + TIE / 2]))
    assert not reply.is_like(Expected([1, 2], [0.5, 0.25 + 2 * TIE]))
    assert not reply.is_like(Expected([1, 3], [0.5, 0.25]))


def test_the_worst_verdict_counts():
    verdicts = [Verdict(outcome) for outcome in (Outcome.TIE, Outcome.WRONG, Outcome.EQUAL)]
    assert worst(verdicts).outcome is Outcome.WRONG


def test_replies_survive_their_way_from_another_process():
    replies = {"a": Expected([1, 2], [0.25, 3.0]), "b": Expected([], [])}
    assert from_json(to_json(replies)) == replies


def test_the_page_has_a_line_for_each_family_and_counts_them():
    rows = [Row("llama", "mlx-lm", "equal", batched="yes"), Row("x", "mlx-vlm", "wrong: a | b")]
    text = page(rows, ["y"])
    assert text.startswith(HEADER)
    assert "| llama | mlx-lm | equal |  |  |  | yes |  |" in text
    assert "wrong: a \\| b" in text
    assert "1 equal, 1 wrong" in text
    assert "\n\n1 other model types" in text


def test_quantised_and_adapted_models_have_a_table_of_their_own():
    rows = [Row("llama", "mlx-lm", "equal"), Row("llama_4bit", "mlx-lm", "equal", batched="yes")]
    text = page(rows, [])
    families, variants = text.split("## Quantised and adapted")
    assert "| llama |" in families
    assert "1 families with" in families
    assert "| llama_4bit | mlx-lm | equal |  |  |  | yes |  |" in variants
    assert "1 models; text: 1 equal." in variants
    assert rows_of(text) == rows


def test_a_run_of_some_families_leaves_the_rows_of_others_on_the_page():
    told = [Row("llama", "mlx-lm", "wrong: a | b"), Row("gemma2", "mlx-lm", "equal")]
    gone = Row("no such family", "mlx-lm", "equal")
    new = Row("llama", "mlx-lm", "equal", batched="no: x | y")
    shown = page([*told, gone], [])
    assert sorted(rows_of(shown), key=str) == sorted([*told, gone], key=str)
    assert sorted(merge(shown, [new], all_families()), key=str) == [told[1], new]
