"""The host's end-to-end suite: it passes on the embedded model, and it can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from backend.pb import backend_pb2 as pb
from scripts.host_suite.__main__ import main
from scripts.host_suite.callers import json_values
from scripts.host_suite.capabilities import CAPABILITIES, TEXT_CAPABILITIES, Subject, UnmetError
from scripts.host_suite.hosted import HostedBackend, OrphanError, StartError

ROOT = Path(__file__).parent.parent
SEEN = pb.Reply(message=b"red", prompt_tokens=7)
SUBJECT = Subject(model="some/model", capabilities=("load",), directory=Path())


@pytest.fixture
def script(tmp_path):
    """Write a `run.sh` with the given body."""

    def write(body):
        path = tmp_path / "run.sh"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.mark.mlx
@pytest.mark.smoke
def test_the_embedded_model_passes_as_the_host_sees_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.host_suite"],
        cwd=ROOT,
        env=os.environ | {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("grpc ")]
    assert passed == list(TEXT_CAPABILITIES)
    assert not list(tmp_path.glob("host-suite-*"))


def test_a_script_that_ends_fails_the_suite_with_its_last_words(script):
    script = script("echo no Python here >&2; exit 3")
    result = CliRunner().invoke(main, ["--run-sh", str(script), "--caps", "health"])
    assert result.exit_code == 1
    assert "run.sh ended with code 3" in result.output
    assert "no Python here" in result.output


def test_an_unknown_capability_is_refused_with_the_known_ones():
    result = CliRunner().invoke(main, ["--caps", "health,poetry"])
    assert result.exit_code == 2
    assert "unknown: poetry" in result.output
    assert "logit_bias" in result.output


def test_standard_input_is_closed(script):
    with HostedBackend(script("command : 3<&0 || echo closed >&2; exit 1")) as backend:
        with pytest.raises(StartError):
            backend.wait_until_accepting()
        assert backend.log_tail(1) == "closed"


def test_the_address_comes_in_one_argument(script):
    with HostedBackend(script('echo "$#" "$1" >&2; exit 1')) as backend:
        with pytest.raises(StartError):
            backend.wait_until_accepting()
        assert backend.log_tail() == f"1 --addr={backend.address}"


def test_a_script_that_does_not_exec_leaves_an_orphan(script, tmp_path):
    started = tmp_path / "started"
    os.mkfifo(started)
    script = script(f"sleep 60 & : >{started}; wait")
    with pytest.raises(OrphanError), HostedBackend(script, orphan_timeout_s=0.2):
        started.read_bytes()


def test_json_values_may_stand_one_behind_the_other():
    assert list(json_values('{"a": 1}\n{"a": 2}\n')) == [{"a": 1}, {"a": 2}]
    assert list(json_values("")) == []


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("health", [pb.Reply()], "message is empty"),
        ("load", [pb.Result(message="no such model")], "success is false: no such model"),
        ("tokenize", [pb.TokenizationResponse(length=1)], "tokens are empty"),
        ("stream", [pb.Reply(), pb.Reply(tokens=1)], "no reply has a message"),
        ("stream", [pb.Reply(message=b"a"), pb.Reply(), pb.Reply(message=b"a")], "came twice"),
        ("logprobs", [pb.Reply(message=b"a")], "logprobs are empty"),
        ("embeddings", [pb.EmbeddingResult(embeddings=[1.0], tokens=1, dim=2)], "tokens * dim"),
        ("tools", [pb.Reply(message=b"get_weather")], "no call of get_weather"),
        ("vision", [SEEN, SEEN], "no tokens of the image"),
        ("vision", [pb.Reply(), pb.Reply(prompt_tokens=9)], "message is empty"),
    ],
)
def test_an_answer_that_the_host_would_not_take_is_not_taken(name, answer, problem):
    with pytest.raises(UnmetError, match=problem.replace("*", r"\*")):
        CAPABILITIES[name].check(answer)


def test_raw_requests_bring_no_more_than_the_host_sends():
    raw = [name for name in CAPABILITIES if CAPABILITIES[name].method == "Predict"]
    for name in set(raw) - {"tools", "vision"}:
        request = CAPABILITIES[name].request(SUBJECT)
        assert not request.UseTokenizerTemplate
        assert not request.Messages
        assert not request.ModelIdentity


def test_a_directory_is_loaded_by_its_path_and_all_else_by_its_name(tmp_path):
    load = CAPABILITIES["load"].request
    by_path = load(Subject(model=str(tmp_path), capabilities=(), directory=tmp_path))
    assert (by_path.Model, by_path.ModelFile) == (str(tmp_path), str(tmp_path))
    by_name = load(SUBJECT)
    assert (by_name.Model, by_name.ModelFile, by_name.Embeddings) == ("some/model", "", False)
