import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from chat_tokenizers import byte_level, sentencepiece

from backend.config import ModelOptions
from backend.core.model import ModelCard, Reuse
from backend.core.prompt import JsonValue, Message, Prompt, Tool, ToolCall, ToolChoice, ToolMode
from backend.core.request import GenerationCall, GenerationParams
from backend.model.loaded import LoadedModel
from backend.model.text.conversation import Turn
from backend.model.text.prefix import MAX_USER_TURNS, branches, common_length
from backend.model.text.renderer import RenderError
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.pipeline.rendering import render
from backend.pipeline.served_model import ServedModel

PARAMS = GenerationParams(request_id="r")

Templates = Callable[[str], ChatTemplate]
Conversation = tuple[Message, ...]

WEATHER = Tool(
    name="weather",
    schema={
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)
SPECIAL = {
    "plain": ("<|im_start|>", "<|im_end|>"),
    "thinking": ("<|turn|>", "<|end|>", "<think>", "</think>", "<call>"),
    "dated": ("<|turn|>", "<|end|>"),
    "llama3": ("<s>", "<|start|>", "<|end|>", "<|eot|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    "xml": (),
}
CHATS: Mapping[str, tuple[str, tuple[Tool, ...], Mapping[str, JsonValue]]] = {
    "plain": ("plain", (), {}),
    "date": ("dated", (), {}),
    "header markers": ("llama3", (), {}),
    "header markers, tools": ("llama3", (WEATHER,), {}),
    "system in the last question": ("mistral", (), {}),
    "system in the last question, tools": ("mistral", (WEATHER,), {}),
    "no special tokens, tools": ("xml", (WEATHER,), {}),
    "thinking": ("thinking", (), {}),
    "thinking, tools": ("thinking", (WEATHER,), {}),
    "not thinking": ("thinking", (), {"enable_thinking": False}),
    "not thinking, tools": ("thinking", (WEATHER,), {"enable_thinking": False}),
}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, thought: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning_content=thought)


def calling(city: str, thought: str = "") -> Conversation:
    """A call and its result."""
    call = ToolCall(call_id=f"for{city:>06}", name="weather", arguments=f'{{"city": "{city}"}}')
    return (
        Message(role="assistant", tool_calls=(call,), reasoning_content=thought),
        Message(role="tool", content="rain", name="weather", tool_call_id=call.call_id),
    )


SYSTEM = Message(role="system", content="You are helpful.\n")
FIRST = (SYSTEM, user("Is it raining in the town?"))
SECOND = (*FIRST, assistant("It is.", "hello"), user("why is it?"))
CONVERSATIONS: Mapping[str, Conversation] = {
    "first turn": FIRST,
    "second turn": SECOND,
    "third turn": (*SECOND, assistant("Clouds.", "world"), user("Hello world")),
    "no system prompt": FIRST[1:],
    "two questions": (*FIRST, user("Hello?")),
    "after calls": (*FIRST, *calling("Oslo", "hello"), *calling("Rome", "world")),
}


CARD = ModelCard(
    name="chat",
    path="",
    model_type="chat",
    context_length=None,
    vocab_size=1000,
    eos_token_ids=frozenset(),
    weights_bytes=0,
    supports_tools=True,
    supports_thinking=True,
)


@dataclasses.dataclass(frozen=True)
class Chat:
    """A template, a tokenizer, and the tools and options of all requests."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)

    def write(self, messages: Sequence[Message]) -> str:
        return self.template.render(messages, self.tools, self.options)

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(self.write(messages), adds_special=False)

    def prompt(self, messages: Sequence[Message], reuse: Reuse = Reuse.AT_SNAPSHOTS) -> Prompt:
        card = dataclasses.replace(CARD, reuse=reuse)
        loaded = LoadedModel(self.tokenizer, self.template, card)
        call = GenerationCall(
            params=PARAMS,
            messages=tuple(messages),
            tools=self.tools,
            template_options=self.options,
        )
        return render(call, ServedModel.of(loaded, ModelOptions(model="chat")))

    def start(self, messages: Sequence[Message], tokens: int) -> str:
        return self.tokenizer.decode(self.token_ids(messages)[:tokens])


@pytest.fixture
def chat(chat_template: Templates) -> Callable[..., Chat]:
    def made(
        name: str,
        tools: tuple[Tool, ...] = (),
        options: Mapping[str, JsonValue] | None = None,
        make: Callable[[Sequence[str]], Tokenizer] = byte_level,
    ) -> Chat:
        return Chat(chat_template(name), make(SPECIAL[name]), tools, options or {})

    return made


def later_requests(messages: Conversation, *, thinks: bool, calls: bool) -> list[Conversation]:
    """Return requests that may follow `messages`: the next turn, or another one at some place."""
    system = tuple(message for message in messages if message.role == "system")
    users = [n for n, message in enumerate(messages) if message.role == "user"]
    thought = "lo and behold" if thinks else ""
    results = [calling("Paris", thought), calling("Paris")] if calls else []
    return [
        (*system, user("Tell me a story.")),
        *((*messages[:n], user("Tell me a story.")) for n in users),
        (*messages, assistant("No idea.", thought), user("Another")),
        *((*messages, *result) for result in results),
    ]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("common", CHATS.values(), ids=CHATS)
def test_the_boundaries_are_where_later_requests_branch_off_before_the_reply(
    chat: Callable[..., Chat],
    common: tuple[str, tuple[Tool, ...], Mapping[str, JsonValue]],
    messages: Conversation,
    make: Callable[[Sequence[str]], Tokenizer],
):
    made = chat(*common, make)
    ids = made.token_ids(messages)
    thinks = made.options.get("enable_thinking", True) is True
    later = later_requests(messages, thinks=thinks, calls=bool(made.tools))
    shared = {common_length(ids, made.token_ids(request)) for request in later}
    boundaries = made.prompt(messages).boundaries
    assert boundaries == tuple(sorted(tokens for tokens in shared if tokens < len(ids)))


@pytest.mark.parametrize(
    ("name", "messages", "start"),
    [
        ("plain", FIRST, "<|im_start|>system\nYou are helpful.\n<|im_end|>\n<|im_start|>user\n"),
        ("plain", SECOND, "<|im_start|>system\nYou are helpful.\n<|im_end|>\n<|im_start|>user\n"),
        ("plain", FIRST[1:], "<|im_start|>user\n"),
        ("plain", FIRST[:1], "<|im_start|>system\nYou are helpful.\n<|im_end|>\n<|im_start|>"),
        ("mistral", FIRST, "<s>[INST]You are helpful.\n\n\n"),
        ("mistral", SECOND, "<s>[INST]You are helpful.\n\n\n"),
    ],
)
def test_the_system_prompt_ends_where_another_conversation_branches_off(
    chat: Callable[..., Chat], name: str, messages: Conversation, start: str
):
    made = chat(name)
    found = made.prompt(messages, Reuse.WITH_WINDOWS)
    assert made.start(messages, found.system_tokens) == start
    assert set(found.boundaries) == {found.system_tokens, found.next_question} - {0}


def test_tools_belong_to_the_system_prompt(chat: Callable[..., Chat]):
    made = chat("llama3", (WEATHER,))
    start = made.start(FIRST[1:], made.prompt(FIRST[1:]).system_tokens)
    assert "Tell the weather" in start
    assert "raining" not in start


@pytest.mark.parametrize("question", ["Why not?", "  what?", "How so?", "", "你好"])
def test_the_letter_that_a_question_begins_with_moves_no_boundary(
    chat: Callable[..., Chat], question: str
):
    made = chat("plain")
    found = made.prompt([SYSTEM, user(question)])
    assert found.boundaries == made.prompt([SYSTEM, user("Is it?")]).boundaries


@pytest.mark.parametrize("reuse", [Reuse.WITH_WINDOWS, Reuse.AT_SNAPSHOTS])
def test_thoughts_that_the_next_turn_drops_lie_behind_a_boundary(
    chat: Callable[..., Chat], reuse: Reuse
):
    made, messages = chat("thinking", (WEATHER,)), CONVERSATIONS["after calls"]
    found = made.prompt(messages, reuse)
    assert found.next_question in found.boundaries
    question = "Is it raining in the town?<|end|>\n<|turn|>assistant\n"
    assert made.start(messages, found.next_question).endswith(question)


def test_where_nothing_is_dropped_the_next_question_comes_after_the_prompt(
    chat: Callable[..., Chat],
):
    assert chat("plain").prompt(SECOND).next_question == 0


def test_a_boundary_lies_before_an_empty_thought(chat: Callable[..., Chat]):
    made = chat("thinking", options={"enable_thinking": False})
    last = made.start(FIRST, made.prompt(FIRST).boundaries[-1])
    assert made.write(FIRST) == last + "<think>\n\n</think>\n\n"


def test_nothing_behind_what_changes_with_each_rendering_is_a_boundary():
    seconds = itertools.count()
    clock = ChatTemplate(lambda turns, *_: f"At noon and {next(seconds)} seconds: {list(turns)}")
    made = Chat(clock, byte_level(()))
    assert made.prompt(SECOND).boundaries
    assert "seconds" not in made.start(SECOND, made.prompt(SECOND).boundaries[-1])


def test_a_request_that_the_template_refuses_makes_no_boundary():
    def one_question(turns: Sequence[Turn], *_: object) -> str:
        if len(turns) > len(FIRST):
            raise RenderError("One question only!")
        return "".join(f"<|turn|>{turn['content']}" for turn in turns)

    made = Chat(ChatTemplate(one_question), byte_level(["<|turn|>"]))
    found = made.prompt(FIRST)
    assert made.start(FIRST, found.system_tokens) == "<|turn|>You are helpful.\n<|turn|>"
    assert found.boundaries == (found.system_tokens,)


def test_a_template_that_writes_the_same_whatever_is_said_has_no_boundaries():
    made = Chat(ChatTemplate(lambda *_: "Always the same."), byte_level(()))
    found = made.prompt(SECOND)
    assert (found.boundaries, found.system_tokens) == ((), 0)


@pytest.mark.parametrize(
    ("reuse", "most", "boundaries"),
    [
        (Reuse.ANYWHERE, 1, 1),
        (Reuse.WITH_WINDOWS, 2, 1),
        (Reuse.AT_SNAPSHOTS, MAX_USER_TURNS + 2, MAX_USER_TURNS + 1),
    ],
)
def test_a_conversation_is_rendered_no_more_often_than_its_prefixes_need_places(
    chat: Callable[..., Chat], reuse: Reuse, most: int, boundaries: int
):
    messages = (SYSTEM, *(user("Hello?"), assistant("Hello!")) * 30, user("Hello?"))
    assert len(branches(messages, (), reuse)) == most
    assert len(chat("plain").prompt(messages, reuse).boundaries) == boundaries


def test_a_prompt_that_can_be_cut_anywhere_is_rendered_once_beside_its_system_prompt():
    written: list[list[str]] = []

    def one_more(turns: Sequence[Turn], *_: object) -> str:
        written.append([str(turn["content"]) for turn in turns])
        return str(written[-1])

    made = Chat(ChatTemplate(one_more), byte_level(()))
    written.clear()
    made.prompt(SECOND, Reuse.ANYWHERE)
    asked = [message.content for message in SECOND]
    assert written == [asked, [asked[0], "Why?"]]


def test_a_conversation_that_takes_long_to_render_is_answered_without_branches(monkeypatch):
    monkeypatch.setattr("backend.model.text.template.BRANCHES_BUDGET_S", 0.0)
    made = Chat(ChatTemplate(lambda turns, *_: str(list(turns))), byte_level(()))
    assert made.prompt(SECOND).boundaries == ()


@pytest.fixture
def model(options: Callable[..., ModelOptions], tiny_models: Callable[[str], Path]) -> ServedModel:
    from backend.model.loader import load

    loaded = load(options(), tiny_models("llama"))
    return ServedModel.of(loaded, options())


@pytest.mark.mlx
@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.NONE])
def test_a_prompt_tells_its_boundaries(model: ServedModel, mode: ToolMode):
    call = GenerationCall(
        params=PARAMS,
        messages=CONVERSATIONS["after calls"],
        tools=(WEATHER,),
        tool_choice=ToolChoice(mode),
        template_options={"enable_thinking": False},
    )
    card = dataclasses.replace(model.card, reuse=Reuse.AT_SNAPSHOTS)
    prompt = render(call, dataclasses.replace(model, card=card))
    assert prompt.boundaries[0] == prompt.system_tokens
    starts = [model.tokenizer.decode(prompt.token_ids[:tokens]) for tokens in prompt.boundaries]
    assert starts[0].endswith("<|im_start|>user\n")
    assert starts[1].endswith("in the town?<|im_end|>\n<|im_start|>assistant\n")
    if mode is ToolMode.NONE:
        assert len(starts) == 2
        assert "Tell the weather" not in starts[0]
    else:
        assert starts[2].endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
        assert "Tell the weather" in starts[0]


@pytest.mark.mlx
def test_a_model_that_can_be_cut_anywhere_is_told_of_the_system_prompt_alone(model: ServedModel):
    prompt = render(GenerationCall(params=PARAMS, messages=SECOND), model)
    assert prompt.boundaries == (prompt.system_tokens,)


@pytest.mark.mlx
def test_raw_text_has_no_boundaries(model: ServedModel):
    prompt = render(
        GenerationCall(params=PARAMS, prompt="hello<|im_end|>hello"),
        model,
    )
    assert (prompt.boundaries, prompt.system_tokens) == ((), 0)
