import json
from io import StringIO

import grpc
import pytest
from rich.console import Console

from backend.cli.client import CallError
from backend.cli.status import StatusSettings, show_status
from backend.pb import backend_pb2 as pb

SESAME = "s3cret"


def test_without_a_terminal_one_frame_is_printed(run_status, scripted, script):
    scripted.reports = [script.report(script.request("a", "active")), script.report()]
    result = run_status()
    assert result.exit_code == 0, result.stderr
    assert "org/tiny (llama)" in result.output
    assert len(scripted.reports) == 1


def test_watching_goes_on_until_ctrl_c(run_status, scripted, script):
    scripted.reports = [script.report(), script.report(), script.press_ctrl_c]
    result = run_status("--watch", "--interval", "0.1")
    assert result.exit_code == 0, result.stderr
    assert result.output.count("org/tiny (llama)") == 2


async def test_on_a_terminal_each_frame_takes_the_place_of_the_one_before(client, scripted, script):
    gone = script.refuse(grpc.StatusCode.INTERNAL, "gone")
    scripted.reports = [script.report(), script.report(script.request("a", "active")), gone]
    terminal = Console(file=StringIO(), width=100, height=30, force_terminal=True)
    settings = StatusSettings(watches=True, interval_s=0.0, as_json=False)
    with pytest.raises(CallError, match="gone"):
        await show_status(terminal, client, settings)
    text = terminal.file.getvalue()
    cursor_up = "\x1b[1A"
    assert text.index("org/tiny") < text.index(cursor_up) < text.index("request")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_watching_outlives_a_restart_of_the_backend(run_status, scripted, script, options):
    away = script.refuse(grpc.StatusCode.UNAVAILABLE, "gone")
    scripted.reports = [script.report(), away, script.report(), script.press_ctrl_c]
    result = run_status("--watch", "--interval", "0.1", *options)
    assert result.exit_code == 0, result.stderr
    assert "no backend answers; waiting for it" in result.output
    assert result.stdout.count("org/tiny") == 2


def test_json_is_an_object_per_look_and_its_numbers_are_numbers(run_status, scripted, script):
    scripted.reports = [
        script.report(script.request("a", "active")),
        script.report(),
        script.press_ctrl_c,
    ]
    result = run_status("--json", "--watch", "--interval", "0.1")
    first, second = map(json.loads, result.output.splitlines())
    assert first["state"] == "BUSY"
    assert first["model"]["context_length"] == 4096
    assert first["memory"]["breakdown"]["weights"] == 1_500_000_000
    assert first["prompt_cache"]["hits"] == {"exact": 4, "miss": 1}
    assert first["generated_tokens"] == 5_000_000_000
    assert [request["request_id"] for request in first["requests"]] == ["a"]
    assert second["requests"] == []


def test_a_backend_that_does_not_know_inspect_is_asked_what_every_one_knows(run_status):
    result = run_status()
    assert result.exit_code == 0, result.stderr
    assert "does not know Inspect" in result.output
    assert "READY" in result.output
    assert "2.0 kB" in result.output
    assert "11 prompt tokens prefilled · 13 tokens generated · 1.5 tokens/s" in result.output
    told = json.loads(run_status("--json").output)
    assert (told["model"], told["prompt_cache"], told["generated_tokens"]) == (None, None, 13)


def test_an_interval_that_is_no_number_is_refused(run_status):
    result = run_status("--watch", "--interval", "nan")
    assert (result.exit_code, "nan is no finite number" in result.stderr) == (2, True)


def test_where_nothing_listens_it_says_so(run_status):
    result = run_status(address="127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: 127.0.0.1:1: no backend answers there; ")
    assert "start one: mlx-grpc-backend serve (UNAVAILABLE: " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_wrong_token_is_told_and_the_right_one_is_taken(run_status, scripted, script):
    scripted.token, scripted.reports = SESAME, [script.report()]
    result = run_status("--token", "wrong")
    assert result.exit_code == 1
    assert "the token is missing or wrong, see --token (UNAUTHENTICATED: " in result.stderr
    assert run_status("--token", SESAME).exit_code == 0


def test_another_error_is_told_as_it_is(run_status, scripted, script):
    scripted.reports = [script.refuse(grpc.StatusCode.INTERNAL, "broken")]
    assert run_status().stderr == f"Error: {scripted.address}: INTERNAL: broken\n"


async def test_a_report_without_a_model_is_no_error(client, scripted, console):
    scripted.reports = [pb.InspectReply()]
    settings = StatusSettings(watches=False, interval_s=0.0, as_json=False)
    await show_status(console, client, settings)
    assert "UNINITIALIZED" in console.file.getvalue()
