"""Draws the documentation's pictures from the real program: `make pictures`."""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from backend.cli.client import BackendClient
from backend.cli.demo import run_demo
from backend.cli.render import model_options, user_message
from backend.cli.server_process import LOOPBACK, ServerProcess, free_port, server_command
from backend.cli.status import dashboard, inspect
from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb
from scripts.drawing.browser import find_browser, screenshot

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 96
STREAMS = 5
LONGEST = 3000
# Rich's own pictures load a font from the network.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_POLL_S = 0.02
PAGE_WIDTH, PAGE_HEIGHT = 1040, 1240


def main() -> None:
    """Draw them all."""
    asyncio.run(draw())


async def draw() -> None:
    """Draw the views of a user."""
    await draw_demo()
    await draw_views()


async def draw_demo() -> None:
    """Draw the demo."""
    console = recorder()
    await run_demo(console)
    save(console, "demo", "mlx-grpc-backend demo")


async def draw_views() -> None:
    """Draw a server with a few streams, and a second server."""
    console = recorder()
    page = f"{LOOPBACK}:{free_port()}"
    with (
        TemporaryDirectory(prefix="models-") as directory,
        started(directory, "first", "--dashboard", page) as server,
        started(directory, "second") as idle,
    ):
        shutil.copytree(MODEL_DIR, Path(directory, "demo"))
        async with loaded(idle, directory), loaded(server, directory) as client:
            while not await sharing(client):  # noqa: ASYNC110 - a snapshot has no event
                await asyncio.sleep(_POLL_S)
            async with streaming(client):
                console.print(dashboard(await inspect(client)))
                await asyncio.to_thread(draw_page, f"http://{page}/")
    save(console, "status", "mlx-grpc-backend status")


def started(directory: str, name: str, *arguments: str) -> ServerProcess:
    """Start a server that shares the machine only with those of this directory."""
    return ServerProcess.start(
        Path(directory, f"{name}.log"),
        command=(*server_command(), *arguments),
        environment={**os.environ, "MLX_BACKEND_LEDGER": f"{directory}/ledger"},
    )


@asynccontextmanager
async def loaded(server: ServerProcess, directory: str) -> AsyncIterator[BackendClient]:
    """Load the demo model, without local paths in the picture."""
    await server.wait_until_ready()
    async with BackendClient(server.address) as client:
        options = model_options("demo")
        options.ModelFile = str(Path(directory, "demo"))
        await client.load_model(options)
        yield client


async def sharing(client: BackendClient) -> bool:
    """Tell whether a backend sees the other one."""
    return len((await inspect(client)).report.machine.backends) > 1


@asynccontextmanager
async def streaming(client: BackendClient) -> AsyncIterator[None]:
    """Have all streams decode meanwhile."""
    streams = [asyncio.create_task(consume(client, number)) for number in range(STREAMS)]
    try:
        while await decoding(client) < STREAMS:  # noqa: ASYNC110 - a snapshot has no event
            await asyncio.sleep(_POLL_S)
        yield
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def decoding(client: BackendClient) -> int:
    """Return how many streams decode."""
    requests = (await inspect(client)).report.requests
    return sum(each.generated_tokens > 0 for each in requests)


def draw_page(url: str) -> None:
    """Take a picture of the dashboard."""
    if (browser := find_browser()) is None:
        sys.stderr.write("no browser on this machine: the dashboard is not drawn\n")
        return
    path = PICTURES / "dashboard.png"
    screenshot(browser, url, path, width=PAGE_WIDTH, height=PAGE_HEIGHT)


async def consume(client: BackendClient, number: int) -> None:
    """Consume one long reply."""
    request = pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[user_message(f"Say hello to number {number}.")],
        Tokens=LONGEST,
        IgnoreEOS=True,
        CorrelationId=f"chat-{number}",
    )
    async for _ in client.stream(request):
        pass


def recorder() -> Console:
    """Return a console that records its output, in colours."""
    return Console(
        file=StringIO(), record=True, width=WIDTH, color_system="truecolor", force_terminal=False
    )


def save(console: Console, name: str, title: str) -> None:
    """Write a console's recording as an SVG."""
    PICTURES.mkdir(exist_ok=True)
    svg = _FONT_FACE.sub("", console.export_svg(title=title, unique_id=name))
    (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
