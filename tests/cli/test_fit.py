import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import mlx.core as mx
import pytest
from click.testing import CliRunner
from real_process import TIMEOUT_S, real_backend
from rich.console import Console
from waiting import wait_until

from backend.cli.app import main
from backend.demo import MODEL_DIR
from backend.model.checkpoint.upstream import INDEX_NAME
from backend.pb import backend_pb2 as pb
from common.directories import state_directory
from common.openblas import find_openblas

pytestmark = pytest.mark.mlx


# OpenBLAS would stay with this process, and change the results of later tests.
ENVIRONMENT = {"COLUMNS": "100", "MLX_BACKEND_PRELOAD_BLAS": "0"}


def fit(*arguments, **environment):
    return CliRunner(env=ENVIRONMENT | environment).invoke(main, ["fit", *arguments])


def printed(foretold):
    from backend.cli.fit import table

    console = Console(file=StringIO(), width=100)
    console.print(table(foretold))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def foretold():
    from backend.config import ModelOptions
    from backend.engine.footprint import forecast

    return forecast(ModelOptions(model="demo"), MODEL_DIR)


def test_the_embedded_model_fits_and_the_table_says_how_often():
    result = fit(str(MODEL_DIR))
    assert result.exit_code == 0, result.output
    assert "(qwen3), context 4,096" in result.output
    assert "× 2,048" in result.output
    assert "No option needs to be set." in result.output


def test_what_it_says_is_held_is_held_by_the_processes(tmp_path):
    told = json.loads(fit(str(MODEL_DIR), "--json").output)
    parts = ("weights_bytes", "vocabulary_bytes", "programs_bytes")
    assert told["resident_bytes"] == sum(told[part] for part in parts)
    with real_backend(tmp_path / "log", os.environ | {"MLX_BACKEND_FINDINGS": "0"}) as backend:
        backend.load(MODEL_DIR)
        backend.stub.Predict(pb.PredictOptions(Prompt="ba be", Tokens=4), timeout=TIMEOUT_S)
        report = inspected(backend)
    held = report.memory.breakdown["resident"]
    assert held == sum(process.resident_bytes for process in report.processes)
    assert told["resident_bytes"] == pytest.approx(held, rel=0.1)


def test_each_part_of_the_memory_is_told_with_the_total():
    text = " ".join(fit(str(MODEL_DIR)).output.split())
    assert "weights 1.7 MB" in text
    assert "in server and engine programs" in text
    assert "held once it is loaded KV up to" in text
    assert "stay free, to compute with memory" in text


def test_json_has_the_sizes_in_bytes():
    told = json.loads(fit(str(MODEL_DIR), "--json").output)
    weights = sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors"))
    assert told["weights_bytes"] == pytest.approx(weights, rel=0.01)
    assert told["files_bytes"] == weights
    assert told["fits"]
    assert [cache["kv_bits"] for cache in told["caches"]] == [None, 8, 4]
    assert set(told["caches"][0]["requests"]) == {"2048", "4096"}


@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_weights_that_the_server_would_cast_are_counted_as_float32(bfloat16_model, tmp_path):
    command = [sys.executable, "-m", "backend.cli", "fit", str(bfloat16_model)]
    state = {"COLUMNS": "120", "XDG_STATE_HOME": str(tmp_path)}
    wide = os.environ | state | {"MLX_BACKEND_PRELOAD_BLAS": "1"}
    counted = [
        json.loads(fit(str(bfloat16_model), "--json").output),
        json.loads(subprocess.check_output([*command, "--json"], env=wide)),
    ]
    weights = mx.load(str(bfloat16_model / "model.safetensors"))
    # Matrices stay beside, but no embedding that is not the head.
    beside = sum(w.nbytes for name, w in weights.items() if w.ndim == 2 and "embed" not in name)
    assert counted[1]["weights_bytes"] == 2 * counted[0]["weights_bytes"] + beside
    assert counted[0]["files_bytes"] == counted[1]["files_bytes"]
    assert "stored in" not in fit(str(bfloat16_model)).output
    assert "stored in" in subprocess.check_output(command, env=wide, text=True)
    # The second start imported transformers with the help of the first.
    assert (state_directory(state) / INDEX_NAME).is_file()


