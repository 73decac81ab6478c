"""The files for Prometheus and Grafana, against the series of a server and their schemas."""

import asyncio
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import served
from waiting import until

from backend.pb import backend_pb2 as pb
from backend.rpc.metrics import MetricsServer

FILES = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS, DASHBOARD = FILES / "alerts.yml", FILES / "grafana.json"
# The values that Grafana puts in the place of its variables.
VARIABLES = {"$instance": "a:1", "$__rate_interval": "1m", "$__range": "1h"}
# The labels that Prometheus adds to every series.
OF_PROMETHEUS = {"instance", "job"}
TIMEOUT_S = 60.0


def rules():
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def dashboard():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def expressions():
    """Return the queries to Prometheus, by the names of alerts, notes and panels."""
    asked = {rule["alert"]: rule["expr"] for rule in rules()}
    board = dashboard()
    asked |= {note["name"]: note["expr"] for note in board["annotations"]["list"]}
    for panel in board["panels"]:
        asked |= {f"{panel['title']} {each['refId']}": each["expr"] for each in panel["targets"]}
    for variable, value in VARIABLES.items():
        asked = {name: text.replace(variable, value) for name, text in asked.items()}
    return asked


def scraped(port):
    """Return the names and labels of all series of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


@pytest.mark.mlx
async def test_alerts_and_panels_ask_for_series_that_a_server_exports(tiny_models, tmp_path):
    promql = pytest.importorskip("promql_parser")
    async with served(tiny_models("llama"), memory_ledger=tmp_path) as backend:
        await backend.stub.Predict(pb.PredictOptions(Prompt="ba be", Tokens=2))
        await until(lambda: backend.engine.status().machine is not None)
        with MetricsServer("127.0.0.1:0", backend.engine) as metrics:
            series = await asyncio.to_thread(scraped, metrics.port)

    def selectors(text):
        found = []
        promql.walk(promql.parse(text), found.append)
        return [each for each in found if isinstance(each, promql.VectorSelector)]

    def is_exported(selector):
        wanted = {each.name: each.value for each in selector.matchers.matchers}
        wanted = {name: value for name, value in wanted.items() if name not in OF_PROMETHEUS}
        return any(
            name == selector.name and wanted.items() <= labels.items() for name, labels in series
        )

    asked = {name: selectors(text) for name, text in expressions().items()}
    assert all(asked.values())
    missing = {
        name: [str(each) for each in found if not is_exported(each)]
        for name, found in asked.items()
        if not all(map(is_exported, found))
    }
    assert not missing


def test_every_alert_says_what_has_happened_and_where():
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 20


def test_promtool_takes_the_rules():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool on this machine")
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", str(ALERTS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def lost(given, kept, path="dashboard"):
    """Yield the fields that a reader has left out or changed."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given} becomes {kept}"


def test_the_dashboard_keeps_to_grafanas_schema():
    """Grafana's own classes know every field of it."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    cog = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()
    board = dashboard()
    read = json.loads(cog.JSONEncoder().encode(models.Dashboard.from_json(board)))
    assert list(lost(board, read)) == []
    assert list(lost({**board, "panles": []}, read)) == ["dashboard.panles: [] becomes None"]


def test_panels_lie_beside_each_other():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert max(columns) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
