"""The process of a job by itself: its pipe, its priority, its end."""

import asyncio
import logging
import os
import subprocess
import sys

import msgspec
import pytest
from real_process import child_jobs

from backend.demo import MODEL_DIR
from backend.jobs.__main__ import Printed
from backend.jobs.job import FAILED, STOPPED, JobProcess, Progress, Quantization
from backend.model.checkpoint.upstream import INDEX_NAME
from common.directories import state_directory

pytestmark = pytest.mark.mlx


def quantization(tmp_path, **fields):
    return Quantization(
        **{
            "model": str(MODEL_DIR),
            "models_dir": "",
            "output_dir": str(tmp_path),
            "name": "small",
            "bits": 4,
            **fields,
        }
    )


def names(directory) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def told(process, is_awaited):
    """Follow a job until its progress is the awaited one, and return that."""
    async for progress in process.updates():
        if is_awaited(progress):
            return progress
    raise AssertionError(process.progress)


async def test_everybody_who_follows_a_job_sees_its_end(tmp_path):
    process = JobProcess(quantization(tmp_path, is_checked=False))

    async def seen():
        return [progress async for progress in process.updates()]

    first, second = await asyncio.gather(seen(), seen())
    late = await seen()
    assert first[0].status == "queued"
    assert first[-1] == second[-1] == await process.result()
    assert late == first[-1:]
    assert first[-1].status == "completed", first[-1].message
    assert names(tmp_path) == ["small"]


async def test_a_job_finds_the_classes_of_transformers_in_their_index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    last = await JobProcess(quantization(tmp_path, model=str(tmp_path))).result()
    assert last.status == FAILED
    assert (state_directory(os.environ) / INDEX_NAME).is_file()


async def test_a_job_has_the_lowest_priority(tmp_path):
    process = JobProcess(quantization(tmp_path))
    await told(process, lambda progress: progress.status == "quantizing")
    assert [os.getpriority(os.PRIO_PROCESS, each) for each in child_jobs()] == [19]
    await process.stop()


async def test_a_job_that_is_stopped_while_it_writes_leaves_nothing(tmp_path):
    process = JobProcess(quantization(tmp_path))
    await told(process, lambda progress: progress.message == "comparing perplexities")
    assert names(tmp_path) == [".small.partial"]
    last = await process.stop()
    assert (last.status, last.message, last.path) == (STOPPED, "stopped", "")
    assert names(tmp_path) == []


async def test_a_job_that_is_stopped_before_it_begins_leaves_nothing(tmp_path):
    last = await JobProcess(quantization(tmp_path)).stop()
    assert last.status == STOPPED
    assert names(tmp_path) == []


async def test_what_is_left_of_a_job_that_was_killed_is_told_and_in_nobodys_way(tmp_path):
    killed = JobProcess(quantization(tmp_path))
    await told(killed, lambda progress: progress.message == "comparing perplexities")
    (child,) = child_jobs()
    os.kill(child, 9)
    last = await killed.result()
    assert (last.status, "was ended by signal 9" in last.message) == (FAILED, True)
    assert names(tmp_path) == [".small.partial"]
    last = await JobProcess(quantization(tmp_path, is_checked=False)).result()
    assert last.status == "completed", last.message
    assert last.message.endswith("; an earlier job for it was cut off, and this one started over")
    assert names(tmp_path) == ["small"]


def start(*prefix: str) -> subprocess.Popen:
    # A host need not set it, and without it a buffer may be lost.
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "backend.jobs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def test_nothing_but_progress_goes_into_the_pipe_whatever_libraries_print(tmp_path):
    with start() as job:
        job.stdin.write(msgspec.json.encode(quantization(tmp_path, is_checked=False)) + b"\n")
        job.stdin.flush()
        told = [msgspec.json.decode(line, type=Progress) for line in job.stdout]
        printed = job.stderr.read().decode()
        assert job.wait() == 0
    assert [progress.status for progress in told] == ["downloading", "quantizing", "completed"]
    assert " INFO backend.jobs: Loading" in printed


def test_printed_lines_become_lines_of_the_log_also_the_last_without_an_end(caplog):
    caplog.set_level(logging.DEBUG)
    printed = Printed()
    print("[INFO] Load", end="", file=printed)
    print("ing\n[ERROR] it bro", end="", file=printed)
    assert caplog.messages == ["Loading"]
    print("ke", end="", file=printed)
    printed.close()
    assert caplog.messages == ["Loading", "it broke"]


def test_a_job_is_done_whatever_the_limit_of_descriptors(tmp_path):
    with start("/bin/sh", "-c", 'ulimit -n 64 && exec "$@"', "sh") as job:
        job.stdin.write(msgspec.json.encode(quantization(tmp_path, is_checked=False)) + b"\n")
        job.stdin.flush()
        *_, last = job.stdout
    assert b'"completed"' in last, last


def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    with start() as job:
        job.stdin.write(msgspec.json.encode(quantization(tmp_path)) + b"\n")
        job.stdin.flush()
        while b"comparing" not in job.stdout.readline():
            pass
        job.stdin.close()
        assert job.wait() == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("line", [b"", b"{}\n", b"nonsense\n", b'{"type": "Mining"}\n'])
def test_a_process_without_a_job_ends_without_a_word_of_progress(line):
    with start() as job:
        told, _ = job.communicate(line)
    assert (job.returncode, told) == (1, b"")
