import pytest
from click.testing import CliRunner

from backend.cli.app import main
from backend.cli.demo import QUESTION, DemoError, hold_conversation


async def test_the_thought_the_call_and_the_answer_are_shown_in_order(
    client, scripted, script, console
):
    scripted.scripts = [
        [script.thought("I should call."), *script.weather_call("Hanoi")],
        [script.content("It is sunny.", tokens=4)],
    ]
    await hold_conversation(console, client)
    text = console.file.getvalue()
    shown = [QUESTION, "I should call.", "get_weather", "temperature", "It is sunny.", "8.0 tokens"]
    assert [text.index(part) for part in shown] == sorted(text.index(part) for part in shown)


async def test_every_call_is_answered_under_its_id(client, scripted, script, console):
    scripted.scripts = [
        [*script.weather_call("Hanoi", 0), *script.weather_call("Quito", 1)],
        [script.content("Fine.")],
    ]
    await hold_conversation(console, client)
    messages = scripted.requests[1].Messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [message.tool_call_id for message in messages[2:]] == ["call_0", "call_1"]


async def test_a_model_that_calls_nothing_fails_the_demo(client, scripted, script, console):
    scripted.scripts = [[script.content("I do not know.")]]
    with pytest.raises(DemoError, match="did not call"):
        await hold_conversation(console, client)


async def test_a_model_that_does_not_answer_fails_the_demo(client, scripted, script, console):
    scripted.scripts = [script.weather_call("Hanoi"), [script.thought("hm")]]
    with pytest.raises(DemoError, match="did not answer"):
        await hold_conversation(console, client)


@pytest.mark.mlx
def test_the_demo_runs_from_start_to_end():
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.stderr
    assert 'get_weather({"city": "Hanoi"})' in result.output
    assert "degrees in Hanoi." in result.output
