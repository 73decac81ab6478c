from io import StringIO

import pytest
from rich.console import Console

from backend.cli.status import Inspection, dashboard
from backend.pb import backend_pb2 as pb


def frame(report, *, width=100, all_memory=False, **options):
    """The frame's lines, each with its blanks run together."""
    console = Console(file=StringIO(), width=width)
    console.print(dashboard(Inspection(report, **options), all_memory=all_memory))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_model_and_slots_stand_on_top(script):
    lines = frame(script.report())
    assert lines[0] == "model org/tiny (llama) · context 4,096"
    assert lines[1] == "/models/tiny"
    assert lines[2] == "state BUSY · 2 of 16 slots taken · 1 waiting"


def test_memory_is_a_bar_per_part_as_long_as_its_share_of_the_largest(script):
    report = script.report()
    lines = frame(report, all_memory=True)[3:6]
    assert [line.removeprefix("memory ").rsplit(" ", 1)[0] for line in lines] == [
        "total 3.0 GB",
        "mlx_peak 6.0 GB",
        "weights 1.5 GB",
    ]
    assert [line.count("━") for line in lines] == [12, 24, 6]


def test_the_memory_of_both_processes_comes_first(script):
    report = script.report()
    report.memory.breakdown["resident"] = 4_000_000_000
    for all_memory in (False, True):
        lines = [line.removeprefix("memory ") for line in frame(report, all_memory=all_memory)]
        assert lines[3].startswith("resident 4.0 GB")
        assert lines[4].startswith("mlx 3.0 GB")
        assert not any(line.startswith("total ") for line in lines)


def test_unless_all_is_asked_for_the_main_parts_of_the_memory_are_shown(script):
    report = script.report()
    report.memory.breakdown.update({"kv_active": 1, "prompt_cache": 2, "mlx_cache": 3})
    names = [line.removeprefix("memory ").split()[0] for line in frame(report)[3:8]]
    assert names == ["total", "weights", "kv_active", "prompt_cache", "cache"]


@pytest.mark.parametrize("width", [60, 70, 80, 92, 120])
def test_headings_of_requests_are_whole_at_every_width(script, width):
    lines = frame(script.report(script.request("a" * 40, "prefilling")), width=width)
    heading = next(line for line in lines if line.startswith("request phase"))
    kept = heading.split()
    assert {"prompt", "cached", "tokens", "tokens/s"} <= set(kept)
    assert ("first" in kept, "KV" in kept, "prefill" in kept) == (
        width >= 70,
        width >= 80,
        width >= 92,
    )
    assert all(len(line) <= width for line in lines)


def test_the_machine_is_shown_where_backends_share_it(script):
    report = script.report()
    assert not any(line.startswith("machine") for line in frame(report))
    kinds = [
        {"model": "a", "is_own": True, "is_busy": True, "wanted_bytes": 500_000},
        {"model": "b", "reserved_bytes": 1_000_000},
    ]
    sizes = {"held_bytes": 4_000_000, "cached_bytes": 1_000_000, "budget_bytes": 3_000_000}
    backends = [pb.BackendReport(process_id=7, **sizes, **kind) for kind in kinds]
    report.machine.CopyFrom(pb.MachineReport(usable_bytes=20_000_000, backends=backends))
    lines = frame(report)
    start = lines.index("machine 14.0 MB of 20.0 MB claimed")
    assert lines[start + 1] == "a (this one) 4.0 MB held 1.0 MB of 3.0 MB KV wants 500.0 kB"
    assert lines[start + 2] == "b (7) 4.0 MB held 2.0 MB of 3.0 MB KV"
    whole = "20.0 MB less 4.0 MB held here, 7.0 MB of 1 other, 6.0 MB kept free"
    assert lines[start + 3] == f"{whole}: 3.0 MB for KV here"