def test_a_draft_model_takes_memory_beside_the_model():
    alone, both = (
        json.loads(fit(str(MODEL_DIR), *more, "--json").output)
        for more in ([], ["--draft-model", str(MODEL_DIR)])
    )
    assert alone["draft_model"] == ""
    assert both["draft_model"] == str(MODEL_DIR)
    assert both["draft_weights_bytes"] == alone["weights_bytes"] == both["weights_bytes"]
    assert both["kv_budget_bytes"] < alone["kv_budget_bytes"]
    wide = alone["caches"][0]
    # The draft model's own cache is of full width beside each.
    assert {cache["draft_bytes_per_token"] for cache in both["caches"]} == {wide["bytes_per_token"]}
    assert both["caches"][0]["requests"]["2048"] == pytest.approx(
        wide["requests"]["2048"] / 2, rel=0.01
    )
    text = fit(str(MODEL_DIR), "--draft-model", str(MODEL_DIR)).output
    assert "and 1.0 MB of KV for 1,000 tokens" in " ".join(text.split())


def test_a_draft_model_is_found_below_the_models_path_or_named():
    found = fit("model", "--models-path", str(MODEL_DIR.parent), "--draft-model", "model")
    assert found.exit_code == 0, found.output
    missing = fit(str(MODEL_DIR), "--draft-model", "nonsense")
    assert missing.exit_code == 1
    assert "draft_model: there is no model 'nonsense'" in missing.stderr


def test_one_that_cannot_draft_is_refused_as_by_a_load(tiny_models):
    refusals = {"llama": "draft_model: it has another vocabulary", "mamba2": "cannot draft: it has"}
    for family, words in refusals.items():
        model = MODEL_DIR if family == "llama" else tiny_models("llama")
        result = fit(str(model), "--draft-model", str(tiny_models(family)))
        assert result.exit_code == 1
        assert words in result.stderr


def test_experts_on_disk_take_the_memory_and_read_the_bytes_that_it_says(tiny_models, tmp_path):
    model = shutil.copytree(tiny_models("qwen3_moe"), tmp_path / "mixture")
    arguments = ("--experts", "disk", "--expert-bytes", "1", "--disk-rate", "2")
    told = json.loads(fit(str(model), *arguments, "--json").output)
    experts = told["experts"]
    assert experts["tokens_per_s"] == pytest.approx(2e6 / experts["token_bytes"])
    assert "at 2.0 MB/s" in " ".join(fit(str(model), *arguments).output.split())
    options = ["experts:disk", "expert_bytes:1"]
    with real_backend(tmp_path / "log") as backend:
        backend.load(model, Options=options)
        request = pb.PredictOptions(Prompt="ba", Tokens=60, IgnoreEOS=True)
        backend.stub.Predict(request, timeout=TIMEOUT_S)
        # The trials between requests read experts, too.
        wait_until(lambda: "tried in" in backend.log_text)
        before = inspected(backend)
        reply = backend.stub.Predict(request, timeout=TIMEOUT_S)
        after = inspected(backend)
    assert after.memory.breakdown["weights"] == told["weights_bytes"]
    assert metric(after, "experts.bytes") <= experts["budget_bytes"]
    read = metric(after, "experts.read_bytes") - metric(before, "experts.read_bytes")
    assert experts["token_bytes"] == pytest.approx(read / reply.tokens, rel=0.1)
    (store,) = model.glob("*.store")
    assert experts["store_bytes"] == pytest.approx(store.stat().st_size, rel=0.1)


