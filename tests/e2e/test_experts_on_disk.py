"""Mixtures whose experts stay on disk give the replies of resident ones, through the socket."""

import asyncio
import os
import shutil
from pathlib import Path

import grpc
import pytest
from real_process import real_backend
from serving import Reply, code_of, goes_on_after_a_loss, inspect, served, stream
from waiting import until

from backend.model.checkpoint.expert_store import STORE_NAME
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

# Longer than a chunk, which therefore needs more experts than fit.
LONG = "ba be bi " * 120
REQUESTS = [
    pb.PredictOptions(Prompt="ba be bi", Tokens=16, IgnoreEOS=True),
    pb.PredictOptions(Prompt="ba be bi bo", Tokens=16, IgnoreEOS=True, Temperature=0.9, Seed=4),
    pb.PredictOptions(Prompt=LONG, Tokens=16, IgnoreEOS=True),
    pb.PredictOptions(Prompt="bo", Tokens=16, Grammar='root ::= ("ba" | "be"){7}'),
]
ON_DISK = ["experts:disk", "prefill_chunk:64", "prefill_chunk_alone:128"]
# With shared experts; with biases; one expert of ten a token, without a gate of its own.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4")


@pytest.fixture(params=FAMILIES)
def mixture(request, tiny_models, tmp_path):
    """A checkpoint of its own, beside which a store may be written."""
    return shutil.copytree(tiny_models(request.param), tmp_path / "mixture")


@pytest.fixture
def one_mixture(tiny_models, tmp_path):
    return shutil.copytree(tiny_models("qwen3_moe"), tmp_path / "mixture")


async def replies(backend):
    """Return the replies to requests one by one, and then to the four at once."""
    alone = [await stream(backend.stub, request) for request in REQUESTS]
    together = await asyncio.gather(*(stream(backend.stub, request) for request in REQUESTS))
    return [reply.said for reply in (*alone, *together)]


async def metrics(backend):
    return {each.name: each.value for each in (await inspect(backend)).metrics}


@pytest.mark.one_in(2)
async def test_replies_are_those_of_resident_experts(mixture):
    async with served(mixture) as backend:
        expected = await replies(backend)
        assert (await metrics(backend))["experts.used"] == 0
    # That all of them fit depends on no family.
    whole = [None] if '"qwen3_moe"' in (mixture / "config.json").read_text("utf-8") else []
    for part in ("expert_bytes:1", *whole, "a fifth"):
        if part == "a fifth":
            part = f"expert_bytes:{(mixture / STORE_NAME).stat().st_size // 5}"
        async with served(mixture, Options=[*ON_DISK, *filter(None, [part])]) as backend:
            assert await replies(backend) == expected
            found = await metrics(backend)
        assert found["experts.used"] == found["experts.hits"] + found["experts.misses"] > 0


async def two_turns(backend):
    """Return a reply, and that to a longer prompt with it, some of which the cache must have."""
    first = await stream(backend.stub, REQUESTS[2])
    later = pb.PredictOptions(Prompt=LONG + first.message + " bo", Tokens=20, IgnoreEOS=True)
    second = await stream(backend.stub, later)
    # Its counts may follow the reply.
    await until(lambda: backend.engine.status().metrics["prompt_cache.hit_tokens"] > 300)
    return first.said, second.said


async def test_a_second_turn_takes_the_first_from_the_prompt_cache(one_mixture):
    async with served(one_mixture) as backend:
        expected = await two_turns(backend)
    async with served(one_mixture, Options=[*ON_DISK, "expert_bytes:1"]) as backend:
        assert await two_turns(backend) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.one_in(2)
async def test_quantised_experts_stay_quantised_on_disk(one_mixture, bits):
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    weights, config = one_mixture / "model.safetensors", one_mixture / "config.json"
    network, facts = load_model(one_mixture)
    network, facts = quantize_model(network, facts, 32, bits)
    whole = weights.stat().st_size
    save_model(one_mixture, network, donate_model=True)
    save_config(facts, config)
    (one_mixture / "model.safetensors.index.json").unlink(missing_ok=True)
    options = ["dequantize:false"]
    async with served(one_mixture, Options=options) as backend:
        expected = await replies(backend)
    async with served(one_mixture, Options=[*options, *ON_DISK, "expert_bytes:1"]) as backend:
        assert await replies(backend) == expected
    assert (one_mixture / STORE_NAME).stat().st_size < whole / 2


async def test_all_experts_are_read_once_if_all_fit(one_mixture):
    async with served(one_mixture, Options=ON_DISK) as backend:
        await replies(backend)
        found = await metrics(backend)
        size = (one_mixture / STORE_NAME).stat().st_size
        assert size / 2 < found["experts.bytes"] == found["experts.read_bytes"] < size
        before = found["experts.misses"]
        await replies(backend)
        assert (await metrics(backend))["experts.misses"] == before


