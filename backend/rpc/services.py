"""The services of one engine, `Inspector` among them; their import takes longer than to listen."""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from backend.config import (
    DRAIN_TIMEOUT_S,
    LISTED_PREFIXES,
    MAX_LISTED_PREFIXES,
    MAX_REQUEST_ID_CHARS,
    ServerConfig,
    TuningOptions,
)
from backend.core.metric_table import Values
from backend.core.prefix_listing import ListingCall, PromptCacheListing, StoredPrefix
from backend.errors import InvalidRequestError, ModelNotLoadedError
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.pipeline.prefix_texts import list_prompt_cache
from backend.pipeline.served_model import ServedEngine
from backend.rpc.parsing.checks import require_printable
from backend.rpc.parsing.generation_fields import named_scope
from backend.rpc.reports import inspect_reply, prompt_cache_report
from backend.rpc.servicer import BackendServicer
from common.rpc import Context, LateServices

_NOT_SHOWN = "prompts are shown only by a backend that has a token (LOCALAI_GRPC_AUTH_TOKEN)"


def listing_call(request: pb.InspectPromptCacheRequest, *, may_read: bool) -> ListingCall:
    """Return the call of a request.

    Args:
        may_read: Whether its sender may read the prompts of others.
    """
    if request.max_prefixes > MAX_LISTED_PREFIXES:
        problem = f"must be at most {MAX_LISTED_PREFIXES}, not {request.max_prefixes}"
        raise InvalidRequestError("max_prefixes", problem)
    if request.words and not may_read:
        raise InvalidRequestError("words", _NOT_SHOWN)
    scope = require_printable("cache_scope", request.cache_scope, MAX_REQUEST_ID_CHARS)
    return ListingCall(
        max_prefixes=request.max_prefixes or LISTED_PREFIXES,
        wants_words=request.words,
        scope=named_scope(scope) if scope else "",
    )


def listing_reply(listing: PromptCacheListing, metrics: Values) -> pb.InspectPromptCacheReply:
    """Return the answer."""
    return pb.InspectPromptCacheReply(
        books=prompt_cache_report(metrics),
        prefixes=[pb.PrefixReport(**_prefix_entry(prefix)) for prefix in listing.prefixes],
        spans=[pb.ReuseReport(**asdict(span)) for span in listing.spans],
        recomputed=[pb.RecomputedReport(**_worded(asdict(each))) for each in listing.recomputed],
        recomputed_tokens=listing.recomputed_tokens,
        stateless_tokens=listing.stateless_tokens,
    )


def _prefix_entry(prefix: StoredPrefix) -> dict[str, Any]:
    return {**_worded(asdict(prefix)), "place": prefix.place.value}


def _worded(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the cache's own tokens, which no caller sees."""
    del values["head"]
    return values


# ruff: noqa: N802 - the methods have the names of the RPCs


class InspectorServicer(backend_pb2_grpc.InspectorServicer):
    """Reports the state of the engine at any time."""

    def __init__(self, engine: ServedEngine, *, has_token: bool) -> None:
        """Create the service.

        Args:
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
    """Return the nodes of the prompt cache."""
    call = listing_call(request, may_read=may_read)
    if (model := engine.model) is None:
        raise ModelNotLoadedError
    listing = await list_prompt_cache(call, model, engine)
    return listing_reply(listing, engine.status().metrics)


class Services:
    """The services of a server that has an engine."""

    def __init__(
        self,
        config: ServerConfig,
        engine: ServedEngine,
        download_environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the services.

        Args:
            download_environment: Of the downloads of jobs' models; empty for this process's.
        """
        self.engine = engine
        tuning = TuningOptions.of(max_slots=config.max_slots)
        self._backend = BackendServicer(engine, tuning, download_environment)
        self._inspector = InspectorServicer(engine, has_token=bool(config.auth_token))

    @property
    def loaded_model(self) -> str:
        """The name of the loaded model; empty if there is none."""
        return self.engine.model.options.model if self.engine.model else ""

    def add_to(self, late_services: LateServices) -> None:
        """Add the services to a running server."""
        backend_pb2_grpc.add_BackendServicer_to_server(self._backend, late_services)
        backend_pb2_grpc.add_InspectorServicer_to_server(self._inspector, late_services)
        late_services.complete()

    async def close(self) -> None:
        """Refuse new requests, wait a while for running ones, then end them, and all jobs."""
        await self.engine.close(drain_timeout_s=DRAIN_TIMEOUT_S)
        await self._backend.close_jobs()
