"""Score with questions, on tiny decision models with random weights, against mlx-vlm's own."""

import asyncio
import json
import math
import shutil
from functools import cache, partial

import grpc
import pytest
from serving import chat, code_of, read_for, served, stream, tokens_read, user
from transformers import AutoTokenizer
from vision import picture, shown
from waiting import until

from backend.pb import backend_pb2 as pb
from scripts.tiny_deciders import POSITIONS as TINY_POSITIONS
from scripts.tiny_deciders import build_clef, build_d1, build_d1_omni, build_decider2, mock_audio
from scripts.tiny_encoders import POSITIONS, build_decider

pytestmark = pytest.mark.mlx
CODE = grpc.StatusCode
ASKED = "Bä be ki? "
STATE = "ba bo ki [MASK] ne, me! "
CALLS = [
    ("choice", ["ba", "ki ne"], STATE),
    ("choice", ["ba", "bö", "du: da de", "x"], STATE * 3),
    ("score", ["ba", "ba"], "ku"),
    ("score", ["no", "la li", "so", "3"], STATE * 2),
    ("bool", [], STATE),
    ("noul", ["true", "false"], "ki 3 "),
    ("choice", ["b", "A", "C_d", "ñ"], ""),
    ("choice", ["x", "y"], STATE),
    ("choice", [f"b{i}" for i in range(12)], "ku"),
    ("choice", [f"k{i}" for i in range(28)], STATE),
]
# Clef reads the name of a question too.
NAME = "answer"
# Probabilities are rounded to four digits.
TOLERANCE = 1.01e-4
BUILDS = {
    "laya": build_decider,
    "d1": build_d1,
    "d1_omni": build_d1_omni,
    "clef": build_clef,
    "decider2": build_decider2,
    "decider2_isolated": partial(build_decider2, isolated_levels=True),
}


@pytest.fixture(scope="module")
def deciders(tmp_path_factory):
    """A checkpoint of each family, by its name; written when it is asked for."""
    directory = tmp_path_factory.mktemp("deciders")
    return cache(lambda name: BUILDS[name](directory / name))


@pytest.fixture(scope="module")
def decider(deciders):
    return deciders("laya")


@pytest.fixture(scope="module")
def alone():
    """The answer of mlx-vlm to a question by itself."""
    from mlx_vlm.decision import predict
    from mlx_vlm.utils import load_model

    @cache
    def loaded(path):
        with mock_audio():
            return load_model(path), AutoTokenizer.from_pretrained(path)

    def answer(path, kind, options, state):
        question = {"type": kind, "instructions": ASKED}
        if kind in ("choice", "score"):
            question["criteria"] = options
        return predict(*loaded(path), state, {NAME: question})["answers"][NAME]

    return answer


async def ask(backend, kind, options, state, **fields):
    request = pb.ScoreRequest(
        prompt=ASKED + state,
        candidates=options,
        stable_prefix_len=len(ASKED.encode()),
        question_type=kind,
        **fields,
    )
    return await backend.stub.Score(request)


def _flat(value, path=()):
    """Return the leaves of an object by their paths."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        inner: leaf
        for key, each in value.items()
        for inner, leaf in _flat(each, (*path, key)).items()
    }


def require_equal(response, options, wanted):
    """Compare an answer, and the probabilities of its candidates."""
    found, wanted = (_flat(each) for each in (json.loads(response.response_json), wanted))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        is_number = isinstance(value, float)
        assert found[key] == (pytest.approx(value, abs=TOLERANCE) if is_number else value), key
    if wanted["type",] == "bool":
        true = wanted["probability",]
        chances = [true if each == "true" else 1 - true for each in options or ["false", "true"]]
    else:
        chances = [each for path, each in wanted.items() if path[0] == "probabilities"]
    given = [math.exp(each.log_prob) for each in response.candidates]
    assert given == pytest.approx(chances, abs=TOLERANCE)
    assert [each.num_tokens for each in response.candidates] == [1] * len(chances)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.one_in(2)
async def test_answers_are_those_of_the_library_alone_and_in_company(shared, deciders, alone, name):
    decider = deciders(name)
    async with shared(decider) as backend:
        single = [await ask(backend, *call) for call in CALLS]
        together = await asyncio.gather(*(ask(backend, *call) for call in CALLS))
    wanted = [alone(decider, *call) for call in CALLS]
    for call, answer, response in zip(CALLS * 2, wanted * 2, [*single, *together], strict=True):
        require_equal(response, call[1], answer)


async def test_details_name_each_option_as_one_token(shared, decider):
    async with shared(decider) as backend:
        response = await ask(backend, *CALLS[0], include_token_logprobs=True, length_normalize=True)
    for option, scored in zip(CALLS[0][1], response.candidates, strict=True):
        assert [each.token for each in scored.tokens] == [option]
        assert scored.length_normalized_log_prob == scored.log_prob


async def test_what_is_no_question_is_refused_by_its_field(shared, decider, tiny_models):
    wrong = {
        "question_type: is empty: this model answers choice, score, bool": ("", ["a", "b"], "ba"),
        "question_type: must be one of choice, score, bool": ("multi_label", ["a", "b"], "ba"),
        "candidates: is empty": ("choice", [], "ba"),
        "candidates: holds 1 values, at least 2 are due": ("score", ["a"], "ba"),
        "candidates: holds a value twice": ("choice", ["a", "a"], "ba"),
        "candidates: of a bool question are none, or true and false": ("bool", ["no", "yes"], "ba"),
        "candidates[1]: takes 60 tokens, at most 48 are read": ("choice", ["a", "ba " * 60], "ba"),
        "candidates: take 128 tokens, at most 112 are read": (
            "choice",
            [f"{option} " * 31 for option in ("ba", "be", "bi", "bo")],
            "ba",
        ),
        "prompt: ": ("choice", ["a", "b"], "ba " * 2 * POSITIONS),
    }
    async with shared(decider) as backend:
        for problem, call in wrong.items():
            code, details = await code_of(ask(backend, *call))
            assert (code, details.startswith(problem)) == (CODE.INVALID_ARGUMENT, True), details
        long = pb.ScoreRequest(
            prompt="ba " * 120, stable_prefix_len=360, question_type="choice", candidates=["a", "b"]
        )
        code, details = await code_of(backend.stub.Score(long))
        assert (code, "its question takes" in details) == (CODE.INVALID_ARGUMENT, True)
        code, details = await code_of(backend.stub.Embedding(pb.PredictOptions(Embeddings="a")))
        assert (code, "answers questions" in details) == (CODE.UNIMPLEMENTED, True)
    async with shared(tiny_models("llama")) as backend:
        code, details = await code_of(ask(backend, *CALLS[0]))
    assert code is CODE.INVALID_ARGUMENT
    assert details.startswith("question_type: is not served: this model scores candidates")


LEVELS = [f"b{level}" for level in range(11)]


@pytest.mark.parametrize(
    ("name", "call", "problem"),
    [
        ("d1", ("score", LEVELS, "ba"), "candidates: holds 11 values, this model reads at most 10"),
        ("decider2", ("choice", ["ba"] * 256, "ba"), "candidates: holds 256 values, this model"),
        ("d1_omni", ("choice", ["a", "ba " * 60], "ba"), "candidates[1]: takes "),
        ("d1_omni", ("bool", [], "ba " * TINY_POSITIONS), "prompt: "),
    ],
)
async def test_each_family_has_limits_of_its_own(shared, deciders, name, call, problem):
    async with shared(deciders(name)) as backend:
        code, details = await code_of(ask(backend, *call))
    assert (code, details.startswith(problem)) == (CODE.INVALID_ARGUMENT, True), details


async def test_decoders_that_answer_questions_do_all_else_too(shared, deciders):
    plain = pb.ScoreRequest(prompt="ba be", candidates=[" bi", " bo"])
    async with shared(deciders("decider2")) as backend:
        code, details = await code_of(
            backend.stub.Score(pb.ScoreRequest(prompt="ba", question_type="bool"))
        )
        assert (code, details) == (
            CODE.INVALID_ARGUMENT,
            "stable_prefix_len: is 0: this model needs a question",
        )
        response = await backend.stub.Score(plain)
        assert [each.num_tokens > 0 for each in response.candidates] == [True, True]
        assert not response.response_json
        assert (await backend.stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=3))).tokens


async def test_d1_sees_as_the_lfm2_that_it_is(shared, deciders, tmp_path):
    copy = shutil.copytree(deciders("d1"), tmp_path / "lfm2")
    config = json.loads((copy / "config.json").read_text("utf-8")) | {"model_type": "lfm2_vl"}
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = [chat([user("what?")], **shown(picture(n)), Tokens=24, IgnoreEOS=True) for n in (1, 2)]
    replies = []
    for directory in (deciders("d1"), copy):
        async with shared(directory) as backend:
            replies.append([(await stream(backend.stub, each)).message for each in asked])
    assert replies[0] == replies[1]
    assert replies[0][0] != replies[0][1]


async def test_a_long_text_is_cut_as_upstream_does_if_the_options_say_so(decider, alone):
    async with served(decider, Options=["truncate:true"]) as backend:
        call = ("choice", ["a", "b"], "ba ki du " * POSITIONS)
        require_equal(await ask(backend, *call), call[1], alone(decider, *call))


async def test_calls_that_leave_end_their_work(shared, decider):
    call, count = ("choice", ["ba", "ki"], "ba be " * 30), 200
    async with shared(decider) as backend:
        tokens, start = await read_for(backend, ask(backend, *call)), tokens_read(backend)
        work = asyncio.gather(*(ask(backend, *call) for _ in range(count)))
        await until(lambda: tokens_read(backend) > start)
        work.cancel()
        await until(lambda: backend.is_idle)
        # It comes after all that is left.
        await ask(backend, *call)
        assert start < tokens_read(backend) < start + count * tokens


async def test_a_checkpoint_without_calibration_is_refused(shared, decider, tmp_path):
    copy = shutil.copytree(decider, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text("utf-8"))
    del config["decision_config"]["temperature"]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    async with shared() as backend:
        code, details = await code_of(backend.load(copy))
    assert (code, "settings of decisions are not whole" in details) == (CODE.INVALID_ARGUMENT, True)
