"""Calls of `docs/guides/debugging.md` fit the protocol and, where grpcurl is, answer as written."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from backend.cli.server_process import ServerProcess
from backend.pb import backend_pb2 as pb
from scripts.host_suite.callers import json_values

ROOT = Path(__file__).parent.parent
ADDRESS = "127.0.0.1:50051"
EXAMPLE = re.compile(r"```sh\n(.*?)```\n\n```(json|text)\n(.*?)```", re.DOTALL)
GRPCURL = shutil.which("grpcurl")


@dataclass(frozen=True)
class Example:
    """A call and its answer, as the page has them."""

    command: str
    kind: str
    answer: str

    @property
    def words(self):
        return shlex.split(self.command.replace("\\\n", " "))

    @property
    def method(self):
        """The method it calls, or the verb."""
        return self.words[-1]


PAGE = (ROOT / "docs" / "guides" / "debugging.md").read_text(encoding="utf-8")
EXAMPLES = [Example(*found) for found in EXAMPLE.findall(PAGE)]
# Times, memory in use and the loss of a training differ from run to run or from machine to machine;
# so does the last token of a reply, which is stored if it was fed.
VARYING = re.compile(
    r"timing_|mlx_peak|total$|loss$|_ms$|_s$|process_id|resident_bytes"
    r"|breakdown\.prompt_cache$|(prompt_cache|books)\.(bytes|nodes|tokens)$"
)
METHODS = {
    f"{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_every_call_of_the_page_has_its_answer():
    assert len(EXAMPLES) == PAGE.count("```sh\n")


def test_every_method_is_on_the_page():
    called = {example.method for example in EXAMPLES}
    assert called >= {*METHODS, "grpc.health.v1.Health/Check"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.method)
def test_requests_and_answers_are_messages_of_the_protocol(example):
    method = METHODS.get(example.method)
    if method is None:
        return
    if "-d" in example.words:
        request = example.words[example.words.index("-d") + 1]
        json_format.Parse(request, GetMessageClass(method.input_type)())
    if example.kind == "json":
        for value in json_values(example.answer):
            json_format.ParseDict(value, GetMessageClass(method.output_type)())


@pytest.mark.mlx
@pytest.mark.skipif(GRPCURL is None, reason="needs grpcurl on the PATH")
async def test_the_calls_answer_as_written(tmp_path):
    # The jobs of the page write there, and refuse to overwrite.
    shutil.rmtree(ROOT / "build" / "jobs", ignore_errors=True)
    with ServerProcess.start(tmp_path / "log") as server:
        await server.wait_until_ready()
        for example in EXAMPLES:
            answer = run(example, server.address)
            if example.kind == "text":
                problems = missing_lines(example.answer, answer)
            else:
                written = json_values(example.answer.replace("$PWD", str(ROOT)))
                problems = differences(example, list(written), list(json_values(answer)))
            assert not problems, f"{example.method}: {answer}"


def missing_lines(written, real):
    """Return the lines that a text lacks."""
    lines = {line.strip() for line in real.splitlines()}
    return [line for line in written.splitlines() if line.strip() not in lines]


def differences(example, written, real):
    """Return where answers lack written values; a stream may be cut in other places."""
    method = METHODS.get(example.method)
    if method is not None and method.server_streaming:
        return [] if text_of(real) == text_of(written) else [text_of(real)]
    return list(differing(written, real, "answer"))


def text_of(replies):
    """Join all texts of a stream."""
    deltas = [delta for reply in replies for delta in reply.get("chat_deltas", [])]
    return "".join(text for delta in deltas for text in delta.values() if isinstance(text, str))


def run(example, address):
    """Run a call as a person would, and return the printed text."""
    done = subprocess.run(
        ["/bin/sh", "-c", example.command.replace(ADDRESS, address)],
        cwd=ROOT,
        env=os.environ | {"PWD": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def differing(written, real, place):
    """Yield where an answer lacks a written key or text, or a written figure that does not vary."""
    match written:
        case dict():
            for key, value in written.items():
                if key not in real:
                    yield f"{place}.{key}"
                else:
                    yield from differing(value, real[key], f"{place}.{key}")
        case list():
            if len(real) < len(written):
                yield f"{place}: {len(real)} elements"
            for index, (mine, theirs) in enumerate(zip(written, real, strict=False)):
                yield from differing(mine, theirs, f"{place}[{index}]")
        case _:
            if not is_alike(written, real, place):
                yield f"{place}: {json.dumps(real)}"


def is_alike(written, real, place):
    if VARYING.search(place):
        return isinstance(real, int | float | str)
    if isinstance(written, float):
        return math.isclose(real, written, rel_tol=0.05)
    return real == written
