"""The tools of one model: each is held to as much of its schema as can be enforced.

What a format cannot express shows while it is written, what llguidance cannot compile only
afterwards. Either costs its own part of its own tool, and is found once per schema.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.formats.format import ToolFormat
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.last_used import LastUsed
from backend.sampling.grammar.schema.repair import token
from backend.sampling.grammar.tools.grammar import call_grammar, writable
from backend.sampling.grammar.tools.parameters import Parameters, PartError
from backend.sampling.grammar.tools.rule import CallRule

_MAX_KEPT = 1024
_MAX_TOLD = 8
_ONE_CALL = CallRule(least=1, most=1, has_text=False)
# The search for a part ends here; what was not found by then is left out with all around it.
_MAX_CHECKS = 200
_SEARCH_S = 2.0
_NOT_COMPILED = "cannot be compiled"

log = logging.getLogger(__name__)


class _Held:
    """The parameters of one tool, as they are enforced."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.is_compiled = False
        self.is_told = False


class HeldTools:
    """Writes the grammars of calls for one model; thread-safe."""

    def __init__(self, tool_format: ToolFormat, compiler: GrammarCompiler) -> None:
        """Start without any tool.

        Args:
            tool_format: The model's format of calls.
            compiler: The model's.
        """
        self._format = tool_format
        self._compiler = compiler
        self._known: LastUsed[bytes, _Held] = LastUsed(_MAX_KEPT)

    def grammar(self, tools: Sequence[Tool], rule: CallRule) -> LarkGrammar | None:
        """Return the grammar of calls to those of the tools that can be called.

        Returns:
            `None` for a format without a grammar.

        Raises:
            GrammarError: No tool can be called; the message names the first.
        """
        if self._format.grammar is None:
            return None
        held = [held.parameters for held in self._callable(tools)]
        if not held:
            self._held(tools[0])
        return call_grammar(self._format, held, rule, self._compiler.vocabulary)

    def weaken(self, tools: Sequence[Tool]) -> bool:
        """Leave out what cannot be compiled; return whether a grammar would be another now.

        If every tool can be compiled by itself, the larger half of them gets open arguments.
        """
        known = list(self._callable(tools))
        if sum(map(self._is_weakened, known)):
            return True
        closed = [held for held in known if not held.parameters.is_open]
        closed.sort(key=lambda held: len(json.dumps(held.parameters.schema)), reverse=True)
        for held in closed[: (len(closed) + 1) // 2]:
            held.parameters = held.parameters.without("#", "is too large beside other tools")
        return bool(closed)

    def _is_weakened(self, held: _Held) -> bool:
        """Leave out what cannot be compiled of one tool, and return whether there was anything."""
        if held.is_compiled:
            return False
        before = held.parameters
        held.parameters, held.is_compiled = _Search(self._is_sound, before).weakened(), True
        return held.parameters is not before

    def tell(self, tools: Sequence[Tool]) -> None:
        """Log once for each tool what is not enforced."""
        for held in self._callable(tools):
            if held.parameters.notes and not held.is_told:
                held.is_told = True
                told = held.parameters
                log.info("tool %r: not enforced: %s", told.tool, _list(told.notes))

    def _callable(self, tools: Sequence[Tool]) -> Iterator[_Held]:
        for tool in tools:
            with suppress(PartError):
                yield self._held(tool)

    def _held(self, tool: Tool) -> _Held:
        key = hashlib.sha256(json.dumps([tool.name, tool.parameters]).encode()).digest()
        if found := self._known.find(key):
            return found
        vocabulary = self._compiler.vocabulary
        parameters = writable(self._format, Parameters.of(tool), vocabulary)
        return self._known.keep(key, _Held(parameters))

    def _is_sound(self, parameters: Parameters) -> bool:
        """Return whether calls with these parameters compile."""
        vocabulary = self._compiler.vocabulary
        try:
            grammar = call_grammar(self._format, [parameters], _ONE_CALL, vocabulary)
            if grammar is not None:
                self._compiler.check(grammar)
        except GrammarError:
            return False
        return True


class _Search:
    """Finds the parts of a schema that cannot be compiled, from the outside inwards."""

    def __init__(self, is_sound: Callable[[Parameters], bool], parameters: Parameters) -> None:
        self._check = is_sound
        self._parameters = parameters
        self._left = _MAX_CHECKS
        self._end = time.monotonic() + _SEARCH_S

    def weakened(self) -> Parameters:
        """Return the parameters without what cannot be compiled."""
        if self._check(self._parameters):
            return self._parameters
        for name in self._parameters.schema.get("$defs", {}):
            self._mend(f"#/$defs/{name}")
        for pointer in self._inner("#"):
            self._mend(pointer)
        if not self._check(self._parameters):
            self._loosen("#", lambda: self._check(self._parameters))
        return self._parameters

    def _mend(self, pointer: str) -> None:
        """Leave out what cannot be compiled in a part of the schema."""
        if self._is_sound(pointer):
            return
        for inner in self._inner(pointer):
            self._mend(inner)
        if not self._is_sound(pointer):
            self._loosen(pointer, lambda: self._is_sound(pointer))

    def _loosen(self, pointer: str, is_sound: Callable[[], bool]) -> None:
        """Leave out one of the keywords of a schema, or else the schema."""
        whole, schema = self._parameters, self._parameters.at(pointer)
        keywords = [key for key in schema if key not in ("type", "$defs", "additionalProperties")]
        for keyword in keywords if isinstance(schema, Mapping) else ():
            self._parameters = whole.without(f"{pointer}/{keyword}", _NOT_COMPILED)
            if is_sound():
                return
        self._parameters = whole.without(pointer, _NOT_COMPILED)

    def _is_sound(self, pointer: str) -> bool:
        """Return whether a part of the schema compiles as the only argument."""
        self._left -= 1
        if self._left < 0 or time.monotonic() > self._end:
            return self._parameters.at(pointer) is True
        definitions = self._parameters.schema.get("$defs", {})
        value = {"$ref": pointer} if pointer.count("/") == 2 and "$defs" in pointer else None
        alone = {
            "type": "object",
            "properties": {"value": value or self._parameters.at(pointer)},
            "required": ["value"],
            "additionalProperties": False,
            "$defs": definitions,
        }
        return self._check(Parameters(self._parameters.tool, alone, {}))

    def _inner(self, pointer: str) -> Iterator[str]:
        """Yield the pointers of the schemas in a schema."""
        schema = self._parameters.at(pointer)
        if not isinstance(schema, Mapping):
            return
        for keyword in ("properties", "patternProperties"):
            for name in schema.get(keyword, {}):
                yield f"{pointer}/{keyword}/{token(name)}"
        for keyword in ("anyOf", "prefixItems"):
            for index in range(len(schema.get(keyword, ()))):
                yield f"{pointer}/{keyword}/{index}"
        for keyword in ("items", "additionalProperties"):
            if isinstance(schema.get(keyword), Mapping):
                yield f"{pointer}/{keyword}"


def _list(notes: Mapping[str, str]) -> str:
    told = [f"{place!r} ({reason})" for place, reason in notes.items()]
    more = [f"and {len(told) - _MAX_TOLD} more"] if len(told) > _MAX_TOLD else []
    return ", ".join(told[:_MAX_TOLD] + more)
