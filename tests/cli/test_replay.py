import json

import pytest
from click.testing import CliRunner

from backend.cli.app import main

GOOD = {"id": 1, "format": "harmony", "chunks": "<|channel|>final<|message|>Done."}
LONG = {"id": 3, "format": "none", "chunks": "0123456789" * 5}
SPLIT = {"id": 2, "format": "none", "chunks": ["ab", "cdé"]}


def run(*arguments, lines=(GOOD, SPLIT)):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    result = CliRunner().invoke(main, ["replay", *arguments], input=text)
    return result, [json.loads(line) for line in result.stdout.splitlines()]


def contents(report):
    return [delta["content"] for delta in report["deltas"]]


def test_a_report_is_written_for_every_recording():
    result, reports = run()
    assert result.exit_code == 0
    assert result.stderr == ""
    assert [(report["id"], report["content"]) for report in reports] == [(1, "Done."), (2, "abcdé")]
    assert contents(reports[1]) == ["ab", "cdé"]


def test_recordings_are_read_from_a_file(tmp_path):
    path = tmp_path / "recordings.jsonl"
    path.write_text(json.dumps(SPLIT) + "\n\n", encoding="utf-8")
    _, [report] = run(str(path), lines=[])
    assert report["content"] == "abcdé"


@pytest.mark.parametrize(
    ("cut", "expected"), [("1", ["a", "b", "c", "d", "é"]), ("4", ["abcd", "é"])]
)
def test_the_text_can_be_cut_anew(cut, expected):
    _, reports = run("--cut", cut)
    assert contents(reports[1]) == expected


def test_a_random_cut_is_the_same_for_the_same_seed():
    first, again, other = (contents(run("--cut", f"random:{n}", lines=[LONG])[1][0]) for n in "112")
    assert first == again != other
    assert "".join(first) == "".join(other) == LONG["chunks"]


@pytest.mark.parametrize("cut", ["0", "-1", "x", "random"])
def test_a_cut_that_is_none_is_refused(cut):
    result, reports = run("--cut", cut)
    assert result.exit_code == 2
    assert "neither a length nor random:SEED" in result.stderr
    assert not reports


def test_a_bad_line_is_named_and_the_others_are_played():
    result, reports = run(lines=[GOOD, "{", {"id": 3, "format": "klingon"}, SPLIT])
    assert result.exit_code == 1
    assert [report["id"] for report in reports] == [1, 2]
    first, second = result.stderr.splitlines()
    assert first.startswith("line 2: no JSON")
    assert second.startswith("line 3: \"format\" is 'klingon'")
    assert "hermes_json" in second
