"""`CacheTypeKey` and `CacheTypeValue` of a LoadModel: llama.cpp's names to MLX's bits."""

import logging
import re

from backend.errors import InvalidRequestError

_FLOAT_BITS = 16
_BITS = {
    **dict.fromkeys(("f16", "bf16", "f32"), _FLOAT_BITS),
    **dict.fromkeys(("q8_0", "q8"), 8),
    **dict.fromkeys(("q4_0", "q4_1", "q4"), 4),
}
# The digit is the width: q5_1, iq4_nl, q6_k.
_OTHER_NAME = re.compile(r"[it]?q([1-8])(_[a-z0-9]+)*")
_WIDTHS = (8, 4)

log = logging.getLogger(__name__)


def kv_bits(key_type: str, value_type: str) -> int | None:
    """Return the bits of a quantised KV cache; `None` leaves it as it is.

    If one is empty, the other decides for both.

    Raises:
        InvalidRequestError: A name is not one of llama.cpp's.
    """
    key_bits = _bits("CacheTypeKey", key_type)
    value_bits = _bits("CacheTypeValue", value_type)
    given = [bits for bits in (key_bits, value_bits) if bits is not None]
    widest = max(given, default=_FLOAT_BITS)
    if min(given, default=widest) < widest:
        text = "CacheTypeKey %s and CacheTypeValue %s: MLX has one width for both, which is %d bits"
        log.warning(text, key_type, value_type, widest)
    return None if widest == _FLOAT_BITS else widest


def _bits(field: str, name: str) -> int | None:
    name = name.strip().lower()
    if not name:
        return None
    if name in _BITS:
        return _BITS[name]
    match = _OTHER_NAME.fullmatch(name)
    if match is None:
        problem = f"{name!r} is unknown; known are {', '.join(_BITS)}"
        raise InvalidRequestError(field, problem)
    nearest = min(_WIDTHS, key=lambda bits: abs(bits - int(match[1])))
    log.warning("%s: MLX has no %s, using q%d_0", field, name, nearest)
    return nearest
