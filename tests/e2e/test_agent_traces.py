"""Long runs of agents through the socket: the prompt cache serves all but the newest turns."""

import json
from pathlib import Path

import pytest
from serving import Served, chat, served, until, user

pytestmark = pytest.mark.mlx

TEMPLATE = Path(__file__).parent.parent / "model" / "templates" / "hermes_tool_use.jinja"
TURNS = 30
CHOICES = ("auto", "required", "none")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
        },
    },
}
SYSTEM = {"role": "system", "content": "You help. " + "be bi ba bo du " * 24}
# The reply is written as the model wrote it, or as the template does: its first tokens differ.
REWRITTEN_TOKENS = 16
# Less is not kept of a model with recurrent layers.
WORTHWHILE_TOKENS = 64


def turn(number, choice):
    """Return the messages that a turn adds: the reply without its thought, and the next message."""
    text = f"{number} " + "bo ba du bi " * 8
    if choice == "none":
        return [{"role": "assistant", "content": text}, user(f"Next, {number}.")]
    call = {"id": f"c{number}", "type": "function"}
    call["function"] = {"name": "look_up", "arguments": json.dumps({"word": f"w{number}"})}
    result = {"role": "tool", "content": text, "tool_call_id": f"c{number}"}
    return [{"role": "assistant", "tool_calls": json.dumps([call])}, result]


def requests():
    """Yield the requests of all turns; the choice of tools changes from turn to turn."""
    history = [SYSTEM, user("Look up some words.")]
    for number in range(TURNS):
        choice = CHOICES[number % len(CHOICES)]
        yield chat(history, tools=[TOOL], ToolChoice=choice, Tokens=24, Temperature=0.9, Seed=1)
        history += turn(number, choice)


async def ask(backend: Served, request):
    """Send a request; return its prompt, and how many of its tokens were not computed."""
    prompt = list((await backend.stub.TokenizeString(request)).tokens)
    before = backend.engine.status().metrics
    await backend.stub.Predict(request)
    seen = before["prompt_cache.looked_up_tokens"] + len(prompt)
    await until(lambda: backend.engine.status().metrics["prompt_cache.looked_up_tokens"] == seen)
    await until(lambda: backend.is_idle)
    after = backend.engine.status().metrics["prompt_cache.hit_tokens"]
    return prompt, after - before["prompt_cache.hit_tokens"]


def common(one, other):
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
@pytest.mark.one_in(2)
async def test_thirty_turns_compute_the_newest_turn_alone_also_after_a_restart(
    tiny_models, tmp_path, family
):
    options = {
        "MaxModelLen": 16_384,
        "Options": [
            f"chat_template:{TEMPLATE}",
            f"cache_dir:{tmp_path}",
        ],
    }
    asked = []
    trace = list(requests())
    for part in (trace[: TURNS // 2], trace[TURNS // 2 :]):
        async with served(tiny_models(family), **options) as backend:
            asked += [await ask(backend, request) for request in part]
    prompts = [prompt for prompt, _ in asked]
    # Without tools, as `none` wants it, a prompt begins otherwise.
    known = [
        max((common(prompt, before) for before in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    ]
    for choice in ("none", "a call"):
        places = [
            n for n in range(TURNS) if (CHOICES[n % len(CHOICES)] == "none") == (choice == "none")
        ]
        reused = [asked[n][1] for n in places]
        assert reused == sorted(reused)
        assert known[places[-1]] > 0.9 * len(prompts[places[-2]])
    short = [k - hits for k, (_, hits) in zip(known, asked, strict=True) if k >= WORTHWHILE_TOKENS]
    assert max(short) <= REWRITTEN_TOKENS
