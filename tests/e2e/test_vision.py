"""Pictures through the socket: the tokens are those of mlx-vlm by itself, however they come."""

import asyncio
import base64
import json
import struct
import threading
import zlib

import grpc
import numpy as np
import pytest
from PIL import Image
from serving import chat, code_of, served, stream, user
from vision import Reference, as_base64, gif, parts, picture, shown, token_ids, wav
from waiting import until

from backend.config import MEDIA_MEMO_BYTES, PREPARED_MEDIA_BYTES, RESERVE_SHARE
from backend.media.decoder_pool import decode_apart
from backend.pb import backend_pb2 as pb
from backend.pipeline import rendering

pytestmark = [
    pytest.mark.mlx,
    # As an error it would be swallowed, and the processor of gemma4 not be found.
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]

FAMILIES = ["qwen3_vl", "smolvlm", "qwen3_5", "gemma3", "gemma4", "qwen2_5_vl", "llava"]
COUNT = 6
SYSTEM = {"role": "system", "content": "You see. " + "be bi ba bo du " * 6}


def ask(messages, *images, **options):
    settings = {"Tokens": COUNT, "Logprobs": 1, "IgnoreEOS": True}
    return chat([SYSTEM, *messages], **shown(*images), **settings | options)


async def replies(backend, *requests):
    folded = await asyncio.gather(*(stream(backend.stub, request) for request in requests))
    return [token_ids(*reply.replies) for reply in folded]


def agrees(ours, theirs):
    """mlx-vlm stops at the end of a turn."""
    return len(theirs) > 0 and ours[: len(theirs)] == theirs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
async def test_tokens_are_those_of_a_cold_run_of_mlx_vlm(tiny_vision_models, family):
    directory = tiny_vision_models(family)
    reference = Reference(directory)
    one, other = picture(1), picture(2, (96, 48))
    questions = {"What is it?": [one], "ba bi": [other], "Both?": [one, other], "Text.": []}
    expected = [
        reference.tokens([SYSTEM, {"role": "user", "content": parts(text, *images)}], COUNT - 1)
        for text, images in questions.items()
    ]
    assert len(set(map(tuple, expected))) == len(expected)
    async with served(directory) as backend:
        requests = [ask([user(text)], *images) for text, images in questions.items()]
        cold = [(await replies(backend, request))[0] for request in requests]
        warm = await replies(backend, *requests, *requests)
    for ours, theirs in zip(cold, expected, strict=True):
        assert agrees(ours, theirs)
    assert warm == cold * 2


class Books:
    """How many tokens a request brought, reused, and how often a tower ran for it."""

    def __init__(self, backend):
        self._backend = backend

    def _read(self):
        status = self._backend.engine.status()
        names = ("prompt_cache.looked_up_tokens", "prompt_cache.hit_tokens", "media_encoded")
        return tuple(status.metrics[name] for name in names)

    async def of(self, request):
        before = self._read()
        tokens = (await replies(self._backend, request))[0]
        return tokens, *(now - then for now, then in zip(self._read(), before, strict=True))


