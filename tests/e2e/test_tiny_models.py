"""The whole path on tiny random models of several families."""

import asyncio
import contextlib
import json
import random
import sys

import grpc
import pytest
from serving import UNENDING, chat, code_of, served, stream, user
from waiting import until

from backend.core.engine_status import EngineState
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

ENDINGS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def raw(prompt: str = "ba be bi bo bu", **options) -> pb.PredictOptions:
    return pb.PredictOptions(Prompt=prompt, **{"Tokens": 12, "IgnoreEOS": True, **options})


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "llama4"]
)
async def test_every_cache_kind_streams_and_folds_alike(tiny_models, family):
    async with served(tiny_models(family)) as backend:
        whole, folded = await asyncio.gather(
            backend.stub.Predict(raw()), stream(backend.stub, raw())
        )
        assert whole.message.decode() == folded.message
        assert whole.tokens == folded.last.tokens == 12
        assert whole.prompt_tokens == folded.last.prompt_tokens > 0


async def test_concurrent_requests_get_the_tokens_they_get_alone(shared, tiny_models):
    requests = [
        raw(f"prompt {'ba ' * i}", Tokens=8 + i, Temperature=0.9, TopP=0.9, Seed=100 + i)
        for i in range(8)
    ]
    async with shared(tiny_models("llama")) as backend:
        alone = [(await backend.stub.Predict(request)).message for request in requests]
        together = await asyncio.gather(*(stream(backend.stub, r) for r in requests))
        assert [reply.message.encode() for reply in together] == alone


