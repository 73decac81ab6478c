"""The wish to think, or not, in the variables and words that a chat template knows.

Templates have many names for one switch, and few words for an effort; some refuse all others.
Which words a template knows is found by rendering it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from backend.core.prompt import JsonValue, Message
from backend.model.text.renderer import Options, Renderer, RenderError, render
from backend.model.text.turns import CallStyle, to_turns

SWITCH = "enable_thinking"
# Other names of the switch, with their values for on and off: templates ignore names that they do
# not read. A budget is a switch too: 0 is off.
_NAMES: Mapping[bool, Mapping[str, JsonValue]] = {
    True: {"thinking": True, "reasoning": True}
    | {"thinking_mode": "enabled", "thinking_option": "on"},
    False: {"thinking": False, "reasoning": False}
    | {"thinking_mode": "disabled", "thinking_option": "off", "thinking_budget": 0},
}
EFFORT = "reasoning_effort"
_EFFORT_NAMES = (EFFORT, "thinking_effort", "reasoning_strength")
_NONE = "none"
# For each effort of the OpenAI API, the words to try, the nearest first.
_WORDS = {
    _NONE: (_NONE, "no_think", "minimal", "low"),
    "minimal": ("minimal", "low"),
    "low": ("low", "medium"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "max", "medium"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
_ALL_WORDS = frozenset(word for words in _WORDS.values() for word in words)
# Of the words that a template copies into the prompt, models know these.
_COMMON = frozenset({"low", "medium", "high"})
_PROBE = "probed"
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
        has one.

        Raises:
            RenderTimeoutError: The template takes too long.
        """
        wish = _NONE if options.get(SWITCH) is False else options.get(EFFORT)
        if not isinstance(wish, str):
            return options
        is_known = wish.strip().lower() in _WORDS
        wish = wish.strip().lower() if is_known else wish
        own = options.keys() - {EFFORT}
        words = {name: self._word(name, wish, options) for name in _EFFORT_NAMES if name not in own}
        given = {EFFORT: wish} if EFFORT in options else {}
        return {**options, **given, **{name: word for name, word in words.items() if word}}

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

        For no effort it is one that the template knows, if there is one, and otherwise none if the
        wish is only implied.
        """
        words = _WORDS.get(wish, (wish,))
        if all(self._text(word) == self._text(None) for word in (*words, _PROBE)):
            return None
        known = (word for word in words if wish == _NONE and self._knows(word))
        taken = (word for word in words if not is_implied and self._takes(word))
        return next(known, next(taken, None))

    def _knows(self, word: str) -> bool:
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
