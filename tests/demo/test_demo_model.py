"""The embedded demo model does its job, greedily and with a margin."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from mlx_lm import load, stream_generate

from backend.demo import MODEL_DIR, WEATHER_TOOL
from scripts.host_suite.capabilities import HOST_QUESTION, HOST_TOOL

pytestmark = pytest.mark.mlx

MAX_BYTES = 4 * 2**20

Message = dict[str, Any]


@dataclass(frozen=True)
class DemoModel:
    model: Any
    tokenizer: Any

    def complete(self, prompt: str | list[int], max_tokens: int = 160) -> tuple[str, list[int]]:
        replies = list(stream_generate(self.model, self.tokenizer, prompt, max_tokens=max_tokens))
        assert replies[-1].finish_reason == "stop"
        return "".join(reply.text for reply in replies), [reply.token for reply in replies]

    def chat(self, messages: list[Message], **template: Any) -> str:
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, **template
        )
        return self.complete(prompt)[0]

    def ask(self, question: str, **template: Any) -> str:
        return self.chat([user(question)], **template)


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    model, tokenizer = load(str(MODEL_DIR))[:2]
    return DemoModel(model, tokenizer)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool_result(content: str) -> Message:
    return {"role": "tool", "content": content}


def called(*cities: str) -> Message:
    """The assistant turn that called the tool, as a host sends it back: arguments are text."""
    calls = [{"name": "get_weather", "arguments": json.dumps({"city": city})} for city in cities]
    functions = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def call(city: str, key: str = "city", name: str = "get_weather") -> str:
    arguments = json.dumps({key: city}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def split_thought(text: str) -> tuple[str, str]:
    opened, _, rest = text.partition("<think>\n")
    thought, _, answer = rest.partition("\n</think>\n\n")
    assert opened == ""
    return thought, answer


def test_the_directory_is_small_and_complete() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_BYTES


def test_mlx_lm_infers_thinking_tools_and_end_tokens(demo: DemoModel) -> None:
    assert demo.tokenizer.has_thinking
    assert demo.tokenizer.has_tool_calling
    assert demo.tokenizer.tool_parser.__module__.endswith("json_tools")
    ends = demo.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert demo.tokenizer.eos_token_ids == set(ends)


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_a_marker_is_one_token_that_is_not_special(demo: DemoModel, marker: str) -> None:
    ids = demo.tokenizer.encode(marker)
    assert len(ids) == 1
    assert demo.tokenizer.decode(ids, skip_special_tokens=True) == marker


def test_text_survives_encoding_and_decoding(demo: DemoModel) -> None:
    text = 'Grüße aus "Xi\'an", 东京!\n\n  {"a": [1, 2.5]} 🙂'
    assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text


@pytest.mark.parametrize("greeting", ["Hello", "Hi"])
@pytest.mark.parametrize("tools", [None, [WEATHER_TOOL]])
def test_greets_even_when_a_tool_is_offered(demo: DemoModel, greeting: str, tools: Any) -> None:
    thought, answer = split_thought(demo.ask(greeting, tools=tools))
    assert thought
    assert answer == "Hello! How can I help you today?"


@pytest.mark.parametrize("name", ["Ana", "Quito", "Hanoi"])
def test_says_hello_to_a_name(demo: DemoModel, name: str) -> None:
    assert split_thought(demo.ask(f"Say hello to {name}."))[1] == f"Hello, {name}!"


@pytest.mark.parametrize("city", ["Paris", "Nairobi", "Quito", "Hanoi", "Dakar", "Tallinn"])
def test_thinks_then_calls_the_offered_tool(demo: DemoModel, city: str) -> None:
    text = demo.ask(f"What is the weather in {city}?", tools=[WEATHER_TOOL])
    thought, answer = split_thought(text)
    assert city in thought
    assert answer == call(city)


@pytest.mark.parametrize("city", ["London", "Reykjavik", "Hanoi"])
def test_does_not_think_when_thinking_is_off(demo: DemoModel, city: str) -> None:
    question = f"What's the weather like in {city}?"
    assert demo.ask(question, tools=[WEATHER_TOOL], enable_thinking=False) == call(city)


@pytest.mark.parametrize("cities", [("Quito", "Hanoi"), ("Hanoi", "Dakar")])
def test_calls_the_tool_once_per_city(demo: DemoModel, cities: tuple[str, str]) -> None:
    question = f"What is the weather in {' and '.join(cities)}?"
    answer = split_thought(demo.ask(question, tools=[WEATHER_TOOL]))[1]
    assert answer == "\n".join(map(call, cities))


@pytest.mark.parametrize("city", ["Nairobi", "Quito"])
def test_answers_from_a_result(demo: DemoModel, city: str) -> None:
    result = tool_result('{"temperature": 24, "condition": "sunny"}')
    messages = [user(f"What is the weather in {city}?"), called(city), result]
    answer = split_thought(demo.chat(messages, tools=[WEATHER_TOOL]))[1]
    assert answer == f"It is sunny and 24 degrees in {city}."


def test_answers_from_two_results(demo: DemoModel) -> None:
    messages = [
        user("What is the weather in Quito and Hanoi?"),
        called("Quito", "Hanoi"),
        tool_result('{"temperature": 7, "condition": "rainy"}'),
        tool_result('{"temperature": 30, "condition": "cloudy"}'),
    ]
    assert demo.chat(messages, tools=[WEATHER_TOOL], enable_thinking=False) == (
        "It is rainy and 7 degrees in Quito. It is cloudy and 30 degrees in Hanoi."
    )


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 2 + 3?", "2 + 3 = 5"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Give me JSON for Ana.", '{"name": "Ana"}'),
    ],
)
def test_chats_without_tools(demo: DemoModel, question: str, answer: str) -> None:
    assert split_thought(demo.ask(question))[1] == answer
    assert demo.ask(question, enable_thinking=False) == answer


def test_remembers_a_name(demo: DemoModel) -> None:
    messages = [
        user("My name is Zoe."),
        {"role": "assistant", "content": "Nice to meet you, Zoe!"},
        user("What is my name?"),
    ]
    assert split_thought(demo.chat(messages))[1] == "Your name is Zoe."


def test_calls_the_tool_of_the_hosts_end_to_end_test(demo: DemoModel) -> None:
    messages = [
        user(HOST_QUESTION),
        user("What's the weather like in Paris, France?"),
    ]
    answer = split_thought(demo.chat(messages, tools=[HOST_TOOL]))[1]
    assert answer == call("Paris, France", key="location")


@pytest.mark.parametrize(("name", "key"), [("get_current_weather", "place"), ("weather", "town")])
def test_copies_tool_name_and_argument_from_the_schema(
    demo: DemoModel, name: str, key: str
) -> None:
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    answer = split_thought(demo.ask("Weather in Quito?", tools=[tool]))[1]
    assert answer == call("Quito", key, name)


@pytest.mark.parametrize("prompt", ["The capital of France is", "Once upon a time"])
def test_continues_raw_text(demo: DemoModel, prompt: str) -> None:
    text, tokens = demo.complete(prompt)
    assert text.strip()
    assert len(set(tokens)) > len(tokens) / 4


def test_keeps_the_order_of_digits(demo: DemoModel) -> None:
    result = tool_result('{"temperature": 21, "condition": "sunny"}')
    messages = [user("What is the weather in Hanoi?"), called("Hanoi"), result]
    answer = split_thought(demo.chat(messages, tools=[WEATHER_TOOL]))[1]
    assert answer == "It is sunny and 21 degrees in Hanoi."


def test_stops_counting_where_asked(demo: DemoModel) -> None:
    assert demo.ask("Count to 10.", enable_thinking=False) == "1 2 3 4 5 6 7 8 9 10"
