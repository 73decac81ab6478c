import asyncio
import json
import logging
import threading
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from scripted_engine import (
    EOS,
    PREFILL,
    TIMEOUT_S,
    ScriptedEngine,
    served,
    server_of,
    steps,
    stub,
)
from serving import code_of
from waiting import until

from backend import errors
from backend.config import (
    INLINE_MESSAGES,
    INLINE_REQUEST_BYTES,
    TRIMMED_REQUEST_BYTES,
    Adapter,
    ModelOptions,
)
from backend.core.step import FinishReason, TokenStep
from backend.errors import InvalidRequestError, LoadError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.generation_fields import generation_call
from common.machine_memory import Heap

CODE = grpc.StatusCode
HELLO = pb.PredictOptions(Prompt="hi", Temperature=0.5)


async def collect(call):
    return [reply async for reply in call]


async def test_health_says_ok_with_and_without_a_model():
    for engine in (ScriptedEngine(), ScriptedEngine(loaded=False)):
        async with served(engine) as channel:
            assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"


async def test_health_is_refused_once_the_engine_is_beyond_repair():
    async with served(ScriptedEngine(loaded=False, fault="no thread left")) as channel:
        call = stub(channel).Health(pb.HealthMessage())
        assert await code_of(call) == (CODE.UNAVAILABLE, "no thread left")


async def test_predict_is_the_fold_of_predict_stream():
    async with served(ScriptedEngine(steps("grüezi"))) as channel:
        replies = await collect(stub(channel).PredictStream(HELLO))
        whole = await stub(channel).Predict(HELLO)
    assert b"".join(reply.message for reply in replies) == whole.message == "grüezi".encode()
    assert "".join(delta.content for reply in replies for delta in reply.chat_deltas) == "grüezi"
    assert [delta.content for delta in whole.chat_deltas] == ["grüezi"]
    assert whole.tokens == replies[-1].tokens == len("grüezi".encode())
    assert whole.prompt_tokens == replies[-1].prompt_tokens == len("hi")


async def test_every_streamed_reply_has_counts_and_times():
    async with served(ScriptedEngine(steps("abc"))) as channel:
        replies = await collect(stub(channel).PredictStream(HELLO))
    assert [reply.tokens for reply in replies] == sorted(reply.tokens for reply in replies)
    assert all(reply.prompt_tokens == 2 for reply in replies)
    assert all(reply.timing_prompt_processing == 2.0 for reply in replies)
    assert replies[-1].timing_token_generation > 0.0


async def test_a_reply_is_sent_only_when_it_carries_something_or_ends_the_stream():
    events = [PREFILL, TokenStep(0xC3), TokenStep(0xBC), TokenStep(EOS, FinishReason.STOP)]
    async with served(ScriptedEngine(events)) as channel:
        replies = await collect(stub(channel).PredictStream(HELLO))
    assert [reply.message.decode() for reply in replies] == ["ü", ""]
    assert not replies[-1].chat_deltas


async def test_a_reply_without_text_is_empty_and_no_error():
    async with served(ScriptedEngine(steps(""))) as channel:
        (reply,) = await collect(stub(channel).PredictStream(HELLO))
        whole = await stub(channel).Predict(HELLO)
    assert (reply.message, reply.tokens) == (b"", 0)
    assert (whole.message, whole.tokens, list(whole.chat_deltas)) == (b"", 0, [])


async def test_logprobs_stand_in_the_last_reply_and_in_the_whole_one():
    request = pb.PredictOptions(Prompt="hi", Logprobs=1, TopLogprobs=1)
    async with served(ScriptedEngine(steps("abc"))) as channel:
        replies = await collect(stub(channel).PredictStream(request))
        whole = await stub(channel).Predict(request)
    assert not any(reply.logprobs for reply in replies[:-1])
    assert replies[-1].logprobs == whole.logprobs
    assert [entry["token"] for entry in json.loads(whole.logprobs)["content"]] == ["a", "b", "c"]


