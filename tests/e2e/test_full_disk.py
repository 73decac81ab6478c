"""A server whose prompt cache is on a disk that gets full goes on, and keeps the newest."""

import os
import re
import signal
from pathlib import Path

import pytest
from real_process import TIMEOUT_S, real_backend
from waiting import wait_until

from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

# Two of the prompts, but not three.
DISK_BYTES = 2**19
PROMPTS = [f"b{vowel} " * 200 for vowel in "aeio"]
MOST_TOKENS = 350


def ask(backend, prompt):
    request = pb.PredictOptions(Prompt=prompt, Tokens=8, IgnoreEOS=True)
    return backend.stub.Predict(request, timeout=TIMEOUT_S).message


def inspect(backend):
    return backend.inspector.Inspect(pb.InspectRequest(), timeout=TIMEOUT_S)


def disk(backend):
    return inspect(backend).prompt_cache.disk


def wait_for_writes(backend, before):
    """Wait until an idle server tells that it has written a whole prompt."""
    wait_until(lambda: disk(backend).written_bytes >= before + DISK_BYTES // 3)


def lose_engine(backend):
    """Kill the engine process: the prompt cache in memory is lost with it."""
    (engine,) = [each.process_id for each in inspect(backend).processes if each.role == "engine"]
    os.kill(engine, signal.SIGKILL)


def test_the_newest_prompt_is_read_back_from_a_disk_that_got_full(
    small_disk, tiny_models, tmp_path
):
    with real_backend(tmp_path / "log", prefix=small_disk(DISK_BYTES)) as backend:
        backend.load(tiny_models("llama"), Options=[f"cache_dir:{tmp_path}"])
        replies = []
        for prompt in PROMPTS:
            before = disk(backend).written_bytes
            replies.append(ask(backend, prompt))
            wait_for_writes(backend, before)
        assert backend.log_text.count("the oldest files make room") == 1
        lose_engine(backend)
        assert ask(backend, PROMPTS[-1]) == replies[-1]
        assert disk(backend).read_tokens > MOST_TOKENS
        assert ask(backend, PROMPTS[0]) == replies[0]
        assert disk(backend).read_tokens < 2 * MOST_TOKENS


def full(call, request):
    """Return the last update of a job."""
    return list(call(request, timeout=TIMEOUT_S))[-1]


def test_jobs_on_a_full_disk_name_the_field_and_leave_no_half(small_disk, tmp_path):
    dataset = tmp_path.with_name("hello.txt")
    dataset.write_text("\n".join(["Hello, Ada!"] * 20))
    target = tmp_path / "out"
    with real_backend(tmp_path / "log", prefix=small_disk(2**15)) as backend:
        started = backend.stub.StartFineTune(
            pb.FineTuneRequest(
                model=str(MODEL_DIR),
                dataset_source=str(dataset),
                output_dir=str(target),
                max_steps=1,
                gradient_accumulation_steps=1,
            )
        )
        request = pb.FineTuneProgressRequest(job_id=started.job_id)
        trained = full(backend.stub.FineTuneProgress, request)
        started = backend.stub.StartQuantization(
            pb.QuantizationRequest(model=str(MODEL_DIR), output_dir=str(target))
        )
        request = pb.QuantizationProgressRequest(job_id=started.job_id)
        quantised = full(backend.stub.QuantizationProgress, request)
        seen = Path(f"/proc/{backend.process.pid}/root{target}")
        assert list(seen.iterdir()) == []
    for last in (trained, quantised):
        assert last.status == "failed"
        assert re.fullmatch(f"output_dir: {target}(/.*)?: No space left on device", last.message)
