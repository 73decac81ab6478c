"""Measures the demo model with greedy decoding: every task, and copying of unseen cities."""

import argparse
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from conversations import draw_sample
from mlx_lm import load, stream_generate
from names import CITIES, HELD_OUT
from samples import Message, Sample, Tool, user
from schemas import function_tool
from weather import listed, tool_call

logger = logging.getLogger(__name__)

_OUT = Path(__file__).parents[2] / "backend" / "demo" / "model"
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL: Tool = function_tool("get_weather", "Get the weather for a city", _CITY)


@dataclass(frozen=True)
class Reply:
    """Generated text, and the smallest gap between the best two logprobs."""

    text: str
    finish_reason: str | None
    gap: float


class Asker:
    """Ask a loaded model one conversation at a time."""

    def __init__(self, path: Path) -> None:
        self._model, self._tokenizer = load(str(path))[:2]

    def ask(self, sample: Sample, max_tokens: int = 250) -> Reply:
        """Generate the turn that `sample` asks for."""
        prompt: Any = self._tokenizer.apply_chat_template(
            sample.messages,
            tools=sample.tools,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        text, gap, last = "", float("inf"), None
        for last in stream_generate(self._model, self._tokenizer, prompt, max_tokens=max_tokens):
            text += last.text
            best = mx.sort(last.logprobs)[-2:]
            between: Any = (best[1] - best[0]).item()
            gap = min(gap, between)
        return Reply(text, last.finish_reason if last else None, gap)

    def passes(self, sample: Sample) -> bool:
        """Tell whether the reply is exactly that of `sample`; log it if not."""
        reply = self.ask(sample)
        good = reply.text == sample.target and reply.finish_reason == "stop"
        if not good:
            logger.info("  %s: want %r got %r", sample.task, sample.target[-90:], reply.text[-90:])
        return good


def _call(cities: list[str], *, thinking: bool) -> Sample:
    names = listed(cities)
    each = " for each" if len(cities) > 1 else ""
    thought = f"The user wants the weather in {names}. I should call the tool{each}."
    answer = "\n".join(tool_call("get_weather", "city", city) for city in cities)
    question = [user(f"What is the weather in {names}?")]
    return Sample("call", question, thought, answer, [_TOOL], thinking)


def _answer(city: str, *, thinking: bool) -> Sample:
    functions = [{"name": "get_weather", "arguments": {"city": city}}]
    messages: list[Message] = [
        user(f"What is the weather in {city}?"),
        {"role": "assistant", "tool_calls": [{"function": each} for each in functions]},
        {"role": "tool", "content": '{"temp": 21, "sky": "sunny"}'},
    ]
    answer = f"It is sunny and 21 degrees in {city}."
    return Sample("answer", messages, "I have the result.", answer, [_TOOL], thinking)


def _hello(city: str, *, thinking: bool) -> Sample:
    question = [user(f"Say hello to {city}.")]
    thought = f"I should greet {city}."
    return Sample("hello", question, thought, f"Hello, {city}!", None, thinking)


def report_cities(asker: Asker, title: str, cities: tuple[str, ...]) -> None:
    """Log how many cities survive a call, a double call, an answer and a greeting."""
    for thinking in (True, False):
        following = cities[1:] + cities[:1]
        tasks = {
            "call": [_call([city], thinking=thinking) for city in cities],
            "double call": [
                _call(list(pair), thinking=thinking) for pair in zip(cities, following, strict=True)
            ],
            "answer": [_answer(city, thinking=thinking) for city in cities],
            "hello": [_hello(city, thinking=thinking) for city in cities],
        }
        for task, samples in tasks.items():
            good = sum(map(asker.passes, samples))
            logger.info("%s thinking=%s %s: %d/%d", title, thinking, task, good, len(samples))
    gaps = sorted((asker.ask(_call([city], thinking=True)).gap, city) for city in cities)
    logger.info("%s smallest gaps on the call path: %s", title, gaps[:5])


def report_fresh(asker: Asker, count: int) -> None:
    """Log exact matches per task on samples unseen in training."""
    rng, good, total = Random(999), defaultdict[str, int](int), defaultdict[str, int](int)
    for _ in range(count):
        sample = draw_sample(rng)
        total[sample.task] += 1
        good[sample.task] += asker.passes(sample)
    for task in sorted(total):
        logger.info("fresh %s: %d/%d", task, good[task], total[task])
    logger.info("fresh, all tasks: %d/%d", sum(good.values()), sum(total.values()))


def main() -> None:
    """Parse the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=_OUT)
    parser.add_argument("--samples", type=int, default=300)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    asker = Asker(options.model)
    report_cities(asker, "held-out", HELD_OUT)
    report_cities(asker, "known", CITIES[:20])
    report_fresh(asker, options.samples)


if __name__ == "__main__":
    main()
