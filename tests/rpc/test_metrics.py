import asyncio
import re
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import STATUS, ScriptedEngine

from backend.config import ModelOptions
from backend.rpc.metrics import MetricsServer
from common.address import AddressError
from common.remedies import CHECKOUT

ROOT = Path(__file__).parent.parent.parent
ANY_PORT = "127.0.0.1:0"
TIMEOUT_S = 30.0


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as reply:
        return reply.read().decode()


def scraped(engine):
    """The value of each series, by name and labels."""
    with MetricsServer(ANY_PORT, engine) as server:
        text = scrape(server.port)
    return {
        (sample.name.removeprefix("mlx_backend_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_reads_the_snapshot():
    series = scraped(ScriptedEngine())
    assert series["tokens_generated_total",] == STATUS.metrics["generated_tokens"]
    assert series["prompt_tokens_processed_total",] == STATUS.metrics["prompt_tokens"]
    assert series["tokens_per_second",] == STATUS.metrics["tokens_per_s"]
    assert series["turn_seconds",] == STATUS.metrics["turn_s"]
    assert series["memory_bytes", "weights"] == 5
    assert (series["requests", "prefilling"], series["requests", "waiting"]) == (1, 0)
    assert (series["state", "ready"], series["state", "busy"]) == (1, 0)
    assert series["model_info", "org/tiny", "bytes"] == 1


def test_a_scrape_tells_of_the_machine_where_backends_share_it():
    engine = ScriptedEngine()
    series = scraped(engine)
    assert series["machine_usable_bytes",] == 2**36
    assert series["machine_claimed_bytes",] == 2**34 + 2**35
    assert series["machine_backends",] == 1
    engine.status = lambda: replace(STATUS, machine=None)
    assert not [name for name, *_ in scraped(engine) if name.startswith("machine")]


def test_a_scrape_reads_the_books_of_the_prompt_cache():
    series = scraped(ScriptedEngine())
    books = {
        "bytes": 2**33,
        "budget_bytes": 2**34,
        "nodes": 3,
        "tokens": 40,
        "looked_up_tokens_total": 50,
        "hit_tokens_total": 20,
        "evictions_total": 4,
        "disk_bytes": 2**35,
        "disk_files": 6,
        "disk_read_tokens_total": 70,
        "disk_written_bytes_total": 700,
        "disk_damaged_total": 8,
        "disk_dropped_total": 9,
    }
    assert {name: series[f"prompt_cache_{name}",] for name in books} == books
    assert series["prompt_cache_lookups_total", "miss"] == 2
    assert series["prompt_cache_lookups_total", "longer"] == 0


def test_each_scrape_reads_anew():
    engine = ScriptedEngine(loaded=False)
    with MetricsServer(ANY_PORT, engine) as server:
        assert 'state="uninitialized"} 1.0' in scrape(server.port)
        asyncio.run(engine.load(ModelOptions(model="org/tiny")))
        assert 'state="ready"} 1.0' in scrape(server.port)


def test_a_taken_port_is_refused():
    with (
        MetricsServer(ANY_PORT, ScriptedEngine()) as server,
        pytest.raises(AddressError, match=f":{server.port}: Address already in use"),
    ):
        MetricsServer(f"127.0.0.1:{server.port}", ScriptedEngine())


def test_the_page_lists_every_metric():
    page = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(mlx_backend_\w+)", page))
    assert listed == {f"mlx_backend_{name}" for name, *_ in scraped(ScriptedEngine())}


def test_without_the_package_the_start_fails_and_says_how_to_get_it():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from backend.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--addr", ANY_PORT, "--metrics-addr", ANY_PORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert CHECKOUT in done.stderr.splitlines()[-1]
