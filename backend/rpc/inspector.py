"""The `Inspector` service, which only this backend has; the command `status` calls it."""
# ruff: noqa: N802 - the methods have the names of the RPCs

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.rpc.reports import inspect_reply
from backend.rpc.servicer import ServedEngine
from common.handlers import Context


class InspectorServicer(backend_pb2_grpc.InspectorServicer):
    """Reports the state of the engine at any time."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    async def Inspect(self, _request: pb.InspectRequest, _context: Context) -> pb.InspectReply:
        """Answer with the latest snapshot."""
        return inspect_reply(self._engine.model, self._engine.status())
