import base64
import json
import re
import subprocess
import sys

import grpc
import pytest
from click.testing import CliRunner

from backend.cli.app import main
from backend.demo import WEATHER_TOOL
from backend.pb import backend_pb2 as pb

TIMEOUT_S = 30.0


def roles(request):
    return [message.role for message in request.Messages]


def test_a_reply_is_printed_with_its_statistics(run_chat, scripted, script):
    scripted.scripts = [[script.thought("hm"), script.content("Hi!", tokens=2)]]
    result = run_chat("hello")
    assert result.exit_code == 0
    assert "hm\nHi!\n2 tokens · 4.0 tokens/s · 30 prompt tokens\n" in result.output


def test_the_next_question_carries_the_conversation(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")], [script.content("Bye!")]]
    run_chat("hello", "", "bye", options=["--system", "Be kind."])
    assert roles(scripted.requests[1]) == ["system", "user", "assistant", "user"]
    assert [message.content for message in scripted.requests[1].Messages][2:] == ["Hi!", "bye"]


def test_clear_forgets_all_but_the_system_message(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")], [script.content("Hi!")]]
    run_chat("hello", "/clear", "hello", options=["--system", "Be kind."])
    assert roles(scripted.requests[1]) == ["system", "user"]


def test_exit_leaves(run_chat, scripted):
    assert run_chat("/exit now", "hello").exit_code == 0
    assert scripted.requests == []


def test_another_system_message_begins_a_new_conversation(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")], [script.content("Hi!")], [script.content("Hi!")]]
    result = run_chat("hello", "/system Be short.", "hello", "/system", "hello")
    assert result.output.count("a new conversation with this system message") == 1
    assert result.output.count("a new conversation without a system message") == 1
    contents = [[message.content for message in r.Messages] for r in scripted.requests]
    assert contents == [["hello"], ["Be short.", "hello"], ["hello"]]


def test_a_line_that_ends_in_a_backslash_goes_on(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")]]
    run_chat("one \\", "two\\", "three")
    assert scripted.requests[0].Messages[0].content == "one \ntwo\nthree"


def test_statistics_are_of_all_replies(run_chat, scripted, script):
    scripted.scripts = [[script.content("a", tokens=2)], [script.content("b", tokens=4)]]
    result = run_chat("/stats", "hello", "again", "/stats")
    assert "0 replies · 0 prompt tokens · 0 tokens generated\n" in result.output
    assert "2 replies · 60 prompt tokens · 6 tokens generated · 6.0 tokens/s\n" in result.output


def test_tools_of_a_file_are_offered_until_they_are_taken_back(
    run_chat, scripted, script, tmp_path
):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([WEATHER_TOOL]))
    scripted.scripts = [[script.content("Hi!")], [script.content("Hi!")]]
    run_chat(f"/tools {path}", "hello", "/tools", "hello")
    assert [request.Tools for request in scripted.requests] == [json.dumps([WEATHER_TOOL]), ""]


@pytest.mark.parametrize("text", ["{}", "nonsense", "[1]", "[" * 9999, '[{"type": "function"}]'])
def test_a_file_without_tools_is_told_and_changes_nothing(
    run_chat, scripted, script, tmp_path, text
):
    path = tmp_path / "tools.json"
    path.write_text(text)
    scripted.scripts = [[script.content("Hi!")]]
    result = run_chat(f"/tools {path}", f"/tools {path}.none", "hello")
    assert result.output.count("tools.json") >= 2
    assert [request.Tools for request in scripted.requests] == [""]


def test_a_command_that_is_none_is_not_sent_and_two_slashes_are_one(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")]]
    result = run_chat("/hlep", "//etc/hosts is what?", "/help")
    assert "/hlep is no command: /help lists them" in result.output
    assert "/system TEXT" in result.output
    (request,) = scripted.requests
    assert request.Messages[0].content == "/etc/hosts is what?"


def test_text_that_the_terminal_cannot_write_or_send_is_replaced(scripted, script):
    scripted.scripts = [[script.content("naïve ━")]]
    arguments = ["chat", "--addr", scripted.address]
    result = CliRunner(charset="ascii").invoke(main, arguments, input=b"caf\xe9\n")
    assert result.exit_code == 0
    assert "na?ve ?" in result.output
    assert scripted.requests[0].Messages[0].content == "caf\ufffd"


def test_a_chat_without_any_input_ends(scripted):
    line = f'exec "{sys.executable}" -m backend.cli chat --addr {scripted.address} <&-'
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/exit leaves" in done.stdout


def test_a_limit_beyond_the_protocols_is_refused_before_the_chat(run_chat):
    result = run_chat("hello", options=["--max-tokens", str(2**31)])
    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr


def test_an_error_is_one_line_and_the_chat_goes_on(run_chat, scripted, script):
    refusal = script.refuse(grpc.StatusCode.INVALID_ARGUMENT, "Messages: too long")
    scripted.scripts = [[refusal], [script.content("Hi!")]]
    result = run_chat("hello", "again")
    assert "INVALID_ARGUMENT: Messages: too long\n" in result.output
    assert "Traceback" not in result.output
    assert roles(scripted.requests[1]) == ["user"]


def test_ctrl_c_cancels_the_reply_and_returns_to_the_prompt(run_chat, scripted, script):
    scripted.scripts = [[script.content("He"), script.press_ctrl_c], [script.content("Hi!")]]
    result = run_chat("hello", "again")
    assert scripted.cancelled.wait(TIMEOUT_S)
    assert result.exit_code == 0
    assert "cancelled" in result.output
    assert "Hi!" in result.output
    assert roles(scripted.requests[1]) == ["user"]


def test_ctrl_c_at_the_prompt_leaves(run_chat, scripted, monkeypatch):
    def press_ctrl_c(_prompt=""):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", press_ctrl_c)
    assert run_chat("hello").exit_code == 0
    assert scripted.requests == []


@pytest.mark.parametrize(
    ("options", "metadata"),
    [
        ([], {}),
        (["--think"], {"enable_thinking": "true"}),
        (["--no-think"], {"enable_thinking": "false"}),
    ],
)
def test_thinking_is_on_off_or_left_to_the_model(run_chat, scripted, script, options, metadata):
    scripted.scripts = [[script.content("Hi!")]]
    run_chat("hello", options=options)
    assert dict(scripted.requests[0].Metadata) == metadata


def test_options_reach_the_request(run_chat, scripted, script):
    scripted.scripts = [[script.content("Hi!")]]
    run_chat("hello", options=["--temperature", "0.25", "--max-tokens", "5"])
    (request,) = scripted.requests
    assert (request.Temperature, request.Tokens) == (0.25, 5)
    assert request.UseTokenizerTemplate


def test_the_weather_tool_is_offered_and_answered(run_chat, scripted, script):
    scripted.scripts = [script.weather_call("Oslo"), [script.content("It is cold.")]]
    result = run_chat("weather?", options=["--weather"])
    assert 'get_weather({"city": "Oslo"})' in result.output
    assert json.loads(scripted.requests[0].Tools) == [WEATHER_TOOL]
    assert roles(scripted.requests[1]) == ["user", "assistant", "tool"]
    assert scripted.requests[1].Messages[2].content in result.output
    assert scripted.requests[1].Messages[2].tool_call_id == "call_0"


def test_the_user_answers_for_tools_of_a_file(run_chat, scripted, script, tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([WEATHER_TOOL]))
    scripted.scripts = [script.weather_call("Oslo"), [script.content("It is cold.")]]
    run_chat("weather?", "snow", options=["--tools", str(path)])
    assert scripted.requests[1].Messages[2].content == "snow"


def test_a_named_model_is_loaded_first(run_chat, scripted, tmp_path):
    assert run_chat(options=["--model", str(tmp_path)]).exit_code == 0
    assert [load.ModelFile for load in scripted.loads] == [str(tmp_path)]


def test_a_model_has_the_same_name_with_a_slash_at_its_end(run_chat, scripted):
    assert run_chat(options=["org/tiny/"]).exit_code == 0
    assert [load.Model for load in scripted.loads] == ["org/tiny"]


def test_two_models_are_one_too_many(run_chat, scripted):
    result = run_chat(options=["demo", "--model", "org/name"])
    assert result.exit_code == 2
    assert "two models, demo and org/name" in result.stderr
    assert scripted.loads == []


def test_a_failed_load_ends_the_chat_with_one_line(run_chat, scripted):
    scripted.load_result = pb.Result(success=False, message="no such model")
    result = run_chat(options=["--model", "org/name"])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {scripted.address}: LoadModel: no such model\n"


def test_without_any_model_the_chat_says_so(run_chat, scripted):
    scripted.state = pb.StatusResponse.UNINITIALIZED
    result = run_chat("hello")
    assert result.exit_code == 2
    assert "no model is loaded" in result.stderr


def test_a_wrong_token_ends_the_chat_and_the_right_one_does_not(run_chat, scripted):
    scripted.token = "secret"  # noqa: S105 - a made-up one
    assert "the token is missing or wrong, see --token" in run_chat().stderr
    assert run_chat(options=["--token", "secret"]).exit_code == 0


def test_a_model_that_no_backend_has_gets_one_of_its_own(scripted, script, monkeypatch):
    """The address is the default one here, where a backend with another model runs."""
    scripted.reports = [script.report()]
    monkeypatch.setattr("backend.cli.client.DEFAULT_ADDRESS", scripted.address)
    result = CliRunner().invoke(main, ["chat", "nope"])
    assert result.exit_code == 1
    assert "there is no model 'nope'" in result.stderr
    assert scripted.loads == []


@pytest.mark.mlx
def test_chat_with_the_embedded_model_needs_no_running_backend():
    result = CliRunner().invoke(
        main, ["chat", "demo", "--weather", "--temperature", "0"], input="weather in Oslo?\n"
    )
    assert result.exit_code == 0, result.stderr
    assert re.search(r"demo at 127\.0\.0\.1:\d+\n", result.output)
    assert 'get_weather({"city": "Oslo"})' in result.output


def test_the_model_and_the_server_are_named_first(run_chat, scripted, script):
    scripted.reports = [script.report()]
    assert f"org/tiny at {scripted.address}\n" in run_chat().output


def test_pictures_are_sent_with_their_question_and_those_after_it(
    run_chat, scripted, script, tmp_path
):
    one, two = tmp_path / "one.png", tmp_path / "a b.jpg"
    one.write_bytes(b"first")
    two.write_bytes(b"second")
    scripted.scripts = [[script.content("a")], [script.content("b")], [script.content("c")]]
    result = run_chat(
        f"What is in {one} ?", "/image", f"/image {two}", "and here?", "/clear", "hello"
    )
    sent = [[base64.b64decode(each) for each in r.Images] for r in scripted.requests]
    assert sent == [[b"first"], [b"first", b"second"], []]
    assert "/image FILE sends a picture: which?" in result.output


def test_pictures_of_a_question_that_failed_are_forgotten(run_chat, scripted, script, tmp_path):
    picture = tmp_path / "one.png"
    picture.write_bytes(b"first")
    refusal = script.refuse(grpc.StatusCode.INVALID_ARGUMENT, "Images: none are taken")
    scripted.scripts = [[refusal], [script.content("Hi!")]]
    result = run_chat(f"{picture}", f"/image {picture}.none", "hello")
    assert [len(request.Images) for request in scripted.requests] == [1, 0]
    assert "No such file" in result.output
