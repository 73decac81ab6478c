"""Bearer-token authentication for every method of a server."""

import hmac

import grpc
import grpc.aio

from common.rpc.abort import abort
from common.rpc.handlers import Context, Continuation, FoundHandler


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose metadata lacks `authorization: Bearer <token>`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Pass a call on if its token is right; else refuse it without reading the request."""
        if self._knows(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata if key == "authorization"]
        return len(given) == 1 and hmac.compare_digest(_as_bytes(given[0]), self._expected)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


async def _refuse(_requests: object, context: Context) -> None:
    await abort(context, grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
