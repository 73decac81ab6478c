"""Long jobs as the host runs them: a load of the backend's own name, a start, progress, an end."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import grpc
import grpc.aio
import mlx.core as mx
import pytest
from real_process import child_jobs
from serving import Served, Stderr, code_of, served

from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx
CODE = grpc.StatusCode


async def quantise(backend: Served, **fields):
    started = await backend.stub.StartQuantization(pb.QuantizationRequest(**fields))
    assert started.success
    request = pb.QuantizationProgressRequest(job_id=started.job_id)
    return [update async for update in backend.stub.QuantizationProgress(request)]


async def train(backend: Served, **fields):
    started = await backend.stub.StartFineTune(pb.FineTuneRequest(**fields))
    assert started.success
    request = pb.FineTuneProgressRequest(job_id=started.job_id)
    return [update async for update in backend.stub.FineTuneProgress(request)]


@pytest.fixture
def dataset(tmp_path):
    """Twenty conversations about one thing, as a JSONL file."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say hello to Ada {number}."},
                {"role": "assistant", "content": "Hello, Ada!"},
            ]
        }
        for number in range(20)
    ]
    path = tmp_path / "hello.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def tokens_of(directory):
    """Return the files that define a checkpoint's tokens, as they are."""
    return [(directory / f"{name}.json").read_bytes() for name in ("tokenizer", "tokenizer_config")]


async def last_of(updates):
    """Read the rest of a stream and return its last message."""
    last = None
    while (update := await updates.read()) is not grpc.aio.EOF:
        last = update
    return last


def lora(dataset, output_dir, **fields):
    return {
        "model": str(MODEL_DIR),
        "dataset_source": str(dataset),
        "output_dir": str(output_dir),
        "adapter_rank": 4,
        "max_steps": 4,
        "gradient_accumulation_steps": 1,
        **fields,
    }


async def test_a_load_of_the_backends_own_name_loads_nothing(tmp_path):
    async with served() as backend:
        result = await backend.load("mlx", ModelPath=str(tmp_path), ModelFile=str(tmp_path / "mlx"))
        assert result.success
        assert backend.engine.model is None


async def test_a_load_for_jobs_frees_the_model(tmp_path):
    async with served(MODEL_DIR) as backend:
        assert (await backend.load("mlx", ModelPath=str(tmp_path))).success
        assert backend.engine.model is None
        code, details = await code_of(backend.stub.Predict(pb.PredictOptions(Prompt="a")))
    assert (code, details) == (CODE.FAILED_PRECONDITION, "model not loaded")


async def test_a_stopped_quantisation_leaves_nothing(tmp_path):
    async with served() as backend:
        request = pb.QuantizationRequest(model=str(MODEL_DIR), output_dir=str(tmp_path), job_id="a")
        await backend.stub.StartQuantization(request)
        updates = backend.stub.QuantizationProgress(pb.QuantizationProgressRequest(job_id="a"))
        while (await updates.read()).message != "comparing perplexities":
            pass
        stopped = await backend.stub.StopQuantization(pb.QuantizationStopRequest(job_id="a"))
        assert (stopped.success, stopped.message) == (True, "stopped")
        last = await last_of(updates)
    assert (last.status, last.output_file) == ("stopped", "")
    assert list(tmp_path.iterdir()) == []


async def test_a_result_that_is_there_already_is_not_written_over(tmp_path):
    target = tmp_path / f"{MODEL_DIR.name}-q8"
    target.mkdir()
    fields = {"model": str(MODEL_DIR), "quantization_type": "q8", "output_dir": str(tmp_path)}
    async with served() as backend:
        last = (await quantise(backend, **fields))[-1]
    assert (last.status, last.message) == ("failed", f"output_dir: {target} exists already")
    assert list(target.iterdir()) == []


