"""SmolLM2 is trained, merged, quantised and served, in minutes on a CPU."""

import json

import pytest
from serving import chat, served, user

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

ANSWER = "Hello, dear Ada!"
QUESTION = "Greet Ada, who is number {}."


def rows(path):
    conversations = [
        [user(QUESTION.format(number)), {"role": "assistant", "content": ANSWER}]
        for number in range(20)
    ]
    lines = (json.dumps({"messages": messages}) for messages in conversations)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


async def last(updates):
    update = [each async for each in updates][-1]
    assert update.status == "completed", update.message
    return update


async def test_it_says_what_it_was_taught_after_export_and_quantisation(real_models, tmp_path):
    fields = {
        "model": str(real_models("smollm2-bf16")),
        "dataset_source": rows(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "trained"),
        "adapter_rank": 8,
        "max_steps": 12,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-3,
    }
    merged = str(tmp_path / "merged")
    async with served() as backend:
        stub = backend.stub
        started = await stub.StartFineTune(pb.FineTuneRequest(**fields))
        request = pb.FineTuneProgressRequest(job_id=started.job_id)
        trained = await last(stub.FineTuneProgress(request))
        assert trained.eval_loss < 1
        export = {"output_path": merged, "export_format": "merged_16bit"}
        request = pb.ExportModelRequest(checkpoint_path=trained.checkpoint_path, **export)
        assert (await stub.ExportModel(request)).success
        asked = {"quantization_type": "q8", "output_dir": str(tmp_path)}
        started = await stub.StartQuantization(pb.QuantizationRequest(model=merged, **asked))
        request = pb.QuantizationProgressRequest(job_id=started.job_id)
        metrics = (quantised := await last(stub.QuantizationProgress(request))).extra_metrics
        assert metrics["bytes_result"] < 0.6 * metrics["bytes_source"]
        assert metrics["perplexity_result"] == pytest.approx(metrics["perplexity_source"], rel=0.05)
        assert (await backend.load(quantised.output_file)).success
        reply = await stub.Predict(chat([user(QUESTION.format(33))], Tokens=12))
    assert reply.message.decode() == ANSWER
