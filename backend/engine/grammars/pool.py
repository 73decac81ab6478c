"""Makes the grammars of requests: a few at a time, so that a slow one holds up few others.

However many large rules wait, one thread is left for small ones; one that takes long there waits
again, with the large ones. The next rule is that of the caller for whom least time was spent.

A thread has a process write and try a grammar, and compiles it if it has passed. The thread cannot
be held up: the process can be killed, and a compilation that has passed its trial ends.
"""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from backend.config import (
    GRAMMAR_PROCESSES,
    MAX_KEPT_GRAMMARS,
    MAX_WRITING_S,
    QUICK_RULE_S,
    SMALL_RULE_BYTES,
)
from backend.core.guide import (
    GrammarParts,
    Guide,
    ReplyGrammar,
    ReplyMatcher,
    ReplyRule,
    ThoughtTexts,
)
from backend.core.model import ModelCard
from backend.engine.grammars.writer_process import (
    Answer,
    Begin,
    Write,
    WriterProcess,
    WritingTooLongError,
    Written,
    lost_twice,
)
from backend.engine.messages.protocol import Failure
from backend.errors import BackendError, GenerationFailedError, GrammarError
from backend.model.text.tokenizer import Tokenizer
from backend.sampling.grammar.writer import LarkGrammar
from common.helper import HelperPool, ProcessEndedError, Question, TooLateError
from common.last_used import LastUsed
from common.machine_memory import trim

if TYPE_CHECKING:
    from backend.sampling.grammar.compiler import GrammarCompiler
    from backend.sampling.grammar.thought_marks import ThoughtMarks


log = logging.getLogger(__name__)
Made = TypeVar("Made")


class SentGrammar:
    """A grammar from rank 0 that is compiled on first use; safe from any thread."""

    def __init__(self, parts: GrammarParts, workshop: "GrammarWorkshop") -> None:
        # No data class: the codec would send both.
        self.parts = parts
        self._workshop = workshop

    def matcher(self) -> ReplyMatcher:
        """Return a matcher for one reply.

        Raises:
            GrammarError: The model cannot follow it.
        """
        return self._workshop.compile(self.parts).matcher()


class GrammarWorkshop:
    """Compiles the grammars of one loaded model; the first one reads its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._lock = threading.Lock()
        self._marks: dict[ThoughtTexts, ThoughtMarks] = {}
        self._made_compiler: GrammarCompiler | None = None

    def read(self, parts: GrammarParts) -> SentGrammar:
        """Return a grammar from its parts; nothing is compiled yet."""
        return SentGrammar(parts, self)

    def is_ready(self, parts: GrammarParts | None) -> bool:
        """Tell whether these parts were compiled before, so that they are at hand."""
        if parts is None:
            return True
        if parts.budget and parts.budget.texts not in self._marks:
            return False
        if not parts.rules:
            return True
        compiler = self._made_compiler
        return compiler is not None and compiler.known(_lark(parts)) is not None

    def compile(self, parts: GrammarParts) -> ReplyGrammar:
        """Return a compiled grammar from its parts; the first takes a second or two.

        Raises:
            GrammarError: The model cannot follow it.
        """
        from backend.sampling.grammar.thought_budget import BudgetedGrammar

        grammar: ReplyGrammar | None = None
        if parts.rules:
            grammar = self.compiler.compile(_lark(parts))
        if parts.budget:
            return BudgetedGrammar(parts.budget, self._marks_of(parts.budget.texts), grammar)
        if grammar is None:
            raise GrammarError("a grammar without rules")
        return grammar

    def _marks_of(self, texts: ThoughtTexts) -> "ThoughtMarks":
        from backend.sampling.grammar.thought_marks import ThoughtMarks

        with self._lock:
            if texts not in self._marks:
                marks = ThoughtMarks(texts, self._tokenizer, self._card.vocab_size)
                marks.prepare()
                self._marks[texts] = marks
            return self._marks[texts]

    @property
    def compiler(self) -> "GrammarCompiler":
        """The compiler; the first use takes a second or two.

        Raises:
            GrammarError: No token ends a reply of this model.
        """
        with self._lock:
            if self._made_compiler is None:
                self._made_compiler = self._make_compiler()
            return self._made_compiler

    def _make_compiler(self) -> "GrammarCompiler":
        from backend.sampling.grammar.compiler import GrammarCompiler, tokenizer_of
        from backend.sampling.grammar.vocabulary import Vocabulary

        vocabulary = Vocabulary.of(self._tokenizer, self._card)
        # Made here, because other threads share it.
        tokenizer_of(vocabulary)
        trim()
        return GrammarCompiler(vocabulary)


def _lark(parts: GrammarParts) -> LarkGrammar:
    start, *definitions = parts.rules
    return LarkGrammar(start, tuple(definitions))


# A load is often followed by a request, whose first token should not wait for the GIL.
WARM_UP_DELAY_S = 2.0
# Of rules that wait: 16 KiB are overtaken by small ones that come up to 16 s later.
_LATER_PER_KIB_S = 1.0
_HALF_FORGOTTEN_S, _KNOWN_CALLERS = 30.0, 1024
_FREE = Written(())


Outcome: TypeAlias = ReplyGrammar | BackendError | None
"""The grammar of a reply, `None` if nothing guides it, or the error of its request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A request that waits for its grammar."""

    request_id: str
    guide: Guide
    done: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A rule that waits; a small one may take the thread of small rules."""

    key: bytes
    caller: str
    size_bytes: int
    is_small: bool
    since_s: float

    @property
    def rank(self) -> float:
        """Its place among equal callers: the later it came, and the larger it is, the later."""
        return self.since_s + self.size_bytes // 2**10 * _LATER_PER_KIB_S


