"""A few seconds of the soak; `python -m benchmarks.soak` takes ten minutes."""

import pytest

from benchmarks.soak.run import CACHE_BYTES, Measure, Plan, run

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]


async def test_clients_of_every_kind_and_lost_engines_leave_nothing_wrong_behind():
    report = await run(Plan(seconds=6.0, requests=32, kill_every_s=2.0))
    assert report.faults == []
    assert report.restarts > 0
    assert report.kv_active_bytes == 0
    assert 0 < report.prompt_cache_bytes <= CACHE_BYTES
    behaviours = {end.partition(":")[0] for end in report.ends}
    assert behaviours == {"stay", "leave", "hang up", "run out", "babble"}
    assert not [end for end in report.ends if "INTERNAL" in end or "UNAVAILABLE" in end]


async def test_attackers_and_lost_helpers_cost_the_others_no_reply():
    report = await run(Plan(seconds=8.0, clients=4, requests=12, attackers=6))
    assert report.faults == []
    assert report.kv_active_bytes == 0
    behaviours = {end.partition(":")[0] for end in report.ends}
    assert {"text without words", "many messages", "leave early", "bad load"} <= behaviours
    assert report.watched.beside.first_token.calls > 1


async def test_a_soak_that_cannot_measure_ends_with_the_reason(monkeypatch):
    def fail(*_):
        raise OSError("no such process")

    monkeypatch.setattr(Measure, "__init__", fail)
    with pytest.raises(ExceptionGroup) as raised:
        await run(Plan(seconds=1.0, clients=4, requests=4))
    assert raised.group_contains(OSError, match="no such process")