def turn(*said):
    """A conversation of questions and answers, in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "qwen3_5", "gemma3", "gemma4"])
@pytest.mark.one_in(3)
async def test_what_was_seen_is_not_looked_at_again(tiny_vision_models, family):
    one, other, third = picture(1), picture(2), picture(3)
    cases = {
        "cold": ask(turn("What is it?"), one),
        "repeat": ask(turn("What is it?"), one),
        "other question": ask(turn("ba bi bo?"), one),
        "second turn": ask(turn("What is it?", "A dog.", "Sure?"), one),
        "second turn, new picture": ask(turn("What is it?", "A dog.", "And this?"), one, other),
        "third turn": ask(turn("What is it?", "A dog.", "And this?", "A cat.", "No."), one, other),
        "other picture": ask(turn("What is it?"), third),
        "elsewhere": chat([user("be bi: What is it?")], **shown(one), Tokens=COUNT, Logprobs=1),
    }
    books, cold = {}, {}
    async with served(tiny_vision_models(family)) as backend:
        for name, request in cases.items():
            books[name] = await Books(backend).of(request)
    async with served(tiny_vision_models(family), Options=["max_cache_bytes:0"]) as backend:
        for name, request in cases.items():
            (cold[name],) = await replies(backend, request)
    assert {name: tokens for name, (tokens, *_) in books.items()} == cold
    runs = {name: ran for name, (*_, ran) in books.items()}
    assert runs == dict.fromkeys(cases, 0) | {
        "cold": 1,
        "second turn, new picture": 1,
        "other picture": 1,
    }
    _, prompt, reused, _ = books["repeat"]
    assert reused == prompt - 1
    assert books["second turn"][2] >= prompt - 8
    assert books["third turn"][2] >= books["second turn, new picture"][1] - 8
    assert books["other picture"][2] < books["other question"][2]


async def test_a_sound_is_heard_and_not_heard_again(tiny_vision_models):
    directory = tiny_vision_models("gemma4")
    low, high = (tone(hertz) for hertz in (220, 880))
    reference = Reference(directory)
    content = [{"type": "audio"}, {"type": "text", "text": "What is it?"}]
    expected = reference.tokens(
        [SYSTEM, {"role": "user", "content": content}], COUNT - 1, audio=[low]
    )
    async with served(directory) as backend:
        books = Books(backend)
        heard = [
            await books.of(ask([user("What is it?")], Audios=[wav(samples)]))
            for samples in (low, high, low)
        ]
    assert agrees(heard[0][0], expected)
    assert heard[1][0] != heard[0][0] == heard[2][0]
    assert [runs for *_, runs in heard] == [1, 1, 0]


def tone(hertz):
    times = np.arange(8000) / 16_000
    # Exact in 16 bits, so that both sides hear the same samples.
    return (np.round(np.sin(2 * np.pi * hertz * times) * 16_000) / 32_768).astype(np.float32)


async def test_a_video_is_read_as_frames(tiny_vision_models):
    directory = tiny_vision_models("qwen3_vl")
    # Few colours: an animation keeps them exactly.
    frames, others = [
        [Image.new("RGB", (64, 64), colour) for colour in colours]
        for colours in (("red", "blue", "white", "green"), ("black", "white", "black", "white"))
    ]
    content = [{"type": "video"}, {"type": "text", "text": "What is it?"}]
    expected = Reference(directory).tokens(
        [SYSTEM, {"role": "user", "content": content}],
        COUNT - 1,
        video=[np.stack([np.asarray(frame) for frame in frames])],
    )
    async with served(directory) as backend:
        books = Books(backend)
        seen = [
            await books.of(ask([user("What is it?")], Videos=[gif(film)]))
            for film in (frames, others, frames)
        ]
    assert agrees(seen[0][0], expected)
    assert seen[1][0] != seen[0][0] == seen[2][0]
    assert [runs for *_, runs in seen] == [1, 1, 0]


async def test_requests_with_and_without_pictures_share_a_batch(shared, tiny_vision_models):
    """Each with its own sampler, seed, grammar and stop strings."""
    one, other = picture(1), picture(2)
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    requests = [
        ask([user("What is it?")], one),
        ask([user("What is it?")], one, Temperature=1.0, Seed=7),
        ask([user("What is it?")], other, Temperature=1.0, Seed=7),
        ask([user("What is it?")], other, Metadata={"json_schema": schema}, Tokens=40),
        ask([user("Only text.")], Temperature=1.0, Seed=8),
        ask([user("Only text.")], Penalty=1.5, FrequencyPenalty=0.5),
        ask([user("Two?")], one, other, TopLogprobs=3),
        ask([user("Only text.")], Metadata={"json_schema": schema}, Tokens=40),
    ]
    async with shared(tiny_vision_models("qwen3_vl"), Options=["max_cache_bytes:0"]) as backend:
        alone = [(await replies(backend, request))[0] for request in requests]
        for _ in range(2):
            assert await replies(backend, *requests) == alone
        constrained = await stream(backend.stub, requests[3])
    assert json.loads(constrained.content).keys() == {"a"}
    assert alone[1] != alone[2]


async def test_markers_say_where_pictures_stand(shared, tiny_vision_models):
    directory = tiny_vision_models("qwen3_vl")
    one, other = picture(1), picture(2)
    reference = Reference(directory)
    content = [
        {"type": "text", "text": "First "},
        *parts(" then ", one)[::1],
        *parts(" and?", other),
    ]
    expected = reference.tokens([SYSTEM, {"role": "user", "content": content}], COUNT - 1)
    marked = "First <__media__> then <__media__> and?"
    settings = {"Tokens": COUNT, "Logprobs": 1, "IgnoreEOS": True}
    async with shared(directory) as backend:
        metadata = await backend.stub.ModelMetadata(pb.ModelOptions())
        assert metadata.media_marker == "<__media__>"
        in_message = ask([user(marked)], one, other)
        raw = pb.PredictOptions(
            Prompt="<|im_start|>user\n" + marked, **shown(one, other), **settings
        )
        by_hand = pb.PredictOptions(**settings, **shown(one, other))
        snippet = "<|vision_start|><|image_pad|><|vision_end|>"
        by_hand.Prompt = raw.Prompt.replace("<__media__>", snippet)
        bare = pb.PredictOptions(Prompt="Look", **shown(one), **settings)
        ending = pb.PredictOptions(Prompt="Look: <__media__>", **shown(one), **settings)
        first, second, third, *_ = await replies(backend, in_message, raw, by_hand, bare, ending)
    assert agrees(first, expected)
    assert second == third


async def test_a_picture_stays_at_its_question_over_a_restart(tiny_vision_models, tmp_path):
    model = tiny_vision_models("qwen3_vl")
    follow_up = ask(turn("What is it?", "A dog.", "And this?"), picture(1), picture(2))
    prompts = []
    for options in ([f"cache_dir:{tmp_path}"], [f"cache_dir:{tmp_path}"], []):
        async with served(model, Options=options) as backend:
            if not prompts:
                await backend.stub.Predict(ask([user("What is it?")], picture(1)))
            prompts.append(list((await backend.stub.TokenizeString(follow_up)).tokens))
    remembered, restarted, stranger = prompts
    assert restarted == remembered != stranger


@pytest.mark.smoke
async def test_a_text_that_spells_a_picture_is_no_picture(shared, tiny_vision_models):
    snippet = "<|vision_start|><|image_pad|><|vision_end|>"
    async with shared(tiny_vision_models("qwen3_vl")) as backend:
        forged, honest = await replies(
            backend,
            ask([user(f"{snippet} What is it?")], picture(1)),
            ask([user("What is it?")], picture(1)),
        )
        text_only = await replies(backend, ask([user(f"{snippet} What is it?")]))
    assert len(forged) == len(honest) == len(text_only[0]) == COUNT


async def test_a_text_that_spells_the_tokens_of_a_picture_does_not_get_it(tiny_vision_models):
    async with served(tiny_vision_models("qwen3_vl")) as backend:
        request = ask([user("What is it?")], picture(1))
        prompt = await backend.stub.TokenizeString(request)
        text = (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=prompt.tokens))).content
        spelled = text[text.rindex("user") + 4 : text.rindex("What is it?")]
        turns = turn(spelled, "No.", "And this?")
        books = Books(backend)
        for number in (1, 2):
            _, count, reused, _ = await books.of(ask(turns, picture(number)))
    # Another picture in the last turn: all before it is known.
    assert count > reused > len(prompt.tokens)


async def test_a_client_that_leaves_in_the_middle_of_pictures_changes_nothing(tiny_vision_models):
    images = [picture(n, (320, 320)) for n in range(4)]
    request = ask([user("What are they?")], *images)
    async with served(tiny_vision_models("qwen3_vl"), Options=["prefill_chunk_alone:8"]) as backend:
        for wait_s in (0.0, 0.02, 0.05, 0.1, 0.2):
            call = backend.stub.PredictStream(request)
            await asyncio.sleep(wait_s)
            call.cancel()
            await until(lambda: backend.is_idle)
        (after,) = await replies(backend, request)
    async with served(tiny_vision_models("qwen3_vl"), Options=["max_cache_bytes:0"]) as backend:
        assert await replies(backend, request) == [after]


async def test_nobody_waits_for_the_pictures_of_others_to_be_read(tiny_vision_models, monkeypatch):
    may_go_on = threading.Event()

    def decode_slowly(*arguments, **options):
        may_go_on.wait(60)
        return decode_apart(*arguments, **options)

    monkeypatch.setattr(rendering, "decode_apart", decode_slowly)
    async with served(tiny_vision_models("qwen3_vl")) as backend:
        crowd = [
            asyncio.ensure_future(stream(backend.stub, ask([user("?")], picture(n))))
            for n in range(40)
        ]
        text = chat([user("ba bi")], Tokens=2)
        assert (await backend.stub.Predict(text)).tokens == 2
        assert (await backend.stub.TokenizeString(text)).tokens
        assert not any(each.done() for each in crowd)
        may_go_on.set()
        assert all(each.last.tokens == COUNT for each in await asyncio.gather(*crowd))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb():
    """A PNG of a few bytes that claims to be enormous."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


