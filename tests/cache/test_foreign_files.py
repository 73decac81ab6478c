"""The disk tier in a directory full of other people's files: it changes none of them."""

import os
import shutil
import stat

import pytest

from backend.cache.disk_tier import NodeDirectory, StoredNode
from backend.cache.kv import PlainArray, PlainSegment
from backend.cache.node_files import FOLDER_NAME, CacheFolder, ForeignFileError
from backend.cache.radix import TokenKey

MODEL = "0123456789abcdef01234567"
OTHER = "fedcba987654321001234567"
DIGEST = "0" * 32
NODE = f"0-5-{DIGEST}.kv"


def stored(start, stop):
    data = memoryview(os.urandom(1000))
    return StoredNode(
        TokenKey.from_ids(range(stop)),
        start,
        PlainSegment('{"states": null}', (PlainArray("uint8", (1000,), data),)),
    )


def use(root, budget_bytes=3000):
    """Have more written than the budget holds, and read again."""
    directory = NodeDirectory(root, MODEL, budget_bytes)
    for start in range(0, 50, 5):
        directory.write(stored(start, start + 5))
    directory.read(TokenKey.from_ids(range(50)), 0, ends_at_snapshot=False)
    return directory


def inventory(root):
    """Every path below a directory, with its kind, its content and its time."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        content = None
        if stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        is_folder = stat.S_ISDIR(status.st_mode)
        found[path] = (status.st_mode, content, None if is_folder else status.st_mtime_ns)
    return found


@pytest.fixture
def models(tmp_path):
    """A models directory such as hosts have: nested, with links, files named as the tier's."""
    root = tmp_path / "models"
    for name in ("llama", "org/qwen", MODEL, f"{MODEL}/nested", f"cache/{MODEL}"):
        (root / name).mkdir(parents=True, exist_ok=True)
        for file in ("model.safetensors", "config.json", NODE, f"0-5-{DIGEST}.damaged"):
            (root / name / file).write_bytes(os.urandom(5000))
    (root / "loose.safetensors").write_bytes(os.urandom(5000))
    (root / "killed.draft").write_bytes(os.urandom(5000))
    (root / "link").symlink_to(root / "llama")
    (root / "llama" / f"5-9-{DIGEST}.kv").symlink_to(root / "loose.safetensors")
    return root


@pytest.mark.parametrize("below", [".", "llama", "org", f"{MODEL}", "cache", "link", "new/folder"])
def test_no_byte_of_a_models_directory_changes(models, below):
    before = inventory(models)
    directory = use(models / below)
    after = inventory(models)
    ours = {path for path in after if FOLDER_NAME in path.parts or path.name in ("new", "folder")}
    assert {path: after[path] for path in after.keys() - ours} == before
    assert 0 < directory.bytes <= 3000 + 1500


@pytest.mark.parametrize("name", ["weights.safetensors", f"{MODEL}/weights.safetensors", OTHER])
def test_a_folder_of_that_name_with_other_files_is_refused(tmp_path, name):
    path = tmp_path / FOLDER_NAME / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    before = inventory(tmp_path)
    with pytest.raises(ForeignFileError, match=f"did not write: {name}"):
        NodeDirectory(tmp_path, MODEL, 0)
    assert {p: v for p, v in inventory(tmp_path).items() if p in before} == before


def test_many_foreign_files_are_counted_and_three_are_named(tmp_path):
    folder = tmp_path / FOLDER_NAME
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.safetensors").touch()
    with pytest.raises(ForeignFileError, match=r"0\.safetensors, .* and 7 more"):
        NodeDirectory(tmp_path, MODEL, 0)


def test_the_files_that_file_managers_leave_are_no_reason_to_refuse(tmp_path):
    use(tmp_path)
    for folder in (tmp_path / FOLDER_NAME, tmp_path / FOLDER_NAME / MODEL):
        (folder / ".DS_Store").write_bytes(b"finder")
    use(tmp_path)
    assert (tmp_path / FOLDER_NAME / MODEL / ".DS_Store").exists()


@pytest.mark.parametrize("place", [FOLDER_NAME, f"{FOLDER_NAME}/{MODEL}", f"{FOLDER_NAME}/{OTHER}"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(models, tmp_path, place):
    root = tmp_path / "cache"
    link = root / place
    link.parent.mkdir(parents=True)
    link.symlink_to(models / MODEL)
    before = inventory(models)
    with pytest.raises(OSError, match=r"."):
        use(root)
    assert inventory(models) == before


@pytest.mark.parametrize("kind", ["link", "hard link", "bytes", "empty", "pipe", "weights"])
@pytest.mark.parametrize("model", [MODEL, OTHER])
def test_a_file_that_only_has_the_name_is_never_touched(models, tmp_path, caplog, kind, model):
    root = tmp_path / "cache"
    use(root)
    weights = models / "llama" / "model.safetensors"
    path = root / FOLDER_NAME / model / NODE
    path.parent.mkdir(exist_ok=True)
    directory = NodeDirectory(root, MODEL, 3000)
    match kind:
        case "link":
            path.symlink_to(weights)
        case "hard link":
            path.hardlink_to(weights)
        case "bytes":
            path.write_bytes(os.urandom(10_000))
        case "empty":
            path.touch()
        case "pipe":
            os.mkfifo(path)
        case "weights":
            shutil.copyfile(weights, path)
    before = inventory(models), inventory(root)[path]
    for start in range(0, 50, 5):
        directory.write(stored(start, start + 5))
    directory.look_again()
    assert (inventory(models), inventory(root)[path]) == before
    assert directory.bytes <= 3000 + 1500
    if kind not in ("link", "pipe"):
        assert f"{NODE} is left alone: this backend did not write it" in caplog.text


def test_a_node_is_not_written_over_a_file_of_its_name(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10**6)
    node = stored(0, 5)
    directory.write(node)
    (path,) = tmp_path.glob("*/*/*.kv")
    path.unlink()
    path.write_bytes(b"weights")
    directory.look_again()
    with pytest.raises(ForeignFileError):
        directory.write(node)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]


def test_files_that_change_hands_between_look_and_removal_are_kept(tmp_path):
    use(tmp_path)
    folder = CacheFolder(tmp_path, MODEL)
    (*_, file) = folder.files()
    path = tmp_path / FOLDER_NAME / file.model / file.name
    path.unlink()
    path.write_bytes(b"weights")
    with pytest.raises(ForeignFileError):
        folder.remove(file)
    with pytest.raises(ForeignFileError):
        folder.put_aside(file.name)
    assert path.read_bytes() == b"weights"
