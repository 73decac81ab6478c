"""The main job on the embedded model: a thought, a tool call, its answer, over a real socket."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from backend.cli.chat import weather_toolbox
from backend.cli.client import BackendClient, CallError, token_option
from backend.cli.render import (
    model_options,
    print_labelled,
    print_reply,
    printable,
    reply_message,
    user_message,
)
from backend.cli.server_process import ServerError, ServerProcess
from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb

# The model never saw this city in training.
QUESTION = "What is the weather in Hanoi?"
MAX_TOKENS = 256


class DemoError(Exception):
    """The demo did not finish; the message may have several lines."""


async def run_demo(console: Console, token: str = "") -> None:
    """Start the server, hold the conversation, stop the server."""
    with (
        TemporaryDirectory(prefix="mlx-backend-demo-") as directory,
        ServerProcess.start(Path(directory) / "server.log") as server,
    ):
        try:
            await _run(console, server, token)
        except (CallError, DemoError, ServerError) as error:
            raise DemoError(f"{error}\nThe server's log ends:\n{server.log_tail()}") from None


async def _run(console: Console, server: ServerProcess, token: str) -> None:
    started = time.monotonic()
    await server.wait_until_ready(token)
    print_labelled(console, "server", f"{server.address}, ready after {_since(started)}")
    async with BackendClient(server.address, token) as client:
        started = time.monotonic()
        await client.load_model(model_options(str(MODEL_DIR)))
        took = f"ready after {_since(started)} with the imports"
        print_labelled(console, "model", f"the embedded one, {took}")
        await hold_conversation(console, client)
    code = server.stop()
    if code != 0:
        raise DemoError(f"the server exited with code {code}")
    print_labelled(console, "server", "stopped")


async def hold_conversation(console: Console, client: BackendClient) -> None:
    """Ask for the weather, answer the tool call, and print the model's reply."""
    toolbox = weather_toolbox(console)
    messages = [user_message(QUESTION)]
    print_labelled(console, "user", QUESTION)
    reply = await print_reply(console, client.stream(_request(messages, toolbox.schemas)))
    if not reply.tool_calls:
        raise DemoError("the model did not call the tool")
    messages += [reply_message(reply), *toolbox.answers(reply)]
    answer = await print_reply(console, client.stream(_request(messages, toolbox.schemas)))
    if not answer.content.strip():
        raise DemoError("the model did not answer")


def _request(messages: Sequence[pb.Message], tools: str) -> pb.PredictOptions:
    return pb.PredictOptions(
        UseTokenizerTemplate=True, Messages=messages, Tools=tools, Tokens=MAX_TOKENS
    )


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


@click.command("demo")
@token_option
def command(token: str) -> None:
    """Run the embedded model once, from start to end.

    A thought, a tool call and its answer, over a real socket.
    """
    try:
        asyncio.run(run_demo(Console(), token))
    except DemoError as error:
        raise click.ClickException(printable(str(error))) from None
