"""The page in a real browser, over a real engine at work."""

import asyncio
import json
import re
import urllib.request
from html import escape
from urllib.parse import urlsplit

import pytest
from serving import UNENDING, served
from waiting import until

from backend.cli.client import BackendClient
from backend.pb import backend_pb2 as pb
from backend.rpc.page import PageServer
from scripts.drawing.browser import find_browser, rendered

pytestmark = pytest.mark.mlx

SESAME = "s3cret"
ANY_PORT = "127.0.0.1:0"
MARKUP = "<img src=x onerror=alert(1)>"
PROMPT = "ba be bi bo bu " * 9


def raw(name, **options):
    return pb.PredictOptions(Prompt=PROMPT, CorrelationId=name, IgnoreEOS=True, **options)


def told_by(page, path):
    with urllib.request.urlopen(f"http://{urlsplit(page.url).netloc}/{path}") as reply:
        return json.loads(reply.read())


async def consume(client, request):
    async for _ in client.stream(request):
        pass


async def test_the_tree_of_the_prompt_cache_is_told_without_a_word_of_it(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await backend.stub.Predict(raw("first", Tokens=4))
        with PageServer(ANY_PORT, backend.engine) as page:
            told = await asyncio.to_thread(told_by, page, "prompt-cache")
    assert sum(int(prefix["tokens"]) for prefix in told["prefixes"]) == int(told["books"]["tokens"])
    assert {prefix["words"] for prefix in told["prefixes"]} == {""}


@pytest.mark.skipif(find_browser() is None, reason="there is no browser on this machine")
async def test_a_browser_shows_requests_memory_and_cache_and_no_markup_of_theirs(
    tiny_models, tmp_path
):
    async with (
        served(
            tiny_models("llama"), auth_token=SESAME, memory_ledger=tmp_path, MaxModelLen=65_536
        ) as backend,
        BackendClient(backend.address, SESAME) as client,
    ):
        await consume(client, raw("first", Tokens=4))
        running = asyncio.create_task(consume(client, raw(MARKUP, **UNENDING)))
        await until(lambda: any(r.generated_tokens for r in backend.engine.status().requests))
        await until(lambda: backend.engine.status().machine is not None)
        (own,) = backend.engine.status().machine.backends
        with PageServer(ANY_PORT, backend.engine, SESAME) as page:
            open_door = f"{page.url}#token={SESAME}"
            shown = await asyncio.to_thread(rendered, find_browser(), open_door)
            running.cancel()
            locked = await asyncio.to_thread(rendered, find_browser(), page.url)
    assert "(llama)</h1>" in shown
    assert f"<title>{escape(MARKUP, quote=False)}-" in shown
    assert "<img" not in shown
    assert '<rect class="active"' in shown
    assert '<polygon class="weights"' in shown
    assert re.search(
        r"<td>active</td><td>[\d,]+</td><td>\d+% \w+</td><td>[\d,]+</td><td>[\d.]+</td>", shown
    )
    assert re.search(r"\b1 of \d+ run · 0 wait ·", shown)
    assert re.search(r"running requests and prompt cache take [\d.]+ \w+ of [\d.]+ \w+ ·", shown)
    assert re.search(r"saved [\d,]+ of [\d,]+ prompt tokens \(\d+%\)", shown)
    assert "<td>prompt</td><td>0</td>" in shown
    assert "tokens generated · " in shown
    assert '<section id="machine" aria-labelledby="machine-title">' in shown
    assert " claimed by 1 backend</p>" in shown
    assert f"<td>{own.model} (this one)</td>" in shown
    assert '<rect class="held"' in shown
    assert '<form id="door">' in locked
    assert '<main id="view" hidden="">' in locked
    assert "llama" not in locked
