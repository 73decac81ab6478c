"""Models of the sizes that people run on a GPU, next to raw mlx-lm and mlx-lm's server.

Their weights are random, so nothing is drafted: a random model repeats itself as no other does.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

from benchmarks.cases.decode_speed import GREEDY, MIXED
from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.bench_report import gpu_name
from benchmarks.harness.contenders import Run, figures_of, in_thread, ratio_of, run_in_turn, say
from benchmarks.harness.figure import Figure, Settings, Target, at_least, at_most
from benchmarks.harness.models import GPU, GpuModel, ensure_built
from benchmarks.harness.other_servers import mlx_lm_server
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling, Workload

OURS, RAW, UPSTREAM = "this backend", "raw mlx-lm", "mlx-lm's server"
DEFAULT_RUNS = 3
# Hardly two prompts have the same length, and on CUDA each new length has its price.
PROMPT_TOKENS = range(64, 128)
# Prompts of agents: their keys lie in the prompt cache.
AGENT_TOKENS = range(2000, 2064)
NEW_TOKENS = 128
LONG_PROMPT_TOKENS = 8000


@dataclass(frozen=True, slots=True)
class Task:
    """Streams that run at the same time, and the least share of raw mlx-lm's tokens/s."""

    name: str
    samplings: tuple[Sampling, ...]
    target: Target
    prompt_tokens: range = PROMPT_TOKENS

    @property
    def is_greedy(self) -> bool:
        """Whether all are; the client of mlx-lm's server asks for nothing else."""
        return all(sampling == GREEDY for sampling in self.samplings)


TASKS = (
    Task("one stream", (GREEDY,), at_least(0.98)),
    Task("eight streams", (GREEDY,) * 8, at_least(1.0)),
    Task("one stream on 2,000 tokens", (GREEDY,), at_least(0.98), AGENT_TOKENS),
    Task("eight streams on 2,000 tokens", (GREEDY,) * 8, at_least(1.0), AGENT_TOKENS),
    Task("eight streams, mixed sampling", MIXED, at_least(1.2)),
    Task("32 streams", (GREEDY,) * 32, at_least(1.0)),
)


async def measure(settings: Settings) -> list[Figure]:
    """Measure each size; a quick run the smallest. Without a GPU there is nothing to measure."""
    if not gpu_name():
        say("no GPU of NVIDIA: SKIPPED")
        return []
    figures = []
    for model in GPU[:1] if settings.is_quick else GPU:
        ensure_built((model,))
        async with _contenders(model) as (runs, server):
            figures += await _speeds(settings, model, runs, server)
            figures += await _first_tokens(settings, model, runs, server)
    return figures


@asynccontextmanager
async def _contenders(model: GpuModel) -> AsyncIterator[tuple[dict[str, Run], Served]]:
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(served(model, "speculation:off", "max_slots:32"))
        environment = environment_of(ours.process.pid)
        raw = stack.enter_context(Baseline(model, environment))
        upstream = stack.enter_context(mlx_lm_server(model.directory, environment, raw.threads))
        runs = {OURS: ours.run, RAW: in_thread(raw.run), UPSTREAM: in_thread(upstream.run)}
        yield runs, ours


async def _speeds(
    settings: Settings, model: GpuModel, runs: Mapping[str, Run], server: Served
) -> list[Figure]:
    """Measure all tasks; the first run of each warms up everything."""
    figures, rng = [], Random(0)
    for task in TASKS:
        measured = {name: run for name, run in runs.items() if task.is_greedy or name != UPSTREAM}
        samples: dict[str, list[float]] = {name: [] for name in measured}
        for run in range(min(settings.runs, DEFAULT_RUNS) + 1):
            lengths = rng.choices(task.prompt_tokens, k=len(task.samplings))
            prompts = [await server.new_prompt(length) for length in lengths]
            workload = Workload(tuple(prompts), task.samplings, NEW_TOKENS)
            for name, speed in (await run_in_turn(measured, workload)).items():
                samples[name] += [speed.whole] if run else []
        name = f"{model.name}, {task.name}"
        figures += figures_of(name, "tokens/s", samples)
        figures.append(ratio_of(name, OURS, RAW, task.target, samples))
    return figures


async def _first_tokens(
    settings: Settings, model: GpuModel, runs: Mapping[str, Run], server: Served
) -> list[Figure]:
    """Measure the time to the first token of a long prompt, and of the same prompt again."""
    new: dict[str, list[float]] = {name: [] for name in runs}
    stored: dict[str, list[float]] = {name: [] for name in runs if name != RAW}
    for run in range(min(settings.runs, DEFAULT_RUNS) + 1):
        prompt = await server.new_prompt(LONG_PROMPT_TOKENS + run)
        workload = Workload((prompt,), (GREEDY,), 2)
        for samples in (new, stored):
            asked = {name: runs[name] for name in samples}
            for name, speed in (await run_in_turn(asked, workload)).items():
                samples[name] += [speed.first_s] if run else []
    name = f"{model.name}, first token of a prompt of {LONG_PROMPT_TOKENS:,}"
    ratio = ratio_of(name, OURS, RAW, at_most(1.1), new)
    return [*figures_of(name, "s", new), ratio, *figures_of(f"{name}, stored", "s", stored)]