async def test_a_stream_goes_on_after_its_engine_is_killed(one_mixture):
    request = pb.PredictOptions(Prompt="ba be", Tokens=100, IgnoreEOS=True)
    async with served(one_mixture) as backend:
        expected = await stream(backend.stub, request)
    async with served(one_mixture, Options=[*ON_DISK, "expert_bytes:1"]) as backend:
        written = (one_mixture / STORE_NAME).stat().st_mtime_ns
        folded = await goes_on_after_a_loss(backend, request)
    assert folded.message == expected.message
    assert (one_mixture / STORE_NAME).stat().st_mtime_ns == written


async def test_the_store_is_written_anew_for_other_weights(one_mixture):
    async with served(one_mixture, Options=ON_DISK):
        first = (one_mixture / STORE_NAME).stat().st_mtime_ns
    async with served(one_mixture, Options=ON_DISK):
        assert (one_mixture / STORE_NAME).stat().st_mtime_ns == first
    os.utime(one_mixture / "model.safetensors")
    async with served(one_mixture, Options=ON_DISK):
        assert (one_mixture / STORE_NAME).stat().st_mtime_ns != first
    (one_mixture / STORE_NAME).write_bytes(b"mlx-backend experts 1\n")
    async with served(one_mixture) as backend:
        expected = await replies(backend)
    async with served(one_mixture, Options=ON_DISK) as backend:
        assert await replies(backend) == expected


async def test_a_damaged_store_never_gives_other_tokens(one_mixture):
    async with served(one_mixture) as backend:
        expected = [(await stream(backend.stub, request)).said for request in REQUESTS]
    async with served(one_mixture, Options=[*ON_DISK, "expert_bytes:1"]) as backend:
        path = one_mixture / STORE_NAME
        data = bytearray(path.read_bytes())
        data[64:-4096] = bytes(len(data) - 4096 - 64)
        with path.open("r+b") as file:
            file.write(data)
        calls = (stream(backend.stub, request) for request in REQUESTS)
        found = await asyncio.gather(*calls, return_exceptions=True)
        restarts = (await metrics(backend))["restarts"]
    failures = [each for each in found if isinstance(each, grpc.aio.AioRpcError)]
    assert failures or restarts
    assert all("damaged" in (each.details() or "") for each in failures)
    pairs = zip(found, expected, strict=True)
    assert all(each.said == reply for each, reply in pairs if isinstance(each, Reply))


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", ["experts:disk"], "experts: the model has none"),
        ("qwen3_moe", ["experts:cloud"], "experts: must be one of resident, disk"),
        ("qwen3_moe", ["experts:disk", "expert_bytes:0"], "expert_bytes: must be at least 1"),
        ("qwen3_moe", ["experts:disk", "speculation:lookup"], "experts: on disk exclude"),
        ("qwen3_moe", ["experts:disk", "tensor_parallel_size:2"], "experts: stay on disk for"),
    ],
)
async def test_a_load_that_cannot_be_names_the_option(tiny_models, family, options, words):
    async with served() as backend:
        code, details = await code_of(backend.load(tiny_models(family), Options=options))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


def test_a_full_disk_fails_the_load_without_half_a_store_and_one_of_fixed_content_is_left_alone(
    small_disk, tiny_models, tmp_path, state_directory
):
    """One backend sees both disks: of the second, the store is in the state directory."""

    def stores():
        return set(state_directory.glob(f"mlx-grpc-backend/experts/*/{STORE_NAME}"))

    model, place, before = tiny_models("gpt_oss"), tmp_path / "mixture", stores()
    fixed = tmp_path.with_name("fixed")
    shutil.copytree(tiny_models("qwen3_moe"), fixed / "mixture")
    size = sum(file.stat().st_size for file in model.iterdir())
    mounted = f"mount --bind {fixed} {fixed} && mount -o remount,bind,ro {fixed}"
    copied = ("sh", "-c", f'cp -r {model} {place} && {mounted} && exec "$@"', "sh")
    prefix = (*small_disk(size + 2**18), *copied)
    with real_backend(tmp_path / "log", prefix=prefix) as backend:
        with pytest.raises(grpc.RpcError) as failed:
            backend.load(place, Options=ON_DISK)
        seen = Path(f"/proc/{backend.process.pid}/root{place}")
        assert {file.name for file in seen.iterdir()} == {file.name for file in model.iterdir()}
        backend.load(place)
        assert not stores() - before
        backend.load(fixed / "mixture", Options=ON_DISK)
        assert len(stores() - before) == 1
    assert not (fixed / "mixture" / STORE_NAME).exists()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "experts: their store takes" in failed.value.details()
