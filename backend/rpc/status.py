"""Errors to gRPC statuses: one table, applied in one place."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import clear_frames, format_tb

import grpc
import grpc.aio

from backend import errors
from common.rpc.abort import abort
from common.rpc.handlers import Context, Continuation, FoundHandler, surround

STATUS_CODES: dict[type[errors.BackendError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    # Distributed hosts drop the replica on this status: nothing else may use it.
    errors.ModelNotLoadedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RefusedMediumError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.ShuttingDownError: grpc.StatusCode.UNAVAILABLE,
    errors.RequestCancelledError: grpc.StatusCode.ABORTED,
    errors.GenerationFailedError: grpc.StatusCode.INTERNAL,
    errors.EngineFailedError: grpc.StatusCode.INTERNAL,
    errors.EngineDownError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineStuckError: grpc.StatusCode.UNAVAILABLE,
    errors.DeviceLostError: grpc.StatusCode.UNAVAILABLE,
    errors.GroupLostError: grpc.StatusCode.UNAVAILABLE,
    errors.HelperLostError: grpc.StatusCode.UNAVAILABLE,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedModelError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DownloadError: grpc.StatusCode.UNAVAILABLE,
    errors.GroupNotFormedError: grpc.StatusCode.UNAVAILABLE,
    errors.LoadCancelledError: grpc.StatusCode.CANCELLED,
    errors.LoadFailedError: grpc.StatusCode.INTERNAL,
    errors.LoadError: grpc.StatusCode.INVALID_ARGUMENT,
}

log = logging.getLogger(__name__)


def status_code(error: BaseException) -> grpc.StatusCode | None:
    """Return the status of the error's nearest ancestor in the table, or `None`."""
    known = (STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)
    return next(known, None)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raises with the status of its error, and the error's text."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Surround the handler with the translation."""
        handler = await continuation(handler_call_details)
        return handler and surround(handler, _translate)


@asynccontextmanager
async def _translate(request: object, context: Context) -> AsyncIterator[None]:
    # This frame lives as long as its error.
    del request
    try:
        yield
    except grpc.aio.InternalError:
        # A message could not be sent: the peer is gone, and gRPC has not reported it yet.
        raise asyncio.CancelledError from None
    except grpc.aio.BaseError:
        raise  # gRPC's own: the call is already aborted
    except Exception as error:  # noqa: BLE001 (the edge: an error not in the table is a bug)
        code = status_code(error)
        if code is None:
            # A bug. The message may quote the request: neither the log nor the caller gets it.
            place = "".join(format_tb(error.__traceback__))
            log.error("unexpected %s while answering a call\n%s", type(error).__name__, place)
            await abort(context, grpc.StatusCode.INTERNAL, "internal error; see the backend's log")
        _release(error)
        await abort(context, code, str(error))


def _release(error: BaseException) -> None:
    """Release the objects of the failed calls, images among them.

    gRPC's own error, which references this one, is in a cycle (grpcio 1.85): the collector may
    take long.
    """
    failed: BaseException | None = error
    while failed is not None:
        clear_frames(failed.__traceback__)
        failed = failed.__context__
