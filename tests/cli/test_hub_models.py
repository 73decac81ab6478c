import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from local_hub import Hub

from backend.cli.app import main
from backend.cli.pull import damaged_files, remove

WEIGHTS, CONFIG = b"w" * 3_000_000, b"{}"


def git_sha1(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.fixture
def snapshot(tmp_path):
    """A cached model as the hub's client lays it out."""
    repository = tmp_path / "models--org--tiny"
    directory = repository / "snapshots" / ("0" * 40)
    directory.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    names = {
        "model.safetensors": (hashlib.sha256(WEIGHTS).hexdigest(), WEIGHTS),
        "config.json": (git_sha1(CONFIG), CONFIG),
        "odd.txt": ("an-etag-of-another-kind", b"odd"),
    }
    for name, (blob, content) in names.items():
        (repository / "blobs" / blob).write_bytes(content)
        (directory / name).symlink_to(f"../../blobs/{blob}")
    return directory


def test_whole_files_are_not_damaged(snapshot):
    assert list(damaged_files(snapshot)) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_differs_from_its_checksum_is_damaged_and_can_be_removed(snapshot, name):
    path = snapshot / name
    path.resolve().write_bytes(b"x" + path.read_bytes()[1:])
    assert list(damaged_files(snapshot)) == [path]
    remove([path])
    assert not path.exists()
    assert list(damaged_files(snapshot)) == []


@pytest.fixture
def cache(snapshot, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(snapshot.parents[2]))
    return snapshot


@pytest.mark.usefixtures("cache")
def test_cached_models_are_listed_with_their_size():
    result = CliRunner().invoke(main, ["list", "--json"])
    rows = {row["name"]: row["bytes"] for row in map(json.loads, result.output.splitlines())}
    assert rows.keys() == {"demo", "org/tiny"}
    assert rows["org/tiny"] == len(WEIGHTS) + len(CONFIG) + len(b"odd")


def test_a_machine_without_a_cache_has_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    result = CliRunner().invoke(main, ["list"])
    assert [line.split()[0] for line in result.output.splitlines()] == ["model", "demo"]


def test_what_is_on_this_machine_is_not_pulled():
    result = CliRunner().invoke(main, ["pull", "demo"])
    assert result.exit_code == 0
    assert result.output.startswith("demo is in /")


def test_a_name_that_is_no_model_is_told():
    result = CliRunner().invoke(main, ["pull", "nope"])
    assert result.exit_code == 1
    assert "there is no model 'nope'" in result.stderr


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub for the child that downloads, with an empty cache."""
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield hub
    hub.close()


def test_a_file_that_was_damaged_on_the_way_is_fetched_again(hub):
    hub.damages = 1
    result = CliRunner().invoke(main, ["pull", "org/tiny"])
    assert result.exit_code == 0, result.stderr
    directory = Path(result.output.removeprefix("org/tiny is in ").replace("\n", ""))
    assert (directory / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_file_that_is_always_damaged_is_an_error(hub):
    hub.damages = 5
    result = CliRunner().invoke(main, ["pull", "org/tiny"])
    assert result.exit_code == 1
    assert "damaged twice" in result.stderr
    assert "model.safetensors" in result.stderr
