"""The plots of the documentation show the figures of the report that lies beside them."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from scripts.drawing import report_table
from scripts.drawing.plots import PICTURES, PLOTS, REPORTS, caption, draw, matched, report_of
from scripts.drawing.report_table import BLOCK, filled

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "performance.md"


@pytest.fixture(scope="module")
def reports():
    return json.loads(REPORTS.read_text(encoding="utf-8"))


def texts(path):
    found = re.findall(r"<(text|tspan)\b[^>]*>([^<]+)</", path.read_text(encoding="utf-8"))
    return [unescape(text).strip() for _, text in found]


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_from_the_report_and_says_how_it_was_measured(reports, name, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = texts(draw(reports, name, tmp_path))
    assert drawn == texts(PICTURES / f"{name}.svg")
    report = report_of(reports, PLOTS[name].benchmark)
    assert set(caption(report, PLOTS[name].benchmark).splitlines()) <= set(drawn)
    assert PLOTS[name].title in drawn


@pytest.mark.parametrize("name", PLOTS)
def test_the_page_shows_a_plot_with_the_command_that_made_it(reports, name):
    report = report_of(reports, PLOTS[name].benchmark)
    page = PAGE.read_text(encoding="utf-8")
    below = page.partition(f"](../pictures/{name}.svg)")[2].split("![")[0]
    assert f"`{caption(report, PLOTS[name].benchmark).rpartition(' · ')[2]}`" in below
    assert report["machine"]["date"] in page


@pytest.mark.parametrize("name", ["docs/reference/performance.md", "README.md"])
def test_tables_of_a_page_are_made_from_their_result_files(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    assert BLOCK.search(page)
    assert filled(page) == page
    emptied = BLOCK.sub(lambda match: f"{match['head']}{match['end']}", page)
    assert filled(emptied) == page != emptied


def test_a_grid_has_a_dash_where_nothing_was_measured_and_no_row_without_figures(
    tmp_path, monkeypatch
):
    figures = [
        {"name": f"one: {who}", "unit": "s", "median": value, "samples": [value]}
        for who, value in {"a": 1.2345, "b": 20.0}.items()
    ]
    machine = {"date": "2026-01-02", "system": "Linux"}
    report = {"command": "python -m benchmarks", "machine": machine, "figures": figures}
    (tmp_path / "made.json").write_text(json.dumps([report]), encoding="utf-8")
    monkeypatch.setattr(report_table, "DOCS", tmp_path)
    made = filled("<!-- grid of made.json: one | a; b; c -->\n<!-- end -->")
    assert "| | a | b | c |" in made
    assert "| one, s | 1.23 | 20 | – |" in made
    with pytest.raises(ValueError, match="unpack"):
        filled("<!-- grid of made.json: two | a -->\n<!-- end -->")


@pytest.mark.parametrize("name", ["plots", "real-models", "loads"])
def test_result_files_say_how_they_were_measured(name):
    for report in json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8")):
        assert re.match(r"python -m benchmarks --json( |$)", report["command"])
        assert {"date", "cores", "load", "mlx"} <= report["machine"].keys()
        assert "revision" not in report["machine"]


def test_a_report_without_what_a_plot_shows_is_refused(reports):
    with pytest.raises(ValueError, match="no report is of storm"):
        report_of(reports, "storm")
    with pytest.raises(ValueError, match="the report has no figure like"):
        matched(reports[0]["figures"], "no such figure")


def test_a_median_lies_among_its_samples(reports):
    for figure in (figure for report in reports for figure in report["figures"]):
        assert figure["samples"]
        assert min(figure["samples"]) <= figure["median"] <= max(figure["samples"])
