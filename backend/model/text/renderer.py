"""Runs a chat template: first on the original input, then on repaired input if it is refused."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from backend.core.prompt import JsonValue, Message
from backend.formats.registry import REASONING_FORMATS
from backend.model.text.conversation import (
    ALL_REPAIRS,
    CallStyle,
    Repair,
    Turn,
    all_forms_of,
    forms_of,
    lead_with_user,
    mark_later,
    open_with_system,
    to_turns,
)

# Templates may drop texts of an assistant: its thoughts, or a preamble of calls.
_KEPT_ROLES = frozenset({"system", "user", "tool"})
# A text normally begins this soon after the one before it; so many are searched for elsewhere.
_NEAR_CHARS = 4096
_MAX_FAR_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a conversation, without its outer white space.

    Attributes:
        place: The index of its turn.
        text: The text, not empty.
        may_be_dropped: Whether a prompt may lack it.
    """

    place: int
    text: str
    may_be_dropped: bool = False


def said(turns: Sequence[Turn]) -> list[Text]:
    """Return the texts of a conversation."""
    return [
        Text(place, text.strip(), turn["role"] not in _KEPT_ROLES)
        for place, turn in enumerate(turns)
        for text in _texts(turn["content"])
        if text.strip()
    ]


def missing(texts: Sequence[Text], prompt: str) -> list[Text]:
    """Return the texts that a prompt has to show and that are not in it, plain or as JSON.

    Its time is proportional to the prompt: only a limited number of texts is searched for in all of
    it, and the rest is taken to be there.
    """
    lost: list[Text] = []
    start, far = 0, 0
    for text in texts:
        end = _end_of(text.text, prompt, start, start + _NEAR_CHARS)
        if not end and far < _MAX_FAR_TEXTS:
            far += 1
            end = _end_of(text.text, prompt, start, len(prompt))
            if not (end or text.may_be_dropped or _end_of(text.text, prompt, 0, len(prompt))):
                lost.append(text)
        start = end or start
    return lost


def _end_of(text: str, prompt: str, start: int, stop: int) -> int:
    """Return the end of a text that begins between two places of a prompt, or 0."""
    for form in _forms(text):
        if (found := prompt.find(form, start, stop + len(form))) >= 0:
            return found + len(form)
    return 0


def with_stand_ins(form: Sequence[Turn], texts: Sequence[Text]) -> list[Turn]:
    """Return a conversation with a word in place of each text, which no template changes."""
    words = {text.text: stand_in(text) for text in texts}
    return [{**turn, "content": _replaced(turn["content"], words)} for turn in form]


def stand_in(text: Text) -> str:
    """Return the word for a text."""
    return f"standin{text.place}x"


def _replaced(content: JsonValue, words: Mapping[str, str]) -> JsonValue:
    if isinstance(content, str):
        for text, word in words.items():
            content = content.replace(text, word)
        return content
    if isinstance(content, Sequence):
        return [_replaced_part(part, words) for part in content]
    return content


def _replaced_part(part: JsonValue, words: Mapping[str, str]) -> JsonValue:
    if isinstance(part, Mapping) and "text" in part:
        return {**part, "text": _replaced(part["text"], words)}
    return part


def _texts(content: JsonValue) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
                yield text


def _forms(text: str) -> Iterator[str]:
    """Yield a text as it is, then as JSON writes it."""
    yield text
    for is_ascii in (False, True):
        if (quoted := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield quoted


Schema: TypeAlias = Mapping[str, JsonValue]
Options: TypeAlias = Mapping[str, JsonValue]
Renderer: TypeAlias = Callable[[Sequence[Turn], Sequence[Schema] | None, Options], str]
_LOST = "the chat template does not show the text of Messages[{}]"
_FOR_TOOLS: Sequence[Repair] = (open_with_system, mark_later, lead_with_user)


class RenderError(Exception):
    """A chat template refused a conversation, or failed on it; carries the template's message."""


class RenderTimeoutError(Exception):
    """A chat template took too long; another attempt would too."""


def render(
    renderer: Renderer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema] | None,
    options: Options,
    *,
    repairs: Sequence[Repair] = ALL_REPAIRS,
    texts: Sequence[Text] = (),
) -> str:
    """Render a conversation, repairing it only if the template refuses it or loses a text.

    Some templates iterate over the tools without checking for `None`: they get an empty list
    instead.

    Args:
        texts: Texts that the prompt has to show, with the indices of their messages.

    Raises:
        RenderError: The template refuses every form of it, or loses a text in each; the message is
            from the first failure.
    """
    failures: list[RenderError] = []
    for form in all_forms_of(turns, repairs):
        for tools in (None, ()) if schemas is None else (schemas,):
            try:
                return _whole(renderer, form, tools, options, texts)
            except RenderError as error:
                failures.append(error)
    raise failures[0]


