from functools import partial
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from serving import handled

from common.rpc import BearerTokenInterceptor, ModelIdentityInterceptor

ONE, MANY, CHAT = "/shop.Shop/One", "/shop.Shop/Many", "/shop.Shop/Chat"


async def one(request, _context):
    return request.ModelIdentity.encode()


async def many(request, context):
    await context.write(request.ModelIdentity.encode())
    await context.write(b"again")


async def chat(requests, _context):
    async for request in requests:
        yield request.ModelIdentity.encode()


def as_request(data):
    return SimpleNamespace(ModelIdentity=data.decode())


HANDLERS = {
    "One": grpc.unary_unary_rpc_method_handler(one, as_request),
    "Many": grpc.unary_stream_rpc_method_handler(many, as_request),
    "Chat": grpc.stream_stream_rpc_method_handler(chat, as_request),
}


served = partial(handled, "shop.Shop", HANDLERS)


async def ask_one(channel, name, **options):
    return [await channel.unary_unary(ONE)(name.encode(), **options)]


async def ask_many(channel, name, **options):
    return [reply async for reply in channel.unary_stream(MANY)(name.encode(), **options)]


async def ask_chat(channel, name, **options):
    call = channel.stream_stream(CHAT)([name.encode()], **options)
    return [reply async for reply in call]


async def listen_to_chat(channel, _name, **options):
    # Writing to a call that is being refused is a race, which grpcio's client reports as its own.
    return [await channel.stream_stream(CHAT)(**options).read()]


def bearer(value):
    return grpc.aio.Metadata(("authorization", value))


@pytest.mark.parametrize("ask", [ask_one, ask_many, ask_chat])
async def test_the_token_opens_every_kind_of_method(ask):
    async with served(BearerTokenInterceptor("s3cret")) as channel:
        assert await ask(channel, "a", metadata=bearer("Bearer s3cret"))


@pytest.mark.parametrize("ask", [ask_one, ask_many, listen_to_chat])
@pytest.mark.parametrize(
    "metadata",
    [
        None,
        bearer("Bearer wrong"),
        bearer("s3cret"),
        bearer("bearer s3cret"),
        bearer("Bearer s3cret "),
        bearer(""),
        grpc.aio.Metadata(("authorization", "Bearer s3cret"), ("authorization", "Bearer x")),
    ],
)
async def test_anything_else_is_unauthenticated(ask, metadata):
    async with served(BearerTokenInterceptor("s3cret")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "a", metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "bearer token" in caught.value.details()


async def test_a_slash_at_the_end_of_a_directory_makes_no_other_model():
    async with served(ModelIdentityInterceptor(lambda: "models/mine")) as channel:
        await ask_one(channel, "models/mine/")


@pytest.mark.parametrize("ask", [ask_one, ask_many])
async def test_a_request_for_another_model_is_refused(ask):
    async with served(ModelIdentityInterceptor(lambda: "mine")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "model identity mismatch" in caught.value.details()


@pytest.mark.parametrize(
    ("asked", "loaded"), [("mine", "mine"), ("", "mine"), ("mine", ""), ("", "")]
)
async def test_an_empty_name_matches_everything(asked, loaded):
    async with served(ModelIdentityInterceptor(lambda: loaded)) as channel:
        assert await ask_one(channel, asked) == [asked.encode()]
        assert await ask_many(channel, asked) == [asked.encode(), b"again"]


async def test_the_name_is_asked_for_at_each_request():
    names = iter(["first", "second"])
    async with served(ModelIdentityInterceptor(lambda: next(names))) as channel:
        assert await ask_one(channel, "first") == [b"first"]
        assert await ask_one(channel, "second") == [b"second"]


async def test_methods_that_receive_a_stream_are_let_through():
    async with served(ModelIdentityInterceptor(lambda: "mine")) as channel:
        assert await ask_chat(channel, "other") == [b"other"]


@pytest.mark.parametrize(
    "interceptor", [BearerTokenInterceptor("s3cret"), ModelIdentityInterceptor(lambda: "mine")]
)
async def test_an_unknown_method_stays_unknown(interceptor):
    async with served(interceptor) as channel:
        call = channel.unary_unary("/shop.Shop/None")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"a", metadata=bearer("Bearer s3cret"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
