"""Files of a checkpoint that no library may open."""

import json
import os

import mlx.core as mx
import pytest

from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import require_whole
from backend.model.checkpoint.gate import require_sound

pytestmark = pytest.mark.mlx


def weights(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(*offsets, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("place", ["", "1_Pooling"])
def test_pipes_devices_and_directories_are_refused_by_name(tmp_path, name, place):
    path = tmp_path / place / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(LoadError, match=f"{name} is not a regular file"):
        require_sound(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(LoadError, match=f"{name} is not a regular file"):
        require_sound(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LoadError, match=f"{name} is not a regular file"):
        require_sound(tmp_path)


def test_links_to_files_are_files_as_a_hub_has_them(tmp_path):
    blob = tmp_path / "blob"
    blob.write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(blob)
    (tmp_path / "model" / "gone.json").symlink_to(tmp_path / "nowhere")
    require_sound(tmp_path / "model")


def test_a_huge_file_is_refused_without_being_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(
        LoadError, match=r"config\.json has 17179869184 bytes, more than the 16777216"
    ):
        require_sound(tmp_path)


def test_a_long_vocabulary_is_left_to_its_reader_as_parsing_it_would_stop_the_server(tmp_path):
    nested = "[" * 101 + "]" * 101
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(f'{{"a": {nested}, "b": "{"x" * 2**18}"}}')
    require_sound(tmp_path)
    vocabulary.write_text(f'{{"a": {nested}, "b": ""}}')
    with pytest.raises(LoadError, match=r"tokenizer\.json is nested more than 100 levels"):
        require_sound(tmp_path)


@pytest.mark.parametrize("depth", [101, 100_000])
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
def test_nested_json_is_refused(tmp_path, depth, brackets):
    begin, end = brackets
    nested = begin * depth + "1" + end * depth
    (tmp_path / "tokenizer_config.json").write_text(f'{{"a":{nested}}}')
    with pytest.raises(LoadError, match=r"tokenizer_config\.json is nested more than 100 levels"):
        require_sound(tmp_path)


def test_other_files_and_what_is_no_json_are_left_to_their_readers(tmp_path):
    (tmp_path / "config.json").write_text("{")
    os.mkfifo(tmp_path / "README.md")
    require_sound(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        weights({"a": tensor(0, 4)}, b"1234"),
        weights({"__metadata__": {"format": "mlx"}, "a": tensor(0, 4)}, b"1234"),
        weights({"b": tensor(4, 6, dtype="BF16"), "a": tensor(0, 4)}, b"123456"),
        weights({"a": tensor(0, 0, shape=(0, 3))}),
    ],
)
def test_sound_weights_pass(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    require_whole(tmp_path / "model.safetensors")


TYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0", "F8_E5M2", "F4"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@pytest.mark.parametrize(("kind", "size"), TYPES.items())
def test_weights_of_a_type_that_mlx_does_not_read_are_refused(tmp_path, kind, size):
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights({"a": tensor(0, size, dtype=kind)}, bytes(size)))
    try:
        mx.load(str(path))
    except RuntimeError:
        with pytest.raises(UnsupportedModelError, match=f"weights of type '{kind}'"):
            require_whole(path)
    else:
        require_whole(path)


@pytest.mark.parametrize(
    "data",
    [
        weights({"a": tensor(4, 0)}, b"1234"),
        weights({"a": tensor(-4, 0)}, b"1234"),
        weights({"a": tensor(0, 8)}, b"12345678"),
        weights({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456"),
        weights({"a": tensor(8, 12)}, b"123456789012"),
        weights({"a": tensor(0, 4, shape=(-1,))}, b"1234"),
        weights({"a": tensor(0, 4, shape="x")}, b"1234"),
        weights({"a": tensor(0.0, 4.0)}, b"1234"),
        weights({"a": tensor(0)}, b"1234"),
        weights({"a": 5}),
        weights({"__metadata__": {"format": 5}, "a": tensor(0, 4)}, b"1234"),
        weights(b"[" * 100_000),
        weights({}, length=2**60),
        weights(b""),
    ],
)
def test_bad_offsets_are_no_safetensors_file(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(LoadError, match="its header cannot be read"):
        require_whole(tmp_path / "model.safetensors")


@pytest.mark.parametrize("text", ["[" + "[]," * 2**17 + "1]", "[" + "1," * (2**20 + 1) + "1]"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_takes_long_to_parse_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=rf"{name} cannot be read: it has more than 131072 objects"):
        require_sound(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tekken.json", "unigram.json"])
def test_vocabularies_may_have_any_number_of_values_and_more_bytes(tmp_path, name):
    (tmp_path / name).write_text("[" + "[]," * 2**17 + " " * 2**24 + "1]")
    require_sound(tmp_path)


def test_a_header_of_weights_that_takes_long_to_parse_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(weights(b'{"a":[' + b"[]," * 2**17 + b"1]}"))
    with pytest.raises(LoadError, match="its header cannot be read"):
        require_whole(tmp_path / "model.safetensors")
