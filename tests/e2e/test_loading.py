"""LoadModel and Free over the socket: good loads, refusals, reports, and the state after each."""

import asyncio
import json
import math
import shutil
from importlib.metadata import version

import grpc
import mlx.core as mx
import pytest
from adapters import write_adapter
from serving import UNENDING, Stderr, code_of, served, stream
from waiting import until

from backend.core.engine_status import EngineState
from backend.pb import backend_pb2 as pb
from scripts.sweep.text_models import build_text_model
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx


def raw(**options) -> pb.PredictOptions:
    return pb.PredictOptions(Prompt="ba be bi", **{"Tokens": 6, "IgnoreEOS": True, **options})


async def test_a_model_file_wins_over_the_name(tiny_models):
    async with served() as backend:
        directory = str(tiny_models("llama"))
        assert (await backend.load("some/name", ModelFile=directory)).success
        assert (await backend.stub.Predict(raw(ModelIdentity="some/name"))).tokens == 6


async def test_links_to_nothing_beside_the_weights_are_no_files_of_a_model(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (directory / "gone.json").symlink_to(tmp_path / "nowhere")
    async with served(directory) as backend:
        assert (await backend.stub.Predict(raw())).tokens == 6


async def test_a_name_is_looked_up_below_the_models_directory(tiny_models):
    directory = tiny_models("llama")
    async with served() as backend:
        options = {"ModelPath": str(directory.parent), "ModelFile": "/does/not/exist"}
        assert (await backend.load(directory.name, **options)).success


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["config.json"]),
        ({"config.json": "{}"}, ["model_type"]),
        ({"config.json": '{"model_type": "llama"}'}, ["safetensors"]),
        ({"config.json": '{"model_type": "llama"}', "x.gguf": ""}, ["gguf"]),
        ({"config.json": "{"}, ["config.json"]),
    ],
)
async def test_a_directory_that_is_no_model_is_told_why(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    async with served() as backend:
        code, details = await code_of(backend.load(tmp_path))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert all(word in details for word in words), details


async def test_weights_that_compute_no_numbers_are_told(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (file,) = directory.glob("*.safetensors")
    poisoned = {name: weight * mx.nan for name, weight in mx.load(str(file)).items()}
    mx.eval(poisoned)
    mx.save_safetensors(str(file), poisoned, {"format": "mlx"})
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
        assert (code, "NaN" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("hidden_size", value) for value in (-1, 0, 2**40, "big", None, "x" * 100_000)),
        ("head_dim", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("vocab_size", 0),
        *(("num_hidden_layers", value) for value in (0, 2.5, 10**7)),
        *(("rms_norm_eps", value) for value in (math.inf, math.nan, -1.0, "x")),
        ("rope_theta", math.inf),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_scaling", {"type": "quantum", "factor": 2.0}),
        ("rope_scaling.factor", 0),
        ("max_position_embeddings", "x"),
        ("rope_traditional", "x"),
        ("layer_types", 5),
        ("quantization", "x"),
        ("architectures", 7),
    ],
)
@pytest.mark.one_in(3)
async def test_a_value_that_no_model_has_is_told_with_its_field(
    tiny_models, tmp_path, field, value
):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    name, _, inner = field.partition(".")
    config[name] = {"type": "linear", inner: value} if inner else value
    path.write_text(json.dumps(config))
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"Model: {path}: {field} is {repr(value)[:50]}")
        assert len(details) < len(str(path)) + 300
        assert (await backend.load(tiny_models("llama"))).success


async def test_weights_of_which_every_token_is_as_likely_as_another_are_told(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (file,) = directory.glob("*.safetensors")
    weights = mx.load(str(file))
    weights["model.norm.weight"] *= 0
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the model gives every token the same chance" in details


async def test_experts_of_16_bits_are_served_on_a_cpu_which_multiplies_32_only(tmp_path, capfd):
    """Upstream contract: on a CPU, mlx 0.32 gathers matrices of float32 only."""
    directory = build("qwen3_moe", tmp_path, dtype="bfloat16")
    async with served(directory) as backend:
        assert (await backend.stub.Predict(raw())).tokens == 6
        assert backend.engine.model.card.weights_bytes > 2 * weights_size(directory)
    await Stderr(capfd).holds("float32")


def weights_size(directory):
    return 0.9 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))