async def test_no_job_writes_into_the_model_that_it_reads(tmp_path, dataset):
    source = shutil.copytree(MODEL_DIR, tmp_path / "model")
    link = tmp_path / "link"
    link.symlink_to(source)
    before = sorted(source.iterdir())
    async with served() as backend:
        trained = await train(backend, **lora(dataset, link / "out", model=str(source)))
        fields = {"model": str(source), "quantization_type": "q8", "output_dir": str(link)}
        quantised = await quantise(backend, **fields)
    for last, name in ((trained[-1], "out"), (quantised[-1], "model-q8")):
        told = f"output_dir: {link / name} is inside {source}, which the job reads"
        assert (last.status, last.message) == ("failed", told)
    assert sorted(source.iterdir()) == before


async def test_jobs_are_two_at_once_and_one_for_each_place(tmp_path, dataset):
    async with served() as backend:
        fields = [lora(dataset, tmp_path / name, max_steps=100_000) for name in "abc"]
        start = backend.stub.StartFineTune
        await start(pb.FineTuneRequest(**fields[0], job_id="first"))
        code, details = await code_of(start(pb.FineTuneRequest(**fields[0])))
        assert (code, details) == (
            CODE.INVALID_ARGUMENT,
            f"output_dir: job 'first' is writing to {tmp_path / 'a'}",
        )
        await start(pb.FineTuneRequest(**fields[1]))
        code, details = await code_of(start(pb.FineTuneRequest(**fields[2])))
        assert (code, details) == (CODE.RESOURCE_EXHAUSTED, "2 jobs are running, at most 2 may")
        assert (await backend.stub.StopFineTune(pb.FineTuneStopRequest(job_id="first"))).success
        assert (await start(pb.FineTuneRequest(**fields[2]))).success


async def test_a_quantised_model_is_smaller_checked_and_can_be_loaded(tmp_path, tiny_models):
    source = tiny_models("llama")
    async with served() as backend:
        await backend.load("mlx", ModelPath=str(source.parent))
        updates = await quantise(
            backend, model=source.name, quantization_type="q8", output_dir=str(tmp_path)
        )
        last = updates[-1]
        assert last.status == "completed", last.message
        # States that last an instant, the first one too, may be missing.
        assert "quantizing" in {update.status for update in updates}
        metrics = last.extra_metrics
        assert metrics["bytes_result"] < metrics["bytes_source"]
        assert metrics["perplexity_result"] == pytest.approx(metrics["perplexity_source"], rel=0.2)
        assert (await backend.load(last.output_file)).success
    assert tokens_of(Path(last.output_file)) == tokens_of(source)
    assert [path.name for path in tmp_path.iterdir()] == [f"{source.name}-q8"]


async def test_checkpoints_of_no_directory_are_refused():
    async with served() as backend:
        call = backend.stub.ListCheckpoints(pb.ListCheckpointsRequest())
        assert await code_of(call) == (CODE.INVALID_ARGUMENT, "output_dir: is empty")


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.one_in(2)
async def test_a_trained_checkpoint_loads_as_an_adapter(tmp_path, dataset, kind):
    async with served() as backend:
        fields = lora(dataset, tmp_path / "out", training_type=kind, save_steps=2)
        updates = await train(backend, **fields)
        last = updates[-1]
        assert last.status == "completed", last.message
        assert (last.current_step, last.total_steps) == (4, 4)
        assert math.isfinite(last.loss)
        request = pb.ListCheckpointsRequest(output_dir=str(tmp_path / "out"))
        checkpoints = (await backend.stub.ListCheckpoints(request)).checkpoints
        assert [checkpoint.step for checkpoint in checkpoints] == [2, 4]
        assert last.checkpoint_path == checkpoints[-1].path
        assert (await backend.load(MODEL_DIR, LoraAdapters=[last.checkpoint_path])).success


async def test_training_lowers_the_loss_and_its_log_has_plain_lines_alone(tmp_path, dataset, capfd):
    async with served() as backend:
        fields = lora(dataset, tmp_path / "out", max_steps=10, learning_rate=0.002)
        updates = await train(backend, **fields)
    losses = [update.loss for update in updates if update.status == "training"]
    assert losses[-1] < losses[0]
    printed = Stderr(capfd).text
    assert "step 0 of 10: loss " in printed
    assert not re.search("[\x1b\u2500-\u25ff]", printed)


