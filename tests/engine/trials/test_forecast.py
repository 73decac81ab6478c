"""The forecast of a model agrees with the measurements of a load."""

from dataclasses import replace
from io import StringIO

import mlx.core as mx
import pytest
from rich.console import Console
from whole_trial import measure

from backend.cli.fit import table, values
from backend.config import MemoryOptions, ModelOptions, TuningOptions
from backend.engine.footprint import forecast
from backend.engine.passes.caches import make_cache_factory
from backend.engine.rows.row import MOST_TOKENS
from backend.engine.trials.draft_model import load_draft
from backend.model.loader import load
from scripts.eagle_head import add_eagle
from scripts.mtp_head import add_head
from scripts.tiny_encoders import build_encoder
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx

FAMILIES = [
    *("llama", "llama_sliding", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2"),
    *("granitemoehybrid", "kimi_linear", "llama4", "llama_wide", "deepseek_v32"),
]


def options(directory):
    return ModelOptions(model=str(directory))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_foretold_is_what_a_load_measures(tiny_models, family):
    directory = tiny_models(family)
    foretold = forecast(options(directory), directory)
    model = load(options(directory), directory)
    assert foretold.card == model.card
    for cache in foretold.caches:
        tuning = TuningOptions(memory=MemoryOptions(kv_bits=cache.bits))
        factory = make_cache_factory(model.network, tuning)
        assert cache.profile == measure(model.network, factory)


def test_what_is_foretold_of_a_draft_model_is_what_a_load_finds(tiny_models):
    directory, draft = tiny_models("llama_sliding"), tiny_models("deepseek_v3")
    named = replace(options(directory), tuning=TuningOptions.of(draft_model=str(draft)))
    foretold = forecast(named, directory)
    model = load(named, directory)
    loaded = load_draft(named, model, range(8))
    assert foretold.draft == loaded.model.card
    alone = forecast(options(directory), directory)
    assert foretold.budget_bytes < alone.budget_bytes
    for cache, without in zip(foretold.caches, alone.caches, strict=True):
        own = without.profile.row_bytes(700)
        assert cache.profile.row_bytes(700) == own + loaded.profile.row_bytes(700)


@pytest.mark.parametrize(
    ("family", "add", "states"), [("qwen3_5", add_head, 1), ("llama", add_eagle, 3)]
)
def test_what_is_foretold_of_a_head_is_what_a_load_finds(tmp_path, family, add, states):
    directory = build(family, tmp_path / "model", num_hidden_layers=4)
    head = add(directory, tmp_path / "head")
    named = replace(options(directory), tuning=TuningOptions.of(draft_model=str(head)))
    foretold = forecast(named, directory)
    loaded = load_draft(named, load(named, directory), range(8))
    assert foretold.draft == loaded.model.card
    assert foretold.draft.weights_bytes > 0
    assert foretold.caches[0].profile.draft == replace(loaded.profile, has_own_lengths=False)
    assert loaded.profile.fixed_bytes == MOST_TOKENS * states * 64 * 4


def test_a_head_that_the_checkpoint_brings_is_foretold(tmp_path):
    directory = add_head(build("qwen3_5", tmp_path))
    assert forecast(options(directory), directory).draft.model_type == "MTP head"


def test_heads_wide_enough_for_it_can_be_quantised(tiny_models):
    directory = tiny_models("llama_wide")
    caches = forecast(options(directory), directory).caches
    assert [cache.bits for cache in caches] == [None, 8, 4]
    sizes = [cache.profile.bytes_per_token for cache in caches]
    assert sizes == sorted(sizes, reverse=True)


def test_a_forecast_reads_no_weights(tiny_models):
    directory = tiny_models("llama")
    before = mx.get_active_memory()
    foretold = forecast(options(directory), directory)
    assert mx.get_active_memory() - before < foretold.card.weights_bytes / 10


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_model_with_towers_is_foretold_with_its_media(tiny_vision_models, family):
    directory = tiny_vision_models(family)
    foretold = forecast(options(directory), directory)
    assert foretold.card == load(options(directory), directory).card
    assert foretold.media_bytes > 0
    assert not foretold.is_mixture


def test_requests_fill_the_budget_and_go_no_further(tiny_models):
    directory = tiny_models("llama")
    foretold = replace(forecast(options(directory), directory), budget_bytes=10**7)
    (cache, *_) = foretold.caches
    rows = foretold.rows(cache, 1000)
    assert (
        rows * cache.profile.row_bytes(1000) <= 10**7 < (rows + 1) * cache.profile.row_bytes(1000)
    )


def test_where_the_weights_do_not_fit_nothing_runs(tiny_models):
    directory = tiny_models("llama")
    foretold = replace(forecast(options(directory), directory), memory_bytes=1000)
    assert not foretold.has_room
    assert foretold.rows(foretold.caches[0], 1) == 0


def test_an_encoder_is_foretold_without_kv_caches(tmp_path):
    directory = build_encoder("bert", tmp_path / "bert")
    foretold = forecast(options(directory), directory)
    assert foretold.card.weights_bytes > 0
    assert foretold.caches == ()
    assert values(foretold)["caches"] == values(foretold)["options"] == []
    console = Console(width=100, file=StringIO())
    console.print(table(foretold))
    assert "none: it is an encoder" in console.file.getvalue()