def test_a_backend_that_is_alone_is_told_what_is_kept_free(script):
    report = script.report()
    own = pb.BackendReport(is_own=True, held_bytes=4_000_000, budget_bytes=15_000_000)
    report.machine.CopyFrom(pb.MachineReport(usable_bytes=20_000_000, backends=[own]))
    whole = "20.0 MB less 4.0 MB held here, 1.0 MB kept free: 15.0 MB for KV here"
    assert whole in frame(report)


def test_the_prompt_cache_tells_its_room_and_its_use(script):
    lines = frame(script.report())
    assert "cache 2.0 GB of 8.0 GB · 35 nodes, 12,345 tokens, 3 evictions" in lines
    assert "63% of 1,000 prompt tokens reused · exact 4, miss 1" in lines


def test_files_are_told_of_where_there_are_any(script):
    report = script.report()
    assert not any(line.startswith("disk") for line in frame(report))
    report.prompt_cache.disk.CopyFrom(
        pb.DiskCacheReport(bytes=4_000_000, files=7, read_tokens=1500, damaged=1, dropped=2)
    )
    assert (
        "disk 4.0 MB · 7 files of this model · 1,500 tokens read · 1 damaged, 2 not written"
        in frame(report)
    )


def test_a_prompt_cache_without_a_budget_is_switched_off(script):
    report = script.report()
    report.prompt_cache.Clear()
    assert "cache switched off" in frame(report)


def test_totals_are_counts_and_a_rate(script):
    expected = "totals 370 prompt tokens prefilled · 5,000,000,000 tokens generated · 45.2 tokens/s"
    assert expected in frame(script.report())


def test_each_request_is_a_row_and_those_that_get_on_come_first(script):
    rows = frame(
        script.report(
            script.request("w", "waiting"),
            script.request("p", "prefilling", prefilled_tokens=500),
            script.request("?", "paused"),
            script.request(
                "a",
                "active",
                prefilled_tokens=1000,
                cached_tokens=850,
                hit_kind="exact",
                generated_tokens=1200,
                first_token_ms=1234.4,
                tokens_per_s=33.3,
                kv_bytes=12_300_000,
            ),
        )
    )[-5:]
    assert rows == [
        "request phase prefill prompt cached KV tokens tokens/s first ms",
        "a active ━━━━━━━━━━━━ 1,000 85% exact 12.3 MB 1,200 33.3 1,234",
        "p prefilling ━━━━━━ 1,000 0% miss 0",
        "w waiting 1,000 0% miss 0",
        "? paused 1,000 0% miss 0",
    ]


def test_on_a_narrow_terminal_only_the_names_are_cut(script):
    request = script.request("request-" + "x" * 40, "prefilling", cached_tokens=9, hit_kind="exact")
    row = frame(script.report(request), width=70)[-1]
    assert row == "request-xxx… prefilling 1,000 1% exact 0"


def test_a_turn_that_takes_long_is_told(script):
    report = script.report()
    report.turn_s = 75.2
    assert any("in one turn for 75 s" in line for line in frame(report))


def test_without_a_model_there_is_little_to_tell():
    assert frame(pb.InspectReply()) == [
        "state UNINITIALIZED",
        "memory total 0 bytes ━━━━━━━━━━━━━━━━━━━━━━━━",
        "totals 0 prompt tokens prefilled · 0 tokens generated · 0.0 tokens/s",
    ]


def test_a_backend_that_told_little_is_said_to():
    assert frame(pb.InspectReply(), is_whole=False)[0].startswith("note this backend does not know")


@pytest.mark.parametrize("name", ["\x1b[2Jx", "[red]x[/red]"])
def test_names_cannot_steer_the_terminal(script, name):
    report = script.report(script.request(name, name, hit_kind=name))
    report.model.name = name
    report.memory.breakdown[name] = 1
    report.prompt_cache.hits[name] = 1
    text = "\n".join(frame(report, width=200, all_memory=True))
    assert text.count(name.replace("\x1b", "")) == 6
    assert "\x1b" not in text
