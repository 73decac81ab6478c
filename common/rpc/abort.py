"""Ends a call with an error message that fits gRPC's trailers; no other code ends calls."""

from typing import NoReturn

import grpc

from common.rpc.handlers import Context
from common.shortening import shortened


async def abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End a call with an error; a long message loses its middle, where values are quoted."""
    await context.abort(code, shortened(message))
