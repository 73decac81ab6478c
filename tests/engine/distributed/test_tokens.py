"""Two and four processes compute the tokens of one: ring over loopback, on the CPU."""

import pytest
from groups import LONG, build_divisible, find_out, grouped

from backend.engine.engine import Engine
from backend.pipeline.served_model import ServedModel

pytestmark = pytest.mark.mlx

CASES = [
    ("llama", "tensor", 2, 2),
    ("gpt_oss", "tensor", 2, 2),
    ("deepseek_v3", "pipeline", 2, 3),
    ("qwen3", "tensor", 4, 1),
    ("qwen3_moe", "pipeline", 4, 4),
]


@pytest.fixture
async def engine():
    engine = Engine(serve=ServedModel.of)
    yield engine
    await engine.close(drain_timeout_s=0.0)


@pytest.mark.parametrize(("family", "kind", "size", "layers"), CASES)
@pytest.mark.one_in(3)
async def test_a_group_gives_the_tokens_of_one_process(
    engine, tmp_path, family, kind, size, layers
):
    directory = build_divisible(family, tmp_path, layers)
    alone = await find_out(engine, grouped(directory, 1))
    together = await find_out(engine, grouped(directory, size, distributed=kind))
    assert [o.tokens for o in together.first] == [o.tokens for o in alone.first]
    assert [o.tokens for o in together.again] == [o.tokens for o in alone.first]
    assert [o.cached_tokens for o in together.again] == [o.cached_tokens for o in alone.again]
    assert together.again[1].cached_tokens == LONG - 1
    assert together.first[4].logprobs == pytest.approx(alone.first[4].logprobs, abs=1e-4)
    for ours, theirs in zip(together.scores.logprobs, alone.scores.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert together.embedding == pytest.approx(alone.embedding, abs=1e-4)
    memory = engine.status().memory_bytes
    assert all(memory[f"rank_{rank}"] > 0 for rank in range(size))


@pytest.mark.parametrize(
    ("family", "tuning"), [("qwen3_next", {}), ("qwen3_next_wide", {"kv_bits": 8})]
)
@pytest.mark.one_in(2)
async def test_ranks_of_which_one_alone_has_keys_agree_on_what_they_try(
    engine, tmp_path, family, tuning
):
    directory = build_divisible(family, tmp_path, 4)
    alone = await find_out(engine, grouped(directory, 1, **tuning))
    together = await find_out(engine, grouped(directory, 2, distributed="pipeline", **tuning))
    assert [o.tokens for o in together.first] == [o.tokens for o in alone.first]
    assert [o.tokens for o in together.again] == [o.tokens for o in alone.first]
