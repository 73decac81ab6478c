"""Warnings that are issued once."""

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache
def warn_once(message: str) -> None:
    """Warn, once per message: formats are examined for every request."""
    log.warning("%s", message)
