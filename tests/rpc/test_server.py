import asyncio
import socket
from contextlib import asynccontextmanager, closing

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http2 import HEADERS, read_frames
from scripted_engine import TIMEOUT_S, ScriptedEngine, served, server_of, steps, stub
from serving import code_of

from backend.cli.client import BackendClient
from backend.config import MESSAGE_LIMIT_BYTES, ServerConfig
from backend.pb import backend_pb2 as pb
from backend.rpc.decoding import RECEIVE_LIMIT_BYTES
from backend.rpc.server import BackendServer
from backend.rpc.services import Services
from common.address import AddressError

CODE = grpc.StatusCode
HELLO = pb.PredictOptions(Prompt="hi")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def raw(channel, method, data, *, streams=False, **options):
    """Send bytes as they are, and return an awaitable of the reply."""
    if not streams:
        return channel.unary_unary(f"/backend.Backend/{method}")(data, **options)
    return channel.unary_stream(f"/backend.Backend/{method}")(data, **options).read()


class Line:
    """A connection of a client's to a server, on which no more than some bytes pass at first."""

    def __init__(self, room):
        self.room = room
        self.has_more = asyncio.Event()
        self.is_closed = asyncio.Event()

    @asynccontextmanager
    async def to(self, address):
        """Yield the address for the client."""
        host, _, port = address.rpartition(":")

        async def serve(reader, writer):
            upstream, to_server = await asyncio.open_connection(host, port)
            with closing(to_server), closing(writer):
                await asyncio.gather(self._send(reader, to_server), self._answer(upstream, writer))

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            yield "{}:{}".format(*server.sockets[0].getsockname())
            self.has_more.set()

    async def _send(self, reader, to_server):
        while data := await reader.read(2**14):
            self.room -= len(data)
            if self.room < 0:
                await self.has_more.wait()
            to_server.write(data)
        to_server.close()

    async def _answer(self, upstream, writer):
        while data := await upstream.read(2**14):
            writer.write(data)
        self.is_closed.set()


async def test_a_taken_port_is_refused():
    server = server_of(ScriptedEngine())
    address = await server.start()
    second = server_of(ScriptedEngine(), address=address)
    with pytest.raises(AddressError, match=f"{address}: Address already in use; stop the process"):
        await second.start()
    await server.stop()


@pytest.mark.parametrize("name", ["100%25.sock", "a#b.sock", "a?b.sock", "a b.sock"])
async def test_a_unix_socket_has_the_very_name_that_was_given(tmp_path, name):
    address = f"unix:{tmp_path}/{name}"
    server = server_of(ScriptedEngine(), address=address)
    await server.start()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    async with BackendClient(address) as client:
        await client.check_health()
    await server.stop()
    assert not list(tmp_path.iterdir())


async def test_it_listens_on_a_unix_socket_and_takes_it_away_at_its_end(tmp_path):
    path = tmp_path / "backend.sock"
    server = server_of(ScriptedEngine(), address=f"unix:{path}")
    assert await server.start() == f"unix:{path}"
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
    await server.stop()
    assert not path.exists()


async def test_health_answers_before_there_is_an_engine_and_other_calls_wait_for_it():
    config = ServerConfig(address="127.0.0.1:0")
    server = BackendServer(config)
    check = health_pb2.HealthCheckRequest(service="backend.Backend")
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
        assert (await health_pb2_grpc.HealthStub(channel).Check(check)).status == SERVING
        early = asyncio.ensure_future(stub(channel).Predict(HELLO))
        wrong = pb.PredictOptions(Prompt="hi", ModelIdentity="another")
        refused = asyncio.ensure_future(code_of(stub(channel).Predict(wrong)))
        done, _ = await asyncio.wait([early, refused], timeout=0.05)
        assert not done
        server.serve(Services(config, ScriptedEngine(steps("ok"))))
        assert (await asyncio.wait_for(early, TIMEOUT_S)).message == b"ok"
        assert (await asyncio.wait_for(refused, TIMEOUT_S))[0] is CODE.NOT_FOUND
        await server.stop()


