import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_hub import COMMIT, Hub

from backend.config import ModelOptions
from backend.demo import MODEL_DIR
from backend.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from backend.model.checkpoint.config_file import draft_options
from backend.model.checkpoint.fetch import EXIT_FAILED
from backend.model.checkpoint.hub import HubModel, download, locate, resolve

Options = Callable[..., ModelOptions]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "models" / "org" / "tiny"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


class TestResolve:
    def test_a_model_file_that_exists_wins(self, options: Options, model: Path):
        assert resolve(options(model="other/model", model_file=str(model))) == model

    def test_a_file_of_a_model_stands_for_its_directory(self, options: Options, model: Path):
        assert resolve(options(model_file=str(model / "model.safetensors"))) == model

    def test_a_model_file_that_is_gone_leaves_it_to_the_model(self, options: Options, model: Path):
        chosen = options(model="org/tiny", model_file=str(model / "gone" / "x"))
        assert resolve(chosen) == HubModel("org/tiny")

    @pytest.mark.parametrize("name", ["~5", "~nobody-here/x", "x" * 300])
    def test_a_name_that_can_be_no_path_is_no_model(self, options: Options, name: str):
        with pytest.raises(ModelNotFoundError, match="there is no model"):
            resolve(options(model=name))

    def test_a_path_below_the_models_dir_is_found(self, options: Options, model: Path):
        chosen = options(model="org/tiny", models_dir=model.parents[1])
        assert resolve(chosen) == model

    def test_an_absolute_path_is_found(self, options: Options, model: Path):
        assert resolve(options(model=str(model))) == model

    @pytest.mark.parametrize("name", ["org/tiny", "hf://org/tiny", "huggingface://org/tiny"])
    def test_what_is_not_on_disk_may_be_a_hub_id(self, options: Options, tmp_path: Path, name: str):
        assert resolve(options(model=name, models_dir=tmp_path)) == HubModel("org/tiny")

    def test_the_embedded_model_has_a_name_unless_a_file_has_it(
        self, options: Options, tmp_path: Path
    ):
        assert resolve(options(model="demo", models_dir=tmp_path)) == MODEL_DIR
        (tmp_path / "demo").mkdir()
        assert resolve(options(model="demo", models_dir=tmp_path)) == tmp_path / "demo"

    @pytest.mark.parametrize("name", ["tiny", "a/b/c", "../tiny", "org/ti ny", "/org/tiny"])
    def test_anything_else_is_not_found_and_tells_where_it_was_sought(
        self, options: Options, tmp_path: Path, name: str
    ):
        with pytest.raises(ModelNotFoundError, match="nothing exists at") as failure:
            resolve(options(model=name, models_dir=tmp_path))
        assert str(tmp_path / name) in str(failure.value)

    def test_no_name_at_all_is_not_found(self, options: Options):
        with pytest.raises(ModelNotFoundError, match="no path was given"):
            resolve(options(model=""))

    def test_a_file_of_another_format_is_refused(self, options: Options, tmp_path: Path):
        (tmp_path / "tiny.gguf").touch()
        with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf is not an MLX model"):
            resolve(options(model="tiny.gguf", models_dir=tmp_path))


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def environment(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """The child's: an empty cache, and no network."""
    return {
        **os.environ,
        "PYTHONPATH": str(request.config.rootpath),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_XET": "1",
    }


@pytest.fixture
def online(environment: dict[str, str], hub: Hub) -> dict[str, str]:
    return {**environment, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}


def write_cache(cache: Path, *names: str) -> Path:
    """Lay out a cached snapshot of `org/tiny` as the hub's client does."""
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


class TestDownload:
    async def test_a_cached_model_needs_no_network(
        self, environment: dict[str, str], tmp_path: Path
    ):
        snapshot = write_cache(tmp_path / "hub", "config.json", "model.safetensors")
        assert await download("org/tiny", environment=environment) == snapshot

    async def test_a_cached_model_serves_while_the_hub_is_down(
        self, environment: dict[str, str], tmp_path: Path
    ):
        snapshot = write_cache(tmp_path / "hub", "config.json", "model.safetensors")
        down = {**environment, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
        assert await download("org/tiny", environment=down) == snapshot

    async def test_without_network_and_cache_the_error_says_so(self, environment: dict[str, str]):
        with pytest.raises(DownloadError, match="org/tiny is not on disk and the hub cannot be"):
            await download("org/tiny", environment=environment)

    async def test_the_files_of_a_model_are_fetched_once_each(self, online: dict[str, str]):
        path = await download("org/tiny", environment=online)
        assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}
        assert (path / "model.safetensors").stat().st_size == 300_000

    async def test_code_is_fetched_when_it_is_trusted(self, online: dict[str, str]):
        path = await download("org/tiny", with_code=True, environment=online)
        assert (path / "own.py").exists()

    async def test_a_model_that_the_hub_does_not_know_is_not_found(self, online: dict[str, str]):
        with pytest.raises(ModelNotFoundError, match="the hub has no model org/gone"):
            await download("org/gone", environment=online)

    async def test_cancelling_ends_the_child(self, online: dict[str, str], hub: Hub):
        hub.holds_weights.set()
        task = asyncio.create_task(download("org/tiny", environment=online))
        assert await asyncio.to_thread(hub.weights_wanted.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(hub.client_left.wait, 20)

    async def test_a_download_goes_on_where_it_was_cancelled(
        self, online: dict[str, str], hub: Hub
    ):
        hub.holds_weights.set()
        task = asyncio.create_task(download("org/tiny", environment=online))
        assert await asyncio.to_thread(hub.weights_wanted.wait, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hub.holds_weights.clear()
        path = await download("org/tiny", environment=online)
        assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_the_child_reports_bytes_as_they_come(online: dict[str, str]):
    done = subprocess.run(
        [sys.executable, "-m", "backend.model.checkpoint.fetch", "org/tiny"],
        env=online,
        check=True,
        capture_output=True,
        text=True,
    )
    *progress, last = map(json.loads, done.stdout.splitlines())
    assert progress[-1] == {"done": 300_002, "total": 300_002}
    assert last["path"].endswith(COMMIT)


def test_the_child_ends_with_its_parent(online: dict[str, str], hub: Hub):
    hub.holds_weights.set()
    stranger = str(os.getppid())
    done = subprocess.run(
        [sys.executable, "-m", "backend.model.checkpoint.fetch", "org/tiny", "--parent", stranger],
        env=online,
        check=False,
        timeout=120,
    )
    assert done.returncode == EXIT_FAILED


async def test_a_model_on_disk_is_located_without_a_child(options: Options, model: Path):
    assert await locate(options(model=str(model))) == model


class TestDraftModel:
    def test_it_is_found_like_any_model(self, options: Options, model: Path, tmp_path: Path):
        for name in (str(model), str(model.relative_to(tmp_path)), f"{tmp_path}{model}"):
            assert resolve(_draft_of(options, name, tmp_path)) == model

    @pytest.mark.parametrize(
        "name", ["org/tiny", "hf://org/tiny", "{}/org/tiny", "{}/hf:/org/tiny"]
    )
    def test_it_may_be_on_the_hub_though_hosts_put_a_directory_before_it(
        self, options: Options, tmp_path: Path, name: str
    ):
        assert resolve(_draft_of(options, name.format(tmp_path), tmp_path)) == HubModel("org/tiny")

    @pytest.mark.parametrize("given", [{}, {"draft_model": "org/tiny", "speculation": "lookup"}])
    def test_there_may_be_none(self, options: Options, given: dict[str, str]):
        assert draft_options(options(given)) is None


def _draft_of(options: Options, name: str, models_dir: Path) -> ModelOptions:
    found = draft_options(options({"draft_model": name}, models_dir=models_dir))
    assert found is not None
    return found