def inspected(backend):
    return backend.inspector.Inspect(pb.InspectRequest(), timeout=TIMEOUT_S)


def metric(report, name):
    (value,) = [each.value for each in report.metrics if each.name == name]
    return value


def test_the_rate_of_a_disk_with_experts_is_measured_and_no_drafter_is_named(tiny_models):
    model = str(tiny_models("qwen3_moe"))
    told = json.loads(fit(model, "--experts", "disk", "--json").output)
    assert told["experts"]["disk_bytes_per_s"] > 0
    assert told["experts"]["budget_bytes"] == pytest.approx(told["experts"]["store_bytes"])
    assert json.loads(fit(model, "--json").output)["experts"] is None
    refused = fit(model, "--experts", "disk", "--draft-model", model)
    assert refused.exit_code == 2
    assert "experts on disk exclude a drafter" in refused.stderr
    dense = fit(str(MODEL_DIR), "--experts", "disk")
    assert dense.exit_code == 1
    assert "experts: the model has none" in dense.stderr


@pytest.mark.parametrize("flag", ["--expert-bytes", "--disk-rate"])
def test_flags_of_experts_on_disk_are_refused_without_them(flag):
    result = fit(str(MODEL_DIR), flag, "5")
    assert (result.exit_code, flag in result.stderr) == (2, True)


def test_a_rate_that_is_no_number_is_refused():
    result = fit(str(MODEL_DIR), "--experts", "disk", "--disk-rate", "nan")
    assert (result.exit_code, "nan is no finite number" in result.stderr) == (2, True)


def test_a_relative_path_is_found_below_the_models_path():
    assert fit(MODEL_DIR.name, "--models-path", str(MODEL_DIR.parent)).exit_code == 0


def test_a_model_that_is_nowhere_is_named():
    result = fit("nonsense")
    assert result.exit_code == 1
    assert "there is no model 'nonsense'" in result.stderr


def test_a_model_of_the_hub_is_not_fetched_unasked(tmp_path):
    result = fit("org/none", HF_HOME=os.fspath(tmp_path))
    assert result.exit_code == 1
    assert "org/none is not on this machine; --download fetches it" in result.stderr


def test_weights_beyond_the_memory_are_told_with_what_to_do(foretold):
    text = printed(replace(foretold, memory_bytes=10**6))
    assert "It does not fit: the weights take 1.7 MB of 1.0 MB." in text
    assert "quantised to fewer bits" in text
    assert "--experts disk" not in text


def test_experts_of_a_mixture_beyond_the_memory_may_stay_on_disk(tiny_models):
    from backend.config import ModelOptions, TuningOptions
    from backend.engine.footprint import forecast

    model = tiny_models("qwen3_moe")
    options = ModelOptions(model=str(model))
    told = [
        printed(replace(forecast(replace(options, tuning=tuning), model), memory_bytes=10**5))
        for tuning in (TuningOptions(), TuningOptions.of(experts="disk"))
    ]
    assert all("It does not fit" in text for text in told)
    assert ["--experts disk says" in text for text in told] == [True, False]


def test_the_weights_of_a_draft_model_count_where_nothing_fits(foretold):
    both = replace(foretold, draft=foretold.card, memory_bytes=3 * 10**6)
    assert not both.has_room
    assert "It does not fit: the weights take 3.5 MB of 3.0 MB." in printed(both)


def test_where_few_requests_fit_a_narrower_cache_is_advised(foretold):
    wide, middle, _ = foretold.caches
    budget = 4 * middle.profile.row_bytes(4096)
    assert budget < 4 * wide.profile.row_bytes(4096)
    assert "- kv_bits:8" in printed(replace(foretold, budget_bytes=budget))


def test_where_not_one_fits_the_longest_request_is_told(foretold):
    narrow = foretold.caches[-1]
    text = printed(replace(foretold, budget_bytes=narrow.profile.row_bytes(1000)))
    assert "A request may hold 1,000 tokens at most." in text