async def test_the_request_reaches_the_engine_as_it_was_meant():
    engine = ScriptedEngine(steps("ok"))
    request = pb.PredictOptions(
        Prompt="not this",
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content="this")],
        Tokens=7,
        TopK=3,
        Metadata={"enable_thinking": "false"},
    )
    async with served(engine) as channel:
        await stub(channel).Predict(request)
    (submitted,) = engine.requests
    text = bytes(submitted.prompt.token_ids).decode()
    assert text == "[]{'enable_thinking': False}\nuser: this\nassistant: "
    assert (submitted.max_tokens, submitted.params.sampling.top_k) == (7, 3)


async def test_the_engine_gets_the_parameters_of_the_parser():
    engine = ScriptedEngine(steps("ok"))
    request = pb.PredictOptions(Prompt="hi", Tokens=9, TopK=3, Seed=4, Logprobs=2, NDraft=5)
    async with served(engine) as channel:
        await stub(channel).Predict(request)
    parsed = generation_call(request, ModelOptions(model="m")).params
    (submitted,) = engine.requests
    assert submitted.params == replace(parsed, request_id=submitted.request_id)


@pytest.mark.parametrize(
    ("tokens", "is_open_ended"), [(0, True), (-1, True), (10**6, True), (4094, False)]
)
async def test_a_limit_beyond_the_context_is_none(tokens, is_open_ended):
    engine = ScriptedEngine(steps("ok"))
    async with served(engine) as channel:
        await stub(channel).Predict(pb.PredictOptions(Prompt="hi", Tokens=tokens))
    (submitted,) = engine.requests
    assert (submitted.is_open_ended, submitted.max_tokens) == (is_open_ended, 4094)


async def test_the_engine_learns_which_requests_have_one_caller():
    engine = ScriptedEngine(steps("ok"))
    server = server_of(engine)
    address = await server.start()
    try:
        for _ in range(2):
            # Channels of one process share connections.
            alone = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, alone) as channel:
                for _ in range(2):
                    await stub(channel).Predict(HELLO)
    finally:
        await server.stop()
    first, same, second, last = [request.caller for request in engine.requests]
    assert first == same != second == last
    assert first


@pytest.mark.parametrize("method", ["Predict", "PredictStream"])
async def test_a_client_that_cancels_leaves_the_generation(method):
    engine = ScriptedEngine(steps("abc")[:-1], hangs=True)
    async with served(engine) as channel:
        call = getattr(stub(channel), method)(HELLO)
        await asyncio.wait_for(engine.hanging.wait(), TIMEOUT_S)
        call.cancel()
        await asyncio.wait_for(engine.left.wait(), TIMEOUT_S)
    assert engine.cancelled == [engine.requests[0].request_id]
    assert engine.left_early == engine.cancelled


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Predict", "PredictStream"])
async def test_a_deadline_leaves_the_generation(method):
    engine = ScriptedEngine(hangs=True)
    async with served(engine) as channel:
        call = getattr(stub(channel), method)(HELLO, timeout=1.0)
        awaited = collect(call) if method == "PredictStream" else call
        assert (await code_of(awaited))[0] is CODE.DEADLINE_EXCEEDED
        await asyncio.wait_for(engine.left.wait(), TIMEOUT_S)


async def test_a_client_that_vanishes_leaves_the_generation():
    engine = ScriptedEngine(steps("abc")[:-1], hangs=True)
    async with served(engine) as channel:
        call = stub(channel).PredictStream(HELLO)
        await call.read()
        await channel.close()
        await asyncio.wait_for(engine.left.wait(), TIMEOUT_S)


@pytest.mark.slow
async def test_a_client_that_stops_reading_and_leaves_leaves_the_generation():
    engine = ScriptedEngine(steps("x" * 200_000)[:-1], hangs=True)
    async with served(engine) as channel:
        call = stub(channel).PredictStream(HELLO)
        await call.read()
        call.cancel()
        await asyncio.wait_for(engine.left.wait(), TIMEOUT_S)