async def test_a_server_without_an_engine_can_be_stopped_while_a_call_waits():
    server = BackendServer(ServerConfig(address="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        call = asyncio.ensure_future(code_of(stub(channel).Predict(HELLO)))
        await asyncio.wait([call], timeout=0.05)
        await asyncio.wait_for(server.stop(), TIMEOUT_S)
        assert (await asyncio.wait_for(call, TIMEOUT_S))[0] is not CODE.OK


async def test_of_too_many_connections_the_further_ones_are_closed():
    server = BackendServer(ServerConfig(address="127.0.0.1:0"), max_connections=3)
    address = await server.start()
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(4)]
    try:
        for channel in channels[:3]:
            assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
        assert (await code_of(stub(channels[3]).Health(pb.HealthMessage())))[0] is CODE.UNAVAILABLE
        await channels[0].close()
        last = stub(channels[3]).Health(pb.HealthMessage(), wait_for_ready=True, timeout=TIMEOUT_S)
        assert (await last).message == b"OK"
        # The others were not touched.
        assert (await stub(channels[1]).Health(pb.HealthMessage())).message == b"OK"
    finally:
        for channel in channels:
            await channel.close()
        await server.stop()


@pytest.mark.slow
async def test_a_slow_sender_is_waited_for_and_a_connection_without_a_client_is_not():
    server = server_of(ScriptedEngine(steps("ok")))
    address = await server.start()
    slow, silent = Line(room=400_000), Line(room=2000)
    async with (
        slow.to(address) as first,
        silent.to(address) as second,
        grpc.aio.insecure_channel(first) as channel,
        grpc.aio.insecure_channel(second) as other,
    ):
        assert (await stub(other).Health(pb.HealthMessage())).message == b"OK"
        silent.room = 0
        large = pb.PredictOptions(Prompt="hi", Metadata={"picture": "a" * 800_000})
        call = asyncio.ensure_future(stub(channel).Predict(large))
        # A peer has twenty seconds for the answer to a ping.
        await asyncio.wait([call], timeout=22)
        slow.has_more.set()
        assert (await asyncio.wait_for(call, TIMEOUT_S)).message == b"ok"
        await asyncio.wait_for(silent.is_closed.wait(), TIMEOUT_S)
    await server.stop()


async def test_a_token_is_asked_for_before_there_is_an_engine():
    server = BackendServer(ServerConfig(address="127.0.0.1:0", auth_token="key"))  # noqa: S106
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        for call in (stub(channel).Health(pb.HealthMessage()), stub(channel).Predict(HELLO)):
            assert (await code_of(call))[0] is CODE.UNAUTHENTICATED
    await server.stop()


async def test_a_unix_socket_in_use_is_refused_and_stays_where_it_is(tmp_path):
    address = f"unix:{tmp_path}/backend.sock"
    server = server_of(ScriptedEngine(), address=address)
    await server.start()
    second = server_of(ScriptedEngine(), address=address)
    with pytest.raises(AddressError, match="another process listens there"):
        await second.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
    await server.stop()


async def test_it_listens_on_ipv6():
    server = server_of(ScriptedEngine(), address="[::1]:0")
    try:
        address = await server.start()
    except AddressError:
        pytest.skip("no IPv6 here")
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
    await server.stop()


@pytest.mark.parametrize("service", ["", "backend.Backend", "backend.Inspector"])
async def test_the_standard_health_service_follows_the_server(service):
    engine = ScriptedEngine()
    request = health_pb2.HealthCheckRequest(service=service)
    server = server_of(engine)
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(request)).status == SERVING
        watch = health.Watch(request)
        assert (await watch.read()).status == SERVING
        await server.stop()
        assert (await watch.read()).status == NOT_SERVING


@pytest.mark.parametrize("service", ["", "backend.Backend", "backend.Inspector"])
async def test_the_standard_health_service_follows_the_engine(service):
    engine = ScriptedEngine()
    request = health_pb2.HealthCheckRequest(service=service)
    async with served(engine) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == SERVING
        for fault, status in (("no thread left", NOT_SERVING), ("", SERVING)):
            engine.become(fault)
            assert (await asyncio.wait_for(watch.read(), TIMEOUT_S)).status == status


async def test_while_draining_it_answers_but_does_not_serve():
    engine = ScriptedEngine(steps("ok"))
    engine.drained.clear()
    server = server_of(engine)
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stopping = asyncio.create_task(server.stop())
        await asyncio.wait_for(engine.closing.wait(), TIMEOUT_S)
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert (await check).status == NOT_SERVING
        assert (await stub(channel).Health(pb.HealthMessage())).message == b"OK"
        engine.drained.set()
        await asyncio.wait_for(stopping, TIMEOUT_S)