class _Line:
    """The rules that wait, and the time that was spent for their callers; from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rules: list[_Waiting] = []
        self._spent: LastUsed[str, tuple[float, float]] = LastUsed(_KNOWN_CALLERS)
        self._news = threading.Condition()

    def put(self, rule: _Waiting) -> None:
        with self._news:
            self._rules.append(rule)
            self._news.notify_all()

    def take(self, *, only_small: bool = False, timeout_s: float | None = None) -> _Waiting | None:
        """Wait for a rule, and return it; `None` after the timeout."""
        with self._news:
            found = self._news.wait_for(lambda: self._next(only_small), timeout_s)
            if found is not None:
                self._rules.remove(found)
            return found

    def charge(self, caller: str, seconds: float) -> None:
        """Count time that was spent for a caller; it is forgotten by and by."""
        with self._news:
            self._spent.keep(caller, (self._spent_for(caller) + seconds, self._clock()))

    def _spent_for(self, caller: str) -> float:
        seconds, then = self._spent.find(caller) or (0.0, 0.0)
        return seconds * math.exp2((then - self._clock()) / _HALF_FORGOTTEN_S)

    def _next(self, only_small: bool) -> _Waiting | None:  # noqa: FBT001 (a predicate)
        rules = [rule for rule in self._rules if rule.is_small or not only_small]
        spent = {caller: self._spent_for(caller) for caller in {rule.caller for rule in rules}}
        # Callers of a few small rules are equal.
        order = [(spent[rule.caller] // QUICK_RULE_S, rule.rank) for rule in rules]
        return rules[order.index(min(order))] if rules else None


class GrammarPool:
    """Makes grammars for one model; safe from any thread."""

    def __init__(
        self,
        workshop: GrammarWorkshop,
        note: Callable[[Sequence[str]], None],
        slots: int = GRAMMAR_PROCESSES,
        start_process: Callable[[Begin], WriterProcess] = WriterProcess,
        limit_s: float = MAX_WRITING_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a pool; see `start`.

        Args:
            note: Called with the requests for which grammars are being compiled, whenever they
                change: a crash would be due to one of them.
            slots: Number of grammars in work at once; of several, the last is for small rules.
            limit_s: Of the time for writing one.
        """
        self._workshop = workshop
        self._note = note
        self._slots = slots
        self._start_process = start_process
        self._limit_s = limit_s
        self._clock = clock
        self._line = _Line(clock)
        self._waiting: dict[bytes, list[_Job]] = {}
        self._compiling: set[str] = set()
        self._note_lock = threading.Lock()
        self._written: LastUsed[bytes, Written] = LastUsed(MAX_KEPT_GRAMMARS)
        self._told: LastUsed[str, str] = LastUsed(MAX_KEPT_GRAMMARS)
        self._processes: HelperPool[WriterProcess] = HelperPool(slots, retries_ended=True)
        self.idle = self._processes.idle
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the threads; one of them prepares for grammars when no first token waits."""
        for number in range(self._slots):
            is_last = number == self._slots - 1
            work = partial(self._work, only_small=is_last) if number else self._warm_up
            threading.Thread(target=work, name="grammars", daemon=True).start()

    def submit(
        self, request_id: str, guide: Guide, done: Callable[[Outcome], None], caller: str = ""
    ) -> None:
        """Make the grammar of a request: at once if it is known, or else on a thread.

        Args:
            done: Receives it; not called after `cancel`. Must not block.
        """
        rule = msgspec.msgpack.encode(guide.rule)
        job, key = _Job(request_id, guide, done), hashlib.sha256(rule).digest()
        written = self._written.find(key) if guide.rule else _FREE
        if written is not None and self._workshop.is_ready(_parts(written, guide)):
            done(self._outcome(job, written))
            return
        with self._lock:
            jobs = self._waiting.setdefault(key, [])
            jobs.append(job)
            if len(jobs) == 1:
                is_small = len(rule) <= SMALL_RULE_BYTES
                self._line.put(_Waiting(key, caller, len(rule), is_small, self._clock()))

    def cancel(self, request_id: str) -> None:
        """Drop a request: nothing is started for it any more."""
        with self._lock:
            for jobs in self._waiting.values():
                jobs[:] = [job for job in jobs if job.request_id != request_id]

    def _warm_up(self) -> None:
        rule = self._line.take(timeout_s=WARM_UP_DELAY_S)
        if rule is None:
            if isinstance(problem := _guarded(lambda: self._workshop.compiler), BackendError):
                log.warning("no process for grammars could be started yet: %s", problem)
            else:
                self._processes.prepare(self._new_process)
        else:
            self._serve(rule, self._limit_s)
        self._work()

    def _work(self, *, only_small: bool = False) -> None:
        limit_s = QUICK_RULE_S if only_small else self._limit_s
        while True:
            rule = self._line.take(only_small=only_small)
            if rule is not None:
                self._serve(rule, limit_s)

    def _serve(self, rule: _Waiting, limit_s: float) -> None:
        """Make a grammar for all requests that wait for it; count the time for their caller."""
        with self._lock:
            if not (jobs := tuple(self._waiting[rule.key])):
                del self._waiting[rule.key]
                return
        began = self._clock()
        made = _guarded(lambda: self._known_or_written(rule.key, jobs[0].guide.rule, limit_s))
        if isinstance(made, Written):
            with self._compiling_for(jobs):
                self._outcome(jobs[0], made)
        self._line.charge(rule.caller, self._clock() - began)
        if isinstance(made, WritingTooLongError) and limit_s < self._limit_s:
            self._line.put(replace(rule, is_small=False))
            return
        with self._lock:
            for job in self._waiting.pop(rule.key):
                job.done(self._outcome(job, made))

    def _outcome(self, job: _Job, made: Written | BackendError) -> Outcome:
        if isinstance(made, BackendError):
            return made
        if made.objection:
            # It may quote a schema, which is the caller's data.
            problem = made.objection if job.guide.is_told else "no grammar can hold them"
            log.info("request id=%s: calls are not constrained: %s", job.request_id, problem)
        parts = _parts(made, job.guide)
        return _guarded(lambda: self._workshop.compile(parts) if parts else None)

    def _known_or_written(self, key: bytes, rule: ReplyRule | None, limit_s: float) -> Written:
        """Return the text of a grammar, which has passed its trial."""
        if rule is None:
            return _FREE
        written = self._written.find(key) or self._written.keep(key, self._write(rule, limit_s))
        for line in written.told:
            # Each process says it once.
            if not self._told.find(line):
                log.info("%s", self._told.keep(line, line))
        return written

    def _write(self, rule: ReplyRule, limit_s: float) -> Written:
        """Have a process write and try a grammar; tools that take too long refuse no request."""
        try:
            return self._written_by_any(rule, limit_s)
        except WritingTooLongError as error:
            if not rule.tools or rule.must_call or limit_s < self._limit_s:
                raise
            free = Written((), str(error))
        if not rule.text:
            return free
        answer = self._written_by_any(replace(rule, tools=()), limit_s)
        return Written(answer.rules, free.objection, answer.told)

    def _written_by_any(self, rule: ReplyRule, limit_s: float) -> Written:
        """Have a process write and try a grammar; if it is lost, another one, with care."""
        tries = count()

        def begin(process: WriterProcess) -> Question:
            # The first may have been lost over this grammar, or killed from outside.
            order = Write(rule, is_suspect=next(tries) > 0)
            return Question(process, msgspec.msgpack.encode(order), limit_s)

        try:
            data = self._processes.run(self._new_process, begin)
        except TooLateError:
            problem = f"takes longer than {limit_s:g} s to translate"
            raise WritingTooLongError(problem) from None
        except ProcessEndedError as error:
            raise lost_twice(error) from error
        answer: Answer = msgspec.msgpack.decode(data, type=Answer)
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _new_process(self) -> WriterProcess:
        vocabulary = self._workshop.compiler.vocabulary
        return self._start_process(
            Begin(vocabulary.alphabet, vocabulary.markers, vocabulary.eos_ids, vocabulary.size)
        )

    @contextmanager
    def _compiling_for(self, jobs: Sequence[_Job]) -> Iterator[None]:
        """Tell that a crash would be due to these requests."""
        names = {job.request_id for job in jobs}
        self._change_compiling(names, set())
        try:
            yield
        finally:
            self._change_compiling(set(), names)

    def _change_compiling(self, begun: set[str], ended: set[str]) -> None:
        with self._note_lock:
            self._compiling = self._compiling - ended | begun
            self._note(sorted(self._compiling))


def _guarded(make: Callable[[], Made]) -> Made | BackendError:
    """Return the result of `make`, or the error of one request; unexpected ones are logged."""
    try:
        return make()
    except BackendError as error:
        return error
    except Exception as error:
        problem = "its grammar could not be compiled"
        log.exception("%s", problem)
        return GenerationFailedError(f"{problem}: {error}")


def _parts(written: Written, guide: Guide) -> GrammarParts | None:
    """Return the parts of a grammar; `None` if nothing guides the reply."""
    if not written.rules and guide.budget is None:
        return None
    return GrammarParts(rules=written.rules, budget=guide.budget)