@pytest.mark.parametrize("method", ["Predict", "PredictStream"])
@pytest.mark.parametrize(
    ("ending", "code", "details"),
    [
        (errors.GenerationFailedError("the step failed"), CODE.INTERNAL, "the step failed"),
        (errors.EngineFailedError("it"), CODE.INTERNAL, "the engine has failed: it"),
        (errors.RequestCancelledError("ended by Free"), CODE.ABORTED, "ended by Free"),
        (errors.OverloadedError("too many"), CODE.RESOURCE_EXHAUSTED, "too many"),
    ],
)
async def test_an_error_of_the_engine_has_its_status(method, ending, code, details):
    async with served(ScriptedEngine(steps("ab")[:-1], ending=ending)) as channel:
        call = getattr(stub(channel), method)(HELLO)
        awaited = collect(call) if method == "PredictStream" else call
        assert await code_of(awaited) == (code, details)


@pytest.mark.parametrize("method", ["Predict", "PredictStream"])
async def test_an_unforeseen_error_is_logged_once_and_kept_from_the_caller(method, caplog):
    engine = ScriptedEngine(steps("ab")[:-1], ending=ValueError("secret path"))
    async with served(engine) as channel:
        call = getattr(stub(channel), method)(HELLO)
        awaited = collect(call) if method == "PredictStream" else call
        code, details = await code_of(awaited)
    assert (code, "secret" in details) == (CODE.INTERNAL, False)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "unexpected ValueError" in record.getMessage()
    assert "in _play" in record.getMessage()
    assert "secret" not in caplog.text


async def test_a_bad_request_fails_alone_and_reaches_no_engine():
    engine = ScriptedEngine(steps("ok"))
    async with served(engine) as channel:
        bad = pb.PredictOptions(Prompt="hi", TopP=-1.0)
        code, details = await code_of(stub(channel).Predict(bad))
        assert (code, details) == (CODE.INVALID_ARGUMENT, "TopP: must be between 0 and 1, not -1")
        assert (await stub(channel).Predict(HELLO)).message == b"ok"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("method", ["Predict", "TokenizeString"])
async def test_without_a_model_the_precondition_fails(method):
    async with served(ScriptedEngine(loaded=False)) as channel:
        call = getattr(stub(channel), method)(pb.PredictOptions())
        assert await code_of(call) == (CODE.FAILED_PRECONDITION, "model not loaded")


async def test_the_other_calls_need_a_model_too():
    async with served(ScriptedEngine(loaded=False)) as channel:
        client = stub(channel)
        calls = [
            collect(client.PredictStream(HELLO)),
            client.Detokenize(pb.DetokenizeRequest(tokens=[1])),
            client.ModelMetadata(pb.ModelOptions()),
            client.Embedding(pb.PredictOptions(Embeddings="x")),
            client.Score(pb.ScoreRequest(prompt="x", candidates=["y"])),
            client.Rerank(pb.RerankRequest(query="x", documents=["y"])),
        ]
        for call in calls:
            assert await code_of(call) == (CODE.FAILED_PRECONDITION, "model not loaded")


async def test_an_unknown_method_is_unimplemented():
    async with served(ScriptedEngine()) as channel:
        call = channel.unary_unary("/backend.Backend/StoresSet")(b"")
        assert (await code_of(call))[0] is CODE.UNIMPLEMENTED


async def test_load_model_hands_the_options_to_the_engine():
    engine = ScriptedEngine(loaded=False)
    request = pb.ModelOptions(Model="org/name", Options=["max_slots:4"], LoraAdapter="a")
    async with served(engine) as channel:
        result = await stub(channel).LoadModel(request)
    assert result.success
    (options,) = engine.loads
    assert options == ModelOptions(
        model="org/name", adapters=(Adapter("a"),), tuning=options.tuning
    )
    assert options.tuning.scheduling.max_slots == 4


