"""A head through the socket: found in its checkpoint or named, refused by name."""

import re
import shutil

import grpc
import mlx.core as mx
import pytest
from serving import (
    SPOKEN,
    Stderr,
    chat,
    code_of,
    goes_on_after_a_loss,
    inspect,
    require_same,
    served,
    spoken,
    stream,
    undrafted,
    until_accepted,
    user,
)
from vision import picture, shown

from backend.pb import backend_pb2 as pb
from scripts import tiny_vision
from scripts.eagle_head import add_eagle
from scripts.mtp_head import NEMOTRON, add_head, write
from scripts.nextn_head import add_nextn
from scripts.sweep.vision_models import build_vision_model
from scripts.tiny_drafters import GEMMA4, LAGUNA, MUSE, add_assistant, add_block
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx


# Drafters of blocks, and their models.
BLOCKS = {
    **dict.fromkeys(("dflash", "dflash2", "dspark"), "qwen3"),
    "muse": "muse_glimmer",
    "laguna": "laguna_s",
}
DEEP = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of many layers: some that contain a head, and others whose heads are apart."""
    directory = tmp_path_factory.mktemp("models")
    for family in ("qwen3_5", "qwen3_next", "llama"):
        build(family, directory / family, num_hidden_layers=8)
    add_head(directory / "qwen3_5", is_right=True)
    add_head(directory / "qwen3_next", directory / "head", is_right=True)
    glm = build("deepseek_v3", directory / "glm", num_hidden_layers=8, model_type="glm4_moe_lite")
    add_nextn(glm, is_right=True)
    for layout, is_nested in (("flat", False), ("nested", True)):
        add_eagle(directory / "llama", directory / layout, is_right=True, is_nested=is_nested)
    build("llama", directory / "gemma", **GEMMA4 | DEEP)
    add_assistant(directory / "gemma", directory / "assistant", is_right=True)
    build("nemotron_h", directory / "nemotron", **NEMOTRON, hybrid_override_pattern=["M", "*"] * 4)
    add_head(directory / "nemotron", is_right=True)
    add_head(build_vision_model("glm5_next", directory / "glm5_next"), is_right=True)
    build("qwen3", directory / "qwen3", num_hidden_layers=8)
    build("llama", directory / "muse_glimmer", **MUSE | {"num_hidden_layers": 8})
    build("llama", directory / "laguna_s", **LAGUNA | DEEP)
    for kind, model in BLOCKS.items():
        add_block(directory / model, directory / kind, kind, is_right=True)
    return directory


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3_5", {}),
        ("qwen3_next", {"DraftModel": "head", "Options": ["speculation:mtp"]}),
        ("glm", {}),
        ("nemotron", {}),
        ("glm5_next", {"Options": ["speculation:mtp"]}),
        ("llama", {"DraftModel": "flat"}),
        ("llama", {"DraftModel": "nested", "Options": ["speculation:mtp"]}),
        ("gemma", {"DraftModel": "assistant", "Options": ["speculation:mtp"]}),
        *[
            (model, {"DraftModel": kind, "Options": ["speculation:mtp"]})
            for kind, model in BLOCKS.items()
        ],
    ],
)
@pytest.mark.one_in(5)
async def test_it_drafts_and_no_reply_changes(models, model, options):
    async with served(models / model, ModelPath=str(models), **options) as backend:
        await require_same(backend, SPOKEN)
        report = await until_accepted(backend, spoken())
        assert report.model.draft_model == str(models / options.get("DraftModel", model))
        assert report.memory.breakdown["draft_weights"] > 0


@pytest.mark.parametrize("kind", [*BLOCKS, "glm5_next"])
@pytest.mark.one_in(4)
async def test_a_stream_goes_on_with_it_when_the_engine_is_lost(models, kind):
    asked = pb.PredictOptions(Prompt="ba", Tokens=120, IgnoreEOS=True, Temperature=0.9, Seed=7)
    head = {"DraftModel": str(models / kind)} if kind in BLOCKS else {}
    options = {**head, "Options": ["speculation:mtp"]}
    async with served(models / BLOCKS.get(kind, kind), **options) as backend:
        alone = await stream(backend.stub, undrafted(asked))
        assert (await goes_on_after_a_loss(backend, asked)).message == alone.message
        # The new engine counts from 0.
        await until_accepted(backend, asked)


async def test_what_is_no_head_of_the_model_is_refused_by_name(models, tiny_models):
    plain, llama = tiny_models("qwen3_5"), tiny_models("llama")
    wide = add_head(build("qwen3_5", models / "wide", hidden_size=128), models / "wide_head")
    unusable = models / "unusable"
    write(unusable, {"model_type": "qwen4_exp_mtp"}, {"norm.weight": mx.ones(4)})
    refusals = [
        (plain, "", "speculation: .* brings no MTP head that can be used"),
        (plain, wide, "draft_model: .* is for states of 128 numbers, and the model has 64"),
        (plain, plain, "draft_model: .* is no head, and speculation is mtp"),
        (llama, "", "speculation: .* brings no MTP head that can be used"),
        (llama, models / "flat", "draft_model: .* after layers 2, 1, -1, and the model has 2"),
        (
            llama,
            unusable,
            r"draft_model: .* \(qwen4_exp_mtp\) cannot draft: the caches of",
        ),
        (llama, models / "dflash", "draft_model: .* num_target_layers is 8, and 2 here"),
        (llama, models / "assistant", "draft_model: the assistant is for a Gemma 4, and"),
    ]
    async with served() as backend:
        for model, head, words in refusals:
            load = backend.load(model, DraftModel=str(head), Options=["speculation:mtp"])
            code, details = await code_of(load)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert re.search(words, details)


async def test_one_that_nobody_asked_for_and_that_is_broken_stops_no_load(tmp_path, capfd):
    directory = add_head(build("qwen3_5", tmp_path))
    weights = mx.load(str(directory / "model.safetensors"))
    del weights["mtp.fc.weight"]
    mx.eval(weights)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    async with served(directory) as backend:
        assert (await stream(backend.stub, spoken())).message
        assert not (await inspect(backend)).model.draft_model
        log = Stderr(capfd)
        await log.holds("the MTP head of")
        assert "WARNING" in log.text
        code, details = await code_of(backend.load(directory, Options=["speculation:mtp"]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("speculation: ")
    assert "do not match its config.json: Missing 1 parameters" in details


async def test_the_log_says_which_of_two_heads_drafts_and_why(models, tmp_path, capfd):
    head = add_head(shutil.copytree(models / "qwen3_5", tmp_path / "model"), tmp_path / "head")
    async with served(models / "qwen3_5", DraftModel=str(head)):
        log = Stderr(capfd)
        await log.holds(f"{head} (MTP head, 0.00 GB) drafts")
        await log.holds("it drafts where a request's grammar and text do not")
        await log.holds(f"the MTP head in {models / 'qwen3_5'} does not draft: draft_model wins")


async def test_it_is_not_loaded_where_nothing_may_draft(models):
    async with served(models / "qwen3_5", Options=["speculation:lookup"]) as backend:
        assert not (await inspect(backend)).model.draft_model


@pytest.mark.parametrize(
    ("family", "add", "is_right"),
    [("qwen3_5", add_head, True), ("gemma4", add_assistant, False)],
)
@pytest.mark.one_in(2)
async def test_a_model_that_sees_is_drafted_for_by_its_head(tmp_path, family, add, is_right):
    directory = tiny_vision.build(family, tmp_path / "model")
    head = add(directory, tmp_path / "head", is_right=is_right)
    asked = [
        chat([user(f"{n}: what is it?")], **shown(picture(n)), Tokens=30, IgnoreEOS=True)
        for n in range(2)
    ]
    async with served(directory, DraftModel=str(head)) as backend:
        await require_same(backend, asked)
        if is_right:
            await until_accepted(backend, asked[0])
        assert (await inspect(backend)).drafted_tokens > 0
