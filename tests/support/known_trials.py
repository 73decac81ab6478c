"""Remembers what trials at load found of a model, for the next engine that loads the same files.

What a trial logs would be missing there, so only trials that said nothing are remembered. The costs
of passes are among it: timed without the trials before them, they would be those of a cold engine.
Groups, and engines with an injected fault, try everything themselves.
"""

import logging
import os
import pickle
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from backend.engine.session import assembly
from backend.model.checkpoint.fingerprint import fingerprint
from backend.model.checkpoint.weights import weight_types
from backend.rank import FAULT_VARIABLE

LOGGERS = ("batch_check", "sharing_check", "media_check")


class Heard(logging.Filter):
    """Counts log records that pass."""

    count = 0

    def filter(self, _record: logging.LogRecord) -> bool:
        self.count += 1
        return True


class KnownTrials:
    """The trials of one engine process; what they find is kept in files, which are never old."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = ""
        self._heard = Heard()
        for name in LOGGERS:
            logging.getLogger(f"backend.engine.trials.{name}").addFilter(self._heard)

    def install(self) -> None:
        """Ask here first in this process."""
        assemble, plan = assembly.assemble_decoder_session, assembly.batch_plan
        media, text = assembly.media_faults, assembly.text_fault

        def assembled(model: Any, options: Any, outlets: Any) -> Any:
            types = weight_types(model.network)
            files = fingerprint(options, Path(model.card.path), types)
            level = logging.root.level
            text_side = options.tokenizer, options.tuning.text, options.tuning.checkpoint
            self._model = repr((model.card.path, files, text_side, options.media_limits, level))
            return assemble(model, options, outlets)

        def planned(network: Any, caches: Any, sample: Any, *lengths: Any, **given: Any) -> Any:
            if given["ranks"].are_several:
                return plan(network, caches, sample, *lengths, **given)
            key = lengths, given["drafts"]
            return self._found(key, lambda: plan(network, caches, sample, *lengths, **given))

        assembly.assemble_decoder_session = assembled
        assembly.batch_plan = planned
        assembly.media_faults = lambda *given: self._found("media", lambda: media(*given))
        assembly.text_fault = lambda *given: self._found("text", lambda: text(*given))

    def _found(self, key: Any, attempt: Callable[[], Any]) -> Any:
        """Return what an attempt finds, or found in another process."""
        name = blake2b(repr((self._model, key)).encode(), digest_size=16).hexdigest()
        file = self._directory / name
        if file.is_file():
            return pickle.loads(file.read_bytes())  # noqa: S301 (our own, of this run)
        said = self._heard.count
        found = attempt()
        if self._heard.count == said:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(found))
            part.rename(file)
        return found


def remember_trials(directory: Path) -> None:
    """Use what other engines of this run know, and add to it."""
    if FAULT_VARIABLE not in os.environ:
        KnownTrials(directory).install()
