"""A model is replaced while a request for it is prepared or waits: the next one answers it."""

import asyncio
import ctypes
import gc
import itertools
import json
import os
import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import grpc
import mlx.core as mx
import pytest
from adapters import write_adapter
from serving import code_of, served
from waiting import until

from backend.config import INLINE_REQUEST_BYTES, TuningOptions
from backend.pb import backend_pb2 as pb
from backend.pipeline import worker_pool
from scripts.tiny_encoders import build_cross_encoder
from scripts.tiny_models import build
from scripts.tiny_retrieval import build_reranker

pytestmark = pytest.mark.mlx

LANES = 3
HEAP_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
MAX_LEFT_BYTES = 3 * 2**20
PROMPT = pb.PredictOptions(Prompt="be bi", Tokens=2)
LONG = pb.PredictOptions(Prompt="be bi", Tokens=300, IgnoreEOS=True)
LARGE = pb.PredictOptions(Prompt="be bi", Tokens=2, NegativePrompt="a" * INLINE_REQUEST_BYTES)
RERANK = pb.RerankRequest(query="be", documents=["bi", "bo"])
CALLS = {
    "Predict": lambda stub: stub.Predict(PROMPT),
    "a large Predict": lambda stub: stub.Predict(LARGE),
    "PredictStream": lambda stub: stub.PredictStream(PROMPT).read(),
    "Embedding": lambda stub: stub.Embedding(pb.PredictOptions(Embeddings="be bi")),
    "Score": lambda stub: stub.Score(pb.ScoreRequest(prompt="be", candidates=[" bi", " bo"])),
    "Rerank": lambda stub: stub.Rerank(RERANK),
}


class HoldingExecutor(ThreadPoolExecutor):
    """Holds its first work back until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.holds, self.goes_on = asyncio.Event(), threading.Event()

    def submit(self, work, *arguments):
        if self.holds.is_set():
            return super().submit(work, *arguments)
        self.holds.set()
        return super().submit(lambda: self.goes_on.wait() and work(*arguments))


def changed_copy(model, directory):
    """Copy a model, and turn its weights round, so that its answers are others."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    weights = {name: mx.contiguous(value[::-1]) for name, value in mx.load(str(path)).items()}
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    return directory


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoders")
    first = build_reranker(root / "tiny-qwen3-Reranker")
    return first, changed_copy(first, root / "other-qwen3-Reranker")


@pytest.fixture(scope="module")
def cross_encoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cross-encoders")
    first = build_cross_encoder("bert", root / "tiny")
    return first, changed_copy(first, root / "other")


class HeapInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in HEAP_FIELDS]