async def test_a_short_training_builds_no_kernels(tmp_path, dataset, monkeypatch):
    """On a CPU they take a compiler longer than all of its passes."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    monkeypatch.setenv("TMPDIR", str(kernels))
    async with served() as backend:
        last = (await train(backend, **lora(dataset, tmp_path / "out", max_steps=1)))[-1]
    assert last.status == "completed", last.message
    assert list(kernels.rglob("*.so")) == []


async def test_a_training_touches_nothing_of_its_users_whatever_the_name(tmp_path, dataset):
    output, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    for directory in (output, elsewhere):
        directory.mkdir()
    (output / ".training").symlink_to(elsewhere)
    (output / ".checkpoint-4.partial").mkdir()
    (output / ".checkpoint-4.partial" / "mine").write_text("mine")
    async with served() as backend:
        last = (await train(backend, **lora(dataset, output)))[-1]
    assert last.status == "completed", last.message
    assert list(elsewhere.iterdir()) == []
    assert (output / ".checkpoint-4.partial" / "mine").read_text() == "mine"
    names = {".training", ".checkpoint-4.partial", "checkpoint-4"}
    assert {path.name for path in output.iterdir()} == names


async def test_a_training_goes_on_from_a_checkpoint(tmp_path, dataset):
    async with served() as backend:
        first = await train(backend, **lora(dataset, tmp_path / "out", max_steps=2))
        fields = lora(dataset, tmp_path / "out", max_steps=5)
        checkpoint = first[-1].checkpoint_path
        resumed = await train(backend, **fields, resume_from_checkpoint=checkpoint)
        assert next(update.current_step for update in resumed if update.current_step) == 3
        assert resumed[-1].current_step == 5
        again = await train(backend, **fields, resume_from_checkpoint=resumed[-1].checkpoint_path)
        assert again[-1].status == "failed"
        assert "step 5 of 5 leaves nothing to train" in again[-1].message


async def test_a_checkpoint_is_exported_in_every_form_and_can_be_loaded(
    tmp_path, dataset, tiny_models
):
    source = tiny_models("llama")
    fields = lora(dataset, tmp_path / "out", model=str(source))
    async with served() as backend:
        checkpoint = (await train(backend, **fields))[-1].checkpoint_path
        for form in ("lora", "merged_16bit", "merged_4bit"):
            target = tmp_path / form
            request = pb.ExportModelRequest(
                checkpoint_path=checkpoint, output_path=str(target), export_format=form
            )
            result = await backend.stub.ExportModel(request)
            assert result.success, result.message
            if form == "lora":
                assert (await backend.load(source, LoraAdapters=[str(target)])).success
            else:
                assert (await backend.load(target)).success
                assert tokens_of(target) == tokens_of(source)
                config = json.loads((target / "config.json").read_text(encoding="utf-8"))
                bits = config.get("quantization", {}).get("bits")
                assert bits == (4 if form == "merged_4bit" else None)
            again = await backend.stub.ExportModel(request)
            told = f"output_path: {target} exists already"
            assert (again.success, again.message) == (False, told)
        for form, place in {"lora": Path(checkpoint), "merged_16bit": source}.items():
            before = sorted(place.iterdir())
            refused = await backend.stub.ExportModel(
                pb.ExportModelRequest(
                    checkpoint_path=checkpoint, output_path=f"{place}/new", export_format=form
                )
            )
            told = f"output_path: {place}/new is inside {place}, which the job reads"
            assert (refused.success, refused.message) == (False, told)
            assert sorted(place.iterdir()) == before


async def test_stopping_a_training_keeps_its_weights_if_asked_to(tmp_path, dataset):
    async with served() as backend:
        fields = lora(dataset, tmp_path / "out", max_steps=100_000)
        started = await backend.stub.StartFineTune(pb.FineTuneRequest(**fields, job_id="long"))
        assert started.job_id == "long"
        updates = backend.stub.FineTuneProgress(pb.FineTuneProgressRequest(job_id="long"))
        while (await updates.read()).current_step < 2:
            pass
        code, details = await code_of(
            backend.stub.StartFineTune(pb.FineTuneRequest(**fields, job_id="long"))
        )
        assert (code, details) == (CODE.INVALID_ARGUMENT, "job_id: job 'long' is running")
        stop = pb.FineTuneStopRequest(job_id="long", save_checkpoint=True)
        assert (await backend.stub.StopFineTune(stop)).success
        last = await last_of(updates)
        assert last.status == "stopped"
        assert mx.load(f"{last.checkpoint_path}/adapters.safetensors")


async def test_a_job_that_is_killed_fails_with_its_signal_and_its_checkpoints_are_found_again(
    tmp_path, dataset
):
    async with served() as backend:
        fields = lora(dataset, tmp_path / "out", max_steps=100_000, save_steps=2)
        started = await backend.stub.StartFineTune(pb.FineTuneRequest(**fields))
        updates = backend.stub.FineTuneProgress(pb.FineTuneProgressRequest(job_id=started.job_id))
        while not (update := await updates.read()).checkpoint_path:
            pass
        (process,) = child_jobs()
        os.kill(process, signal.SIGKILL)
        last = await last_of(updates)
        assert last.status == "failed"
        assert "was ended by signal 9" in last.message
        assert mx.load(str(Path(update.checkpoint_path) / "adapters.safetensors"))
        found = pb.ListCheckpointsRequest(output_dir=str(tmp_path / "out"))
        latest = (await backend.stub.ListCheckpoints(found)).checkpoints[-1]
        again = await train(backend, **lora(dataset, tmp_path / "out"))
        assert again[-1].message == (
            f"an earlier training in {tmp_path / 'out'} was cut off after step {latest.step}; "
            f"resume_from_checkpoint {latest.path} continues from there"
        )


async def test_a_job_ends_with_the_server(tmp_path, dataset):
    async with served() as backend:
        fields = lora(dataset, tmp_path / "out", max_steps=100_000)
        started = await backend.stub.StartFineTune(pb.FineTuneRequest(**fields))
        updates = backend.stub.FineTuneProgress(pb.FineTuneProgressRequest(job_id=started.job_id))
        while (await updates.read()).status != "training":
            pass
    assert child_jobs() == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "wizard", "content": "a"}]}, "TemplateError: "),
        ({"messages": [{"role": "user", "content": 3}]}, "TypeError: "),
        ({"text": "\ud800"}, "TypeError: "),
    ],
)
async def test_a_row_that_the_model_cannot_read_is_named(tmp_path, row, problem):
    rows = [row, row]
    if "messages" in row:
        said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
        rows[0] = {"messages": said}
    else:
        rows[0] = {"text": "hi"}
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)))
    async with served() as backend:
        last = (await train(backend, **lora(dataset, tmp_path / "out")))[-1]
    assert last.status == "failed"
    assert last.message.startswith("dataset_source: rows.jsonl, row 2 does not suit the model: ")
    assert problem in last.message


async def test_what_cannot_be_quantised_or_trained_fails_in_plain_words(tmp_path, dataset, caplog):
    other = shutil.copytree(MODEL_DIR, tmp_path / "other")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    async with served() as backend:
        fields = {"model": str(other), "output_dir": str(tmp_path)}
        odd = (await quantise(backend, **fields, extra_options={"group_sise": "32"}))[-1]
        assert odd.status == "failed"
        assert odd.message == "model: cannot be quantised: Model type odd not supported."
        assert "extra_options['group_sise'] is ignored; known are check, group_size" in caplog.text
        missing = await quantise(backend, model="nothing-here", output_dir=str(tmp_path))
        assert missing[-1].status == "failed"
        assert "nothing-here" in missing[-1].message
        fields = lora(dataset, tmp_path / "out", target_modules=["x_proj"])
        unknown = await train(backend, **fields)
        assert unknown[-1].status == "failed"
        assert "the model's layers have no 'x_proj'; they have" in unknown[-1].message
