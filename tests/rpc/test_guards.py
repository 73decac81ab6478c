"""Which calls need the token, and which are for one model only: every method has its row here."""

from typing import NamedTuple

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from scripted_engine import ScriptedEngine, served, steps
from serving import code_of

from backend.rpc.server import SERVICES
from common.rpc import IDENTITY_FIELD

CODE = grpc.StatusCode
SESAME = "s3cret"
SESAME_METADATA = (("authorization", f"Bearer {SESAME}"),)


class Guards(NamedTuple):
    """The needs of a call: the process's token if there is one, the loaded model's name."""

    token: bool
    identity: bool


# Without these fields, a request is refused before its model is compared.
FIELDS = {
    "Rerank": {"query": "a", "documents": ["b"]},
    "Score": {"prompt": "a", "candidates": ["b"]},
    "TokenClassify": {"text": "a"},
    "Embedding": {"Embeddings": "a"},
    "AudioTranscription": {"dst": __file__},
    "AudioTranscriptionStream": {"dst": __file__},
}

OPEN_TO_HOSTS = Guards(token=True, identity=False)
FOR_ONE_MODEL = Guards(token=True, identity=True)

GUARDS = {
    "/backend.Backend/Health": OPEN_TO_HOSTS,
    "/backend.Backend/Free": OPEN_TO_HOSTS,
    "/backend.Backend/LoadModel": OPEN_TO_HOSTS,
    "/backend.Backend/Predict": FOR_ONE_MODEL,
    "/backend.Backend/PredictStream": FOR_ONE_MODEL,
    "/backend.Backend/Embedding": FOR_ONE_MODEL,
    "/backend.Backend/TokenizeString": FOR_ONE_MODEL,
    "/backend.Backend/Rerank": FOR_ONE_MODEL,
    "/backend.Backend/Score": FOR_ONE_MODEL,
    # These messages name no model.
    "/backend.Backend/Detokenize": OPEN_TO_HOSTS,
    "/backend.Backend/Status": OPEN_TO_HOSTS,
    "/backend.Backend/GetMetrics": OPEN_TO_HOSTS,
    "/backend.Backend/ModelMetadata": OPEN_TO_HOSTS,
    "/backend.Backend/TokenClassify": FOR_ONE_MODEL,
    "/backend.Backend/AudioTranscription": FOR_ONE_MODEL,
    "/backend.Backend/AudioTranscriptionStream": FOR_ONE_MODEL,
    "/backend.Backend/StartFineTune": OPEN_TO_HOSTS,
    "/backend.Backend/FineTuneProgress": OPEN_TO_HOSTS,
    "/backend.Backend/StopFineTune": OPEN_TO_HOSTS,
    "/backend.Backend/ListCheckpoints": OPEN_TO_HOSTS,
    "/backend.Backend/ExportModel": OPEN_TO_HOSTS,
    "/backend.Backend/StartQuantization": OPEN_TO_HOSTS,
    "/backend.Backend/QuantizationProgress": OPEN_TO_HOSTS,
    "/backend.Backend/StopQuantization": OPEN_TO_HOSTS,
    "/backend.Inspector/Inspect": OPEN_TO_HOSTS,
    "/backend.Inspector/InspectPromptCache": OPEN_TO_HOSTS,
    "/grpc.health.v1.Health/Check": OPEN_TO_HOSTS,
    "/grpc.health.v1.Health/Watch": OPEN_TO_HOSTS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPEN_TO_HOSTS,
}
STANDARD_SERVICES = (
    *health_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in (*SERVICES, *STANDARD_SERVICES)
    for method in service.methods
}


def call(channel, path, data=b"", **options):
    """Make a call of the method's own shape, and return an awaitable of its first reply."""
    method = METHODS[path]
    if method.client_streaming:
        return channel.stream_stream(path)(**options).read()
    if method.server_streaming:
        return channel.unary_stream(path)(data, **options).read()
    return channel.unary_unary(path)(data, **options)


def test_every_method_has_a_row():
    assert sorted(METHODS) == sorted(GUARDS)


def test_the_guarded_messages_are_those_that_name_a_model():
    named = {path for path, m in METHODS.items() if IDENTITY_FIELD in m.input_type.fields_by_name}
    assert named == {path for path, guards in GUARDS.items() if guards.identity}


@pytest.mark.parametrize("path", GUARDS)
async def test_a_call_without_the_token_is_refused(path):
    assert GUARDS[path].token
    async with served(ScriptedEngine(), auth_token=SESAME) as channel:
        code, details = await code_of(call(channel, path))
        wrong = (("authorization", "Bearer other"),)
        assert await code_of(call(channel, path, metadata=wrong)) == (code, details)
    assert (code, "bearer token" in details) == (CODE.UNAUTHENTICATED, True)


async def test_a_call_with_the_token_is_served():
    async with served(ScriptedEngine(), auth_token=SESAME) as channel:
        for path in ("/backend.Backend/Health", "/grpc.health.v1.Health/Check"):
            assert await call(channel, path, metadata=SESAME_METADATA) is not None


class Loading(ScriptedEngine):
    """Has no model until a request waits for it."""

    async def loaded_model(self, timeout_s):  # noqa: ARG002
        return ScriptedEngine().model


@pytest.mark.parametrize("path", [path for path, guards in GUARDS.items() if guards.identity])
async def test_a_request_that_waited_for_another_model_is_refused(path):
    fields = {IDENTITY_FIELD: "org/other", **FIELDS.get(path.rpartition("/")[2], {})}
    request = GetMessageClass(METHODS[path].input_type)(**fields)
    async with served(Loading(loaded=False)) as channel:
        code, details = await code_of(call(channel, path, request.SerializeToString()))
    assert (code, "model identity mismatch" in details) == (CODE.NOT_FOUND, True)


@pytest.mark.parametrize("path", [path for path, guards in GUARDS.items() if guards.identity])
async def test_a_request_for_another_model_is_refused(path):
    request = GetMessageClass(METHODS[path].input_type)(**{IDENTITY_FIELD: "org/other"})
    async with served(ScriptedEngine(steps("ok"))) as channel:
        code, details = await code_of(call(channel, path, request.SerializeToString()))
    assert (code, "model identity mismatch" in details) == (CODE.NOT_FOUND, True)
