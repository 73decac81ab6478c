"""The backend of a chat: the one that runs, or one of its own that ends with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from rich.console import Console

from backend.cli.client import BackendClient, CallError
from backend.cli.conversation import model_options
from backend.cli.hub_models import cached_models, pull
from backend.cli.inspection import inspect
from backend.cli.server_process import ServerError, ServerProcess
from backend.config import ModelOptions
from backend.model.checkpoint.hub import HubModel, resolve

CHAT_HINT = "chat with the embedded model: mlx-grpc-backend chat demo"


class NoModelError(Exception):
    """Nothing is loaded, and no model was named."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The backend and the model that a chat was asked for.

    Attributes:
        model: To be loaded; empty for the loaded one.
        is_chosen: Whether the address was given, so that no other backend will do.
    """

    address: str
    token: str
    model: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Partner:
    """The backend that a chat talks to, and where it listens."""

    client: BackendClient
    address: str

    async def described(self) -> str:
        """Return the model and the address in one line."""
        name = (await inspect(self.client)).report.model.name or "the loaded model"
        return f"{name} at {self.address}"


@asynccontextmanager
async def partner_of(console: Console, wanted: Wanted) -> AsyncIterator[Partner]:
    """Yield a backend that has the wanted model.

    Raises:
        CallError: No backend answers, or it cannot load the model.
        NoModelError: It has no model.
        ServerError: A server of its own does not start.
    """
    if await _will_do(wanted):
        async with BackendClient(wanted.address, wanted.token) as client:
            await _ensure_model(console, client, wanted.model)
            yield Partner(client, wanted.address)
        return
    async with _own_backend(console, wanted) as partner:
        yield partner


@asynccontextmanager
async def _own_backend(console: Console, wanted: Wanted) -> AsyncIterator[Partner]:
    await _fetch(console, wanted.model)
    with TemporaryDirectory(prefix="mlx-backend-chat-") as directory:
        log = Path(directory) / "server.log"
        with ServerProcess.start(log) as server:
            try:
                await server.wait_until_ready(wanted.token)
                async with BackendClient(server.address, wanted.token) as client:
                    await _ensure_model(console, client, wanted.model)
                    yield Partner(client, server.address)
            except (CallError, ServerError) as error:
                raise ServerError(
                    f"{error}\nThe server's log ends:\n{server.log_tail(5)}"
                ) from None


async def _will_do(wanted: Wanted) -> bool:
    """Tell whether to talk to the backend at the address, answering or not."""
    if wanted.is_chosen or not wanted.model:
        return True
    async with BackendClient(wanted.address, wanted.token) as client:
        try:
            loaded = (await inspect(client)).report.model.name
        except CallError as error:
            return error.code is not grpc.StatusCode.UNAVAILABLE
    return loaded in ("", wanted.model)


async def _ensure_model(console: Console, client: BackendClient, model: str) -> None:
    await client.check_health()
    if model:
        with console.status(f"loading {model}"):
            await client.load_model(model_options(model))
    elif not await client.has_model():
        raise NoModelError(f"no model is loaded there: name one, or {CHAT_HINT}")


async def _fetch(console: Console, model: str) -> None:
    """Fetch a model of the hub with a bar, if it is not on this machine.

    Raises:
        ModelNotFoundError: There is no such model.
        DownloadError: The hub cannot be reached.
    """
    place = await asyncio.to_thread(resolve, ModelOptions(model=model))
    if isinstance(place, HubModel) and place.repo_id not in await asyncio.to_thread(_cached):
        await pull(console, place.repo_id)


def _cached() -> set[str]:
    return {model.name for model in cached_models()}
