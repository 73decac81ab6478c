from typing import Any

import pytest
from jinja_here import jinja_here
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from backend.core.prompt import Message, Tool, ToolCall
from backend.errors import InvalidRequestError
from backend.model.text.hf_renderer import make_renderer, template_text
from backend.model.text.template import ChatTemplate

QUESTION = Message(role="user", content="Is it raining?")
WEATHER = Tool(
    name="weather",
    schema={
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    },
)


class OwnRenderer(PreTrainedTokenizerFast):
    """A tokenizer with a Python template, whose switch has the other name."""

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, thinking: Any = None, **_: Any
    ) -> str:
        names = [tool["function"]["name"] for tool in tools or []]
        return f"{conversation[-1]['content']} {names} {thinking}"


def tokenizer(
    kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **settings: object
) -> PreTrainedTokenizerFast:
    return kind(tokenizer_object=FastTokenizer(models.BPE()), **settings)


def template_of(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    renderer = make_renderer(tokenizer, {})
    return ChatTemplate(renderer, template_text(tokenizer)) if renderer else jinja_here(tokenizer)


def test_a_tokenizer_without_a_template_has_no_renderer():
    plain = tokenizer()
    assert make_renderer(plain, {}) is None
    assert template_text(plain) == ""


def test_of_several_templates_the_one_for_tools_is_told_and_used_with_tools():
    several = {"default": "plain", "tool_use": "tools: {{ tools | length if tools else 0 }}"}
    template = template_of(tokenizer(chat_template=several))
    assert template.text == several["tool_use"]
    assert template.render([QUESTION], [], {}) == "plain"
    assert template.render([QUESTION], [WEATHER], {}) == "tools: 1"


def test_a_tokenizers_own_method_is_used():
    template = template_of(tokenizer(OwnRenderer))
    assert template.supports_tools
    text = template.render([QUESTION], [WEATHER], {"enable_thinking": False})
    assert text == "Is it raining? ['weather'] False"
    assert template.render([QUESTION], [], {}) == "Is it raining? [] None"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no, thanks') }}", r"^Messages: no, thanks$"),
        ("{{ messages[0].gone.further }}", "has no attribute"),
        ("{{ messages[7].content + 'x' }}", "Messages: "),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_whatever_a_template_raises_is_told_to_the_caller(source: str, words: str):
    with pytest.raises(InvalidRequestError, match=words):
        template_of(tokenizer(chat_template=source)).render([QUESTION], [], {})


def test_special_tokens_and_options_are_variables():
    source = "{{ bos_token }}{{ messages[0].content }}{{ color }}"
    template = template_of(tokenizer(chat_template=source, bos_token="<s>"))  # noqa: S106
    assert template.render([QUESTION], [], {"color": "red"}) == "<s>Is it raining?red"


@pytest.mark.mlx
class TestTemplatesOfMlxLm:
    @pytest.fixture
    def template(self) -> ChatTemplate:
        from backend.model.checkpoint.upstream import import_mlx_lm

        import_mlx_lm()
        return template_of(tokenizer(chat_template_type="deepseek_v32"))

    def test_tools_get_the_system_message_that_they_need(self, template: ChatTemplate):
        assert template.supports_tools
        assert '"name": "weather"' in template.render([QUESTION], [WEATHER], {})

    def test_past_calls_are_given_as_text(self, template: ChatTemplate):
        call = ToolCall(call_id="c1", name="weather", arguments='{"city": "Oslo"}')
        messages = [
            QUESTION,
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="sun", tool_call_id="c1"),
        ]
        text = template.render(messages, [], {})
        assert '<｜DSML｜parameter name="city" string="true">Oslo' in text
        assert "<result>sun</result>" in text

    def test_thinking_is_switched(self, template: ChatTemplate):
        assert template.supports_thinking
        assert template.render([QUESTION], [], {"enable_thinking": True}).endswith("<think>")
        assert template.render([QUESTION], [], {"enable_thinking": False}).endswith("</think>")

    def test_variables_that_it_does_not_know_are_left_out(self, template: ChatTemplate):
        options = {"enable_thinking": False, "reasoning_effort": "low"}
        assert template.render([QUESTION], [], options).endswith("</think>")
