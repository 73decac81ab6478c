"""The order of prefixes on the screen, and their indentation."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from backend.pb import backend_pb2 as pb

BARS = "▁▂▃▄▅▆▇█"
SPAN_S = 300.0


def arranged(prefixes: Iterable[pb.PrefixReport]) -> Iterator[tuple[pb.PrefixReport, str]]:
    """Yield each prefix, below its parent, with the lines drawn before it.

    The best come first. A conversation is a column: prefixes are indented only at branches.
    """
    below: dict[int, list[pb.PrefixReport]] = defaultdict(list)
    for prefix in prefixes:
        below[prefix.parent].append(prefix)
    pending = [(prefix, "", "") for prefix in _worst_first(below[0])]
    while pending:
        prefix, drawn, indent = pending.pop()
        yield prefix, drawn
        children = _worst_first(below[prefix.number])
        branch, below_it = ("├ ", "│ ") if len(children) > 1 else ("", "")
        pending += [(child, indent + branch, indent + below_it) for child in children]


def reuse_bars(spans: Sequence[pb.ReuseReport]) -> str:
    """Return a bar for each span of time, the oldest first; a blank without requests."""
    if not spans:
        return ""
    newest = min(spans, key=lambda span: span.age_s).age_s
    bars = {round((span.age_s - newest) / SPAN_S): _bar(span) for span in spans}
    return "".join(bars.get(age, " ") for age in range(max(bars), -1, -1))


def _bar(span: pb.ReuseReport) -> str:
    share = span.hit_tokens / max(span.looked_up_tokens, 1)
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]


def _worst_first(prefixes: Iterable[pb.PrefixReport]) -> list[pb.PrefixReport]:
    return sorted(prefixes, key=lambda prefix: (prefix.is_pinned, prefix.worth))
