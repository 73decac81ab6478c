import asyncio
import gc
import weakref

import grpc
import pytest
from scripted_engine import ScriptedEngine, served, stub
from serving import code_of
from waiting import until

from backend import errors
from backend.engine.supervision.open_calls import OpenCalls
from backend.pb import backend_pb2 as pb
from backend.rpc.server import STATUS_CODES, status_code
from common.log import MAX_MESSAGE_BYTES

ERROR_TYPES = [error for error in vars(errors).values() if isinstance(error, type)]


def ancestors_in_table(error_type):
    return [kind for kind in error_type.__mro__ if kind in STATUS_CODES]


@pytest.mark.parametrize("error_type", ERROR_TYPES)
def test_every_error_but_those_that_others_extend_has_a_status(error_type):
    is_extended = error_type in {errors.BackendError, errors.FieldError}
    assert bool(ancestors_in_table(error_type)) != is_extended


def test_an_error_without_a_row_takes_the_row_of_its_parent():
    assert status_code(errors.ContextLengthError("Prompt", "x")) == grpc.StatusCode.INVALID_ARGUMENT


def test_only_a_missing_model_is_a_failed_precondition():
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    assert [kind for kind, code in STATUS_CODES.items() if code is precondition] == [
        errors.ModelNotLoadedError
    ]


@pytest.mark.parametrize("error", [errors.BackendError("x"), ValueError("x"), KeyError("x")])
def test_what_nobody_planned_for_has_no_status(error):
    assert status_code(error) is None


LONG = 300_000


@pytest.mark.parametrize("letter", ["x", "é", "\n", "\0"])
@pytest.mark.parametrize(
    ("method", "request_with", "code", "end"),
    [
        (
            "Predict",
            lambda text: pb.PredictOptions(Messages=[pb.Message(role=text)]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "",
        ),
        (
            "PredictStream",
            lambda text: pb.PredictOptions(Prompt="a", Metadata={"enable_thinking": text}),
            grpc.StatusCode.INVALID_ARGUMENT,
            "",
        ),
        (
            "Predict",
            lambda text: pb.PredictOptions(ModelIdentity=text),
            grpc.StatusCode.NOT_FOUND,
            "'org/tiny' is loaded",
        ),
        (
            "LoadModel",
            lambda text: pb.ModelOptions(Model="a", Options=[f"max_slots:{text}"]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "",
        ),
    ],
)
async def test_an_error_that_quotes_a_long_field_arrives(letter, method, request_with, code, end):
    async with served(ScriptedEngine()) as channel:
        call = getattr(stub(channel), method)(request_with(letter * LONG))
        found, details = await code_of(call if method != "PredictStream" else call.read())
    assert found is code
    assert len(details.encode()) <= MAX_MESSAGE_BYTES
    assert details.endswith(end)


class Picture:
    """Something large."""


class FailingEngine(ScriptedEngine):
    """Fails deep below a call, with a picture in hand."""

    def __init__(self):
        super().__init__()
        self.pictures = []

    def submit(self, _model, _request):
        try:
            self._decode()
        except ValueError:
            raise errors.InvalidRequestError("Images[0]", "is damaged") from None

    def _decode(self):
        picture = Picture()
        self.pictures.append(weakref.ref(picture))
        raise ValueError


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class MortalEngine(ScriptedEngine):
    """Keeps its callers waiting, until one failure ends them all."""

    def __init__(self):
        super().__init__()
        self.calls = OpenCalls()

    def submit(self, _model, request):
        return self.calls.submit(request)


async def test_one_failure_ends_the_calls_of_many_and_each_by_itself(caplog):
    engine, count = MortalEngine(), 12
    async with served(engine) as channel:
        calls = [
            asyncio.create_task(code_of(stub(channel).Predict(pb.PredictOptions(Prompt="a"))))
            for _ in range(count)
        ]
        await until(lambda: len(engine.calls.requests) == count)
        engine.calls.fail_all(errors.ContextLengthError("Prompt", "is too long"))
        ends = await asyncio.gather(*calls)
    assert ends == [(grpc.StatusCode.INVALID_ARGUMENT, "Prompt: is too long")] * count
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.usefixtures("no_collector")
async def test_a_call_that_failed_holds_nothing_of_what_it_was_about():
    engine, prompt = FailingEngine(), "a picture, and this"
    async with served(engine) as channel:
        code, _ = await code_of(stub(channel).Predict(pb.PredictOptions(Prompt=prompt)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [picture() for picture in engine.pictures] == [None]
    requests = [held for held in gc.get_objects() if isinstance(held, pb.PredictOptions)]
    assert prompt not in [request.Prompt for request in requests]
