"""The only way in which a call ends with an error: with a message that fits gRPC's trailers."""

from typing import NoReturn

import grpc

from common.handlers import Context
from common.shortening import shortened


async def abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End a call; of a message that is too long the middle is left out, where values are quoted."""
    await context.abort(code, shortened(message))
