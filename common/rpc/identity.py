"""Refuses requests that are meant for another model."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from common.rpc.abort import abort
from common.rpc.handlers import Context, Continuation, FoundHandler, surround

IDENTITY_FIELD = "ModelIdentity"


class ModelIdentityInterceptor(grpc.aio.ServerInterceptor):
    """Compares the model that a request names with the loaded one.

    Every request message with the field is checked, in any method. An empty name, in the request
    or of the loaded model, matches everything.

    Args:
        loaded_model: Returns the identity of the loaded model, empty when nothing is loaded.
    """

    def __init__(self, loaded_model: Callable[[], str]) -> None:
        self._loaded_model = loaded_model

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Wrap the handler with the comparison."""
        handler = await continuation(handler_call_details)
        return handler and surround(handler, self._compare)

    @asynccontextmanager
    async def _compare(self, request: object, context: Context) -> AsyncIterator[None]:
        wanted, loaded = getattr(request, IDENTITY_FIELD, ""), self._loaded_model()
        if wanted and loaded and wanted != loaded:
            # The host looks for this text and removes the replica from its list.
            await abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"model identity mismatch: {wanted!r} was asked for, {loaded!r} is loaded",
            )
        yield
