"""Work that may never end, because it waits for storage that does not answer."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def in_own_thread(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Return what a function returns on a thread of its own; cancelling this leaves it there.

    In a pool, threads that hang would be missed by others, and the end of the process would wait
    for them.
    """
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    work = partial(_work, outcome, partial(function, *args, **kwargs))
    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    return await outcome


def _work(outcome: "asyncio.Future[Result]", function: Callable[[], Result]) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(outcome.set_result, function())
    except BaseException as error:  # noqa: BLE001 (told to whoever waits)
        settle = partial(outcome.set_exception, error)
    # The loop may have ended meanwhile.
    with suppress(RuntimeError):
        outcome.get_loop().call_soon_threadsafe(_settle, outcome, settle)


def _settle(outcome: "asyncio.Future[Result]", settle: Callable[[], None]) -> None:
    if not outcome.cancelled():
        settle()
