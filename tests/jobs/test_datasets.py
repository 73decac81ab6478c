import json
import os

import pytest

from backend.errors import InvalidRequestError
from backend.jobs.finetuning import read_dataset

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


TOOL = {"type": "function", "function": {"name": "clock_now"}}
SPEAKERS = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("a.jsonl", json.dumps(CHAT), CHAT),
        ("a.json", json.dumps([{"text": "one"}]), {"text": "one"}),
        ("a.csv", "prompt,completion\na,b\n", {"prompt": "a", "completion": "b"}),
        ("a.txt", "one\n\n\n", {"text": "one"}),
        (
            "a.jsonl",
            json.dumps({"instruction": "add", "input": "1 2", "output": "3"}),
            {"prompt": "add\n\n1 2", "completion": "3"},
        ),
        (
            "a.jsonl",
            json.dumps({"conversations": [{"from": "human", "value": "a"}]}),
            {"messages": [{"role": "user", "content": "a"}]},
        ),
        (
            "a.jsonl",
            json.dumps({"conversations": [{"from": name, "value": name} for name in SPEAKERS]}),
            {"messages": [{"role": SPEAKERS[name], "content": name} for name in SPEAKERS]},
        ),
        ("a.jsonl", json.dumps({**CHAT, "tools": [TOOL]}), {**CHAT, "tools": [TOOL]}),
        ("a.jsonl", json.dumps({**CHAT, "tools": None, "id": 7}), CHAT),
        ("a.jsonl", '\n \r\n{"text": "a"}\r\n\n', {"text": "a"}),
        ("a.jsonl", '{"text": "a\u2028b"}', {"text": "a\u2028b"}),
        ("a.csv", "instruction,input,output\nadd,,3\n", {"prompt": "add", "completion": "3"}),
        ("a.csv", 'text\n"one, ""two""\nthree"\n', {"text": 'one, "two"\nthree'}),
    ],
)
def test_every_form_is_read(tmp_path, name, text, row):
    assert read_dataset(written(tmp_path, name, text)).train == [row]


def test_every_tenth_row_is_held_out_unless_the_dataset_brings_its_own(tmp_path):
    rows = [json.dumps({"text": str(number)}) for number in range(20)]
    whole = read_dataset(written(tmp_path, "train.jsonl", "\n".join(rows)))
    assert [row["text"] for row in whole.validation] == ["9", "19"]
    assert len(whole.train) == 18
    written(tmp_path, "valid.jsonl", rows[0])
    parts = read_dataset(str(tmp_path))
    assert (len(parts.train), len(parts.validation)) == (20, 1)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", "", "a.jsonl has no rows"),
        ("a.jsonl", "{", "line 1 is not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n{"x": 1}', "a.jsonl, row 2 has neither messages"),
        ("a.jsonl", '{"messages": ["a"]}', "a.jsonl, row 1 has neither messages"),
        ("a.jsonl", f'{{"text": "a"}}\n{json.dumps(CHAT)}', "a.jsonl has rows of several forms"),
        ("a.jsonl", '{"messages": []}', "a.jsonl, row 1 has neither messages"),
        ("a.jsonl", '{"conversations": [{"from": "cat", "value": "a"}]}', "row 1 has neither"),
        ("a.jsonl", '{"conversations": [{"from": ["human"], "value": "a"}]}', "row 1 has neither"),
        ("a.jsonl", '{"prompt": "a", "completion": 1}', "a.jsonl, row 1 has neither messages"),
        ("a.jsonl", '{"text": " "}', "a.jsonl, row 1 has neither messages"),
        ("a.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        ("a.json", "[1]", "a.json, row 1 has neither messages"),
        ("a.csv", "", "a.csv has no rows"),
        ("a.csv", f"text\n{'a' * 200_000}\n", "the table is malformed: field larger than"),
        ("a.txt", "\n\n \n", "a.txt has no rows"),
        ("a.json", "{}", "the file is not a JSON array"),
        ("a.xml", "", "a.xml has an unsupported format"),
    ],
)
def test_a_malformed_file_is_refused_by_the_place(tmp_path, name, text, problem):
    with pytest.raises(InvalidRequestError, match="dataset_source: ") as caught:
        read_dataset(written(tmp_path, name, text))
    assert problem in str(caught.value)


def test_a_missing_dataset_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="there is no file or directory"):
        read_dataset(str(tmp_path / "none"))
    with pytest.raises(InvalidRequestError, match=r"holds no train\.jsonl"):
        read_dataset(str(tmp_path))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match=r"a\.txt: 'utf-8' codec can't decode"):
        read_dataset(str(path))


@pytest.mark.parametrize("name", ["valid.csv", "validation.jsonl", "test.txt"])
def test_a_part_for_validation_may_be_of_another_kind_of_file(tmp_path, name):
    written(tmp_path, "train.jsonl", '{"text": "a"}')
    row = '{"text": "b"}' if name.endswith("jsonl") else "text\nb" if "csv" in name else "b"
    written(tmp_path, name, row)
    dataset = read_dataset(str(tmp_path))
    assert (dataset.train, dataset.validation) == ([{"text": "a"}], [{"text": "b"}])


@pytest.mark.timeout(20)
def test_a_pipe_is_no_dataset(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(InvalidRequestError, match="there is no file or directory"):
        read_dataset(str(tmp_path / "train.jsonl"))
    with pytest.raises(InvalidRequestError, match=r"holds no train\.jsonl"):
        read_dataset(str(tmp_path))
