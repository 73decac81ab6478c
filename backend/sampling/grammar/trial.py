"""Tries whether a grammar compiles: the kernel ends a process in which that takes too long.

For a process with one thread, which may have trials made in forks of it. A fork that crashes, or
fills the memory, costs its grammar alone.
"""

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import NoReturn, Protocol

from backend.config import MAX_COMPILE_MEMORY_BYTES, MAX_COMPILE_S
from backend.errors import GrammarError
from backend.sampling.grammar.compiler import problem_of
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.token_trie import tokenizer_of
from backend.sampling.grammar.vocabulary import Vocabulary

# The limit is in processor time, and this many times as much may pass on a busy machine.
_PATIENCE = 10
_TIMERS = frozenset({signal.SIGPROF, signal.SIGALRM})


class Checker(Protocol):
    """Tells whether grammars compile."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that they are for."""

    def check(self, grammar: LarkGrammar) -> None:
        """Require that a grammar compiles.

        Raises:
            GrammarError: It does not; the message says why.
        """


class Trial:
    """Compiles grammars to see whether they do, and keeps nothing of them.

    A compilation that exceeds the limits ends this process, unless trials are made in forks, which
    cost some milliseconds.

    Attributes:
        forks: Whether they are.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        forks: bool = False,
        cpu_s: float = MAX_COMPILE_S,
        memory_bytes: int = MAX_COMPILE_MEMORY_BYTES,
    ) -> None:
        """Set the limits of a trial; that of memory holds for this process from now on.

        Args:
            vocabulary: The tokens that the grammars are for.
            forks: Whether trials are made in forks.
            cpu_s: Processor time, in seconds.
            memory_bytes: Memory on top of this process's; macOS does not limit it.
        """
        self.vocabulary = vocabulary
        self.forks = forks
        self._cpu_s = cpu_s
        tokenizer_of(vocabulary)
        _limit_memory(memory_bytes)

    def check(self, grammar: LarkGrammar) -> None:
        """Require that a grammar compiles, and that some text begins it.

        Raises:
            GrammarError: It does not, or in a fork takes too much time or memory.
        """
        if problem := self._forked(grammar) if self.forks else self._timed(grammar):
            raise GrammarError(problem)

    def _timed(self, grammar: LarkGrammar) -> str:
        """Return what is wrong with a grammar; the kernel ends the process if it takes too long."""
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * self._cpu_s)
        try:
            return problem_of(grammar, self.vocabulary)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _forked(self, grammar: LarkGrammar) -> str:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._try(grammar, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            told = answer.read().decode()
        return self._ending(os.waitpid(child, 0)[1]) or told

    def _ending(self, status: int) -> str:
        """Return what a fork's end says of its grammar; nothing if it ended as it should."""
        code = os.waitstatus_to_exitcode(status)
        if -code in _TIMERS:
            return f"takes longer than {self._cpu_s} s to compile"
        return "is too large" if code else ""

    def _try(self, grammar: LarkGrammar, writer: int) -> NoReturn:
        """Compile in the fork, and tell what is wrong."""
        try:
            # Rust has last words when the stack is full.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, self._timed(grammar).encode())
            os._exit(0)
        finally:
            os._exit(1)


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space to its present size and some more; write no dump of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