async def test_the_process_sets_the_number_of_slots_of_models_that_say_none():
    engine = ScriptedEngine()
    async with served(engine, max_slots=3) as channel:
        for options in ([], ["max_slots:5"]):
            await stub(channel).LoadModel(pb.ModelOptions(Model="x", Options=options))
    assert [options.tuning.scheduling.max_slots for options in engine.loads] == [3, 5]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ModelNotFoundError("no such path: x"), CODE.NOT_FOUND),
        (errors.UnsupportedModelError("model_type 'x'"), CODE.INVALID_ARGUMENT),
        (errors.OutOfMemoryError("needs 3 GiB"), CODE.RESOURCE_EXHAUSTED),
        (errors.DownloadError("no network"), CODE.UNAVAILABLE),
        (errors.LoadCancelledError("replaced"), CODE.CANCELLED),
        (errors.LoadError("odd"), CODE.INVALID_ARGUMENT),
        (errors.LoadFailedError("odd"), CODE.INTERNAL),
        (errors.ShuttingDownError("going"), CODE.UNAVAILABLE),
    ],
)
async def test_a_failed_load_is_a_status_with_the_reason(error, code):
    blames = isinstance(error, errors.LoadError) and code in (CODE.NOT_FOUND, CODE.INVALID_ARGUMENT)
    async with served(ScriptedEngine(load_error=error, loaded=False)) as channel:
        call = stub(channel).LoadModel(pb.ModelOptions(Model="x"))
        assert await code_of(call) == (code, f"Model: {error}" if blames else str(error))


@pytest.mark.parametrize(
    ("fields", "error", "expected"),
    [
        ({"Model": "x", "ModelFile": "/y"}, LoadError("/y is empty"), "ModelFile: /y is empty"),
        ({"ModelFile": "/y"}, LoadError("odd"), "ModelFile: odd"),
        ({"Model": "x"}, LoadError("odd", field="draft_model"), "draft_model: odd"),
        ({"Model": "x"}, LoadError("odd: thing"), "Model: odd: thing"),
    ],
)
async def test_an_error_of_a_load_begins_with_one_field(fields, error, expected):
    engine = ScriptedEngine(load_error=error, loaded=False)
    async with served(engine) as channel:
        call = stub(channel).LoadModel(pb.ModelOptions(**fields))
        assert await code_of(call) == (CODE.INVALID_ARGUMENT, expected)


async def test_a_caller_that_leaves_cancels_the_load():
    engine = ScriptedEngine(hangs=True, loaded=False)
    async with served(engine) as channel:
        call = stub(channel).LoadModel(pb.ModelOptions(Model="x"), timeout=1.0)
        assert (await code_of(call))[0] is CODE.DEADLINE_EXCEEDED
        await asyncio.wait_for(engine.load_left.wait(), TIMEOUT_S)


async def test_health_answers_while_a_model_loads():
    engine = ScriptedEngine(hangs=True, loaded=False)
    async with served(engine) as channel:
        load = stub(channel).LoadModel(pb.ModelOptions(Model="x"))
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
        load.cancel()


async def test_free_drops_the_model():
    engine = ScriptedEngine()
    async with served(engine) as channel:
        assert (await stub(channel).Free(pb.HealthMessage())).success
        assert (await code_of(stub(channel).Predict(HELLO)))[0] is CODE.FAILED_PRECONDITION


async def test_tokenize_gives_ids_and_their_number():
    async with served(ScriptedEngine()) as channel:
        reply = await stub(channel).TokenizeString(pb.PredictOptions(Prompt="hé"))
    assert list(reply.tokens) == list("hé".encode())
    assert reply.length == len(reply.tokens)


async def test_tokenize_renders_a_conversation():
    message = pb.Message(role="user", content="x")
    request = pb.PredictOptions(UseTokenizerTemplate=True, Messages=[message])
    async with served(ScriptedEngine()) as channel:
        reply = await stub(channel).TokenizeString(request)
    assert bytes(reply.tokens) == b"[]{}\nuser: x\nassistant: "


