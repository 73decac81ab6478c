"""Messages anywhere, through the socket: the text that the model reads, and its cached part."""

import json
from pathlib import Path

import grpc
import pytest
from serving import chat, code_of, user
from waiting import until

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

TEMPLATES = Path(__file__).parent.parent / "model" / "templates"
NAMES = ["system_first", "one_system", "plain", "mistral", "gemma"]


def system(text, role="system"):
    return {"role": role, "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


LATER = [system("S1"), user("U"), system("MID"), user("go")]


def on(name):
    return [f"chat_template:{TEMPLATES / f'{name}.jinja'}"]


async def read(backend, messages, **options):
    """Return the text of a conversation that the model reads."""
    tokens = (await backend.stub.TokenizeString(chat(messages, **options))).tokens
    return (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens))).content


@pytest.mark.parametrize("name", NAMES)
async def test_system_messages_anywhere_are_read_in_their_place(shared, tiny_models, name):
    conversations = [
        LATER,
        [user("U"), system("MID"), user("go")],
        [system("S1"), user("U"), assistant("A"), system("MID", "developer"), user("go")],
        [system("S1"), user("U"), assistant("A"), user("go"), system("MID")],
    ]
    async with shared(tiny_models("llama"), Options=on(name)) as backend:
        for messages in conversations:
            text = await read(backend, messages)
            places = [text.find(message["content"]) for message in messages]
            assert -1 not in places
            # Mistral's template writes the first system message into the last question.
            start = int(messages[0]["role"] == "system")
            assert places[start:] == sorted(places[start:])


async def test_a_later_system_message_is_marked_only_where_the_template_has_no_place_for_it(
    shared, tiny_models
):
    async with shared(tiny_models("llama"), Options=on("plain")) as backend:
        assert "<|im_start|>system\nMID<|im_end|>" in await read(backend, LATER)
    async with shared(tiny_models("llama"), Options=on("system_first")) as backend:
        assert "user\n<system>\nMID\n</system>\n\ngo<|im_end|>" in await read(backend, LATER)


@pytest.mark.parametrize("name", NAMES)
async def test_results_of_functions_and_of_no_call_are_read(shared, tiny_models, name):
    async with shared(tiny_models("llama"), Options=on(name)) as backend:
        assert "RES" in await read(backend, [user("U"), system("RES", "function")])
        assert "RES" in await read(backend, [user("U"), system("RES", "tool")])


async def test_results_are_read_in_the_order_of_their_calls(shared, tiny_models):
    calls = [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in "ab"]
    calling = {"role": "assistant", "tool_calls": json.dumps(calls)}
    results = [{"role": "tool", "content": f"R{each}", "tool_call_id": each} for each in "ab"]
    async with shared(tiny_models("llama")) as backend:
        text = await read(backend, [user("U"), calling, *results])
        assert text.index("Ra") < text.index("Rb")
        assert await read(backend, [user("U"), calling, *reversed(results)]) == text


CONTINUED = {"continue_final_message": "true"}


@pytest.mark.parametrize("name", NAMES)
async def test_a_reply_goes_on_with_the_last_message_if_the_client_wishes_it(
    shared, tiny_models, name
):
    async with shared(tiny_models("llama"), Options=on(name)) as backend:
        messages = [user("U"), assistant("ba be")]
        text = await read(backend, messages, Metadata=CONTINUED)
        assert text.endswith("ba be")
        assert (await read(backend, messages)).startswith(text)
        asked = chat(messages, Tokens=7, IgnoreEOS=True, Metadata=CONTINUED)
        rest = await backend.stub.Predict(asked)
        raw = pb.PredictOptions(Prompt=text, Tokens=7, IgnoreEOS=True)
        assert rest.message == (await backend.stub.Predict(raw)).message
        assert rest.prompt_tokens == (await backend.stub.TokenizeString(asked)).length


