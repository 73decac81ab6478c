"""The prompt cache through the socket: it reuses prefixes and changes no token."""

import asyncio
import json
from itertools import pairwise

import pytest
from serving import UNENDING, Stderr, chat, served, user
from waiting import until

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

# The first, whose caches can be cut, and the last, which keeps states, run always.
FAMILIES = [
    *("llama", "llama_sliding", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32"),
    *("llama4", "qwen3_5", "mamba2", "nemotron_h", "granitemoehybrid", "kimi_linear", "qwen3_next"),
]
SYSTEM = {"role": "system", "content": "You help. " + "be bi ba bo du " * 24}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
SETTINGS = {"Tokens": 10, "IgnoreEOS": True}


def raw(prompt, **options):
    return pb.PredictOptions(Prompt=prompt, **SETTINGS | options)


def agent_turn(history, **options):
    return chat(history, tools=TOOLS, **SETTINGS | options)


def agent_steps(turns):
    """The messages that an agent sends in each turn: it calls the tool, then reads its result."""
    history = [SYSTEM, user("Look up some words.")]
    for turn in range(turns):
        yield list(history)
        call = {"id": f"c{turn}", "type": "function"}
        call["function"] = {"name": "look_up", "arguments": json.dumps({"word": f"w{turn}"})}
        history.append({"role": "assistant", "tool_calls": json.dumps([call])})
        result = f"{turn} " + "bo ba du bi " * 12
        history.append({"role": "tool", "content": result, "tool_call_id": f"c{turn}"})


async def tokens_of(backend, request):
    return list((await backend.stub.TokenizeString(request)).tokens)


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


async def ask(backend, *requests):
    """Send requests at once; return the replies, and how many prompt tokens were cached."""
    before = backend.engine.status().metrics
    replies = await asyncio.gather(*(backend.stub.Predict(request) for request in requests))
    counted = before["prompt_cache.looked_up_tokens"] + sum(
        reply.prompt_tokens for reply in replies
    )
    await until(lambda: backend.engine.status().metrics["prompt_cache.looked_up_tokens"] == counted)
    await until(lambda: backend.is_idle)
    metrics = await backend.stub.GetMetrics(pb.MetricsRequest())
    books = json.loads(metrics.prompt_json_for_slot)["prompt_cache"]
    return [reply.message for reply in replies], books["hit_tokens"] - before[
        "prompt_cache.hit_tokens"
    ]


async def ask_uncached(directory, requests):
    async with served(directory, MaxModelLen=8192, Options=["max_cache_bytes:0"]) as backend:
        return [(await backend.stub.Predict(request)).message for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(7)
async def test_conversations_compute_only_what_is_new_and_read_like_uncached_ones(
    tiny_models, family
):
    drawn = [agent_turn(h, Temperature=0.8, Seed=5) for h in agent_steps(3)]
    drawn += [agent_turn([SYSTEM, user("Something else.")]), drawn[1], drawn[2]]
    other = agent_turn([SYSTEM, user("Yet another.")])
    async with served(tiny_models(family), MaxModelLen=8192) as backend:
        prompts, reused = [], []
        for request in map(agent_turn, agent_steps(4)):
            prompts.append(await tokens_of(backend, request))
            reused.append((await ask(backend, request))[1])
        # Another conversation reuses all of the system prompt.
        system = shared(prompts[0], await tokens_of(backend, other))
        assert (await ask(backend, other))[1] >= 0.99 * system
        asked = [await ask(backend, request) for request in drawn]
    reusable = [shared(before, after) for before, after in pairwise(prompts)]
    assert reused[0] == 0
    assert min(r / c for r, c in zip(reused[1:], reusable, strict=True)) >= 0.95
    assert all(hit_tokens > 0 for _, hit_tokens in asked)
    warm = [messages[0] for messages, _ in asked]
    assert warm == await ask_uncached(tiny_models(family), drawn)


async def test_the_log_says_how_much_was_cached(tiny_models, caplog):
    caplog.set_level("INFO")
    async with served(tiny_models("llama")) as backend:
        for name in ("first", "second"):
            await ask(backend, raw("ba be bi bo bu " * 9, CorrelationId=name))
    [line] = [r.getMessage() for r in caplog.records if "id=second" in r.getMessage()]
    prompt_tokens = int(line.split("prompt_tokens=")[1].split()[0])
    assert f"cached_tokens={prompt_tokens - 1} cache_hit=exact" in line


async def test_status_tells_what_the_prompt_cache_holds_until_the_model_is_freed(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await ask(backend, raw("ba be bi bo bu " * 9))
        # The pass that was in flight for it ends a turn later.
        await until(lambda: backend.engine.status().memory_bytes["kv_active"] == 0)
        status = await backend.stub.Status(pb.HealthMessage())
        assert status.memory.breakdown["prompt_cache"] > 0
        assert status.memory.breakdown["kv_active"] == 0
        await backend.stub.Free(pb.HealthMessage())
        status = await backend.stub.Status(pb.HealthMessage())
        assert "prompt_cache" not in status.memory.breakdown


async def test_a_model_that_is_loaded_again_meets_none_of_the_old_prefixes(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await ask(backend, raw("ba be bi bo bu " * 9))
        assert (await backend.load(tiny_models("qwen3"))).success
        assert (await ask(backend, raw("ba be bi bo bu " * 9)))[1] == 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
@pytest.mark.one_in(2)
async def test_a_prompt_whose_caller_left_goes_on_where_it_stopped(tiny_models, family):
    prompt = "ba be bi bo bu " * 250
    options = ["prefill_chunk_alone:8"]
    async with served(tiny_models(family), MaxModelLen=8192, Options=options) as backend:
        call = backend.stub.PredictStream(raw(prompt, CorrelationId="left", **UNENDING))
        await until(lambda: any(r.prefilled_tokens > 100 for r in backend.engine.status().requests))
        call.cancel()
        await until(lambda: backend.is_idle)
        warm, hit_tokens = await ask(backend, raw(prompt))
    assert hit_tokens > 100
    assert warm == await ask_uncached(tiny_models(family), [raw(prompt)])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
async def test_a_prefix_on_disk_survives_a_restart(tiny_models, tmp_path, family):
    request = agent_turn(next(agent_steps(1)))
    options = {"MaxModelLen": 8192, "Options": [f"cache_dir:{tmp_path}"]}
    async with served(tiny_models(family), **options) as backend:
        first, hit_tokens = await ask(backend, request)
        assert hit_tokens == 0
    async with served(tiny_models(family), **options) as backend:
        second, hit_tokens = await ask(backend, request)
        length = len(await tokens_of(backend, request))
    assert second == first
    assert hit_tokens >= 0.95 * length


async def test_an_idle_model_writes_its_prefixes_to_disk(tiny_models, tmp_path):
    async with served(tiny_models("llama"), Options=[f"cache_dir:{tmp_path}"]) as backend:
        await ask(backend, raw("ba be bi bo bu " * 30))
        await until(lambda: any(tmp_path.glob("*/*/*.kv")))


async def test_a_request_names_a_directory_below_the_models_only(tiny_models, tmp_path, capfd):
    prompt = "ba be bi bo bu " * 30
    paths = {"ModelPath": str(tmp_path)}
    async with served(tiny_models("llama"), **paths) as backend:
        await ask(backend, raw(prompt, PromptCachePath=str(tmp_path.parent / "elsewhere")))
        await Stderr(capfd).holds("is not below the models")
        await ask(backend, raw(prompt[3:], PromptCachePath=str(tmp_path / "prefixes")))
    assert list((tmp_path / "prefixes").glob("*/*/*.kv"))
    assert not (tmp_path.parent / "elsewhere").exists()


async def test_a_read_only_request_leaves_nothing(tiny_models):
    prompt = "ba be bi bo bu " * 30
    async with served(tiny_models("llama")) as backend:
        await ask(backend, raw(prompt, PromptCacheRO=True))
        assert backend.engine.status().metrics["prompt_cache.tokens"] == 0
        await ask(backend, raw(prompt))
        assert (await ask(backend, raw(prompt, PromptCacheRO=True)))[1] > 0


async def test_a_stop_string_leaves_a_prefix_that_is_right(tiny_models):
    prompt = "ba be bi bo bu " * 9
    [text] = await ask_uncached(tiny_models("llama"), [raw(prompt, Tokens=30)])
    stop = text.decode()[len(text) // 2 :][:3]
    before_stop = text.decode()[: text.decode().index(stop)]
    longer = raw(prompt + before_stop + "bo")
    async with served(tiny_models("llama")) as backend:
        stopped, _ = await ask(backend, raw(prompt, Tokens=30, StopPrompts=[stop]))
        warm, hit_tokens = await ask(backend, longer)
    assert stopped == [before_stop.encode()]
    assert hit_tokens > 20
    assert warm == await ask_uncached(tiny_models("llama"), [longer])


async def test_many_conversations_at_once_on_one_system_prompt(tiny_models):
    requests = [agent_turn([SYSTEM, user(f"Question {i}")], Seed=i) for i in range(12)]
    async with served(tiny_models("qwen3"), MaxModelLen=8192) as backend:
        warm, hit_tokens = await ask(backend, *requests)
        length = len(await tokens_of(backend, requests[0]))
    assert hit_tokens > 10 * 0.9 * length
    assert warm == await ask_uncached(tiny_models("qwen3"), requests)
