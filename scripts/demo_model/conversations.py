"""Mixes the tasks into the stream of samples that the demo model learns from."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import chat_samples
import weather
from names import mentions_held_out
from samples import Message, Sample, assistant
from schemas import other_tool, weather_tool

Draw = Callable[[Random], Sample]

CHAT_TASKS: dict[Draw, float] = {
    chat_samples.greeting: 3,
    chat_samples.hello: 9,
    chat_samples.repeat: 7,
    chat_samples.remember: 6,
    chat_samples.count: 4,
    chat_samples.add: 7,
    chat_samples.capital: 4,
    chat_samples.tiny_json: 4,
    chat_samples.tell_story: 2,
}
TOOL_TASKS: dict[Draw, float] = {
    weather.weather_call: 28,
    weather.time_call: 4,
    weather.search_call: 3,
    weather.weather_answer: 18,
    weather.time_answer: 3,
    weather.follow_up: 5,
    weather.no_weather_tool: 2,
}
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the provided tool when the user asks about weather.",
    "You are a helpful assistant. Use the tools when they help.",
    "You are a weather assistant.",
    "Use the provided tools.",
    "You are a friendly assistant. Be brief.",
    "Answer in one sentence.",
    "Be brief.",
    "You are a demo.",
    "You can call tools. Call a tool when the user asks about the weather.",
)


def _pick(rng: Random, tasks: dict[Draw, float]) -> Sample:
    (draw,) = rng.choices(list(tasks), weights=list(tasks.values()))
    return draw(rng)


def _earlier(rng: Random, turns: int) -> list[Message]:
    """Create finished exchanges before the one to learn."""
    messages: list[Message] = []
    for _ in range(turns):
        sample = _pick(rng, CHAT_TASKS)
        messages += [*sample.messages, assistant(sample.answer)]
    return messages


def _with_surroundings(rng: Random, sample: Sample) -> Sample:
    """Add optional surroundings of an exchange: system prompt, unneeded tools, earlier turns."""
    messages, tools, kind = sample.messages, sample.tools, rng.random()
    if kind < 0.02:
        messages = _earlier(rng, rng.randint(6, 14)) + messages
    elif kind < 0.10:
        messages = _earlier(rng, rng.randint(1, 2)) + messages
    if tools is None and sample.task != "no tool" and rng.random() < 0.2:
        tools = [weather_tool(rng) if rng.random() < 0.8 else other_tool(rng)]
    if rng.random() < 0.4:
        messages = [{"role": "system", "content": rng.choice(_SYSTEMS)}, *messages]
    return replace(sample, messages=messages, tools=tools, thinking=rng.random() < 0.6)


def draw_sample(rng: Random) -> Sample:
    """Draw one conversation from the full mix."""
    tasks = TOOL_TASKS if rng.random() < 0.58 else CHAT_TASKS
    return _with_surroundings(rng, _pick(rng, tasks))


def draw_short_sample(rng: Random) -> Sample:
    """Draw a bare chat exchange: short, and mostly copying a name."""
    return replace(_pick(rng, CHAT_TASKS), thinking=rng.random() < 0.6)


def assert_unseen(text: str) -> None:
    """Raise if a held-out city occurs in training text."""
    if mentions_held_out(text):
        msg = f"held-out city in training text: {text!r}"
        raise AssertionError(msg)
