"""Trials that a load leaves for later: made between requests, once for all later engines."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from nursery import LATER
from serving import SPOKEN, Stderr, served, stream, undrafted
from waiting import until

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

BEGUN = "trying between requests"
ENDED = "requests are computed together, with drafts"

LOAD_TEXT = """
import sys
from pathlib import Path
from types import SimpleNamespace
from backend.config import ModelOptions
from backend.engine.assembly import assemble_any_loop
from backend.model.loader import load
from backend.engine.findings import Notebook

directory = Path(sys.argv[1])
options = ModelOptions(model=str(directory))
assemble_any_loop(load(options, directory), options, SimpleNamespace(post=print), Notebook())
print([name for name in sys.modules if name.startswith("mlx_vlm.")])
"""


@pytest.fixture(autouse=True)
def later(monkeypatch):
    """Have engines act as those of the product."""
    monkeypatch.setenv(LATER, "1")


async def test_neither_a_lost_engine_nor_a_second_load_is_tried_again(tiny_models, tmp_path, capfd):
    model, file, log = tiny_models("llama"), tmp_path / "findings.json", Stderr(capfd)
    async with served(model, findings=file) as backend:
        first = await stream(backend.stub, SPOKEN[0])
        await log.holds(ENDED)
        os.kill(backend.engine.process_id, signal.SIGKILL)
        assert (await stream(backend.stub, SPOKEN[0])).said == first.said
        await backend.stub.Free(pb.HealthMessage())
        assert (await backend.load(model)).success
        found = await asyncio.gather(*(stream(backend.stub, SPOKEN[0]) for _ in range(3)))
        assert [reply.said for reply in found] == [first.said] * 3
    async with served(model, findings=file) as backend:
        assert (await stream(backend.stub, SPOKEN[0])).said == first.said
    assert log.text.count(BEGUN) == 1


async def test_a_file_of_rubbish_is_told_and_replaced(tiny_models, tmp_path, capfd, caplog):
    file, log = tmp_path / "findings.json", Stderr(capfd)
    file.write_text("{rubbish")
    async with served(tiny_models("llama"), findings=file) as backend:
        await stream(backend.stub, SPOKEN[0])
        await log.holds(ENDED)
    assert caplog.text.count("is not used, and models are tried again") == 1
    assert '"ragged"' in file.read_text()


async def test_requests_that_come_with_the_load_are_answered_as_alone(tiny_models, tmp_path, capfd):
    log = Stderr(capfd)
    async with served(tiny_models("qwen3"), findings=tmp_path / "one.json") as backend:
        found = await asyncio.gather(*(stream(backend.stub, request) for request in SPOKEN * 2))
        await log.holds(ENDED)
        alone = [await stream(backend.stub, undrafted(request)) for request in SPOKEN]
    assert [reply.said for reply in found] == [reply.said for reply in alone] * 2


async def test_an_engine_that_is_lost_while_it_tries_costs_no_request(tiny_models, tmp_path, capfd):
    log = Stderr(capfd)
    async with served(tiny_models("llama"), findings=tmp_path / "one.json") as backend:
        requests = [asyncio.create_task(stream(backend.stub, request)) for request in SPOKEN]
        await log.holds(BEGUN)
        os.kill(backend.engine.process_id, signal.SIGKILL)
        found = await asyncio.gather(*requests)
        await until(lambda: backend.is_idle)
        alone = [await stream(backend.stub, undrafted(request)) for request in SPOKEN]
    assert [reply.said for reply in found] == [reply.said for reply in alone]


def test_a_text_checkpoint_does_not_import_mlx_vlm(tiny_models):
    command = [sys.executable, "-c", LOAD_TEXT, str(tiny_models("llama"))]
    assert subprocess.check_output(command, text=True).splitlines()[-1] == "[]"
