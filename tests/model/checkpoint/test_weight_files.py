import json
from pathlib import Path

import mlx.core as mx
import pytest

from backend.errors import LoadError
from backend.model.checkpoint.config_file import require_whole

pytestmark = pytest.mark.mlx


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((3, 4)), "b": mx.ones(5)}, {"format": "mlx"})
    return path


def test_a_whole_file_is_accepted(weights: Path):
    require_whole(weights)


@pytest.mark.parametrize("kept", [8, 20, -1, -40])
def test_a_cut_file_is_named_with_what_it_lacks(weights: Path, kept: int):
    whole = weights.read_bytes()
    weights.write_bytes(whole[:kept])
    with pytest.raises(LoadError, match=r"\.safetensors is truncated: it has \d+ of \d+ bytes"):
        require_whole(weights)


def test_an_empty_file_is_named(weights: Path):
    weights.write_bytes(b"")
    with pytest.raises(LoadError, match=r"model\.safetensors is empty"):
        require_whole(weights)


def test_a_pointer_of_git_lfs_is_told_with_the_command(weights: Path):
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(LoadError, match="git lfs pull"):
        require_whole(weights)


def with_header(content: bytes, length: int | None = None) -> bytes:
    return (len(content) if length is None else length).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "content",
    [
        b"<html>no such file</html>",
        with_header(b"{"),
        with_header(b"[]"),
        with_header(json.dumps({"a": {"data_offsets": [0]}}).encode()),
        with_header(json.dumps({"a": 3}).encode()),
        with_header(b"{}", length=0),
        with_header(b"{}", length=2**62),
    ],
)
def test_what_has_no_header_is_no_safetensors_file(weights: Path, content: bytes):
    weights.write_bytes(content)
    with pytest.raises(LoadError, match="is not a safetensors file"):
        require_whole(weights)
