"""The tools of one model: each is held to as much of its schema as can be enforced.

What a format cannot express shows while it is written, what llguidance cannot compile only
afterwards. Either costs its own part of its own tool, and is found once per schema.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.formats.dialects import Literals, Tags
from backend.formats.format import ToolFormat
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.schema.repair import token
from backend.sampling.grammar.tools.grammar import call_grammar, writable
from backend.sampling.grammar.tools.parameters import Parameters, PartError, PerSchema
from backend.sampling.grammar.tools.rule import CallRule
from backend.sampling.grammar.trial import Checker

_MAX_TOLD = 8
_ONE_CALL = CallRule(least=1, most=1, has_text=False)
# The search for a part ends here; what was not found by then is left out with all around it.
_MAX_CHECKS = 200
# For one tool, and for all tools of a request.
_SEARCH_S, _ALL_SEARCHES_S = 2.0, 8.0
_NOT_COMPILED = "cannot be compiled"
_KEPT = frozenset({"type", "$defs", "additionalProperties"})

log = logging.getLogger(__name__)


class HeldTool:
    """The parameters of one tool, as they are enforced."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._is_compiled = False
        self._is_told = False

    def weaken(self, is_sound: Callable[[Parameters], bool], until_s: float = math.inf) -> bool:
        """Leave out what cannot be compiled, and return whether there was anything.

        Args:
            is_sound: Tells whether parameters can be compiled.
            until_s: End of the search, by the monotonic clock.
        """
        if self._is_compiled:
            return False
        before = self.parameters
        until_s = min(until_s, time.monotonic() + _SEARCH_S)
        self.parameters, self._is_compiled = _Search(is_sound, before, until_s).weakened(), True
        return self.parameters is not before

    @property
    def size(self) -> int:
        """Length of its schema; 0 if any arguments are allowed."""
        return 0 if self.parameters.is_open else len(json.dumps(self.parameters.schema))

    def opened(self) -> "HeldTool":
        """Return the same tool with any arguments, for one request."""
        twin = HeldTool(self.parameters.without("#", "is too large beside other tools"))
        twin._is_compiled, twin._is_told = True, self._is_told
        self._is_told = True
        return twin

    def tell(self) -> None:
        """Log once what is not enforced."""
        if self.parameters.notes and not self._is_told:
            self._is_told = True
            told = self.parameters
            log.info("tool %r: not enforced: %s", told.tool, _list(told.notes))


class HeldTools:
    """Knows what of each tool's schema one model can be held to; thread-safe."""

    def __init__(
        self, tool_format: ToolFormat, checker: Checker, parameters: PerSchema[Parameters]
    ) -> None:
        """Start without any tool.

        Args:
            tool_format: The model's format of calls.
            checker: Tells what compiles.
            parameters: The parameters of tools, as they are read.
        """
        self._format = tool_format
        self._checker = checker
        self._parameters = parameters
        self._known = PerSchema(self._read)

    def offered(self, tools: Sequence[Tool]) -> "OfferedTools":
        """Return the tools of a request."""
        return OfferedTools(self._format, self._checker, tools, self._known.of)

    def _read(self, tool: Tool) -> HeldTool:
        parameters = self._parameters.of(tool)
        held = HeldTool(writable(self._format, parameters, self._checker.vocabulary))
        # A terminal that matches nothing compiles, and would be noticed in the middle of a call.
        if self._has_raw_text and held.parameters.combines_texts:
            held.weaken(SoundCalls(self._format, self._checker).is_sound)
        return held

    @property
    def _has_raw_text(self) -> bool:
        frames = self._format.grammar.frames if self._format.grammar else ()
        return any(isinstance(frame.dialect, Tags | Literals) for frame in frames)


class SoundCalls:
    """Checks calls of one tool in one model's format."""

    def __init__(self, tool_format: ToolFormat, checker: Checker) -> None:
        self._format = tool_format
        self._checker = checker

    def is_sound(self, parameters: Parameters) -> bool:
        """Return whether calls with these parameters compile, and can be completed."""
        vocabulary = self._checker.vocabulary
        grammar = call_grammar(self._format, [parameters], _ONE_CALL, vocabulary)
        if grammar is None:
            return True
        texts = [line for line in grammar.definitions if line[0].isupper() and " & " in line]
        try:
            self._checker.check(grammar)
            for line in texts:
                self._checker.check(LarkGrammar(line.partition(":")[0], (line,)))
        except GrammarError:
            return False
        return True


class OfferedTools:
    """The tools of one request, those without those that no arguments fit."""

    def __init__(
        self,
        tool_format: ToolFormat,
        checker: Checker,
        tools: Sequence[Tool],
        known: Callable[[Tool], HeldTool],
    ) -> None:
        self._format = tool_format
        self._checker = checker
        self._until_s = time.monotonic() + _ALL_SEARCHES_S
        self.held: list[HeldTool] = []
        self._refusals: list[PartError] = []
        for tool in tools:
            try:
                self.held.append(known(tool))
            except PartError as error:
                self._refusals.append(error)

    def grammar(self, rule: CallRule) -> LarkGrammar | None:
        """Return the grammar of calls; `None` for a format without a grammar.

        Raises:
            PartError: No tool can be called; the message names the first.
        """
        if not self.held and self._format.grammar:
            raise self._refusals[0]
        parameters = [held.parameters for held in self.held]
        return call_grammar(self._format, parameters, rule, self._checker.vocabulary)

    def weaken(self) -> bool:
        """Leave out what cannot be compiled; return whether a grammar would be another now.

        If every tool can be compiled by itself, the larger half of them gets open arguments.
        """
        is_sound = SoundCalls(self._format, self._checker).is_sound
        if sum(held.weaken(is_sound, self._until_s) for held in self.held):
            return True
        sizes = sorted(held.size for held in self.held if held.size)
        if sizes:
            middle = sizes[len(sizes) // 2]
            self.held = [held.opened() if held.size >= middle else held for held in self.held]
        return bool(sizes)

    def tell(self) -> None:
        """Log once for each tool what is not enforced."""
        for held in self.held:
            held.tell()


class _Search:
    """Finds the parts of a schema that cannot be compiled, from the outside inwards."""

    def __init__(
        self, is_sound: Callable[[Parameters], bool], parameters: Parameters, until_s: float
    ) -> None:
        self._check = is_sound
        self._parameters = parameters
        self._left = _MAX_CHECKS
        self._until_s = until_s

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
        keywords = set() if self._is_over else schema.keys() - _KEPT
        for keyword in sorted(keywords):
            self._parameters = whole.without(f"{pointer}/{keyword}", _NOT_COMPILED)
            if is_sound():
                return
        self._parameters = whole.without(pointer, _NOT_COMPILED)

    def _is_sound(self, pointer: str) -> bool:
        """Return whether a part of the schema compiles as the only argument."""
        part = self._parameters.at(pointer)
        if isinstance(part, bool):
            return True
        self._left -= 1
        if self._is_over:
            return False
        alone = {
            "type": "object",
            "properties": {"value": part},
            "required": ["value"],
            "additionalProperties": False,
            "$defs": self._parameters.schema.get("$defs", {}),
        }
        return self._check(Parameters(self._parameters.tool, alone))

    @property
    def _is_over(self) -> bool:
        return self._left < 0 or time.monotonic() > self._until_s

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
