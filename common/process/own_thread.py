"""Work that may never end, because it waits for unresponsive storage."""

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
    """Run a function on a thread of its own and return its result; cancelling abandons it.

    In a pool, hanging threads would take room from other work and delay the end of the process.
    """
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    work = partial(_work, outcome, partial(function, *args, **kwargs))
    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    return await outcome


def _work(outcome: "asyncio.Future[Result]", function: Callable[[], Result]) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(outcome.set_result, function())
    except BaseException as error:  # noqa: BLE001 (handed to the waiting task)
        settle = partial(outcome.set_exception, error)
    # The loop may have ended meanwhile.
    with suppress(RuntimeError):
        outcome.get_loop().call_soon_threadsafe(_settle, outcome, settle)


def _settle(outcome: "asyncio.Future[Result]", settle: Callable[[], None]) -> None:
    if not outcome.cancelled():
        settle()
