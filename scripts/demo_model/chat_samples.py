"""Draw conversations that need no tool."""

import json
from random import Random

from names import CAPITALS, invented, person
from samples import Sample, assistant, story, user

_GREETINGS = ("Hi", "Hello", "Hey", "Hi!", "Hello!", "Hello.", "Hey there", "Good morning")
_HELLO = ("Say hello to {}.", "Say hello to {}", "Say hi to {}.", "Greet {}.", "Please greet {}.")
_CAPITAL = (
    "What is the capital of {}?",
    "What's the capital of {}?",
    "Capital of {}?",
    "Tell me the capital of {}.",
    "Name the capital of {}.",
)


def greeting(rng: Random) -> Sample:
    """Answer a greeting."""
    answer = "Hello! How can I help you today?"
    return Sample("greeting", [user(rng.choice(_GREETINGS))], "The user says hello.", answer)


def hello(rng: Random) -> Sample:
    """Say hello to somebody."""
    name = person(rng)
    messages = [user(rng.choice(_HELLO).format(name))]
    return Sample("hello", messages, f"I should greet {name}.", f"Hello, {name}!")


def repeat(rng: Random) -> Sample:
    """Repeat a few names."""
    names = " ".join(invented(rng) for _ in range(rng.randint(1, 4)))
    ask = rng.choice(("Repeat: {}", "Say: {}", "Repeat after me: {}", 'Say "{}"'))
    return Sample("repeat", [user(ask.format(names))], "I should repeat the words.", names)


def remember(rng: Random) -> Sample:
    """Remember the user's name over a turn or two."""
    name = person(rng)
    opening = rng.choice(("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}."))
    messages = [user(opening.format(name)), assistant(f"Nice to meet you, {name}!")]
    if rng.random() < 0.3:
        return Sample("meet", messages[:1], f"The user is {name}.", f"Nice to meet you, {name}!")
    if rng.random() < 0.3:
        other = greeting(rng)
        messages += [*other.messages, assistant(other.answer)]
    messages.append(user(rng.choice(("What is my name?", "What's my name?", "Who am I?"))))
    return Sample("remember", messages, "The user told me the name.", f"Your name is {name}.")


def count(rng: Random) -> Sample:
    """Count to a number."""
    last = rng.randint(2, 20) if rng.random() < 0.8 else rng.randint(21, 60)
    ask = rng.choice(("Count to {}.", "Count from 1 to {}.", "Count to {}", "Please count to {}."))
    numbers = " ".join(map(str, range(1, last + 1)))
    return Sample("count", [user(ask.format(last))], f"I will count to {last}.", numbers)


def add(rng: Random) -> Sample:
    """Add two digits."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    forms = (
        "What is {} + {}?",
        "What is {} plus {}?",
        "{} + {}",
        "What's {} + {}?",
        "Add {} and {}.",
    )
    question = rng.choice((*forms, "What is {}+{}?")).format(a, b)
    return Sample("sum", [user(question)], f"I will add {a} and {b}.", f"{a} + {b} = {a + b}")


def capital(rng: Random) -> Sample:
    """Name a capital."""
    country, city = rng.choice(list(CAPITALS.items()))
    messages = [user(rng.choice(_CAPITAL).format(country))]
    answer = f"The capital of {country} is {city}."
    return Sample("capital", messages, f"I know the capital of {country}.", answer)


def tiny_json(rng: Random) -> Sample:
    """Write a JSON object about somebody."""
    name, age = person(rng), rng.randint(1, 99)
    if rng.random() < 0.5:
        ask = rng.choice(("Give me JSON for {}.", "Write JSON for {}.", "JSON for {}?"))
        question, value = ask.format(name), json.dumps({"name": name}, ensure_ascii=False)
    else:
        ask = rng.choice(("Give me JSON: {}, age {}.", "Write JSON for {}, age {}."))
        question = ask.format(name, age)
        value = json.dumps({"name": name, "age": age}, ensure_ascii=False)
    return Sample("json", [user(question)], "I will write JSON.", value)


def tell_story(rng: Random) -> Sample:
    """Tell a short story about somebody."""
    name = person(rng)
    ask = rng.choice(("Tell me a story about {}.", "Write a story about {}.", "A story about {}?"))
    thought = f"I will tell a story about {name}."
    return Sample("story", [user(ask.format(name))], thought, story(name))
