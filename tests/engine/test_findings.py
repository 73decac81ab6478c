"""Findings of trials are kept for the next load, and a file is never trusted blindly."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from backend.core.prompt import MediaKind
from backend.engine import findings as findings_store
from backend.engine.findings import (
    MAX_BEGUN,
    MAX_MODELS,
    Findings,
    FindingsStore,
    MediaFindings,
    Notebook,
    Page,
    decoded,
    encoded,
)
from backend.engine.plan import Batching, BatchPlan

FOUND = Findings(
    is_sound=True,
    group_sizes=(64, None),
    reads_text=True,
    media=MediaFindings({MediaKind.AUDIO: "cracks"}, {}),
    plan=BatchPlan(Batching.LATENT, 37.5, packs=True, pass_seconds={1: 0.25, 8: 0.5}),
    knows_drafts=True,
    remarks=((logging.INFO, "batches are padded"),),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "caches" / "findings.json"


def written(path: Path, **findings: Findings) -> FindingsStore:
    store = FindingsStore(path)
    for key, each in findings.items():
        store.note(key, each)
    store.write()
    return store


def test_the_next_server_knows_what_this_one_found(path):
    written(path, a=FOUND)
    assert FindingsStore(path).known() == {"a": FOUND}
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_file_they_are_kept_in_memory():
    store = FindingsStore()
    store.note("a", FOUND)
    store.write()
    assert store.known() == {"a": FOUND}


def test_servers_add_to_one_file(path):
    one, other = FindingsStore(path), FindingsStore(path)
    assert one.known() == other.known() == {}
    one.note("a", FOUND)
    one.write()
    other.note("b", FOUND)
    other.write()
    assert FindingsStore(path).known() == {"a": FOUND, "b": FOUND}


def test_the_oldest_make_room_for_new_ones(path, monkeypatch):
    monkeypatch.setattr(findings_store, "MAX_MODELS", 2)
    assert MAX_MODELS > 2
    store = written(path, a=FOUND, b=FOUND)
    store.note("a", FOUND)
    store.note("c", FOUND)
    store.write()
    assert list(FindingsStore(path).known()) == ["a", "c"]


def test_a_folder_in_the_place_of_the_file_is_named(path, caplog):
    path.mkdir(parents=True)
    assert FindingsStore(path).known() == {}
    assert f"{path} is not used" in caplog.text
    assert caplog.text.count(str(path)) == 2


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"\x00\xff", b'{"a": 1', b"{" * 100_000),
        encoded([("a", FOUND)])[:-20],
    ],
)
def test_a_file_that_is_none_is_ignored_and_replaced(path, caplog, content):
    path.parent.mkdir()
    path.write_bytes(content)
    assert FindingsStore(path).known() == {}
    assert "is not used, and models are tried again" in caplog.text
    written(path, a=FOUND)
    assert FindingsStore(path).known() == {"a": FOUND}


@pytest.mark.parametrize(
    "entry",
    [
        *(b"1", b"null", b'"x"', b"[]", b'{"plan": 1}', b'{"plan": {"batching": "magic"}}'),
        *(b'{"begun": "x"}', b'{"is_sound": 1}', b'{"remarks": [["x", 1]]}'),
        *(b'{"plan": {"overhead": -1}}', b'{"plan": {"pass_seconds": {"1": 0.0}}}'),
        b'{"plan": {"pass_seconds": {"1": -0.5}}}',
    ],
)
def test_an_entry_of_another_shape_is_left_out(entry):
    good = msgspec.json.encode(FOUND)
    assert decoded(b'{"bad": %b, "good": %b}' % (entry, good)) == {"good": FOUND}


def test_what_a_later_edition_writes_besides_is_no_obstacle():
    entry = msgspec.json.encode({**msgspec.to_builtins(FOUND, str_keys=True), "new": [1]})
    assert decoded(b'{"a": %b}' % entry) == {"a": FOUND}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_used(path, caplog, mode):
    written(path, a=FOUND)
    path.chmod(mode)
    assert FindingsStore(path).known() == {}
    assert "others may have written it" in caplog.text


def test_neither_links_nor_pipes_nor_huge_files_are_read(path, tmp_path, monkeypatch):
    written(path, a=FOUND)
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert FindingsStore(link).known() == FindingsStore(pipe).known() == {}
    monkeypatch.setattr(findings_store, "MAX_FILE_BYTES", 10)
    assert FindingsStore(path).known() == {}


def test_a_place_where_nothing_can_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = written(tmp_path / "file" / "findings.json", a=FOUND)
    store.write()
    assert store.known() == {"a": FOUND}
    assert (
        caplog.text.count(f"is not kept: MLX_BACKEND_FINDINGS {tmp_path}/file/findings.json") == 1
    )


def test_what_a_process_has_begun_is_for_the_next_process_only(path):
    begun = msgspec.structs.replace(FOUND, begun=1)
    store = written(path, a=begun, b=FOUND)
    assert store.known()["a"].begun == 1
    assert list(FindingsStore(path).known()) == ["b"]
    store.forgive()
    assert store.known()["a"] == FOUND


def test_a_page_collects_repeats_and_hands_over(caplog):
    told = []
    page = Notebook({"a": FOUND}, lambda *found: told.append(found)).page("a")
    with caplog.at_level(logging.INFO):
        page.repeat()
        page.say(logging.WARNING, "%d rows: %s", 2, "wrong")
    assert [record.getMessage() for record in caplog.records] == [
        "batches are padded",
        "2 rows: wrong",
    ]
    page.add(begun=MAX_BEGUN)
    assert page.has_failed
    page.hand_over()
    ((key, findings),) = told
    assert (key, findings.begun, len(findings.remarks)) == ("a", MAX_BEGUN, 2)
    assert Page().findings == Notebook().page("b").findings == Findings()
