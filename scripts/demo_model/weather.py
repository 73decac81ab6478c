"""Draw conversations that call a tool, and that answer from its results."""

import json
from dataclasses import dataclass
from random import Random

from names import place, place_in_region
from samples import Message, Sample, Tool, assistant, user
from schemas import other_tool, required_key, search_tool, time_tool, weather_tool

_ASK = (
    "What is the weather in {}?",
    "What is the weather in {}?",
    "What's the weather in {}?",
    "What is the weather like in {}?",
    "What's the weather like in {}?",
    "What is the weather in {} today?",
    "What's the weather like in {} today?",
    "What is the weather like today in {}?",
    "What is the weather in {} right now?",
    "What is the current weather in {}?",
    "What will the weather be in {} tomorrow?",
    "What is the weather for {}?",
    "How is the weather in {}?",
    "How is the weather in {} today?",
    "How's the weather in {} now?",
    "Weather in {}?",
    "Weather in {}",
    "Weather for {}, please.",
    "Tell me the weather in {}.",
    "Please tell me the weather in {}.",
    "Can you tell me the weather in {}?",
    "Could you check the weather in {}?",
    "Check the weather in {}.",
    "Check the weather for {} please.",
    "Give me the weather for {}.",
    "Get the weather of {}",
    "Show me the forecast for {}.",
    "I want to know the weather in {}.",
    "I need the weather in {}.",
    "What is the temperature in {}?",
    "Use the tool to get the weather in {}.",
)
_ASK_ONE = (
    "Is it raining in {}?",
    "Is it sunny in {} today?",
    "Is it cold in {}?",
    "How warm is it in {}?",
    "Do I need an umbrella in {}?",
    "I am going to {}. What is the weather there?",
    "{}: what is the weather?",
    "What is {}'s weather like?",
)
_ASK_TIME = (
    "What time is it in {}?",
    "What is the time in {}?",
    "Tell me the time in {}.",
    "What's the local time in {}?",
)
_SEARCH = ("Search for {}.", "Search the web for {}.", "Look up {}.", "Find {}.")
_NEXT = ("And in {}?", "And {}?", "What about {}?", "How about {}?", "And the weather in {}?")
_OPENINGS = ("Hi! ", "Hello. ", "Hey, ", "Please help me. ", "Good morning. ")
_SKIES = [
    "sunny",
    "rainy",
    "cloudy",
    "windy",
    "snowy",
    "foggy",
    "clear",
    "stormy",
    "hot",
    "cold",
    "dry",
    "humid",
]
_THANKS = ("Thanks!", "Thank you.", "Thanks", "Great, thank you!")


@dataclass(frozen=True)
class Report:
    """A weather tool's result for one place: its text, and the answering sentence."""

    content: str
    sentence: str


