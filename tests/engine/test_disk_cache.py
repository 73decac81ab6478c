"""The disk tier below the prompt cache: after a restart, after eviction, with damaged files."""

import shutil

import pytest
from engine_driver import Driver, make_request, prompt_of
from waiting import until

from backend.cache.node_files import FOLDER_NAME
from backend.core.request import Remembered
from backend.engine import loop as engine_loop
from backend.engine.prefix_store import MAX_TRIED_PATHS, DiskLink, DiskSettings
from backend.engine.rows.row import Row

pytestmark = pytest.mark.mlx

FAMILIES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "llama4"]
BASE = prompt_of(300)
NEW = prompt_of(40, salt=3)


def driver_for(networks, family, directory, **tuning):
    tuning = {"cache_dir": str(directory), **tuning} if directory else tuning
    return Driver(networks(family), **tuning)


def restarted(networks, family, directory, **tuning):
    """A driver on the files that another one has left."""
    return driver_for(networks, family, directory, **tuning)


def leave(driver):
    """End a session as a process does that is told to stop."""
    driver.loop.close()


def cold(networks, family, request):
    return driver_for(networks, family, None, max_cache_bytes=0).run(request)[0].token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [BASE, [*BASE, *NEW], [*BASE[:200], *NEW]])
@pytest.mark.one_in(3)
def test_a_prefix_survives_a_restart(networks, tmp_path, family, tokens):
    first = driver_for(networks, family, tmp_path)
    first.run(make_request("first", BASE, boundaries=[128], max_tokens=5))
    leave(first)
    second = restarted(networks, family, tmp_path)
    request = make_request("second", tokens)
    outcome = second.run(request)[0]
    assert outcome.cached_tokens >= 128
    assert outcome.token_ids == cold(networks, family, request)
    leave(second)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
async def test_what_was_evicted_from_memory_comes_back_from_disk(networks, tmp_path, family):
    driver = driver_for(networks, family, tmp_path, max_cache_bytes=300_000)
    prompts = [prompt_of(250, salt=salt) for salt in range(5)]
    for i, prompt in enumerate(prompts):
        driver.run(make_request(f"r{i}", prompt, max_tokens=3))
        if i == 0:
            # Until the disk's thread has written all of it, a read goes first and misses it.
            stored = driver.loop.status().metrics["prompt_cache.bytes"]
            driver.loop.prefixes.rest()
            await until(lambda stored=stored: written_bytes(driver) >= stored)
    assert driver.loop.status().metrics["prompt_cache.evictions"] > 0
    request = make_request("again", prompts[0])
    outcome = driver.run(request)[0]
    assert outcome.cached_tokens > 0
    assert outcome.token_ids == cold(networks, family, request)
    leave(driver)


def test_two_processes_share_a_directory(networks, tmp_path):
    one = driver_for(networks, "llama", tmp_path)
    other = driver_for(networks, "llama", tmp_path)
    one.run(make_request("first", BASE))
    leave(one)
    outcome = other.run(make_request("second", BASE))[0]
    assert outcome.cached_tokens == len(BASE) - 1
    leave(other)


def test_a_damaged_file_is_put_aside_and_the_prompt_computed(networks, tmp_path, caplog):
    leave_damaged(networks, tmp_path, lambda content: content[:-100] + bytes(100))
    assert computed_anew(networks, tmp_path)
    assert "is damaged and put aside" in caplog.text
    assert list(tmp_path.glob("*/*/*.damaged"))


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_file_that_says_nothing_is_left_alone_and_the_prompt_computed(
    networks, tmp_path, caplog, content
):
    leave_damaged(networks, tmp_path, lambda _: content)
    assert computed_anew(networks, tmp_path)
    assert "is left alone" in caplog.text
    assert all(path.read_bytes() == content for path in tmp_path.glob("*/*/*.kv"))


def leave_damaged(networks, directory, damage):
    first = driver_for(networks, "llama", directory)
    first.run(make_request("first", BASE))
    leave(first)
    for path in directory.glob("*/*/*.kv"):
        path.write_bytes(damage(path.read_bytes()))


def computed_anew(networks, directory):
    second = restarted(networks, "llama", directory)
    request = make_request("second", BASE)
    outcome = second.run(request)[0]
    assert outcome.token_ids == cold(networks, "llama", request)
    leave(second)
    return outcome.cached_tokens == 0


def test_a_file_that_vanishes_is_a_miss(networks, tmp_path):
    first = driver_for(networks, "llama", tmp_path)
    first.run(make_request("first", BASE))
    leave(first)
    second = restarted(networks, "llama", tmp_path)
    second.run(make_request("warm-up", NEW))
    for path in tmp_path.glob("*/*/*.kv"):
        path.unlink()
    outcome = second.run(make_request("second", BASE))[0]
    assert outcome.cached_tokens == 0
    leave(second)


