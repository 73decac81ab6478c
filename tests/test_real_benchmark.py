"""The benchmark of published models: other servers by HTTP, and models that are not there."""

import asyncio
import json
import os
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from waiting import until

from benchmarks.cases import gpu, offloading, real
from benchmarks.harness.figure import Settings
from benchmarks.harness.models import PublishedModel
from benchmarks.harness.other_servers import OtherServer, OtherServerError
from benchmarks.harness.workload import Sampling, Workload


class Completions(BaseHTTPRequestHandler):
    """Streams two chunks of text, which stand for five tokens, unless the prompt is "refused"."""

    asked = ()

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked += (body,)
        self.send_response(400 if body["prompt"] == "refused" else 200)
        self.end_headers()
        for event in (
            {"choices": [{"text": "one"}]},
            {"choices": [{"text": " and more"}]},
            {"choices": [], "usage": {"completion_tokens": 5}},
        ):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def served():
    Completions.asked = ()
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield OtherServer(server.server_port)
        server.shutdown()


def workload(*prompts):
    return Workload(prompts, (Sampling(),) * len(prompts), 7)


def test_the_tokens_of_another_server_are_those_of_its_usage():
    with served() as server:
        speed = server.run(workload("a", "b"))
    seconds = 10 / speed.whole
    assert 0 < speed.first_s <= seconds
    assert sorted(body["prompt"] for body in Completions.asked) == ["a", "b"]
    assert {body["max_tokens"] for body in Completions.asked} == {7}


def test_a_server_that_refuses_a_request_is_an_error():
    with served() as server, pytest.raises(OtherServerError, match="400"):
        server.run(workload("a", "refused"))


async def test_a_model_that_is_not_there_is_skipped_aloud(monkeypatch, capsys):
    missing = PublishedModel("Some model", "no-such-folder", "*.gguf")
    monkeypatch.setattr(real, "SMOLLM2", missing)
    assert await real.measure(Settings(runs=1, is_quick=True)) == []
    assert "Some model: SKIPPED, run `make real-models` first" in capsys.readouterr().err


def test_a_gpu_is_measured_only_where_one_is_found(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "gpu_name", lambda: "")
    assert asyncio.run(gpu.measure(Settings(runs=1, is_quick=True))) == []
    assert "SKIPPED" in capsys.readouterr().err


def test_experts_on_disk_are_measured_only_where_a_page_cache_can_be_emptied(monkeypatch, capsys):
    monkeypatch.delattr(offloading.os, "posix_fadvise", raising=False)
    assert asyncio.run(offloading.measure(Settings(runs=1, is_quick=True))) == []
    assert "SKIPPED" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot forget pages")
async def test_the_page_cache_of_a_store_is_emptied_while_it_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "experts.store"
    path.write_bytes(bytes(2**22))
    told, advise = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: told.append(advise(*given)))
    with offloading.without_page_cache(path):
        assert told
        begun = len(told)
        await until(lambda: len(told) > begun + 1)