async def test_only_a_text_of_the_assistant_can_be_gone_on_with(shared, tiny_models):
    call = json.dumps([{"id": "a", "function": {"name": "f", "arguments": "{}"}}])
    calling = {"role": "assistant", "content": "A", "tool_calls": call}
    async with shared(tiny_models("llama")) as backend:
        for last in (user("U"), assistant(" "), calling):
            asked = chat([user("U"), last], Metadata=CONTINUED)
            code, details = await code_of(backend.stub.Predict(asked))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith('Metadata["continue_final_message"]: needs a last message')
        odd = chat([user("U"), assistant("A")], Metadata={"continue_final_message": "perhaps"})
        _, details = await code_of(backend.stub.Predict(odd))
        assert details.startswith('Metadata["continue_final_message"]: must be true or false')


async def test_a_text_that_cannot_be_shown_is_refused_by_name(shared, tiny_models, tmp_path):
    last = tmp_path / "last.jinja"
    last.write_text("{{ messages[-1].content }}")
    async with shared(tiny_models("llama"), Options=[f"chat_template:{last}"]) as backend:
        code, details = await code_of(
            backend.stub.Predict(chat([user("U"), assistant("A"), user("go")]))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "Messages: the chat template does not show the text of Messages[0]"
        assert (await backend.stub.Predict(chat([user("U")], Tokens=1))).tokens == 1


async def reused(backend, messages, tools=()):
    """Ask; return the tokens of the prompt, and how many of them were cached."""
    before = backend.engine.status().metrics["prompt_cache.hit_tokens"]
    reply = await backend.stub.Predict(chat(messages, tools=tools, Tokens=2, IgnoreEOS=True))
    await until(lambda: backend.is_idle)
    return reply.prompt_tokens, backend.engine.status().metrics["prompt_cache.hit_tokens"] - before


async def test_a_conversation_with_later_system_messages_stays_cached(shared, tiny_models):
    words = "ba be bi bo bu " * 8
    messages = [system(f"S {words}"), user(f"U {words}")]
    async with shared(tiny_models("llama"), Options=on("system_first")) as backend:
        asked, _ = await reused(backend, messages)
        for turn in range(3):
            messages += [assistant(f"A{turn} {words}"), system(f"M{turn} {words}")]
            messages += [user(f"U{turn} {words}")] if turn % 2 else []
            prompt_tokens, hit_tokens = await reused(backend, messages)
            # All but the start of the reply, which is written otherwise.
            assert hit_tokens > asked - 12
            asked = prompt_tokens


async def test_steps_of_an_agent_stay_cached_where_the_template_moves_the_system_text(
    shared, tiny_models
):
    words = "ba be bi bo bu " * 8
    messages = [system(f"S {words}"), user(f"U {words}"), assistant("A"), user(f"V {words}")]
    tools = [{"type": "function", "function": {"name": "f", "description": words}}]
    async with shared(tiny_models("llama"), Options=on("mistral")) as backend:
        asked, _ = await reused(backend, messages, tools)
        for turn in range(3):
            call = {"id": f"c{turn}", "function": {"name": "f", "arguments": "{}"}}
            messages += [{**assistant(f"A{turn}"), "tool_calls": json.dumps([call])}]
            messages += [{"role": "tool", "content": words, "tool_call_id": call["id"]}]
            prompt_tokens, hit_tokens = await reused(backend, messages, tools)
            assert hit_tokens > asked - 12
            asked = prompt_tokens


async def test_a_call_that_was_cut_off_leaves_the_rest_of_the_prompt_alone(shared, tiny_models):
    before = [system("S", "developer"), user("U")]
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"path": "a'}}
    after = [
        {"role": "assistant", "tool_calls": json.dumps([call])},
        {"role": "tool", "content": "R", "tool_call_id": "c1"},
    ]
    async with shared(tiny_models("llama"), Options=on("xml")) as backend:
        start = await read(backend, before)
        assert start.startswith("<|system|>S")
        text = await read(backend, [*before, *after])
    assert text.startswith(start)
    assert '{"path": "a' in text