async def test_reflection_lists_the_services():
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    async with served(ScriptedEngine()) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        (answer,) = [answer async for answer in reflect([listing])]
    names = {service.name for service in answer.list_services_response.service}
    assert {"backend.Backend", "backend.Inspector", "grpc.health.v1.Health"} <= names


async def test_a_request_for_the_loaded_model_is_served():
    request = pb.PredictOptions(Prompt="hi", ModelIdentity="org/tiny")
    async with served(ScriptedEngine(steps("ok"))) as channel:
        assert (await stub(channel).Predict(request)).message == b"ok"


async def test_without_a_model_an_identity_is_no_mismatch():
    request = pb.PredictOptions(Prompt="hi", ModelIdentity="org/tiny")
    async with served(ScriptedEngine(loaded=False)) as channel:
        code, _ = await code_of(stub(channel).Predict(request))
    assert code is CODE.FAILED_PRECONDITION


@pytest.mark.parametrize("method", ["Predict", "PredictStream", "TokenizeString", "LoadModel"])
@pytest.mark.parametrize(
    ("data", "details"),
    [(b"\x0a\x02\xff\xfe", " is not valid UTF-8"), (b"\xff" * 9, " is not a backend.")],
)
async def test_bytes_that_are_no_request_are_an_invalid_argument(method, data, details):
    async with served(ScriptedEngine(steps("ok"))) as channel:
        call = raw(channel, method, data, streams=method == "PredictStream")
        code, given = await code_of(call)
    assert code is CODE.INVALID_ARGUMENT
    assert details in given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "code", "details"),
    [
        (MESSAGE_LIMIT_BYTES - 64, CODE.INVALID_ARGUMENT, "Prompt: at least 52428"),
        (MESSAGE_LIMIT_BYTES, CODE.INVALID_ARGUMENT, "Prompt: makes a message of 52428805 bytes"),
        (RECEIVE_LIMIT_BYTES, CODE.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max"),
    ],
)
async def test_a_message_may_have_50_mib(size, code, details):
    request = pb.PredictOptions(Prompt="x" * size)
    async with served(ScriptedEngine()) as channel:
        given = await code_of(stub(channel).Predict(request))
    assert given[0] is code
    assert given[1].startswith(details)


def frame(kind, flags, stream, payload=b""):
    """Return a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def field(name, value):
    """Return a header of a request, as HPACK writes one without tables."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def half_open_calls(count, path=b"/backend.Backend/Predict"):
    """Return the bytes of a connection with so many calls whose requests never come."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path}
    fields |= {b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc"}
    headers = b"".join(field(*each) for each in fields.items())
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    return begin + b"".join(frame(1, 4, 2 * number + 1, headers) for number in range(count))


async def test_thousands_of_half_open_calls_end_no_call_of_another():
    """GRPC itself ends any call while more than a thousand wait for the event loop."""
    server = server_of(ScriptedEngine(steps("ok")))
    host, port = (await server.start()).rsplit(":", 1)
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        await stub(channel).Health(pb.HealthMessage())
        with socket.create_connection((host, int(port))) as other:
            # The event loop takes none of them meanwhile.
            other.sendall(half_open_calls(6000))
            calls = [stub(channel).Health(pb.HealthMessage()) for _ in range(50)]
            assert {reply.message for reply in await asyncio.gather(*calls)} == {b"OK"}
            assert (await stub(channel).Predict(HELLO)).message == b"ok"
    await server.stop()


@pytest.mark.parametrize("path", [b"/backend.Backend/Pr\xecdict", b"\xff", b"/"])
async def test_a_call_whose_method_has_an_odd_name_ends_no_call_of_another(path):
    """GRPC itself accepts no calls any more after a name that is not UTF-8, and ends the others."""
    server = server_of(ScriptedEngine(steps("ok")))
    host, port = (await server.start()).rsplit(":", 1)
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        with socket.create_connection((host, int(port))) as other:
            other.sendall(half_open_calls(3, path))
            await asyncio.wait_for(asyncio.to_thread(read_frames, other, HEADERS, 3), TIMEOUT_S)
        assert (await code_of(raw(channel, "Sing", b"")))[0] is CODE.UNIMPLEMENTED
        assert (await stub(channel).Predict(HELLO)).message == b"ok"
        assert not watch.done()
    await server.stop()
