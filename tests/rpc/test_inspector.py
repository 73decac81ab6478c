import json
from dataclasses import fields

import grpc
from scripted_engine import STATUS, ScriptedEngine, inspector, served, stub
from serving import code_of

from backend.core.engine_status import RequestStatus
from backend.pb import backend_pb2 as pb

CODE = grpc.StatusCode


async def inspected(engine):
    async with served(engine) as channel:
        return await inspector(channel).Inspect(pb.InspectRequest())


async def test_a_request_is_told_with_its_progress():
    (request,) = (await inspected(ScriptedEngine())).requests
    assert request == pb.RequestReport(
        request_id="a",
        phase="prefilling",
        prompt_tokens=30,
        prefilled_tokens=20,
        cached_tokens=10,
        hit_kind="shorter",
        kv_bytes=2**34,
        kv_shared_bytes=2**33,
    )


async def test_the_books_of_the_prompt_cache_are_told():
    books = (await inspected(ScriptedEngine())).prompt_cache
    assert (books.bytes, books.budget_bytes) == (2**33, 2**34)
    assert (books.nodes, books.tokens, books.evictions) == (3, 40, 4)
    assert (books.looked_up_tokens, books.hit_tokens) == (50, 20)
    assert dict(books.hits) == {"miss": 2, "exact": 1}
    assert books.disk == pb.DiskCacheReport(
        bytes=2**35, files=6, read_tokens=70, written_bytes=700, damaged=8, dropped=9
    )


async def test_the_model_and_the_totals_are_told():
    reply = await inspected(ScriptedEngine())
    assert reply.state == pb.StatusResponse.READY
    assert reply.model == pb.ModelReport(
        name="org/tiny", type="bytes", context_length=4096, max_slots=16
    )
    assert (reply.slots_taken, reply.waiting) == (1, 0)
    assert (reply.prompt_tokens, reply.generated_tokens, reply.tokens_per_s) == (11, 13, 1.5)
    assert reply.turn_s == STATUS.metrics["turn_s"]
    assert reply.memory.total == 10
    resident = {"resident": 2**26 + 2**28}
    assert dict(reply.memory.breakdown) == STATUS.memory_bytes | resident


async def test_without_a_model_none_is_told():
    reply = await inspected(ScriptedEngine(loaded=False))
    assert reply.state == pb.StatusResponse.UNINITIALIZED
    assert not reply.HasField("model")


async def test_the_hosts_metrics_tell_the_same():
    async with served(ScriptedEngine()) as channel:
        reply = await inspector(channel).Inspect(pb.InspectRequest())
        metrics = await stub(channel).GetMetrics(pb.MetricsRequest())
    details = json.loads(metrics.prompt_json_for_slot)
    assert [pb.RequestReport(**request) for request in details["requests"]] == reply.requests
    assert pb.PromptCacheReport(**details["prompt_cache"]) == reply.prompt_cache


def test_nothing_of_a_request_is_left_out():
    told = [field.name for field in pb.RequestReport.DESCRIPTOR.fields]
    assert told == [field.name for field in fields(RequestStatus)]


async def test_every_number_is_told_with_its_name_and_also_where_it_was_before():
    reply = await inspected(ScriptedEngine())
    told = {metric.name: metric for metric in reply.metrics}
    assert {name: metric.value for name, metric in told.items()} == STATUS.metrics
    assert told["generated_tokens"] == pb.MetricReport(
        name="generated_tokens",
        value=13,
        kind="counter",
        help="Tokens generated",
        words="tokens generated",
    )
    assert (reply.restarts, reply.lost_s) == (1, 2.5)


async def test_it_answers_while_a_model_loads():
    async with served(ScriptedEngine(hangs=True, loaded=False)) as channel:
        load = stub(channel).LoadModel(pb.ModelOptions(Model="x"))
        assert not (await inspector(channel).Inspect(pb.InspectRequest())).HasField("model")
        load.cancel()


async def test_bytes_that_are_no_request_are_an_invalid_argument():
    async with served(ScriptedEngine()) as channel:
        call = channel.unary_unary("/backend.Inspector/Inspect")(b"\xff" * 9)
        code, details = await code_of(call)
    assert code is CODE.INVALID_ARGUMENT
    assert "is not a backend.InspectRequest message" in details
