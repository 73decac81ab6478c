"""The wish to think, in the variables and words of templates."""

import jinja2
import pytest

from backend.model.text.renderer import Efforts, RenderError, with_all_names

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
NONE = {**OFF, "reasoning_effort": "none"}
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def template(source):
    """A template of a few variables."""
    compiled = jinja2.Environment(autoescape=False).from_string(source)  # noqa: S701 (no HTML)

    def refuse(problem):
        raise RenderError(problem)

    def render(_turns, _tools, options):
        return compiled.render(raise_exception=refuse, **with_all_names(options))

    return render


def fitted(source, options):
    return Efforts(template(source)).fitted(options)


# Like Hunyuan 3: it refuses all other words.
PICKY = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['high', 'low', 'no_think'] %}"
    "{{ raise_exception('unknown') }}{% endif %}{{ reasoning_effort | default('no_think') }}"
)
# Like gpt-oss.
COPYING = "Reasoning: {{ reasoning_effort | default('medium') }}"
# Like Mistral Small 4: it refuses all other words, and its default is none.
STRICT = (
    "{% set reasoning_effort = reasoning_effort | default('none') %}"
    "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('unknown') }}{% endif %}"
    "{{ reasoning_effort }}"
)
# Like the preview of Hunyuan 3: all other words are its default.
IGNORANT = "<think>{{ '</think>' if reasoning_effort not in ['low', 'high'] }}"
# Like Solar.
SKIPPING = "{{ 'done' if reasoning_effort in ['low', 'minimal'] else 'think' }}"
# Like Command A.
KNOWING = "{{ 'done' if reasoning_effort == 'none' else 'think' }}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (PICKY, ["no_think", "low", "low", "high", "high", "high", "high"]),
        (COPYING, ["low", "low", "low", "medium", "high", "high", "high"]),
        (STRICT, ["none", "none", "high", "high", "high", "high", "high"]),
        (IGNORANT, ["none", "minimal", "low", "high", "high", "high", "high"]),
        (SKIPPING, ["minimal", "minimal", *EFFORTS[2:]]),
        (KNOWING, EFFORTS),
        ("no variable", EFFORTS),
    ],
    ids=["refuses", "copies", "refuses some", "thinks by some", "skips", "knows", "ignores"],
)
def test_an_effort_is_the_nearest_word_that_the_template_takes(source, words):
    found = [fitted(source, {"reasoning_effort": effort}) for effort in EFFORTS]
    assert [options["reasoning_effort"] for options in found] == words
    assert fitted(source, {"reasoning_effort": " High "}) == fitted(
        source, {"reasoning_effort": "high"}
    )


@pytest.mark.parametrize(
    ("source", "word"), [(PICKY, "no_think"), (SKIPPING, "minimal"), (KNOWING, "none")]
)
def test_no_thinking_is_no_effort_where_the_template_knows_a_word_for_it(source, word):
    assert fitted(source, OFF) == {**OFF, "reasoning_effort": word}
    assert fitted(source, {**OFF, "reasoning_effort": "high"})["reasoning_effort"] == word


@pytest.mark.parametrize("source", [COPYING, IGNORANT, "no variable", "{{ enable_thinking }}"])
def test_otherwise_the_switch_alone_is_passed(source):
    assert fitted(source, OFF) == OFF


@pytest.mark.parametrize("source", [COPYING, SKIPPING, KNOWING, "{{ enable_thinking }}"])
def test_thinking_leaves_the_effort_to_the_template(source):
    assert fitted(source, ON) == ON


@pytest.mark.parametrize("source", [PICKY, STRICT, IGNORANT])
def test_thinking_is_some_effort_where_none_is_the_default(source):
    assert fitted(source, ON) == {**ON, "reasoning_effort": "high"}
    assert fitted(source, {**ON, "reasoning_effort": "low"})["reasoning_effort"] != "none"


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        # Like MiniMax M3.
        ("{{ thinking_mode in ['enabled', 'disabled'] and thinking_mode }}", {}, {}),
        # Like Baichuan M2.
        ("{{ thinking_mode if thinking_mode in ['on', 'off'] }}", "on", "off"),
        # Like a template of DeepSeek V4.
        ("{{ 'think' if thinking_mode == 'thinking' }}", "thinking", {}),
        ("{{ thinking_mode }}", {}, {}),
    ],
)
def test_the_mode_is_the_word_that_the_template_knows(source, on, off):
    for switch, word in ((ON, on), (OFF, off)):
        assert fitted(source, switch) == {**switch, **({"thinking_mode": word} if word else {})}
        own = {**switch, "thinking_mode": "own"}
        assert fitted(source, own) == own


def test_a_word_of_the_templates_own_is_passed_as_it_is():
    for source in (PICKY, COPYING, KNOWING):
        assert fitted(source, {"reasoning_effort": "Odd"}) == {"reasoning_effort": "Odd"}


def test_an_effort_has_the_names_that_the_template_reads():
    source = "{{ thinking_effort }} {{ reasoning_strength | default('high') }}"
    found = fitted(source, {"reasoning_effort": "low", "thinking_effort": "own"})
    assert found == {
        "reasoning_effort": "low",
        "thinking_effort": "own",
        "reasoning_strength": "low",
    }


@pytest.mark.parametrize("options", [{}, {"reasoning_effort": None}, {"reasoning_effort": 5}])
def test_without_a_word_nothing_changes(options):
    assert fitted(COPYING, options) == options


def test_a_template_is_asked_once_for_each_effort():
    count = 0

    def counting(_turns, _tools, options):
        nonlocal count
        count += 1
        return str(options)

    efforts = Efforts(counting)
    efforts.fitted(NONE)
    asked = count
    efforts.fitted(NONE)
    assert count == asked


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ON, "True True enabled on  True  "),
        (OFF, "False False disabled off 0  True True"),
        ({}, "       "),
        ({**OFF, "thinking_mode": "adaptive"}, "False False adaptive off 0  True True"),
        ({"enable_thinking": "auto"}, "auto       "),
    ],
)
def test_the_switch_has_all_its_names(options, text):
    names = (
        *("thinking", "reasoning", "thinking_mode", "thinking_option", "thinking_budget"),
        *("force_reasoning", "skip_reasoning", "no_thinking"),
    )
    source = " ".join("{{ " + name + " }}" for name in names)
    assert template(source)(None, None, options) == text