async def test_a_config_that_transformers_refuses_is_served_if_mlx_lm_takes_it(tmp_path, caplog):
    """Upstream contract: transformers 5 knows no layers of the kind conv_mixer, which gear has."""
    directory = build_text_model("gear", tmp_path)
    async with served(directory) as backend:
        assert (await backend.stub.Predict(raw())).tokens == 6
    assert "transformers refuses config.json" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"Not Found", "is not a safetensors file"),
    ],
)
async def test_weights_that_did_not_come_are_told_by_file(tiny_models, tmp_path, content, words):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (directory / "model.safetensors").write_bytes(content)
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "model.safetensors" in details
    assert words in details


async def test_an_unsupported_architecture_is_named(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "quantum_9000"}))
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "quantum_9000" in details
        assert f"mlx-lm {version('mlx-lm')}" in details
        assert "pip install --upgrade" in details


async def test_a_missing_path_is_told_and_the_next_load_works(tiny_models, tmp_path):
    async with served() as backend:
        code, details = await code_of(backend.load(tmp_path / "nothing"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "nothing" in details
        status = await backend.stub.Status(pb.HealthMessage())
        assert status.state == pb.StatusResponse.ERROR
        assert (await backend.load(tiny_models("llama"))).success


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"EngineArgs": '{"no_such_key": 1}'}, ["no_such_key", "max_slots"]),
        ({"EngineArgs": "{"}, ["EngineArgs"]),
        ({"EngineArgs": '{"max_slots": "many"}'}, ["max_slots"]),
        ({"Options": ["max_slots:zero"]}, ["max_slots"]),
        ({"Options": ["max_slots:0"]}, ["max_slots"]),
        ({"DType": "float3"}, ["DType", "float3"]),
        ({"MaxModelLen": -5}, ["MaxModelLen"]),
        ({"TensorParallelSize": -1}, ["TensorParallelSize", "between 1 and 1024"]),
        ({"TensorParallelSize": 10**6}, ["TensorParallelSize", "between 1 and 1024"]),
        ({"TensorParallelSize": 1024}, ["TensorParallelSize: 1024 processes", "attention heads"]),
        (
            {"Options": ["tensor_parallel_size:999", "distributed:pipeline"]},
            ["TensorParallelSize: 999 processes: the model has 2 layers"],
        ),
        ({"Options": ["hosts:" + "127.0.0.1," * 1000]}, ["Options: hosts: 1000 processes"]),
        ({"LoraAdapters": ["a"], "LoraScales": [1.0, 2.0]}, ["LoraScales"]),
    ],
)
async def test_bad_load_options_are_told(tiny_models, options, words):
    async with served() as backend:
        code, details = await code_of(backend.load(tiny_models("llama"), **options))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert all(word in details for word in words), details


async def test_what_a_refused_load_puts_into_the_log_is_short(tiny_models, caplog):
    caplog.set_level("INFO")
    odd = {
        "DType": "x" * 100_000,
        "Options": ["y" * 100_000],
        "CacheTypeKey": "q4_" + "z" * 100_000,
    }
    async with served() as backend:
        for chosen in (odd, {**odd, "CacheTypeKey": ""}):
            await code_of(backend.load(tiny_models("llama"), **chosen))
    assert "unknown options: yyy" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 5000


async def test_an_unknown_option_is_logged_and_ignored(tiny_models, caplog):
    caplog.set_level("INFO")
    options = ["use_jinja", "gpu_layers:99", "max_slots:3"]
    async with served(tiny_models("llama"), Options=options) as backend:
        assert backend.engine.model.tuning.scheduling.max_slots == 3
    assert "gpu_layers" in caplog.text


async def test_request_fields_win_over_model_options(tiny_models):
    options = ["max_tokens:5", "top_k:1", "seed:7"]
    async with served(tiny_models("llama"), Options=options) as backend:
        assert (await backend.stub.Predict(raw(Tokens=0))).tokens == 5
        assert (await backend.stub.Predict(raw(Tokens=9))).tokens == 9
        greedy = (await backend.stub.Predict(raw())).message
        by_option = [await backend.stub.Predict(raw(Temperature=1.5)) for _ in range(2)]
        assert {reply.message for reply in by_option} == {greedy}
        by_request = await backend.stub.Predict(raw(Temperature=5.0, TopK=100, Seed=3))
        assert by_request.message != greedy


