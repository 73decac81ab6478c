"""A published model through the socket, next to raw mlx-lm, mlx-lm's server and llama.cpp."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.contenders import Run, figures_of, in_thread, ratio_of, run_in_turn, say
from benchmarks.harness.figure import Figure, Settings, Target, at_least
from benchmarks.harness.models import REAL, SMOLLM2, SMOLLM2_4BIT, SMOLLM2_FLOAT32, PublishedModel
from benchmarks.harness.other_servers import llama_cpp_server, mlx_lm_server
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling, Workload
from common.process import usable_cores
from scripts.real_models.packages import PackageMissingError, llama_cpp_python

OURS, WITHOUT_DRAFTS, RAW = "this backend", "drafts off", "raw mlx-lm"
RAW_FLOAT32 = "raw mlx-lm, float32"
UPSTREAM, LLAMA_CPP = "mlx-lm's server", "llama.cpp Q4_1"
RUNS = 3
# A task of one kind of weights is repeated until it has taken so long.
TASK_S = 30.0
# With fewer tokens/s in a short reply, longer tasks would take minutes.
LEAST_SPEED = 0.5
PROMPT_TOKENS = 1000
TOPICS = ("a bridge", "two foxes", "a baker", "the sea", "a train", "an old map", "snow", "bees")
LINES = "\n".join(f"{n}. A story of {topic}, {n * 70} words" for n, topic in enumerate(TOPICS[:4]))
STORY = "{}. Write a long story about {}."
COPY = f"{{}}. Repeat this list, and nothing else, for {{}}:\n{LINES}"


@dataclass(frozen=True, slots=True)
class Task:
    """Streams that run at the same time.

    Attributes:
        text: Of a prompt, with places for a number and a topic.
        others: Those that our tokens/s are compared with, and the target.
        left_out: Those that are not measured.
    """

    name: str
    text: str
    rows: int
    new_tokens: int
    others: Mapping[str, Target]
    left_out: tuple[str, ...] = ()


TASKS = (
    Task("one stream", STORY, 1, 32, {RAW: at_least(1.0), RAW_FLOAT32: at_least(0.95)}),
    Task("one stream that copies", COPY, 1, 32, {RAW: at_least(1.0)}),
    # Raw mlx-lm computes a batch as its server does.
    Task("eight streams", STORY, 8, 24, {UPSTREAM: at_least(3.0)}, (RAW, RAW_FLOAT32)),
)
QUICK_TOKENS = 8


async def measure(settings: Settings) -> list[Figure]:
    """Measure each type of weights in turn, or those in `directories`; a quick run measures one."""
    known = (SMOLLM2,) if settings.is_quick else (SMOLLM2, SMOLLM2_4BIT)
    chosen = {directory.resolve() for directory in settings.directories}
    figures = []
    for model in known:
        if chosen and model.directory.resolve() not in chosen:
            continue
        if model.directory.is_dir():
            async with _contenders(model) as (runs, server):
                figures += await _speeds(settings, model, runs)
                if model is SMOLLM2:
                    figures += await _first_tokens(settings, model, runs, server)
        else:
            say(f"{model.name}: SKIPPED, run `make real-models` first")
    return figures


@asynccontextmanager
async def _contenders(model: PublishedModel) -> AsyncIterator[tuple[dict[str, Run], Served]]:
    """Start all, each with the same BLAS and the number of threads that is best for raw mlx-lm."""
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(served(model))
        without = await stack.enter_async_context(served(model, "speculation:off"))
        environment = environment_of(ours.process.pid)
        # One after another: each finds its number of threads while nothing else computes.
        raw = stack.enter_context(Baseline(model, environment))
        threads = raw.threads
        upstream = mlx_lm_server(model.directory, environment, threads)
        wide = stack.enter_context(Baseline(SMOLLM2_FLOAT32, environment))
        say(f"threads: {threads} for {RAW}, {wide.threads} for {RAW_FLOAT32}")
        others = {RAW: raw.run, RAW_FLOAT32: wide.run}
        others |= {UPSTREAM: stack.enter_context(upstream).run}
        try:
            llama_cpp = llama_cpp_server(llama_cpp_python(REAL), model.file, usable_cores())
            others[LLAMA_CPP] = stack.enter_context(llama_cpp).run
        except PackageMissingError as error:
            say(f"{LLAMA_CPP}: SKIPPED, its wheel cannot be had here: {error}")
        runs: dict[str, Run] = {OURS: ours.run, WITHOUT_DRAFTS: without.run}
        yield runs | {name: in_thread(run) for name, run in others.items()}, ours


async def _speeds(
    settings: Settings, model: PublishedModel, runs: Mapping[str, Run]
) -> list[Figure]:
    numbers = count(1)
    warm = await run_in_turn(runs, _workload(replace(TASKS[0], new_tokens=4), numbers))
    slow = [name for name, speed in warm.items() if speed.whole < LEAST_SPEED]
    figures = []
    for task in TASKS:
        skipped = () if task is TASKS[0] else slow
        left_out = list(dict.fromkeys((*task.left_out, *skipped)))
        measured = {name: run for name, run in runs.items() if name not in left_out}
        if left_out:
            say(f"{task.name}: without {', '.join(left_out)}")
        samples: dict[str, list[float]] = {name: [] for name in measured}
        new_tokens = QUICK_TOKENS if settings.is_quick else task.new_tokens
        started = time.monotonic()
        while len(samples[OURS]) < min(settings.runs, RUNS):
            if samples[OURS] and time.monotonic() - started > TASK_S:
                break
            workload = _workload(replace(task, new_tokens=new_tokens), numbers)
            for name, speed in (await run_in_turn(measured, workload)).items():
                samples[name].append(speed.whole)
        figures += figures_of(f"{model.name}, {task.name}", "tokens/s", samples)
        figures += _ratios(f"{model.name}, {task.name}", task.others, samples)
    return figures


def _workload(task: Task, numbers: Iterator[int]) -> Workload:
    """Create prompts that none has seen, in the model's own turns."""
    texts = (task.text.format(next(numbers), topic) for topic in TOPICS[: task.rows])
    prompts = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts)
    return Workload(tuple(prompts), (Sampling(),) * task.rows, task.new_tokens)


async def _first_tokens(
    settings: Settings, model: PublishedModel, runs: Mapping[str, Run], server: Served
) -> list[Figure]:
    """Measure the time to the first token of a prompt that is new, and of the same again."""
    left_out = (WITHOUT_DRAFTS, RAW, RAW_FLOAT32)
    new: dict[str, list[float]] = {name: [] for name in runs if name not in left_out}
    stored: dict[str, list[float]] = {name: [] for name in new}
    for _ in range(1 if settings.is_quick else RUNS - 1):
        workload = Workload((await server.new_prompt(PROMPT_TOKENS),), (Sampling(),), 2)
        for samples in (new, stored):
            for name, own in samples.items():
                own.append((await runs[name](workload)).first_s)
                say(f"{name}: first token after {own[-1]:.1f} s")
    name = f"{model.name}, first token of a prompt of {PROMPT_TOKENS:,}"
    return [*figures_of(name, "s", new), *figures_of(f"{name}, stored", "s", stored)]


def _ratios(
    name: str, targets: Mapping[str, Target], samples: Mapping[str, Sequence[float]]
) -> list[Figure]:
    """Compare our speeds with those of others, run by run."""
    return [
        ratio_of(name, ours, other, target, samples)
        for ours in (OURS, WITHOUT_DRAFTS)
        for other, target in targets.items()
        if other in samples
    ]