def taken_bytes():
    """Return the bytes that this process has from the C library, without freed ones or garbage."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = HeapInfo
    heap = mallinfo()
    return heap.uordblks + heap.hblkhd


async def answers_of_calls_during_a_load(call, first, second, monkeypatch):
    """Return the answers of the first model, of a call prepared for it, and of the second one."""
    executor = HoldingExecutor()
    executor.holds.set()
    others = itertools.chain([executor] * LANES, iter(ThreadPoolExecutor, None))
    monkeypatch.setattr(worker_pool, "_new_threads", lambda _name, _count: next(others))
    async with served(first) as backend:
        before = await call(backend.stub)
        executor.holds.clear()
        preparing = asyncio.ensure_future(call(backend.stub))
        await executor.holds.wait()
        assert (await backend.load(second)).success
        executor.goes_on.set()
        answers = before, await preparing, await call(backend.stub)
    return [untimed(answer) for answer in answers]


def untimed(answer):
    return [text for text in str(answer).splitlines() if "timing" not in text]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_call_that_was_prepared_for_another_model_is_prepared_again(
    decoders, call, monkeypatch
):
    before, answer, after = await answers_of_calls_during_a_load(call, *decoders, monkeypatch)
    assert answer == after != before


async def test_pairs_for_another_cross_encoder_are_made_again(cross_encoders, monkeypatch):
    rerank = CALLS["Rerank"]
    before, answer, after = await answers_of_calls_during_a_load(
        rerank, *cross_encoders, monkeypatch
    )
    assert answer == after != before


async def drained(stream):
    while await stream.read():
        pass


async def test_a_call_that_waits_for_others_moves_to_the_next_model(decoders):
    first, second = decoders
    async with served(first, Options=["max_slots:1"]) as backend:
        stream = backend.stub.PredictStream(LONG)
        await stream.read()
        waiting = asyncio.ensure_future(backend.stub.Predict(PROMPT))
        await until(lambda: len(backend.engine.calls.requests) == 2)
        assert (await backend.load(second)).success
        assert (await waiting).message == (await backend.stub.Predict(PROMPT)).message
        ended = await code_of(drained(stream))
    assert ended == (grpc.StatusCode.ABORTED, "another model is being loaded")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it is glibc's")
async def test_threads_keep_nothing_of_the_tokenizers_of_models_that_were_replaced(decoders):
    words = pb.PredictOptions(Prompt=" ".join(f"{number * 7919:x}bebibo" for number in range(9000)))
    async with served(decoders[0]) as backend:
        await backend.stub.TokenizeString(words)
        before = taken_bytes()
        for model in (*decoders[::-1], *decoders[::-1]):
            assert (await backend.load(model)).success
            await backend.stub.TokenizeString(words)
        # Threads that have nothing more to do end a moment later.
        await until(lambda: taken_bytes() - before < MAX_LEFT_BYTES, timeout_s=30)


def without(name):
    """Return a function that removes a file of a checkpoint."""
    return lambda directory: (directory / name).unlink()


def with_text(name, text):
    def write(directory):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)

    return write


def with_pipe(name):
    def replace(directory):
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return replace


def with_pattern(pattern):
    def replace(directory):
        path = directory / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        path.write_text(json.dumps(tokenizer | {"pre_tokenizer": {**split, "invert": False}}))

    return replace


def with_adapter(directory, **parameters):
    config = write_adapter(directory / "adapter", seed=1) / "adapter_config.json"
    written = json.loads(config.read_text())
    written["lora_parameters"] |= parameters
    config.write_text(json.dumps(written))


def with_config(**values):
    """Return a function that changes values of config.json."""

    def change(directory):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def with_scales_for_other_groups(directory):
    path, words = directory / "model.safetensors", {"group_size": 32, "bits": 4}
    weights = mx.load(str(path))
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name], scales, _ = mx.quantize(weights[name], **words)
    wider = mx.zeros((len(scales), 3))
    weights |= {name.replace("weight", part): wider for part in ("scales", "biases")}
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    with_config(quantization=words)(directory)


def with_draft_of_another_vocabulary(directory):
    path = shutil.copytree(directory, directory / "draft") / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    mirrored = dict(zip(vocabulary, [*vocabulary.values()][::-1], strict=True))
    path.write_text(json.dumps(tokenizer | {"model": tokenizer["model"] | {"vocab": mirrored}}))


def without_numbers(directory):
    path = directory / "model.safetensors"
    poisoned = {name: weight * mx.nan for name, weight in mx.load(str(path)).items()}
    mx.eval(poisoned)
    mx.save_safetensors(str(path), poisoned, {"format": "mlx"})


def with_pipe_in_another_tokenizer(directory):
    with_pipe("special_tokens_map.json")(shutil.copytree(directory, directory.with_name("other")))


def filled(value, directory):
    """Return the value of a field with the directory in the place of braces."""
    if isinstance(value, list):
        return [filled(each, directory) for each in value]
    return value.format(directory) if isinstance(value, str) else value


NAMES = {*pb.ModelOptions.DESCRIPTOR.fields_by_name, *TuningOptions().by_name()}
HEADER = json.dumps({"a": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}})
WEIGHTS_OF_ANOTHER_TYPE = chr(len(HEADER)) + "\0" * 7 + HEADER
NEVER = {
    "a pattern without end": (
        with_pattern(r"(\w+\s?)*$"),
        {},
        "'(\\\\w+\\\\s?)*$' is malformed, or",
    ),
    "no config": (without("config.json"), {}, "has no config.json"),
    "no weights": (without("model.safetensors"), {}, "has no weights"),
    "a truncated weight file": (with_text("model.safetensors", "x" * 99), {}, "safetensors"),
    "an index without files": (
        with_text("model.safetensors.index.json", '{"weight_map": ["a"]}'),
        {},
        "weight_map is not an object of file names",
    ),
    "an index of a file that cannot be": (
        with_text("model.safetensors.index.json", json.dumps({"weight_map": {"a": "x" * 5000}})),
        {},
        "is incomplete: 1 of 1 weight files are missing, xxx",
    ),
    "no tokenizer": (without("tokenizer.json"), {}, ""),
    "a tokenizer that is none": (with_text("tokenizer.json", "{}"), {}, ""),
    "weights that are still to be downloaded": (
        lambda place: (place / "model-2.safetensors").symlink_to("nowhere"),
        {},
        "model-2.safetensors cannot be read: No such file",
    ),
    **{
        f"{name} as {text}": (with_text(name, text), {}, f"{name} is not a JSON object")
        for name in ("generation_config.json", "tokenizer_config.json")
        for text in ("null", "[]")
    },
    "a generation config that is no text": (
        lambda place: (place / "generation_config.json").write_bytes(b"\xff"),
        {},
        "generation_config.json cannot be read: 'utf-8'",
    ),
    "weights of a type that MLX does not read": (
        with_text("model-2.safetensors", WEIGHTS_OF_ANOTHER_TYPE),
        {},
        "has weights of type 'F64', which MLX does not read",
    ),
    "a token that is none": (
        lambda _: None,
        {"Options": ["eos_token:nobody"]},
        "eos_token: 'nobody' is not a token of this model",
    ),
    "a pipe": (with_pipe("generation_config.json"), {}, "is not a regular file"),
    "deep JSON": (with_text("special_tokens_map.json", "[" * 5000 + "]" * 5000), {}, "levels deep"),
    "no adapter": (
        lambda _: None,
        {"LoraAdapter": "nowhere"},
        "LoraAdapter: nowhere does not exist",
    ),
    "one of two adapters": (
        with_adapter,
        {"LoraAdapters": ["{}/adapter", "nowhere"]},
        "LoraAdapters[1]: nowhere does not exist",
    ),
    "adapters on several processes": (
        with_adapter,
        {"LoraAdapters": ["{}/adapter"], "TensorParallelSize": 2},
        "LoraAdapters[0]: a model on several processes takes no adapters",
    ),
    "hosts that are elsewhere": (
        lambda _: None,
        {"Options": ["hosts:192.0.2.1,192.0.2.2"]},
        "Options: hosts: the first one, 192.0.2.1, must be an address of this machine",
    ),
    "a context without room for a reply": (
        lambda _: None,
        {"MaxModelLen": 1},
        "MaxModelLen: must be at least 2, not 1",
    ),
    "another number of hosts": (
        lambda _: None,
        {"Options": ["hosts:127.0.0.1,127.0.0.1"], "TensorParallelSize": 4},
        "TensorParallelSize: is 4, and there are 2 hosts",
    ),
    "a number of processes that does not divide the heads": (
        lambda _: None,
        {"TensorParallelSize": 3},
        "TensorParallelSize: 3 processes: the model has 4 and 2 heads; sizes that work: 2",
    ),
    "a link of processes that nobody starts": (
        lambda _: None,
        {"Options": ["tensor_parallel_size:2", "distributed_backend:mpi"]},
        "Options: distributed_backend: mpi must start all ranks",
    ),
    "a link of processes without its devices": (
        lambda _: None,
        {"Options": ["hosts:127.0.0.1,127.0.0.1", "distributed_backend:jaccl"]},
        "Options: distributed_backend: jaccl needs a hostfile with the RDMA devices",
    ),
    "another tokenizer that is nowhere": (
        lambda _: None,
        {"Tokenizer": "nowhere"},
        "Tokenizer: nowhere does not exist",
    ),
    "another tokenizer with a pipe": (
        with_pipe_in_another_tokenizer,
        {"Tokenizer": "{}/../other"},
        "other/special_tokens_map.json is not a regular file",
    ),
    "a draft model that is none": (
        lambda directory: (directory / "draft").mkdir(),
        {"Options": ["draft_model:{}/draft"]},
        "is not an MLX or safetensors model: it has no config.json",
    ),
    "a draft model of no type": (
        with_text("../draft/config.json", '{"model_type": ["llama"]}'),
        {"Options": ["draft_model:{}/../draft"]},
        "config.json does not name a model_type",
    ),
    "a draft model of no JSON": (
        with_text("../draft/config.json", "{"),
        {"Options": ["draft_model:{}/../draft"]},
        "draft/config.json cannot be read: ",
    ),
    "a head that is not there": (
        lambda _: None,
        {"Options": ["speculation:mtp"]},
        "brings no MTP head that can be used",
    ),
    "experts that are not there": (
        lambda _: None,
        {"Options": ["experts:disk"]},
        "experts: the model has none that could stay on disk",
    ),
    "an adapter that drops all": (
        partial(with_adapter, dropout=1),
        {"LoraAdapter": "{}/adapter"},
        "lora_parameters.dropout is 1, not a number",
    ),
    "an adapter of another rank": (
        partial(with_adapter, rank=3),
        {"LoraAdapter": "{}/adapter"},
        "without the rank of its config, 3",
    ),
    "a template of two bytes": (
        lambda directory: (directory / "odd.jinja").write_bytes(b"\xff\xfe"),
        {"Options": ["chat_template:{}/odd.jinja"]},
        "odd.jinja is not UTF-8",
    ),
    "a large template": (
        with_text("../odd.jinja", "x" * (2**22 + 1)),
        {"Options": ["chat_template:{}/../odd.jinja"]},
        "odd.jinja has 4194305 bytes, more than",
    ),
    "a file of hosts without end": (
        lambda _: None,
        {"Options": ["hostfile:/dev/zero"]},
        "hostfile: /dev/zero cannot be used: it is no file of at most",
    ),
    "a home of nobody": (
        lambda _: None,
        {"LoraAdapter": "~nobody-of-this-name/x"},
        "LoraAdapter: is in the home of a user who does not exist",
    ),
    "a cache in a home of nobody": (
        lambda _: None,
        {"Options": ["cache_dir:~nobody-of-this-name"]},
        "cache_dir: is in the home of a user",
    ),
    "a template in a home of nobody": (
        lambda _: None,
        {"Options": ["chat_template:~nobody-of-this-name"]},
        "is neither a",
    ),
    "a template that ends too early": (
        lambda _: None,
        {"Options": ["chat_template:{{{{ broken"]},
        "chat_template: line 1 of the template: unexpected end of template",
    ),
    "a template of the checkpoint that ends too early": (
        with_text("chat_template.jinja", "{% for message in messages %}{{ mess"),
        {},
        "chat_template.jinja: line 1 of the template: unexpected end of template",
    ),
    "a template of the checkpoint for tools that ends too early": (
        with_text("additional_chat_templates/tool_use.jinja", "{% if"),
        {},
        "chat_template.jinja: line 1 of the template: unexpected 'end of template'",
    ),
    "no template": (lambda _: None, {"Options": ["chat_template:" + "9" * 400]}, "is neither a"),
    "a folder that is none": (lambda _: None, {"Options": ["cache_dir:a\0"]}, "cache_dir: is not"),
    "a number that is too large": (
        lambda _: None,
        {"Options": [f"expected_tokens:{10**30}"]},
        "expected_tokens: expected an integer of at most 9007199254740992",
    ),
    "a share of the memory that is none": (
        lambda _: None,
        {"GPUMemoryUtilization": 1e-45},
        "GPUMemoryUtilization: must be between 1e-07 and 1, not 1.4013e-45",
    ),
    "a model that nobody knows": (
        with_config(model_type="unheard_of"),
        {},
        "unheard_of",
    ),
    "weights of another width": (
        with_config(hidden_size=32),
        {},
        "do not match its config.json: Expected shape",
    ),
    "weights of more layers": (
        with_config(num_hidden_layers=1),
        {},
        "do not match its config.json: Received ",
    ),
    "scales for other groups": (
        with_scales_for_other_groups,
        {},
        "do not match its config.json: [quantize]",
    ),
    "an adapter for another width": (
        lambda directory: write_adapter(directory / "adapter", seed=1, width=32),
        {"LoraAdapter": "{}/adapter"},
        "adapter does not fit: ",
    ),
    "a draft model of another vocabulary": (
        with_draft_of_another_vocabulary,
        {"Options": ["draft_model:{}/draft"]},
        "draft_model: it has another vocabulary than the model",
    ),
    "a pipeline of a model that has none": (
        lambda _: None,
        {"Options": ["tensor_parallel_size:2", "distributed:pipeline"]},
        "distributed: qwen3 has no pipeline parallelism in mlx-lm; ",
    ),
    "a link of processes that MLX lacks here": (
        lambda _: None,
        {"Options": ["hosts:127.0.0.1,127.0.0.1", "distributed_backend:nccl"]},
        "Options: distributed_backend: nccl cannot be used here",
    ),
    "a share of the memory without room for a request": (
        lambda _: None,
        {"GPUMemoryUtilization": 1e-6},
        "GPUMemoryUtilization: is too small: ",
    ),
    "less memory than a request needs": (
        lambda _: None,
        {"Options": ["max_kv_bytes:1"]},
        "max_kv_bytes: is too small: 1 bytes are for KV caches",
    ),
    "more memory than there is": (
        lambda _: None,
        {"Options": [f"wired_limit_mb:{2**53}"]},
        "wired_limit_mb: must be between 0 and",
    ),
}


CODES_OF_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
}


@pytest.mark.parametrize(("spoil", "options", "problem"), NEVER.values(), ids=NEVER)
@pytest.mark.one_in(3)
async def test_a_load_that_cannot_work_is_refused_while_the_model_goes_on_serving(
    shared, decoders, tmp_path, spoil, options, problem
):
    spoil(bad := shutil.copytree(decoders[1], tmp_path / "bad"))
    async with shared(decoders[0]) as backend:
        process = backend.engine.process_id
        running = aiter(backend.stub.PredictStream(LONG))
        first = await anext(running)
        chosen = {name: filled(value, bad) for name, value in options.items()}
        code, details = await code_of(backend.load(bad, **chosen))
        assert code in CODES_OF_REFUSALS, details
        assert problem in details
        assert "loaded again" not in details
        assert re.match(r"(\w+)[:\[]", details)[1] in NAMES, details
        assert [first, *[reply async for reply in running]][-1].tokens == LONG.Tokens
        assert (await backend.stub.Predict(PROMPT)).tokens == 2
        assert backend.engine.process_id == process


async def test_loads_that_cannot_work_wait_for_no_other_and_hold_up_nobody(decoders, tmp_path):
    bad = shutil.copytree(decoders[1], tmp_path / "bad")
    (bad / "config.json").unlink()
    draft = ["speculation:draft", f"draft_model:{tmp_path}/nowhere"]
    asked = {
        "/nowhere": (tmp_path / "nowhere", {}),
        "has no config.json": (bad, {}),
        "LoraAdapter: gone does not exist": (decoders[1], {"LoraAdapter": "gone"}),
        "draft_model: there is no model": (decoders[0], {"Options": draft}),
    }
    async with served(decoders[0]) as backend:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            hub = "HF_ENDPOINT=http://{}:{}".format(*silent.getsockname())
            variables = [hub.encode(), b"HF_HUB_OFFLINE=0", f"HF_HOME={tmp_path}".encode()]
            load = asyncio.ensure_future(code_of(backend.load("org/model", EnvVars=variables)))
            taken, _ = await asyncio.get_running_loop().sock_accept(silent)
            each = [*asked.values()] * 10
            loads = [code_of(backend.load(model, **options)) for model, options in each]
            refusals = await asyncio.gather(*loads)
            assert (await backend.stub.Predict(PROMPT)).tokens == 2
            assert not load.done()
            taken.close()
        code, _ = await load
    assert code is grpc.StatusCode.UNAVAILABLE
    assert {code.name for code, _ in refusals} == {"NOT_FOUND", "INVALID_ARGUMENT"}
    told = [words in details for (_, details), words in zip(refusals, [*asked] * 10, strict=True)]
    assert all(told)


async def test_after_a_load_that_fails_late_the_model_is_loaded_again(decoders, tmp_path):
    without_numbers(bad := shutil.copytree(decoders[1], tmp_path / "bad"))
    async with served(decoders[0]) as backend:
        before = (await backend.stub.Predict(PROMPT)).message
        code, details = await code_of(backend.load(bad))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "NaN" in details
        assert details.endswith(f"{decoders[0]} is loaded again")
        assert (await backend.stub.Predict(PROMPT)).message == before


TOO_SMALL = {
    "GPUMemoryUtilization": {"GPUMemoryUtilization": 1e-6},
    "max_kv_bytes": {"Options": ["max_kv_bytes:1000"], "GPUMemoryUtilization": 0.5},
}


@pytest.mark.parametrize("field", TOO_SMALL)
async def test_memory_without_room_for_any_request_is_refused(decoders, field):
    async with served() as backend:
        code, details = await code_of(backend.load(decoders[1], **TOO_SMALL[field]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.match(rf"{field}: is too small: [\d,]+ bytes are for KV caches", details), details


async def test_a_model_that_cannot_come_back_is_told_to_be_gone(decoders, tmp_path):
    first = shutil.copytree(decoders[0], tmp_path / "first")
    without_numbers(bad := shutil.copytree(decoders[1], tmp_path / "bad"))
    async with served(first) as backend:
        (first / "config.json").unlink()
        code, details = await code_of(backend.load(bad))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"No model is loaded now: {first} could not be loaded again" in details
        code, details = await code_of(backend.stub.Predict(PROMPT))
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")


async def test_requests_that_arrive_during_a_replacement_wait_for_it(decoders):
    async with served(decoders[0]) as backend:
        load = asyncio.create_task(backend.load(decoders[1]))
        await until(lambda: backend.engine.model is None)
        replies = await asyncio.gather(*(backend.stub.Predict(PROMPT) for _ in range(20)))
        assert (await load).success
        assert {reply.tokens for reply in replies} == {2}


async def test_no_answer_is_of_another_model_while_two_are_loaded_in_turn(tmp_path):
    names = ("one", "two")
    for seed, name in enumerate(names):
        build("llama", tmp_path / name, seed=seed)
    async with served() as backend:
        load = partial(backend.load, ModelPath=str(tmp_path))
        request = partial(pb.PredictOptions, Prompt="be bi bo", Tokens=6, IgnoreEOS=True)
        expected = {}
        for name in names:
            await load(name)
            expected[name] = (await backend.stub.Predict(request())).message
        assert len(set(expected.values())) == 2
        answers = {name: [] for name in names}
        refusals = set()

        async def ask(name):
            while not ended.is_set():
                try:
                    reply = await backend.stub.Predict(request(ModelIdentity=name))
                    answers[name].append(reply.message)
                except grpc.aio.AioRpcError as error:
                    refusals.add(error.code())

        ended = asyncio.Event()
        asking = asyncio.gather(*(ask(name) for name in names * 2))
        for name in names * 4:
            await load(name)
            count = len(answers[name])
            await until(lambda found=answers[name], count=count: len(found) > count + 2)
        ended.set()
        await asking
    assert {name: set(found) for name, found in answers.items()} == {
        name: {message} for name, message in expected.items()
    }
    assert refusals <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED}