def test_the_files_stay_within_their_budget(networks, tmp_path):
    budget = 300_000
    driver = driver_for(networks, "llama", tmp_path, max_cache_disk_bytes=budget)
    for salt in range(8):
        driver.run(make_request(f"r{salt}", prompt_of(200, salt=salt)))
    leave(driver)
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*/*")]
    assert 0.5 * budget < sum(sizes) < 1.2 * budget


async def test_what_the_files_had_no_room_for_is_written_when_memory_gives_it_up(
    networks, tmp_path
):
    size = driver_for(networks, "llama", None)
    size.run(make_request("size", BASE))
    nbytes = size.loop.status().metrics["prompt_cache.bytes"]
    bounds = {"max_cache_bytes": 5 * nbytes // 2, "max_cache_disk_bytes": 3 * nbytes // 2}
    driver = driver_for(networks, "llama", tmp_path, **bounds)
    prompts = [prompt_of(300, salt=salt) for salt in (0, 5, 9)]
    for count, prompt in enumerate(prompts[:2], start=1):
        driver.run(make_request(f"r{count}", prompt))
        driver.loop.prefixes.rest()
        await until(lambda count=count: written_bytes(driver) >= count * nbytes)
    driver.run(make_request("r3", prompts[2]))
    assert driver.loop.status().metrics["prompt_cache.evictions"] > 0
    # The reply's node is evicted, and written, before that of the prompt.
    await until(lambda: written_bytes(driver) >= 3 * nbytes)
    outcome = driver.run(make_request("again", prompts[0]))[0]
    assert outcome.cached_tokens > 0
    leave(driver)


def written_bytes(driver):
    return driver.loop.status().metrics["prompt_cache.disk.written_bytes"]


def test_a_prompt_that_memory_knows_does_not_wait_for_the_disk(networks, tmp_path):
    driver = driver_for(networks, "llama", tmp_path)
    driver.run(make_request("first", BASE))
    driver.loop.requests.submit(make_request("second", BASE))
    assert driver.loop.status().metrics["waiting"] == 1
    assert not driver.loop.is_idle
    driver.run()
    leave(driver)


def test_a_request_may_leave_while_it_waits_for_the_disk(networks, tmp_path):
    driver = driver_for(networks, "llama", tmp_path)
    driver.loop.requests.submit(make_request("first", BASE))
    assert driver.loop.is_idle
    driver.loop.requests.cancel("first")
    driver.loop.requests.take_in(driver.fetched.get(timeout=60))
    driver.loop.check()
    assert driver.loop.status().metrics["waiting"] == 0
    leave(driver)


def test_what_is_not_to_be_remembered_is_not_stored(networks, tmp_path):
    driver = driver_for(networks, "llama", tmp_path)
    driver.run(make_request("nothing", BASE, remembered=Remembered.NOTHING))
    assert driver.loop.status().metrics["prompt_cache.tokens"] == 0
    driver.run(make_request("prompt", BASE, remembered=Remembered.PROMPT))
    assert driver.loop.status().metrics["prompt_cache.tokens"] == len(BASE) - 1
    leave(driver)
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 1


def test_a_directory_that_cannot_be_made_is_told_and_done_without(networks, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    driver = driver_for(networks, "llama", tmp_path / "file")
    assert driver.run(make_request("first", BASE))[0].finish is not None
    assert "nothing is kept on disk" in caplog.text


def test_a_directory_with_other_files_is_told_and_done_without(networks, tmp_path, caplog):
    weights = tmp_path / FOLDER_NAME / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    driver = driver_for(networks, "llama", tmp_path, max_cache_disk_bytes=0)
    assert driver.run(make_request("first", BASE))[0].finish is not None
    leave(driver)
    assert "nothing is kept on disk" in caplog.text
    assert "holds what this backend did not write: model.safetensors" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [weights]


def test_a_directory_that_was_removed_is_made_again(networks, tmp_path):
    directory = tmp_path / "cache"
    first = driver_for(networks, "llama", directory)
    first.run(make_request("first", BASE))
    shutil.rmtree(directory)
    leave(first)
    second = restarted(networks, "llama", directory)
    assert second.run(make_request("second", BASE))[0].cached_tokens == len(BASE) - 1
    leave(second)


def test_a_path_that_leads_round_in_circles_is_told_and_done_without(tmp_path, caplog):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    settings = DiskSettings(models_dir=tmp_path, fingerprint="0" * 24)
    link = DiskLink(settings, ends_at_snapshots=False)
    request = make_request("first", BASE, cache_path=str(tmp_path / "loop" / "cache"))
    assert not link.read(Row(request), known=0)
    assert "nothing is kept on disk" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_in_which_others_can_write_is_not_used(networks, tmp_path, mode, caplog):
    (tmp_path / FOLDER_NAME).mkdir()
    (tmp_path / FOLDER_NAME).chmod(mode)
    driver = driver_for(networks, "llama", tmp_path)
    assert driver.run(make_request("first", BASE))[0].finish is not None
    leave(driver)
    assert "others can write to it" in caplog.text
    assert list((tmp_path / FOLDER_NAME).iterdir()) == []


def test_callers_who_make_up_paths_fill_neither_the_log_nor_the_disk(tmp_path, caplog):
    link = DiskLink(DiskSettings(models_dir=tmp_path / "models"), ends_at_snapshots=False)
    for number in range(3 * MAX_TRIED_PATHS):
        request = make_request("first", BASE, cache_path=str(tmp_path / f"{number}"))
        assert not link.read(Row(request), known=0)
    assert caplog.text.count("is ignored") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_idle_session_writes_to_disk_once_it_has_been_quiet(networks, tmp_path, monkeypatch):
    driver = driver_for(networks, "llama", tmp_path)
    driver.run(make_request("a", BASE, max_tokens=5))
    monkeypatch.setattr(engine_loop, "IDLE_TIMEOUT_S", 3600.0)
    driver.turn()
    assert driver.loop.idle_timeout_s is not None
    monkeypatch.setattr(engine_loop, "IDLE_TIMEOUT_S", 0.0)
    driver.turn()
    assert driver.loop.idle_timeout_s is None
    leave(driver)
