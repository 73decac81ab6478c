"""Draw tool schemas with varied names, arguments and descriptions."""

from random import Random

from names import place
from samples import Tool

WEATHER_NAMES = [
    "get_current_weather",
    "current_weather",
    "weather",
    "lookup_weather",
    "weather_lookup",
    "fetch_weather",
    "weather_report",
    "get_forecast",
    "getWeather",
    "check_weather",
    "weather_at",
    "city_weather",
    "forecast",
    "read_weather_now",
    "weather_api",
    "get_weather_info",
    "get_local_weather",
]
TIME_NAMES = ["get_time", "get_current_time", "current_time", "time_in", "clock", "local_time"]
PLACE_KEYS = [
    "location",
    "place",
    "town",
    "city_name",
    "query",
    "where",
    "area",
    "region",
    "name",
    "address",
    "q",
]

_WEATHER_TEXTS = (
    "Get the weather",
    "Get the current weather",
    "Get the weather for a city",
    "Get the current weather in a given location",
    "Get weather information for a location.",
    "Return the current weather of a city.",
    "Look up the weather",
    "Current weather",
)
_TIME_TEXTS = ("Get the time", "Get the current time in a city", "Return the local time.")
_KEY_TEXTS = (
    "The city",
    "City name",
    "Name of the city",
    "The city name",
    "The location",
    "The city and state, e.g. {}",
    "City and country, e.g. {}",
    "The place to look up, for example {}",
)
_OPTIONS: tuple[tuple[str, Tool], ...] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("units", {"type": "string", "description": "metric or imperial"}),
    ("days", {"type": "integer"}),
    ("lang", {"type": "string"}),
    ("format", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
)


def _syllables(rng: Random) -> str:
    count = rng.randint(1, 3)
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count))


def _key(rng: Random) -> str:
    """Draw the name of the place argument; invented ones teach copying it."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(("city", "location"))
    return rng.choice(PLACE_KEYS) if kind < 0.8 else _syllables(rng)


def function_tool(name: str, description: str | None, parameters: Tool) -> Tool:
    """Make a function tool; without a description, the key is left out."""
    function: Tool = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _object(rng: Random, key: str, hint: str | None, option: tuple[str, Tool] | None) -> Tool:
    """Make an object schema that requires `key`; an option may come before or after it."""
    wanted: Tool = {"type": "string"}
    if hint is not None:
        wanted["description"] = hint
    properties = [(key, wanted)]
    if option is not None:
        properties.insert(rng.randint(0, 1), option)
    return {"type": "object", "properties": dict(properties), "required": [key]}


def place_tool(rng: Random, names: list[str], texts: tuple[str, ...]) -> Tool:
    """Draw a tool that takes one place."""
    hint = rng.choice(_KEY_TEXTS).format(place(rng)) if rng.random() < 0.4 else None
    option = rng.choice(_OPTIONS) if rng.random() < 0.2 else None
    text = rng.choice(texts) if rng.random() < 0.85 else None
    return function_tool(rng.choice(names), text, _object(rng, _key(rng), hint, option))


def weather_tool(rng: Random) -> Tool:
    """Draw a weather tool, most often named get_weather."""
    kind = rng.random()
    if kind < 0.5:
        names = ["get_weather"]
    elif kind < 0.85:
        names = WEATHER_NAMES
    else:
        names = [rng.choice((f"{_syllables(rng)}_weather", f"weather_{_syllables(rng)}"))]
    return place_tool(rng, names, _WEATHER_TEXTS)


def time_tool(rng: Random) -> Tool:
    """Draw a tool that tells the time in a place."""
    return place_tool(rng, TIME_NAMES, _TIME_TEXTS)


def search_tool(rng: Random) -> Tool:
    """Draw a search tool."""
    key = rng.choice(["query", "q", "text", "topic"])
    name = rng.choice(["search", "web_search", "search_web", "lookup", "find"])
    return function_tool(name, "Search the web", _object(rng, key, None, None))


def other_tool(rng: Random) -> Tool:
    """Draw a tool no question of ours needs."""
    name, text, key = rng.choice(
        (
            ("send_email", "Send an email", "to"),
            ("calculate", "Evaluate an expression", "expression"),
            ("get_news", "Get the news", "topic"),
            ("get_stock_price", "Get the price of a stock", "symbol"),
            ("play_music", "Play a song", "song"),
        )
    )
    return function_tool(name, text, _object(rng, key, None, None))


def required_key(tool: Tool) -> str:
    """Name the one required argument of a drawn tool."""
    return str(tool["function"]["parameters"]["required"][0])