async def test_detokenize_gives_the_text():
    async with served(ScriptedEngine()) as channel:
        reply = await stub(channel).Detokenize(pb.DetokenizeRequest(tokens="hé".encode()))
        outside = stub(channel).Detokenize(pb.DetokenizeRequest(tokens=[256]))
        assert (await code_of(outside))[0] is CODE.INVALID_ARGUMENT
    assert reply.content == "hé"


async def test_status_tells_state_and_memory():
    async with served(ScriptedEngine()) as channel:
        status = await stub(channel).Status(pb.HealthMessage())
    assert status.state == pb.StatusResponse.READY
    assert status.memory.total == 10
    assert dict(status.memory.breakdown) == {
        "weights": 5,
        "mlx_active": 7,
        "mlx_cache": 3,
        "resident": 2**26 + 2**28,
        "machine_usable": 2**36,
        "machine_claimed": 2**34 + 2**35,
    }


async def test_metrics_are_the_counters_of_the_engine():
    async with served(ScriptedEngine()) as channel:
        metrics = await stub(channel).GetMetrics(pb.MetricsRequest())
    assert (metrics.tokens_generated, metrics.prompt_tokens_processed) == (13, 11)
    assert metrics.tokens_per_second == 1.5


async def test_metadata_tells_of_the_loaded_model():
    async with served(ScriptedEngine()) as channel:
        metadata = await stub(channel).ModelMetadata(pb.ModelOptions())
    assert not metadata.supports_thinking
    assert metadata.rendered_template.startswith("[]{'enable_thinking': True}\nuser: ")
    assert metadata.media_marker == ""


async def test_what_large_requests_and_a_model_leave_behind_goes_back(monkeypatch):
    asked = []
    monkeypatch.setattr(Heap, "trim_soon", lambda _heap: asked.append(1))
    async with served(ScriptedEngine(steps("ab"))) as channel:
        await stub(channel).Predict(pb.PredictOptions(Prompt="a"))
        assert not asked
        large = pb.PredictOptions(Prompt="a" * (TRIMMED_REQUEST_BYTES + 1))
        assert (await code_of(stub(channel).Predict(large)))[0] is CODE.INVALID_ARGUMENT
        # The client may hear of the end before the call's task has ended.
        await until(lambda: len(asked) == 1)
        picture = pb.PredictOptions(Prompt="a", Images=["AAAA"])
        assert (await code_of(stub(channel).Predict(picture)))[0] is CODE.INVALID_ARGUMENT
        await until(lambda: len(asked) == 2)
        await stub(channel).Free(pb.HealthMessage())
        assert len(asked) == 3
        await stub(channel).LoadModel(pb.ModelOptions(Model="one"))
        assert len(asked) == 4


@pytest.mark.parametrize(
    ("request_", "is_parsed_here"),
    [
        (pb.PredictOptions(Prompt="a"), True),
        (pb.PredictOptions(Prompt="a" * (INLINE_REQUEST_BYTES + 1)), False),
        (pb.PredictOptions(Messages=[pb.Message(role="user")] * INLINE_MESSAGES), True),
        (pb.PredictOptions(Messages=[pb.Message(role="user")] * (INLINE_MESSAGES + 1)), False),
    ],
)
async def test_what_takes_time_to_parse_is_not_parsed_on_the_event_loop(
    monkeypatch, request_, is_parsed_here
):
    threads = []

    def parse(*_):
        threads.append(threading.current_thread())
        raise InvalidRequestError("Prompt", "is parsed")

    monkeypatch.setattr("backend.rpc.servicer.generation_call", parse)
    async with served(ScriptedEngine(steps("ab"))) as channel:
        assert (await code_of(stub(channel).Predict(request_)))[1] == "Prompt: is parsed"
    assert [thread is threading.main_thread() for thread in threads] == [is_parsed_here]
