"""The `Inspector` service of this backend, used by the commands `status` and `cache`."""
# ruff: noqa: N802 - the methods have the names of the RPCs

from backend.errors import ModelNotLoadedError
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.pipeline.prompt.stored import list_prompt_cache
from backend.rpc.prompt_cache_report import listing_call, listing_reply
from backend.rpc.reports import inspect_reply
from backend.rpc.servicer import ServedEngine
from common.rpc.handlers import Context


class InspectorServicer(backend_pb2_grpc.InspectorServicer):
    """Reports the state of the engine at any time."""

    def __init__(self, engine: ServedEngine, *, has_token: bool) -> None:
        """Create the service.

        Args:
            engine: The engine to report on.
            has_token: Whether callers need a token: without one they may not read prompts.
        """
        self._engine = engine
        self._has_token = has_token

    async def Inspect(self, _request: pb.InspectRequest, _context: Context) -> pb.InspectReply:
        """Answer with the latest snapshot."""
        return inspect_reply(self._engine.model, self._engine.status())

    async def InspectPromptCache(
        self, request: pb.InspectPromptCacheRequest, _context: Context
    ) -> pb.InspectPromptCacheReply:
        """Answer with the nodes of the prompt cache."""
        return await inspect_prompt_cache(self._engine, request, may_read=self._has_token)


async def inspect_prompt_cache(
    engine: ServedEngine, request: pb.InspectPromptCacheRequest, *, may_read: bool
) -> pb.InspectPromptCacheReply:
    """Return the nodes of the prompt cache.

    Args:
        engine: The engine with the cache.
        request: The number of nodes, and whether with words.
        may_read: Whether the caller may read prompts.

    Raises:
        BackendError: The request cannot be met, or there is no prompt cache.
    """
    call = listing_call(request, may_read=may_read)
    if (model := engine.model) is None:
        raise ModelNotLoadedError
    listing = await list_prompt_cache(call, model, engine)
    return listing_reply(listing, engine.status().metrics)
