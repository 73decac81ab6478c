"""Lists the prompt cache, with text where it may be read."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby

from msgspec import structs

from backend.core.model import ModelKind
from backend.core.prefix_listing import ListingCall, ListingRequest, PromptCacheListing
from backend.core.prompt import Hidden, token_of_key
from backend.errors import UnsupportedError
from backend.pipeline import worker_pool
from backend.pipeline.served_model import ServedEngine, ServedModel

# Tokens of a prefix shown as its first words.
_HEAD_TOKENS = 24


async def list_prompt_cache(
    call: ListingCall, model: ServedModel, engine: ServedEngine
) -> PromptCacheListing:
    """Return the content of the prompt cache; the engine answers between two turns."""
    if model.card.kind is not ModelKind.DECODER:
        problem = f"{model.card.name} is no decoder: it has no prompt cache"
        raise UnsupportedError(problem)
    head_tokens = _HEAD_TOKENS if call.wants_words else 0
    request = ListingRequest(max_prefixes=call.max_prefixes, head_tokens=head_tokens)
    listing = await engine.compute(model, request)
    return await worker_pool.run(partial(_readable, listing, call.scope, model), size_bytes=0)


def _readable(listing: PromptCacheListing, scope: str, model: ServedModel) -> PromptCacheListing:

    def words(head: tuple[int, ...]) -> str:
        return "".join(_texts(head, scope, model))

    return structs.replace(
        listing,
        prefixes=tuple(replace(e, head=(), words=words(e.head)) for e in listing.prefixes),
        recomputed=tuple(replace(e, head=(), words=words(e.head)) for e in listing.recomputed),
    )


def _texts(head: tuple[int, ...], scope: str, model: ServedModel) -> Iterator[str]:
    """Yield the text of tokens; for unreadable ones, the reason in brackets."""
    tokens = (token_of_key(key_id, scope) for key_id in head)
    for hidden, run in groupby(tokens, _hidden):
        ids = [token for token in run if isinstance(token, int)]
        yield model.tokenizer.decode(ids) if hidden is None else f"[{hidden.value}]"


def _hidden(token: int | Hidden) -> Hidden | None:
    return token if isinstance(token, Hidden) else None
