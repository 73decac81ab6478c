"""Tries in a fork of this process whether a grammar compiles: the kernel ends a long trial.

For a process with one thread. A fork that crashes, or fills the memory, costs its grammar alone.
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
    """Compiles grammars in forks of this process, and keeps nothing of them."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cpu_s: float = MAX_COMPILE_S,
        memory_bytes: int = MAX_COMPILE_MEMORY_BYTES,
    ) -> None:
        """Set the limits of a trial.

        Args:
            vocabulary: The tokens that the grammars are for.
            cpu_s: Processor time, in seconds.
            memory_bytes: Memory on top of this process's; macOS does not limit it.
        """
        self.vocabulary = vocabulary
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes

    def check(self, grammar: LarkGrammar) -> None:
        """Require that a grammar compiles, and that some text begins it.

        Raises:
            GrammarError: It does not, or takes too much time or memory.
        """
        # The tokenizer is shared by all forks.
        tokenizer_of(self.vocabulary)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._try(grammar, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            told = answer.read().decode()
        problem = self._ending(os.waitpid(child, 0)[1]) or told
        if problem:
            raise GrammarError(problem)

    def _ending(self, status: int) -> str:
        """Return what a fork's end says of its grammar; nothing if it ended as it should."""
        code = os.waitstatus_to_exitcode(status)
        if -code in _TIMERS:
            return f"takes longer than {self._cpu_s} s to compile"
        return "is too large" if code else ""

    def _try(self, grammar: LarkGrammar, writer: int) -> NoReturn:
        """Compile in the fork, and tell what is wrong."""
        try:
            self._limit()
            os.write(writer, problem_of(grammar, self.vocabulary).encode())
            os._exit(0)
        finally:
            os._exit(1)

    def _limit(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * self._cpu_s)
        # Rust has last words when the stack is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + self._memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