def _whole(
    renderer: Renderer,
    form: Sequence[Turn],
    tools: Sequence[Schema] | None,
    options: Options,
    texts: Sequence[Text],
) -> str:
    written = renderer(form, tools, options)
    if absent := missing(texts, written):
        # A template may change a text that it shows: a word in its place tells.
        try:
            shown = renderer(with_stand_ins(form, absent), tools, options)
        except RenderError:
            return written
        if lost := [text for text in absent if stand_in(text) not in shown]:
            raise RenderError(_LOST.format(lost[0].place))
    return written


def render_with_tools(
    renderer: Renderer,
    turns: Sequence[Turn],
    schemas: Sequence[Schema],
    options: Options,
    *,
    texts: Sequence[Text] = (),
) -> str | None:
    """Render with the tools in the text, or return `None` if they would be lost.

    Some templates write tools only into a system message; they get an empty one. Others write them
    only before a last question or result, or where there is no system message: text of system
    messages becomes part of other turns.

    Raises:
        RenderError: The template refuses the conversation.
    """
    for form in forms_of(turns, _FOR_TOOLS):
        text = render(renderer, form, schemas, options, texts=texts)
        if text != render(renderer, form, None, options):
            return text
    return None


SWITCH = "enable_thinking"
# Other names of the switch, with their values for on and off: templates ignore names that they do
# not read. A budget is a switch too: 0 is off.
_NAMES: Mapping[bool, Mapping[str, JsonValue]] = {
    True: {"thinking": True, "reasoning": True, "force_reasoning": True}
    | {"thinking_mode": "enabled", "thinking_option": "on"},
    False: {"thinking": False, "reasoning": False, "skip_reasoning": True, "no_thinking": True}
    | {"thinking_mode": "disabled", "thinking_option": "off", "thinking_budget": 0},
}
# Where templates differ in the words of a name: those to try, the default first.
_MODE = "thinking_mode"
_MODES = {True: ("enabled", "thinking", "on"), False: ("disabled", "chat", "off")}
EFFORT = "reasoning_effort"
_EFFORT_NAMES = (EFFORT, "thinking_effort", "reasoning_strength")
_NONE = "none"
_NONES = (_NONE, "no_think")
# With these it is the template's choice whether there are thoughts.
_LITTLE = frozenset({"minimal", "low"})
# For each effort of the OpenAI API, the words to try, the nearest first.
_WORDS = {
    _NONE: (*_NONES, "minimal", "low"),
    "minimal": ("minimal", "low", _NONE, "medium"),
    "low": ("low", "medium", "high"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "max", "medium"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
_ALL_WORDS = frozenset(word for words in _WORDS.values() for word in words)
# Of the words that a template copies into the prompt, models know these.
_COMMON = frozenset({"low", "medium", "high"})
_PROBE = "probed"
# The effort of thoughts that are switched on, in templates that know no other switch.
_SOME = "medium"
_THOUGHT_STARTS = tuple(
    start
    for start in (each.rstrip() for known in REASONING_FORMATS for each in known.starts)
    if start
)
_QUESTION = to_turns([Message(role="user", content="?")], CallStyle())


def with_all_names(options: Options) -> Mapping[str, JsonValue]:
    """Return options with the switch under all of its names; a caller's own value wins."""
    switch = options.get(SWITCH)
    if isinstance(switch, bool):
        return {**_NAMES[switch], **options}
    return {"thinking": switch, **options} if SWITCH in options else options


class _Key(NamedTuple):
    """A question to a template: which word is a wish, in a variable and beside a switch?"""

    name: str
    wish: str
    switch: bool | None
    is_implied: bool


class Efforts:
    """Finds the words of a template for an effort, and remembers them."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._found: dict[_Key, str | None] = {}

    def fitted(self, options: Options) -> Options:
        """Return options with the effort in words that the template takes.

        Without thoughts, and without a wish, it is the word of the template for no effort, if it
        has one. With thoughts it is one for some effort, if none is the template's default.

        Raises:
            RenderTimeoutError: The template takes too long.
        """
        options = {**options, **self._mode(options)}
        wish = _NONE if options.get(SWITCH) is False else options.get(EFFORT)
        if options.get(SWITCH) is True and EFFORT not in options:
            wish = _SOME
        if not isinstance(wish, str):
            return options
        is_known = wish.strip().lower() in _WORDS
        wish = wish.strip().lower() if is_known else wish
        own = options.keys() - {EFFORT}
        words = {name: self._word(name, wish, options) for name in _EFFORT_NAMES if name not in own}
        given = {EFFORT: wish} if EFFORT in options else {}
        return {**options, **given, **{name: word for name, word in words.items() if word}}

    def _mode(self, options: Options) -> Options:
        """Return the switch's other name with the template's word, unless that is the default."""
        switch = options.get(SWITCH)
        if not isinstance(switch, bool) or _MODE in options:
            return {}
        key = _Key(_MODE, "", switch, is_implied=True)
        if key not in self._found:
            mode = _EffortVariable(self._renderer, _MODE, switch)
            self._found[key] = next(filter(mode.knows, _MODES[switch]), None)
        word = self._found[key]
        return {_MODE: word} if word and word != _MODES[switch][0] else {}

    def _word(self, name: str, wish: str, options: Options) -> str | None:
        switch = options.get(SWITCH)
        key = _Key(name, wish, switch if isinstance(switch, bool) else None, EFFORT not in options)
        if key in self._found:
            return self._found[key]
        variable = _EffortVariable(self._renderer, name, key.switch)
        word = variable.word(wish, is_implied=key.is_implied)
        if wish in _WORDS:
            self._found[key] = word
        return word


class _EffortVariable:
    """A variable for the effort, in a template that may read it."""

    def __init__(self, renderer: Renderer, name: str, switch: bool | None) -> None:  # noqa: FBT001
        self._renderer = renderer
        self._name = name
        self._switch: Options = {} if switch is None else {SWITCH: switch}
        self._texts: dict[str | None, str | None] = {}

    def word(self, wish: str, *, is_implied: bool) -> str | None:
        """Return the nearest word that the template takes, if it reads the variable.

        For no effort it is one that the template knows, if there is one. If the wish is only
        implied, there is no other, and for some effort none unless the default is no effort.
        """
        words = _WORDS.get(wish, (wish,))
        if all(self._text(word) == self._text(None) for word in (*words, _PROBE)):
            return None
        if wish == _NONE:
            known = [word for word in self._apt(words, thinks=False) if self.knows(word)]
            if known or is_implied:
                return next(iter(known), None)
        thinks = None if wish in _LITTLE else wish != _NONE
        found = next(iter(self._apt(words, thinks=thinks)), None)
        return found if found is None or not is_implied or self._is_off(found) else None

    def _apt(self, words: Sequence[str], *, thinks: bool | None) -> list[str]:
        """Return the words that the template takes; those that begin a thought, or not, if any."""
        taken = [word for word in words if self._takes(word)]
        return [word for word in taken if self._thinks(word) is thinks] or taken

    def _is_off(self, word: str) -> bool:
        """Return whether the default is no effort, and this word another."""
        default = self._text(None)
        is_none = any(self.knows(none) and self._text(none) == default for none in _NONES)
        return default != self._text(word) and (
            is_none or (self._thinks(word) and not self._thinks(None))
        )

    def _thinks(self, word: str | None) -> bool:
        """Return whether the prompt ends with the start of a thought."""
        return (self._text(word) or "").rstrip().endswith(_THOUGHT_STARTS)

    def knows(self, word: str) -> bool:
        """Return whether a word changes the prompt as no other would, and is not just copied."""
        text = self._text(word)
        return text not in (None, self._text(_PROBE)) and not self._copies(word)

    def _takes(self, word: str) -> bool:
        """Return whether a word is not refused, nor copied although models do not know it."""
        is_common = word in _COMMON or word not in _ALL_WORDS
        return self._text(word) is not None and (is_common or not self._copies(word))

    def _copies(self, word: str) -> bool:
        """Return whether the template only copies the word into the prompt."""
        text, other = self._text(word), self._text(_PROBE)
        if text is None or other is None or text == other:
            return False
        return text.replace(word, _PROBE) == other.replace(word, _PROBE)

    def _text(self, word: str | None) -> str | None:
        """Return the text of a question with the variable set, or `None` if it is refused."""
        if word not in self._texts:
            value = {} if word is None else {self._name: word}
            try:
                text = render(self._renderer, _QUESTION, None, {**self._switch, **value})
            except RenderError:
                text = None
            self._texts[word] = text
        return self._texts[word]