async def test_free_gives_back_and_the_next_load_works(tiny_models):
    async with served(tiny_models("llama")) as backend:
        running = asyncio.create_task(code_of(stream(backend.stub, raw(**UNENDING))))
        await until(lambda: not backend.is_idle)
        assert (await backend.stub.Free(pb.HealthMessage())).success
        assert (await running)[0] is grpc.StatusCode.ABORTED
        code, details = await code_of(backend.stub.Predict(raw()))
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")
        assert (await backend.load(tiny_models("qwen3"))).success
        assert (await backend.stub.Predict(raw())).tokens == 6


async def test_another_model_replaces_the_first(tiny_models):
    async with served(tiny_models("llama")) as backend:
        first = (await backend.stub.Predict(raw())).message
        await until(lambda: backend.engine.status().state is EngineState.READY)
        before = backend.engine.status().memory_bytes
        for _ in range(3):
            await backend.load(tiny_models("qwen3"))
            await backend.load(tiny_models("llama"))
        assert (await backend.stub.Predict(raw())).message == first
        await until(lambda: backend.engine.status().state is EngineState.READY)
        after = backend.engine.status().memory_bytes
        assert after["mlx_active"] - before["mlx_active"] < before["weights"]


async def test_a_request_that_waits_for_a_load_is_told_of_the_shutdown(tiny_models):
    async with served() as backend:
        load = asyncio.ensure_future(code_of(backend.load(tiny_models("llama"))))
        await until(lambda: backend.engine.load_task is not None)
        waiting = asyncio.ensure_future(
            code_of(backend.stub.Predict(pb.PredictOptions(Prompt="ba")))
        )
        await backend.engine.close(drain_timeout_s=0.0)
        shut_down = (grpc.StatusCode.UNAVAILABLE, "the backend is shutting down")
        assert await waiting == shut_down
        assert (await load)[0] is grpc.StatusCode.CANCELLED


async def test_a_load_whose_caller_leaves_can_be_repeated(tiny_models):
    async with served() as backend:
        call = backend.stub.LoadModel(pb.ModelOptions(Model=str(tiny_models("llama"))))
        await asyncio.sleep(0)
        call.cancel()
        assert (await backend.load(tiny_models("qwen3"))).success
        assert backend.engine.model.card.model_type == "qwen3"


async def test_a_load_whose_caller_leaves_costs_no_model(tiny_models):
    async with served(tiny_models("llama")) as backend:
        served_model = backend.engine.model
        load = backend.stub.LoadModel(pb.ModelOptions(Model=str(tiny_models("qwen3"))))
        await until(lambda: backend.engine.model is None)
        load.cancel()
        assert (await backend.stub.Predict(raw())).tokens == 6
        assert backend.engine.model is served_model
        status = await backend.stub.Status(pb.HealthMessage())
        assert status.state != pb.StatusResponse.ERROR


async def test_a_request_waits_for_the_load_after_one_whose_caller_leaves(tiny_models):
    async with served() as backend:
        first = backend.stub.LoadModel(pb.ModelOptions(Model=str(tiny_models("qwen3"))))
        await until(lambda: backend.engine.load_task is not None)
        second = asyncio.create_task(backend.load(tiny_models("llama")))
        await until(lambda: backend.engine.has_waiting_loads)
        request = asyncio.ensure_future(backend.stub.Predict(raw()))
        first.cancel()
        assert (await request).tokens == 6
        assert (await second).success
        assert backend.engine.model.card.model_type == "llama"


async def test_status_tells_the_state_and_the_memory(tiny_models):
    async with served() as backend:
        empty = await backend.stub.Status(pb.HealthMessage())
        assert empty.state == pb.StatusResponse.UNINITIALIZED
        await backend.load(tiny_models("llama"))
        ready = await backend.stub.Status(pb.HealthMessage())
        assert ready.state == pb.StatusResponse.READY
        assert ready.memory.total >= ready.memory.breakdown["weights"] > 0
        running = backend.stub.PredictStream(raw(**UNENDING))
        await running.read()
        await until(lambda: backend.engine.status().state is EngineState.BUSY)
        running.cancel()


