import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from backend.cli.app import main
from backend.cli.client import CallError, explained
from common.remedies import version_of


def invoke(*arguments, **environment):
    return CliRunner(env={"COLUMNS": "80", **environment}).invoke(main, arguments)


@pytest.mark.parametrize(
    ("name", "hint"), [("stauts", "did you mean status?"), ("xyzzy", "there are serve, chat")]
)
def test_a_command_that_is_none_is_told_with_the_one_that_was_meant(name, hint):
    result = invoke(name)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_summaries_of_the_help_are_whole():
    lines = invoke("--help").output.partition("Commands:")[2].splitlines()[1:]
    assert len(lines) == len(main.list_commands(None))
    assert all(line.endswith(".") and not line.endswith("..") for line in lines)


def test_versions_are_of_the_backend_and_its_libraries():
    rows = dict(line.split(maxsplit=1) for line in invoke("version").output.splitlines())
    assert rows["mlx"] == version_of("mlx")
    assert rows["python"] == sys.version.split()[0]
    assert rows.keys() >= {"mlx-grpc-backend", "mlx-lm", "system"}


@pytest.mark.parametrize(("shell", "at"), [("bash", "1"), ("zsh", "1"), ("fish", "sta")])
def test_shells_complete_the_commands(shell, at):
    variable = "_MAIN_COMPLETE"
    done = invoke(**{variable: f"{shell}_source"})
    assert variable in done.output
    words = {"COMP_WORDS": "main sta", "COMP_CWORD": at}
    assert "status" in invoke(**{variable: f"{shell}_complete", **words}).output


def test_an_error_without_a_known_status_is_told_as_it_is():
    assert explained(CallError("odd"), "do that") == "odd"


def test_a_token_that_no_header_can_have_is_refused():
    result = invoke("status", "--token", "schlüssel")
    assert result.exit_code == 2
    assert "only printable ASCII" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_at_the_other_end_is_one_line():
    command = [sys.executable, "-m", "backend.cli", "list"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Error: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr
