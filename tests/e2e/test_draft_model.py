"""A draft model through the socket: found as hosts name it, seen by people, refused by name."""

import json
import shutil

import grpc
import pytest
from serving import (
    SPOKEN,
    code_of,
    goes_on_after_a_loss,
    inspect,
    require_same,
    served,
    spoken,
    stream,
    until_accepted,
)

from backend.pb import backend_pb2 as pb
from scripts.draft_pair import split_off
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A models directory: a model of many layers, and a draft model of its first one."""
    directory = tmp_path_factory.mktemp("models")
    build("llama", directory / "large", num_hidden_layers=8)
    split_off(directory / "large", directory / "small")
    return directory


def budget_of(report):
    return report.memory.breakdown["kv_budget"]


async def test_it_drafts_and_no_reply_changes(models, caplog):
    caplog.set_level("INFO")
    async with served(models / "large", DraftModel=str(models / "small")) as backend:
        await require_same(backend, SPOKEN)
        report = await until_accepted(backend, spoken())
        assert report.model.draft_model == str(models / "small")
        assert report.memory.breakdown["draft_weights"] > 0
    assert "drafted=" in caplog.text


@pytest.mark.parametrize("named", ["small", "{models}/small", "{models}{models}/small"])
async def test_it_is_found_however_the_host_writes_its_path(models, named):
    named = named.format(models=models)
    options = {"ModelPath": str(models), "DraftModel": named}
    async with served(models / "large", **options) as backend:
        assert (await inspect(backend)).model.draft_model == str(models / "small")


async def test_it_is_an_option_too_which_wins(models):
    options = [f"draft_model:{models / 'small'}", "speculation:draft"]
    async with served(models / "large", Options=options, DraftModel="/none") as backend:
        assert (await inspect(backend)).model.draft_model == str(models / "small")


async def test_a_stream_goes_on_with_it_when_the_engine_is_lost(models):
    asked = pb.PredictOptions(Prompt="ba", Tokens=500, IgnoreEOS=True, Temperature=0.9, Seed=7)
    async with served(models / "large", DraftModel=str(models / "small")) as backend:
        alone = await stream(backend.stub, asked)
        assert (await goes_on_after_a_loss(backend, asked)).message == alone.message
        assert backend.engine.status().memory_bytes["draft_weights"] > 0


def other_words(models, tmp_path):
    """A draft model with the words of two tokens exchanged."""
    draft = shutil.copytree(models / "small", tmp_path / "other")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    words["b"], words["c"] = words["c"], words["b"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return draft


async def test_one_that_cannot_draft_is_refused_by_name(models, tmp_path, tiny_models):
    refusals = [
        (tmp_path / "none", grpc.StatusCode.NOT_FOUND, "draft_model: there is no model"),
        (
            other_words(models, tmp_path),
            grpc.StatusCode.INVALID_ARGUMENT,
            "draft_model: it has another vocabulary than the model: 2 of",
        ),
        (tiny_models("mamba2"), grpc.StatusCode.INVALID_ARGUMENT, "cannot draft: it has"),
    ]
    async with served() as backend:
        for path, code, words in refusals:
            found = await code_of(backend.load(models / "large", DraftModel=str(path)))
            assert words in found[1]
            assert found[0] is code


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["speculation:draft"], "draft_model: is missing, and speculation is draft"),
        (["draft_model:" + "x" * 2000], "draft_model: is a path of more than"),
    ],
)
async def test_options_that_do_not_fit_are_refused(models, options, told):
    async with served() as backend:
        code, details = await code_of(backend.load(models / "large", Options=options))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert told in details


async def test_a_negative_bound_of_drafts_is_refused(models):
    async with served(models / "large") as backend:
        code, details = await code_of(backend.stub.Predict(spoken(NDraft=-1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "NDraft: must be at least 0, not -1"


async def test_one_that_is_not_used_is_told_at_load_and_leaves_its_memory(models, caplog):
    options = {"DraftModel": str(models / "small"), "Options": ["speculation:lookup"]}
    async with served(models / "large", **options) as backend:
        alone = await inspect(backend)
        assert not alone.model.draft_model
        await backend.load(models / "large", DraftModel=options["DraftModel"])
        assert budget_of(await inspect(backend)) < budget_of(alone)
    assert f"draft_model {str(models / 'small')!r} is not loaded: speculation is lookup" in (
        caplog.text
    )
