import pytest

from backend.cli.cache import arranged, reuse_bars
from backend.pb import backend_pb2 as pb


def prefix(number, parent=0, worth=1.0, **fields):
    return pb.PrefixReport(number=number, parent=parent, worth=worth, **fields)


def drawn(*prefixes):
    return [(drawn + str(prefix.number)) for prefix, drawn in arranged(prefixes)]


def test_a_conversation_is_a_column():
    assert drawn(prefix(1), prefix(2, 1), prefix(3, 2)) == ["1", "2", "3"]


def test_where_prefixes_part_each_is_drawn_below_and_the_best_comes_first():
    tree = [prefix(1), prefix(2, 1, 3.0), prefix(3, 2), prefix(4, 1, 5.0), prefix(5, 4, 5.0)]
    assert drawn(*tree) == ["1", "├ 4", "│ 5", "├ 2", "│ 3"]


def test_what_goes_last_comes_first():
    assert drawn(prefix(1, worth=9.0), prefix(2, is_pinned=True)) == ["2", "1"]


@pytest.mark.parametrize(
    ("spans", "bars"),
    [
        ([], ""),
        ([(10.0, 100, 0)], "▁"),
        ([(10.0, 100, 100)], "█"),
        ([(910.0, 100, 50), (610.0, 100, 100), (10.0, 100, 0)], "▅█ ▁"),
    ],
)
def test_reuse_is_a_bar_for_each_span_and_a_blank_where_nobody_asked(spans, bars):
    reports = [
        pb.ReuseReport(age_s=age_s, requests=1, looked_up_tokens=tokens, hit_tokens=hits)
        for age_s, tokens, hits in spans
    ]
    assert reuse_bars(reports) == bars
