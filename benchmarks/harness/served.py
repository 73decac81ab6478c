"""The server under measurement, and its clients, which run in another interpreter."""

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio

from backend.cli.server_process import ServerProcess
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.harness.models import AnyModel
from benchmarks.harness.workload import Sampling, Speed, Timeline, Workload, speed, words


def processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process so far; `None` without Linux's /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name, in brackets, may contain spaces.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MAX_MODEL_LEN = 32768
POLL_INTERVAL_S = 0.02
BOOKS_TIMEOUT_S = 30.0
NEW_SEEDS_START = 1_000_000  # above those that callers of `prompt` choose


@contextmanager
def started_server(environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Start a server as a host does, in an environment or in ours; it is not ready yet."""
    with (
        TemporaryDirectory(prefix="mlx-backend-bench-") as directory,
        ServerProcess.start(Path(directory) / "server.log", environment=environment) as process,
    ):
        yield process


@asynccontextmanager
async def served(model: AnyModel, *options: str, dtype: str = "") -> AsyncIterator["Served"]:
    """Start a server and load a model with `key:value` options, in a type or its own."""
    with started_server() as process:
        await process.wait_until_ready()
        async with grpc.aio.insecure_channel(process.address) as channel:
            server = Served(process, channel)
            await server.load(model, options, dtype)
            yield server


class Served:
    """A loaded model, reached over the socket."""

    def __init__(self, process: ServerProcess, channel: grpc.aio.Channel) -> None:
        self.process = process
        self._stub = backend_pb2_grpc.BackendStub(channel)
        self._inspector = backend_pb2_grpc.InspectorStub(channel)
        self._sent_tokens = 0
        self._new_seeds = itertools.count(NEW_SEEDS_START)

    async def load(self, model: AnyModel, options: Sequence[str] = (), dtype: str = "") -> None:
        """Load a model with `key:value` options, replacing the previous one."""
        await self._stub.LoadModel(
            pb.ModelOptions(
                Model=model.name,
                ModelFile=str(model.directory),
                MaxModelLen=MAX_MODEL_LEN,
                DType=dtype,
                # The measured server is one that knows its model.
                Options=["check_at_load:true", *options],
            )
        )
        self._sent_tokens = 0

    async def prompt(self, tokens: int, seed: int) -> str:
        """Return a text of about this many tokens; another seed gives another beginning."""
        token_ids = await self.token_ids(pb.PredictOptions(Prompt=words(tokens, seed)))
        reply = await self._stub.Detokenize(pb.DetokenizeRequest(tokens=token_ids[:tokens]))
        return str(reply.content)

    async def new_prompt(self, tokens: int) -> str:
        """Return a text of about this many tokens with a unique beginning."""
        return await self.prompt(tokens, next(self._new_seeds))

    async def token_ids(self, request: pb.PredictOptions) -> list[int]:
        """Return the prompt tokens of a request."""
        return list((await self._stub.TokenizeString(request)).tokens)

    async def stream(self, prompt: str, new_tokens: int, sampling: Sampling) -> Timeline:
        """Generate one row, and return the arrival times of its tokens."""
        return await self.send(_request(prompt, new_tokens, sampling))

    async def send(self, request: pb.PredictOptions) -> Timeline:
        """Generate one row, and return the arrival times of its tokens."""
        row = Timeline()
        prompt_tokens = 0
        async for reply in self._stub.PredictStream(request):
            row.mark(time.perf_counter(), reply.tokens)
            row.text += reply.message
            prompt_tokens = reply.prompt_tokens
        self._sent_tokens += prompt_tokens
        return row

    async def logprobs(self, request: pb.PredictOptions) -> list[dict[str, Any]]:
        """Generate one row, and return its tokens as the OpenAI API describes them."""
        found: list[dict[str, Any]] = json.loads((await self._stub.Predict(request)).logprobs)[
            "content"
        ]
        return found

    async def first_token_ms(self, request: pb.PredictOptions) -> float:
        """Generate one row, and return the time to its first token."""
        started = time.perf_counter()
        row = await self.send(request)
        return (row.times[0] - started) * 1000.0

    async def embed(self, text: str) -> None:
        """Have a text embedded."""
        await self._stub.Embedding(pb.PredictOptions(Embeddings=text))

    async def prompt_cache(self) -> dict[str, Any]:
        """Return the counts of the prompt cache, once they include all requests."""
        async with asyncio.timeout(BOOKS_TIMEOUT_S):
            while True:
                metrics = await self._stub.GetMetrics(pb.MetricsRequest())
                details = json.loads(metrics.prompt_json_for_slot)
                books: dict[str, Any] = details["prompt_cache"]
                if not details["requests"] and books["looked_up_tokens"] == self._sent_tokens:
                    return books
                await asyncio.sleep(POLL_INTERVAL_S)

    async def memory(self) -> dict[str, int]:
        """Return the memory in bytes, by part."""
        status = await self._stub.Status(pb.HealthMessage())
        return dict(status.memory.breakdown)

    async def run(self, workload: Workload) -> Speed:
        """Generate all rows of a workload at the same time, and return the speed."""
        return await self.send_together(
            [
                _request(prompt, workload.new_tokens, sampling)
                for prompt, sampling in zip(workload.prompts, workload.samplings, strict=True)
            ]
        )

    async def send_together(self, requests: Sequence[pb.PredictOptions]) -> Speed:
        """Generate one row per request at the same time, and return the speed."""
        started = time.perf_counter()
        return speed(started, await asyncio.gather(*map(self.send, requests)))

    async def time_together(self, requests: Sequence[pb.PredictOptions]) -> list[tuple[float, int]]:
        """Generate one row per request at the same time; return seconds and tokens of each."""
        started = time.perf_counter()
        rows = await asyncio.gather(*map(self.send, requests))
        return [(row.times[-1] - started, row.counts[-1]) for row in rows]

    async def inspect(self) -> pb.InspectReply:
        """Return all that the server tells of itself."""
        return await self._inspector.Inspect(pb.InspectRequest())

    async def engine_pid(self) -> int:
        """Return the process that computes; raises ValueError if none does."""
        (pid,) = (p.process_id for p in (await self.inspect()).processes if p.role == "engine")
        return int(pid)

    async def lose_engine(self) -> None:
        """Kill the process that computes, once it has generated a token of a running request."""
        async with asyncio.timeout(BOOKS_TIMEOUT_S):
            while True:
                if any(each.generated_tokens for each in (await self.inspect()).requests):
                    os.kill(await self.engine_pid(), signal.SIGKILL)
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def engine_seconds(self) -> float | None:
        """Return the processor time of the engine so far, if the system reports it."""
        return processor_seconds(await self.engine_pid())

    async def health_seconds(self) -> float:
        """Return the time of one Health, over its own connection, as hosts call it."""
        started = time.perf_counter()
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            await backend_pb2_grpc.BackendStub(channel).Health(pb.HealthMessage())
        return time.perf_counter() - started


def _request(prompt: str, new_tokens: int, sampling: Sampling) -> pb.PredictOptions:
    return pb.PredictOptions(
        Prompt=prompt,
        Tokens=new_tokens,
        IgnoreEOS=True,
        Temperature=sampling.temperature,
        TopK=sampling.top_k,
        TopP=sampling.top_p,
        MinP=sampling.min_p,
    )
