"""Find what makes prompts differ early although they are the same: a date, an id, a counter."""

from backend.cache.token_key import BYTES_PER_TOKEN, TokenKey

MIN_LOST_TOKENS = 64
_RUN_TOKENS = 16
_SKIPS = (1, 2, 4, 8, 16, 32)
_REACH_TOKENS = 512


def agrees_again(key: TokenKey, matched: int, beyond: TokenKey) -> bool:
    """Tell whether a prompt goes on like a stored one soon after the place where they differ.

    Args:
        key: The prompt.
        matched: Where they differ.
        beyond: The stored tokens from there on.
    """
    if len(key) - matched < MIN_LOST_TOKENS:
        return False
    stored = beyond[:_REACH_TOKENS].packed
    runs = (key[matched + skip : matched + skip + _RUN_TOKENS] for skip in _SKIPS)
    return any(len(run) == _RUN_TOKENS and _holds(stored, run.packed) for run in runs)


def _holds(stored: bytes, run: bytes) -> bool:
    place = stored.find(run)
    while place >= 0 and place % BYTES_PER_TOKEN:
        place = stored.find(run, place + 1)
    return place >= 0
