"""Routes upstream's attention to the caches of a batch whose rows keep their own lengths.

All families of mlx-lm and mlx-vlm, and the drafters of mlx-vlm, compute attention with
`scaled_dot_product_attention` of a module `base`, which their modules import by name. `install`
replaces it with a function that knows `RaggedKV`, in `base` and in every imported module.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias, cast

import mlx.core as mx

from backend.cache.row_kv import RowKV
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.row_attention import attend_row

_NAME = "scaled_dot_product_attention"
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")
_FAMILIES = ("mlx_lm.models.", "mlx_vlm.models.", "mlx_vlm.speculative.drafters.")
# Of upstream's function, after queries and keys.
_PARAMETERS = ("values", "cache", "scale", "mask", "sinks")
_MARK = "sends_ragged_rows_back"

Attention: TypeAlias = Callable[..., Any]


def install() -> None:
    """Route the attention of all modules that have been imported; cheap if nothing is new."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith(_FAMILIES)}
    routes = {name: _route(modules[name]) for name in _BASES if name in modules}
    originals = {inspect.unwrap(route): route for route in routes.values()}
    for module in modules.values():
        route = originals.get(getattr(module, _NAME, None))
        if route is not None:
            setattr(module, _NAME, route)


def _route(base: ModuleType) -> Attention:
    """Return the function that replaces a base module's attention."""
    current: Attention = getattr(base, _NAME)
    return current if hasattr(current, _MARK) else _routed(current)


def _routed(upstream: Attention) -> Attention:
    @wraps(upstream)
    def attend(queries: mx.array, keys: object, *rest: object, **named: object) -> mx.array:
        if not isinstance(keys, RaggedKV | RowKV):
            return upstream(queries, keys, *rest, **named)
        given = dict(zip(_PARAMETERS, rest, strict=False)) | named
        scale, sinks = cast(float, given["scale"]), cast(mx.array | None, given.get("sinks"))
        mask = given.get("mask")
        if isinstance(keys, RaggedKV):
            return keys.attend(queries, scale, mask, sinks)
        return attend_row(keys, queries, scale, cast(mx.array | None, mask), sinks)

    setattr(attend, _MARK, True)
    return attend