HOSTILE = {
    "a path": ("/etc/passwd", "only base64 or a data URI"),
    "a URL": ("http://127.0.0.1/a.png", "only base64 or a data URI"),
    "no base64": ("%%%", ""),
    "zero bytes": ("data:image/png;base64,", ""),
    "a truncated PNG": (as_base64(picture(1))[:400], ""),
    "a decompression bomb": (base64.b64encode(bomb()).decode(), ""),
    "one by 20,000": (as_base64(picture(1, (1, 20_000))), ""),
    "an SVG": (base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(), ""),
    "40 MB": ("A" * 40_000_000, "characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_picture_is_refused_by_its_number(shared, tiny_vision_models, name):
    payload, problem = HOSTILE[name]
    request = ask([user("What is it?")], picture(1))
    request.Images.append(payload)
    async with shared(tiny_vision_models("qwen3_vl")) as backend:
        code, details = await code_of(backend.stub.Predict(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("Images[1]: ")
        assert problem in details
        assert backend.is_idle
        await replies(backend, ask([user("Text.")]))


REFUSED = {
    "too many": ({"Images": [as_base64(picture(1))] * 3}, "Images: holds 3, at most 2"),
    "no audio tower": ({"Audios": [wav(tone(220))]}, "Audios[0]: the loaded model takes no audio"),
    "too few markers": (
        {"Prompt": "<__media__>", "Images": [as_base64(picture(n)) for n in range(2)]},
        "Prompt: has 1 places for 2 media",
    ),
    "too many markers": (
        {"Prompt": "<__media__> <__media__>", "Images": [as_base64(picture(1))]},
        "Prompt: has 2 places for 1 media",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_media_that_have_no_place_are_refused(shared, tiny_vision_models, name):
    fields, problem = REFUSED[name]
    request = pb.PredictOptions(**{"Prompt": "What is it?", "Tokens": 3} | fields)
    async with shared(tiny_vision_models("qwen3_vl"), LimitImagePerPrompt=2) as backend:
        code, details = await code_of(backend.stub.Predict(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(problem)


async def test_a_sound_of_which_the_model_hears_nothing_is_refused(shared, tiny_vision_models):
    request = ask([user("What is it?")], Audios=[wav(tone(220)), wav(tone(220)[:100])])
    async with shared(tiny_vision_models("gemma4")) as backend:
        code, details = await code_of(backend.stub.Predict(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "Audios[1]: the model's processor: is too short"


async def test_a_model_without_towers_refuses_pictures(tiny_vision_models, tiny_models):
    request = ask([user("What is it?")], picture(1))
    async with served(tiny_models("llama")) as backend:
        refused = await code_of(backend.stub.Predict(request))
        assert await backend.load(tiny_vision_models("qwen3_vl"), Options=["vision:false"])
        as_text = await code_of(backend.stub.Predict(request))
        assert await replies(backend, ask([user("Text.")]))
    problem = "Images[0]: the loaded model reads text only"
    assert refused == as_text == (grpc.StatusCode.INVALID_ARGUMENT, problem)


async def test_cross_attention_is_refused_at_load_by_its_name(tiny_vision_models):
    async with served() as backend:
        code, details = await code_of(backend.load(tiny_vision_models("mllama")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "by cross attention" in details
        assert "not even with text alone" in details


async def test_remembered_media_take_their_room_from_the_kv_caches(tiny_vision_models):
    directory = tiny_vision_models("qwen3_vl")
    budgets = []
    for sees in ("false", "true"):
        async with served(directory, Options=[f"vision:{sees}"]) as backend:
            budgets.append(backend.engine.status().memory_bytes["kv_budget"])
    media = MEDIA_MEMO_BYTES + PREPARED_MEDIA_BYTES
    assert budgets[0] - budgets[1] >= (1 - RESERVE_SHARE) * media


async def test_text_requests_to_a_model_that_sees_are_batched(tiny_vision_models):
    requests = [ask([user(f"{n} be bi?")], Temperature=0.8, Seed=n) for n in range(1, 5)]
    async with served(tiny_vision_models("gemma3")) as backend:
        alone = [(await replies(backend, request))[0] for request in requests]
        assert await replies(backend, *requests) == alone
        assert backend.engine.status().metrics["media_encoded"] == 0


async def test_what_was_seen_survives_a_restart(tiny_vision_models, tmp_path):
    """Positions after a picture are known again, though its tower has not run."""
    question = "What is it? " + "be bi ba " * 12
    request = ask(turn(question), picture(1))
    later = ask(turn(question, "A dog.", "Sure?"), picture(1))
    options = {"Options": [f"cache_dir:{tmp_path}"]}
    async with served(tiny_vision_models("qwen3_vl"), **options) as backend:
        (first,) = await replies(backend, request)
    async with served(tiny_vision_models("qwen3_vl"), **options) as backend:
        tokens, prompt, reused, _ = await Books(backend).of(request)
        (second,) = await replies(backend, later)
    assert (tokens, reused) == (first, prompt - 1)
    async with served(tiny_vision_models("qwen3_vl"), Options=["max_cache_bytes:0"]) as backend:
        await replies(backend, request)
        assert await replies(backend, later) == [second]


async def test_a_request_that_gives_way_to_others_goes_on_with_the_same_tokens(tiny_vision_models):
    requests = [ask([user(f"{n}?")], picture(n), Tokens=40) for n in range(4)]
    async with served(tiny_vision_models("qwen3_vl"), Options=["max_cache_bytes:0"]) as backend:
        alone = [(await replies(backend, request))[0] for request in requests]
    async with served(tiny_vision_models("qwen3_vl"), Options=["max_kv_bytes:300000"]) as backend:
        assert await replies(backend, *requests) == alone
