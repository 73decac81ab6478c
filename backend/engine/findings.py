"""The results of a model's trials, as plain values, kept for its next load.

The server keeps them in memory for the next process, and in a file for its own next start. The
file is never needed: without it, or with one that cannot be read, trials run again.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from backend.core.prompt import MediaKind
from backend.engine.plan import BatchPlan
from common.directories import own_content, replace_file

# A trial that ended so many processes is not repeated in the next one.
MAX_BEGUN = 3

log = logging.getLogger(__name__)


class MediaFindings(msgspec.Struct, frozen=True):
    """The kinds of media that a model reads wrongly, with reasons.

    Attributes:
        refused: Not even one may be in a prompt.
        single: Not two of them.
    """

    refused: Mapping[MediaKind, str]
    single: Mapping[MediaKind, str]


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a model's trials so far; everything else has not been tried yet.

    Attributes:
        is_sound: It computes numbers that depend on its input.
        group_sizes: Values of its quantised KV cache that share a scale; see `CacheFactory`.
        reads_text: It reads text correctly through mlx-vlm.
        media: The kinds of media that it reads wrongly.
        plan: How its rows may be batched.
        knows_drafts: The plan tells whether rows may take drafted tokens.
        remarks: Lines of the log, with levels.
        begun: Processes that began to try the rest, and have not told an end.
    """

    is_sound: bool = False
    group_sizes: tuple[int | None, ...] | None = None
    reads_text: bool = False
    media: MediaFindings | None = None
    plan: BatchPlan | None = None
    knows_drafts: bool = False
    remarks: tuple[tuple[int, str], ...] = ()
    begun: int = 0


Tell: TypeAlias = Callable[[str, Findings], None]
"""Receives the findings of a model, with its key."""


def forget(_key: str, _findings: Findings) -> None:
    """Keep nothing."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """The findings of all models, as one process knows them.

    Attributes:
        tell: Called with the findings of a model.
    """

    known: Mapping[str, Findings] = field(default_factory=dict)
    tell: Tell = forget

    def page(self, key: str) -> "Page":
        """Return the findings of one model."""
        return Page(key, self.known.get(key, Findings()), self.tell)


@dataclass(eq=False, slots=True)
class Page:
    """The findings of one model while it is tried; belongs to the main thread.

    Attributes:
        findings: At first those of an earlier load.
    """

    _key: str = ""
    findings: Findings = field(default_factory=Findings)
    _tell: Tell = forget

    def add(self, **found: Any) -> None:  # noqa: ANN401 (fields of `Findings`)
        """Note something; see `hand_over`."""
        self.findings = msgspec.structs.replace(self.findings, **found)

    def say(self, level: int, text: str, *values: object) -> None:
        """Write a line to the log, now and in each later load."""
        log.log(level, text, *values)
        self.add(remarks=(*self.findings.remarks, (level, text % values)))

    @property
    def has_failed(self) -> bool:
        """Whether the rest ended too many processes to be tried again."""
        return self.findings.begun >= MAX_BEGUN

    def repeat(self) -> None:
        """Write the lines of earlier trials to the log."""
        for level, text in self.findings.remarks:
            log.log(level, "%s", text)

    def hand_over(self) -> None:
        """Tell the present findings."""
        self._tell(self._key, self.findings)


def decoded(data: bytes) -> Mapping[str, Findings]:
    """Return the findings of a file; those of another shape are left out.

    Raises:
        msgspec.DecodeError: It is not a file of findings.
    """
    found: dict[str, Findings] = {}
    for key, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        try:
            findings = msgspec.json.decode(raw, type=Findings, strict=True)
        except msgspec.ValidationError:
            continue
        if _is_plausible(findings.plan):
            found[key] = findings
    return found


def _is_plausible(plan: BatchPlan | None) -> bool:
    """Tell whether the numbers of a plan are such as are measured."""
    if plan is None:
        return True
    seconds = plan.pass_seconds.values()
    return 0 <= plan.overhead < math.inf and all(0 < each < math.inf for each in seconds)


def encoded(findings: Sequence[tuple[str, Findings]]) -> bytes:
    """Return findings as a file, in order."""
    return msgspec.json.format(msgspec.json.encode(dict(findings)), indent=1)


MAX_MODELS = 256
MAX_FILE_BYTES = 2**20


class FindingsStore:
    """The findings of models by their keys; for any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Start empty; the file is read when it is needed.

        Args:
            path: The file; `None` keeps them in memory only.
        """
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, Findings] = {}
        self._has_read = False
        self._is_writable = path is not None

    def known(self) -> Mapping[str, Findings]:
        """Return all findings; reads the file the first time."""
        with self._lock:
            if not self._has_read:
                self._has_read = True
                self._known = {**self._read(logging.WARNING), **self._known}
            return dict(self._known)

    def note(self, key: str, findings: Findings) -> None:
        """Keep the findings of a model in memory."""
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = findings

    def forgive(self) -> None:
        """Let trials that ended processes be tried again: somebody has asked for a load."""
        with self._lock:
            self._known = {
                key: msgspec.structs.replace(each, begun=0) for key, each in self._known.items()
            }

    def write(self) -> None:
        """Write the file, with the findings of other servers in it; an error is only logged.

        The findings of a model with begun trials are not written: these may have ended a process.
        """
        with self._lock:
            if self._path is None or not self._is_writable:
                return
            settled = {key: each for key, each in self._known.items() if not each.begun}
            others = [each for each in self._read(logging.DEBUG).items() if each[0] not in settled]
            latest = [*others, *settled.items()][-MAX_MODELS:]
            try:
                replace_file(self._path, encoded(latest))
            except OSError as error:
                self._is_writable = False
                problem = "what loads found of models is not kept: MLX_BACKEND_FINDINGS %s: %s"
                log.warning(problem, self._path, error.strerror or error)

    def _read(self, level: int) -> Mapping[str, Findings]:
        """Return the findings of the file; none if it is missing, foreign or malformed."""
        if self._path is None:
            return {}
        try:
            return decoded(own_content(self._path, MAX_FILE_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.log(level, "%s is not used, and models are tried again: %s", self._path, error)
            return {}
