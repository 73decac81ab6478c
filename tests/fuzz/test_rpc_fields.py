"""Odd requests to every RPC of a real process: each gets an answer, or a status that is not a bug.

More of it: `pytest tests/fuzz --hypothesis-profile=long`.
"""

import os

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from odd_messages import messages
from real_process import TIMEOUT_S, real_backend
from waiting import wait_until

from backend.pb import backend_pb2 as pb

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.timeout(0),
    # Hypothesis warns that a text is long when it reports a failure.
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning"),
]

BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
METHODS = {
    method.name: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# Loads change the state that the others find; they have a test of their own.
SERVING = sorted(set(METHODS) - {"LoadModel", "Free"})
MAX_GROWTH_MB = 250.0

# Fields that make a request of each type valid and short.
GOOD = {
    "PredictOptions": {"Prompt": "ba be", "Tokens": 3, "Embeddings": "ba"},
    "RerankRequest": {"query": "ba", "documents": ["be", "bi"]},
    "ScoreRequest": {"prompt": "ba", "candidates": ["be"]},
    "DetokenizeRequest": {"tokens": [5, 6]},
}
CHAT = {"UseTokenizerTemplate": True, "Messages": [{"role": "user", "content": "ba"}]}

# There are fifty of these tests: a third of the usual examples is enough for each.
profile = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=settings.default.max_examples // 3,
)


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    log = tmp_path_factory.mktemp("fuzz") / "log"
    with real_backend(log, os.environ | {"HF_HUB_OFFLINE": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def loaded(backend, tiny_models):
    backend.load(tiny_models("llama"), MaxModelLen=256)
    return backend


def full_name(method):
    return f"/{METHODS[method].containing_service.full_name}/{method}"


def ask(backend, method, data):
    """Send bytes, and return the status of the reply and its details."""
    streams = METHODS[method].server_streaming
    kind = backend.channel.unary_stream if streams else backend.channel.unary_unary
    try:
        replies = kind(full_name(method))(data, timeout=TIMEOUT_S)
        assert not streams or list(replies)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def require_sane(backend, method, data):
    code, details = ask(backend, method, data)
    event(code.name)
    assert code not in BUGS, (code, details, backend.process.log_tail(3))
    assert code is grpc.StatusCode.OK or details
    assert backend.stub.Health(pb.HealthMessage(), timeout=TIMEOUT_S).message == b"OK"


@pytest.fixture
def unmoved(loaded):
    """The backend; after all examples of a test it has to be as it was before them."""
    before = loaded.resident_mb
    yield loaded
    wait_until(loaded.is_idle)
    assert loaded.resident_mb < before + MAX_GROWTH_MB


@pytest.mark.parametrize("method", SERVING)
@profile
@given(data=st.data(), is_chat=st.booleans())
@pytest.mark.one_in(2)
def test_odd_fields_are_answered_or_refused(unmoved, method, data, is_chat):
    kind = GetMessageClass(METHODS[method].input_type)
    base = GOOD.get(kind.DESCRIPTOR.name, {})
    chat = CHAT if is_chat and kind is pb.PredictOptions else {}
    odd = data.draw(messages(kind.DESCRIPTOR))
    require_sane(unmoved, method, kind(**(base | chat | odd)).SerializeToString())


@pytest.mark.parametrize("method", SERVING)
@profile
@given(data=st.binary(max_size=60))
def test_bytes_of_any_kind_are_answered_or_refused(unmoved, method, data):
    require_sane(unmoved, method, data)


@profile
@given(odd=messages(pb.ModelOptions.DESCRIPTOR))
def test_odd_loads_are_refused_or_work(backend, tiny_models, odd):
    base = {"Model": str(tiny_models("llama")), "MaxModelLen": 256}
    require_sane(backend, "LoadModel", pb.ModelOptions(**(base | odd)).SerializeToString())


def test_behind_odd_loads_a_good_one_works(backend, tiny_models):
    backend.load(tiny_models("llama"))
    assert backend.stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=2)).tokens == 2
