"""Chat templates come with checkpoints: one that attacks or loops is refused or ended, no more."""

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from backend.core.prompt import Message
from backend.errors import InvalidRequestError
from backend.model.hf_renderer import make_renderer
from backend.model.template import ChatTemplate
from backend.model.time_limit import TimeLimit

QUESTION = Message(role="user", content="{{ 7 * 7 }}{% include 'x' %}")
NESTED_LOOPS = "{% for n in range(90000) %}" * 4 + "{% endfor %}" * 4
ENDLESS_MACRO = (
    "{% macro walk(depth) %}{% if depth %}{{ walk(depth - 1) }}{{ walk(depth - 1) }}{% endif %}"
    "{% endmacro %}{{ walk(100) }}"
)


def template_of(source: str, seconds: float = 60.0) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer(models.BPE()), chat_template=source
    )
    return ChatTemplate(make_renderer(tokenizer, {}, TimeLimit(seconds)))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__init__.__globals__['__builtins__']['open']('/etc/hostname').read() }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ open('/etc/hostname').read() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ walk(1) }}",
        "{% macro walk() %}{{ walk() }}{% endmacro %}{{ walk() }}",
    ],
)
def test_a_template_gets_out_of_its_sandbox_by_no_way(source):
    with pytest.raises(InvalidRequestError, match=r"^Messages: "):
        template_of(source).render([QUESTION], [], {})


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception.__globals__ }}", "{{ messages | attr('__class__') | attr('__mro__') }}"],
)
def test_what_python_hides_is_undefined(source):
    assert template_of(source).render([QUESTION], [], {}) == ""


@pytest.mark.parametrize("source", [NESTED_LOOPS, ENDLESS_MACRO])
def test_a_template_that_does_not_end_is_ended(source):
    template = template_of(source, seconds=0.2)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.2 s"):
            template.render([QUESTION], [], {})


def test_what_a_message_says_is_no_template():
    text = template_of("{{ messages[0].content }}").render([QUESTION], [], {})
    assert text == QUESTION.content


@pytest.mark.parametrize("name", ["messages", "chat_template", "tools", "tokenize"])
def test_the_options_of_a_request_replace_no_part_of_it(name):
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
        template_of("{{ messages }}").render([QUESTION], [], {name: "{{ 1 }}"})
