"""How soon after its start does the server answer Health?"""

import time

from benchmarks.harness.figure import Figure, Settings, at_most
from benchmarks.harness.served import started_server


async def measure(settings: Settings) -> list[Figure]:
    """Measure from exec to the first answer; the first start fills the page cache."""
    samples = [await _first_health_ms() for _ in range(settings.runs + 1)]
    figure = Figure(
        name="exec to first Health", unit="ms", samples=tuple(samples[1:]), target=at_most(200)
    )
    return [figure]


async def _first_health_ms() -> float:
    started = time.perf_counter()
    with started_server() as process:
        await process.wait_until_ready()
        return (time.perf_counter() - started) * 1000.0