def tool_call(name: str, key: str, value: str) -> str:
    """Write one call as the model does."""
    call = {"name": name, "arguments": {key: value}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def listed(names: list[str]) -> str:
    """Join names as a sentence does: "A", "A and B", "A, B and C"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _places(rng: Random) -> list[str]:
    """Draw the places of one question: mostly one, often two, seldom three."""
    kind = rng.random()
    if kind < 0.08:
        return [place_in_region(rng)]
    count = 1 if kind < 0.62 else 2 if kind < 0.95 else 3
    return [place(rng) for _ in range(count)]


def _question(rng: Random, places: list[str]) -> str:
    ask = rng.choice(_ASK_ONE if len(places) == 1 and rng.random() < 0.2 else _ASK)
    joint = " and in " if len(places) == 2 and rng.random() < 0.1 else None
    text = ask.format(joint.join(places) if joint else listed(places))
    return rng.choice(_OPENINGS) + text if rng.random() < 0.1 else text


def _offer(rng: Random, tool: Tool) -> list[Tool]:
    """Offer `tool`, often among others, in any order."""
    tools = [tool]
    while len(tools) < 3 and rng.random() < 0.3:
        tools.append(rng.choice((other_tool, search_tool))(rng))
    rng.shuffle(tools)
    return tools


def _calls(tool: Tool, places: list[str]) -> str:
    name, key = tool["function"]["name"], required_key(tool)
    return "\n".join(tool_call(name, key, each) for each in places)


def _call_thought(places: list[str], wanted: str = "the weather in") -> str:
    each = " for each" if len(places) > 1 else ""
    return f"The user wants {wanted} {listed(places)}. I should call the tool{each}."


def weather_call(rng: Random) -> Sample:
    """Ask for the weather where a weather tool is offered."""
    tool, places = weather_tool(rng), _places(rng)
    tools = _offer(rng, tool)
    if rng.random() < 0.25:
        tools.insert(rng.randint(0, len(tools)), time_tool(rng))
    messages = [user(_question(rng, places))]
    return Sample("call", messages, _call_thought(places), _calls(tool, places), tools)


def time_call(rng: Random) -> Sample:
    """Ask for the time where a time tool is offered, often together with a weather tool."""
    tool, places = time_tool(rng), [place(rng)]
    tools = _offer(rng, tool)
    if rng.random() < 0.5:
        tools.insert(rng.randint(0, len(tools)), weather_tool(rng))
    messages = [user(rng.choice(_ASK_TIME).format(places[0]))]
    thought = _call_thought(places, "the time in")
    return Sample("time call", messages, thought, _calls(tool, places), tools)


def search_call(rng: Random) -> Sample:
    """Ask to search where a search tool is offered."""
    tool, places = search_tool(rng), [place(rng)]
    tools = [tool, weather_tool(rng)] if rng.random() < 0.4 else [tool]
    messages = [user(rng.choice(_SEARCH).format(places[0]))]
    thought = _call_thought(places, "a search for")
    return Sample("search call", messages, thought, _calls(tool, places), tools)


def _temperature(rng: Random) -> str:
    whole = rng.randint(-12, 40)
    return f"{whole}.{rng.randint(1, 9)}" if rng.random() < 0.1 else str(whole)


def _as_json(rng: Random, where: str, sky: str | None, degrees: str | None) -> str:
    """Write a report as JSON with varied keys and order, and unrequested facts."""
    facts: list[tuple[str, object]] = []
    if degrees is not None:
        keys = ["temp", "temperature", "temp_c", "temperature_c", "celsius", "degrees"]
        facts.append((rng.choice(keys), json.loads(degrees)))
    if sky is not None:
        keys = ["sky", "condition", "conditions", "description", "weather", "summary"]
        facts.append((rng.choice(keys), sky))
    if rng.random() < 0.25:
        facts.append((rng.choice(("city", "location")), where))
    if rng.random() < 0.15:
        facts.append(rng.choice((("unit", "celsius"), ("humidity", rng.randint(20, 90)))))
    rng.shuffle(facts)
    return json.dumps(dict(facts), ensure_ascii=False)


def _report(rng: Random, where: str) -> Report:
    """Draw a tool result; occasionally a fact is missing, or the lookup failed."""
    sky, degrees, kind = rng.choice(_SKIES), _temperature(rng), rng.random()
    if kind < 0.05:
        error = rng.choice(("not found", "unknown city", "timeout"))
        content = rng.choice((f"error: {error}", json.dumps({"error": error})))
        return Report(content, f"I could not get the weather in {where}.")
    if kind < 0.12:
        return Report(_as_json(rng, where, None, degrees), f"It is {degrees} degrees in {where}.")
    if kind < 0.19:
        content = rng.choice((_as_json(rng, where, sky, None), sky))
        return Report(content, f"It is {sky} in {where}.")
    sentence = f"It is {sky} and {degrees} degrees in {where}."
    if kind < 0.75:
        return Report(_as_json(rng, where, sky, degrees), sentence)
    plain = ("{s}, {d} degrees", "{d} degrees and {s}", "It is {s} and {d} degrees.")
    forms = (*plain, "{d}°C, {s}", "{c}, {d}C", "{c}, {d}°C", "{c} with {d} degrees", "{d}C {s}")
    return Report(rng.choice(forms).format(s=sky, c=sky.capitalize(), d=degrees), sentence)


def _call_turn(rng: Random, tool: Tool, places: list[str]) -> Message:
    """Make the assistant turn that called the tool, with or without its thought."""
    name, key = tool["function"]["name"], required_key(tool)
    functions = [{"name": name, "arguments": {key: each}} for each in places]
    turn: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": each} for each in functions],
    }
    if rng.random() < 0.5:
        turn["reasoning_content"] = _call_thought(places)
    return turn


def _exchange(
    rng: Random, tool: Tool, question: str, places: list[str]
) -> tuple[list[Message], str]:
    """Make question, calls and results, and the answer they lead to."""
    reports = [_report(rng, each) for each in places]
    results = [{"role": "tool", "content": report.content} for report in reports]
    messages = [user(question), _call_turn(rng, tool, places), *results]
    return messages, " ".join(report.sentence for report in reports)


def weather_answer(rng: Random) -> Sample:
    """Answer from the results of one or more calls."""
    tool, places = weather_tool(rng), _places(rng)
    messages, answer = _exchange(rng, tool, _question(rng, places), places)
    thought = "I have the results." if len(places) > 1 else "I have the result."
    return Sample("answer", messages, thought, answer, _offer(rng, tool))


def time_answer(rng: Random) -> Sample:
    """Answer from the result of a time tool."""
    tool, where = time_tool(rng), place(rng)
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    content = rng.choice((json.dumps({"time": clock}), clock, f"It is {clock}."))
    question = user(rng.choice(_ASK_TIME).format(where))
    messages = [question, _call_turn(rng, tool, [where]), {"role": "tool", "content": content}]
    answer = f"It is {clock} in {where}."
    return Sample("time answer", messages, "I have the result.", answer, _offer(rng, tool))


def follow_up(rng: Random) -> Sample:
    """Continue after an answered weather question: another place, or thanks."""
    tool, first = weather_tool(rng), [place(rng)]
    messages, answer = _exchange(rng, tool, _question(rng, first), first)
    messages.append(assistant(answer))
    if rng.random() < 0.3:
        thanks = [*messages, user(rng.choice(_THANKS))]
        return Sample("thanks", thanks, "The user thanks me.", "You are welcome!", [tool])
    places = [place(rng)]
    question = rng.choice(_NEXT).format(places[0])
    if rng.random() < 0.5:
        messages.append(user(question))
        return Sample("call", messages, _call_thought(places), _calls(tool, places), [tool])
    more, answer = _exchange(rng, tool, question, places)
    return Sample("answer", messages + more, "I have the result.", answer, [tool])


def no_weather_tool(rng: Random) -> Sample:
    """Ask for the weather without a suitable tool."""
    messages = [user(_question(rng, [place(rng)]))]
    answer = "I cannot look up the weather without a tool."
    tools = [rng.choice((other_tool, time_tool))(rng)] if rng.random() < 0.4 else None
    return Sample("no tool", messages, "I have no tool for the weather.", answer, tools)