async def test_counts_and_timings_are_cumulative_in_every_reply(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        reply = await stream(backend.stub, raw(Tokens=20))
        counts = [r.tokens for r in reply.replies]
        assert counts == sorted(counts)
        assert counts[-1] == 20
        assert all(r.prompt_tokens == reply.last.prompt_tokens > 0 for r in reply.replies)
        assert all(r.timing_prompt_processing > 0 for r in reply.replies)
        assert reply.last.timing_token_generation > 0


async def test_logprobs_cover_every_token_once_in_the_last_reply(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        reply = await stream(backend.stub, raw(Logprobs=3, TopLogprobs=3))
        assert [bool(r.logprobs) for r in reply.replies] == [False] * (len(reply.replies) - 1) + [
            True
        ]
        entries = json.loads(reply.last.logprobs)["content"]
        assert len(entries) == reply.last.tokens == 12
        for entry in entries:
            assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] <= 0
        unary = await backend.stub.Predict(raw(Logprobs=3, TopLogprobs=3))
        assert json.loads(unary.logprobs) == json.loads(reply.last.logprobs)


async def test_tokens_of_zero_or_less_mean_up_to_the_context(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=64) as backend:
        for tokens in (0, -1, 10_000):
            unary = await backend.stub.Predict(raw(Tokens=tokens))
            streamed = await stream(backend.stub, raw(Tokens=tokens))
            assert unary.prompt_tokens + unary.tokens == 64
            assert streamed.last.tokens == unary.tokens


async def test_a_context_size_does_not_cap(tiny_models):
    async with served(tiny_models("llama"), ContextSize=16) as backend:
        assert (await backend.stub.Predict(raw(Tokens=40))).tokens == 40


async def test_a_prompt_over_the_context_is_refused_with_both_numbers(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=32) as backend:
        code, details = await code_of(backend.stub.Predict(raw("ba be " * 50)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Prompt" in details
        assert "32" in details
        code, details = await code_of(backend.stub.Predict(raw("x" * 1_000_000)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_logit_bias_moves_tokens(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        ids = (await backend.stub.TokenizeString(pb.PredictOptions(Prompt="ba"))).tokens
        reply = await backend.stub.Predict(raw(LogitBias=json.dumps({str(ids[0]): 1000})))
        text = (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=[ids[0]] * 12))).content
        assert reply.message.decode() == text
        code, details = await code_of(backend.stub.Predict(raw(LogitBias='{"99999": 1}')))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "LogitBias" in details


@pytest.mark.smoke
async def test_tokenizing_and_detokenizing_are_inverse(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        text = 'Grüße aus Zürich: 你好 🙂 {"a": 1}'
        answer = await backend.stub.TokenizeString(pb.PredictOptions(Prompt=text))
        assert answer.length == len(answer.tokens) > 0
        back = await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=answer.tokens))
        assert back.content == text
        code, details = await code_of(backend.stub.Detokenize(pb.DetokenizeRequest(tokens=[-1])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "-1" in details


async def test_tokenizing_messages_counts_the_rendered_prompt(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        request = chat([user("ba be bi")], Tokens=1)
        counted = await backend.stub.TokenizeString(request)
        assert counted.length == (await backend.stub.Predict(request)).prompt_tokens


async def test_tokens_are_counted_whatever_the_reply_would_need(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        plain = await backend.stub.TokenizeString(chat([user("ba be bi")]))
        request = chat([user("ba be bi")], Grammar="root ::= x", Images=["x"], Temperature=-1.0)
        assert (await backend.stub.TokenizeString(request)).tokens == plain.tokens


async def test_a_conversation_over_the_context_can_still_be_counted(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=32) as backend:
        counted = await backend.stub.TokenizeString(chat([user("ba be bi " * 50)]))
        assert counted.length > 32


async def test_a_stop_string_never_shows_and_ends_generation(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        whole = (await backend.stub.Predict(raw(Tokens=30))).message.decode()
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        expected = whole[: whole.index(stop)]
        reply = await stream(backend.stub, raw(Tokens=30, StopPrompts=[stop, "never"]))
        assert reply.message == reply.content == expected
        assert reply.last.tokens < 30
        unary = await backend.stub.Predict(raw(Tokens=30, StopPrompts=[stop]))
        assert unary.message.decode() == expected


async def test_penalties_reach_the_engine(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        plain = await backend.stub.Predict(raw(Tokens=24))
        for option in ({"Penalty": 1.8}, {"PresencePenalty": 1.9}, {"FrequencyPenalty": 1.9}):
            assert (await backend.stub.Predict(raw(Tokens=24, **option))).message != plain.message
        for off in ({"Penalty": 1.0}, {"TopK": -1}, {"MinP": 0.0}, {"Penalty": 0.0}):
            assert (await backend.stub.Predict(raw(Tokens=24, **off))).message == plain.message


async def test_health_answers_during_a_long_prefill(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        call = backend.stub.PredictStream(raw("ba be bi " * 600, Tokens=1))
        reading = asyncio.create_task(call.read())
        answers = 0
        while not reading.done():
            assert (await backend.stub.Health(pb.HealthMessage())).message == b"OK"
            answers += 1
        assert answers > 0
        await reading


@pytest.mark.parametrize("rpc", ["Predict", "PredictStream"])
async def test_a_client_that_leaves_frees_its_slot(shared, tiny_models, rpc):
    async with shared(tiny_models("llama")) as backend:
        call = getattr(backend.stub, rpc)(raw(**UNENDING))
        if rpc == "PredictStream":
            await call.read()
        else:
            await until(lambda: not backend.is_idle)
        call.cancel()
        await until(lambda: backend.is_idle)
        assert (await backend.stub.Predict(raw())).tokens == 12


async def test_a_deadline_ends_the_request(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        code, _ = await code_of(backend.stub.Predict(raw(**UNENDING), timeout=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: backend.is_idle)


async def test_too_many_waiting_are_refused_and_the_others_served(tiny_models):
    options = ["max_slots:1", "max_waiting:2"]
    async with served(tiny_models("llama"), Options=options) as backend:
        first = backend.stub.PredictStream(raw(**UNENDING))
        await first.read()
        calls = [asyncio.ensure_future(backend.stub.Predict(raw())) for _ in range(5)]
        await until(lambda: sum(call.done() for call in calls) == 3)
        first.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert len(refused) == 3
        assert {r.tokens for r in results if r not in refused} == {12}
        assert {r.code() for r in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "max_waiting 2" in refused[0].details()


async def test_sixteen_clients_that_come_and_go_leave_nothing_behind(tiny_models):
    rng = random.Random(1)

    async def client(number: int) -> None:
        for _ in range(6):
            request = raw("ba " * rng.randint(1, 300), Tokens=rng.randint(1, 60), Seed=number + 1)
            call = backend.stub.PredictStream(request, timeout=rng.choice([None, 0.05, 30]))
            with contextlib.suppress(grpc.aio.AioRpcError):
                for _ in range(rng.randint(0, 20)):
                    if await call.read() is grpc.aio.EOF:
                        break
            call.cancel()
            assert await call.code() in ENDINGS

    async with served(tiny_models("llama"), Options=["max_slots:6"]) as backend:
        expected = (await backend.stub.Predict(raw())).message
        await asyncio.gather(*(client(i) for i in range(16)))
        await until(lambda: backend.is_idle)
        # The pass that was in flight for the last of them ends a turn later.
        await until(lambda: backend.engine.status().memory_bytes["kv_active"] == 0)
        assert backend.engine.status().state is EngineState.READY
        assert (await backend.stub.Predict(raw())).message == expected


async def test_a_client_that_is_killed_frees_its_slot(shared, tiny_models):
    code = (
        "import sys, grpc\n"
        "from backend.pb import backend_pb2 as pb, backend_pb2_grpc\n"
        "stub = backend_pb2_grpc.BackendStub(grpc.insecure_channel(sys.argv[1]))\n"
        "request = pb.PredictOptions(Prompt='ba', IgnoreEOS=True)\n"
        "for reply in stub.PredictStream(request):\n"
        "    print('streaming', flush=True)\n"
    )
    async with shared(tiny_models("llama")) as backend:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, backend.address, stdout=asyncio.subprocess.PIPE
        )
        assert await client.stdout.readline() == b"streaming\n"
        client.kill()
        await until(lambda: backend.is_idle)
        await client.wait()
        assert (await backend.stub.Predict(raw())).tokens == 12


async def test_the_log_tells_how_each_request_ended(tiny_models, caplog):
    caplog.set_level("INFO")

    def lines():
        return [r.getMessage() for r in caplog.records if "request id=" in r.getMessage()]

    async with served(tiny_models("llama"), Options=["max_slots:1", "max_waiting:0"]) as backend:
        await backend.stub.Predict(raw())
        running = backend.stub.PredictStream(raw(**UNENDING))
        await running.read()
        code, _ = await code_of(backend.stub.Predict(raw()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        await until(lambda: len(lines()) == 3)
    assert [line.rsplit("finish=", 1)[1] for line in lines()] == ["length", "error", "cancelled"]