async def test_metrics_count_tokens(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await backend.stub.Predict(raw(Tokens=30))
        await until(lambda: backend.engine.status().metrics["generated_tokens"] == 30)
        metrics = await backend.stub.GetMetrics(pb.MetricsRequest())
        assert metrics.tokens_generated == 30
        assert metrics.prompt_tokens_processed > 0


async def test_metrics_list_each_request_with_its_progress(tiny_models):
    options = ["max_slots:2", "prefill_chunk:1", "prefill_chunk_alone:1", "prefill_pause_ms:1"]
    # So long that neither the stream nor the prompt comes to its end.
    async with served(tiny_models("llama"), MaxModelLen=65_536, Options=options) as backend:

        async def requests() -> dict[str, dict]:
            metrics = await backend.stub.GetMetrics(pb.MetricsRequest())
            listed = json.loads(metrics.prompt_json_for_slot)["requests"]
            return {request["request_id"][0]: request for request in listed}

        active = backend.stub.PredictStream(raw(**UNENDING, CorrelationId="a"))
        await active.read()
        prefilling = backend.stub.PredictStream(
            pb.PredictOptions(Prompt="ba be bi " * 6000, IgnoreEOS=True, CorrelationId="p")
        )
        rows = backend.engine.status
        await until(
            lambda: any(
                row.request_id.startswith("p") and row.prefilled_tokens for row in rows().requests
            )
        )
        waiting = backend.stub.PredictStream(raw(**UNENDING, CorrelationId="w"))
        await until(lambda: backend.engine.status().metrics["waiting"] == 1)
        seen = await requests()
        assert seen["a"]["phase"] == "active"
        assert seen["a"]["generated_tokens"] > 0
        assert seen["a"]["first_token_ms"] > 0
        assert seen["a"]["tokens_per_s"] > 0
        assert seen["p"]["phase"] == "prefilling"
        assert 0 < seen["p"]["prefilled_tokens"] < seen["p"]["prompt_tokens"]
        assert seen["w"]["phase"] == "waiting"
        assert seen["w"]["prefilled_tokens"] == 0
        for call in (active, prefilling, waiting):
            call.cancel()
        await until(lambda: backend.is_idle)
        assert await requests() == {}


async def test_a_dtype_is_cast_to(tiny_models):
    async with served() as backend:
        await backend.load(tiny_models("llama"), DType="bfloat16")
        half = backend.engine.status().memory_bytes["weights"]
        await backend.load(tiny_models("llama"), DType="float32")
        assert backend.engine.status().memory_bytes["weights"] == 2 * half


async def test_adapters_change_the_reply_by_their_scale(tiny_models, tmp_path):
    one, two = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    replies = []
    async with served() as backend:
        for options in (
            {},
            {"LoraAdapter": str(one)},
            {"LoraAdapter": str(one), "LoraScale": 0.5},
            {"LoraAdapters": [one.name, two.name], "LoraScales": [1.0, 2.0]},
        ):
            await backend.load(tiny_models("llama"), ModelPath=str(tmp_path), **options)
            replies.append((await backend.stub.Predict(raw(Logprobs=1))).logprobs)
        code, details = await code_of(backend.load(tiny_models("llama"), LoraAdapter="nowhere"))
    assert len(set(replies)) == len(replies)
    assert (code, "nowhere" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_hub_id_that_cannot_be_fetched_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    async with served() as backend:
        code, details = await code_of(backend.load("nobody/nothing"))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "nobody/nothing" in details
        status = await backend.stub.Status(pb.HealthMessage())
        assert status.state == pb.StatusResponse.ERROR


async def test_the_log_tells_how_replies_will_be_read(tiny_models, caplog):
    caplog.set_level("INFO")
    async with served(tiny_models("qwen3")):
        assert (
            "are read as text with tool calls in hermes_json and thoughts in think" in caplog.text
        )
