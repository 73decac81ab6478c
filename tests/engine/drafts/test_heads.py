"""A head changes no reply, and is right where it knows the model."""

import random
from dataclasses import replace
from functools import partial

import pytest
from drafting import FEW, assert_same, head_driver, head_pair, requests_of, samplings
from engine_driver import Driver, make_request, prompt_of, room_for
from fp8 import store_fp8

from backend.core.request import SamplingParams
from backend.engine.plan import Batching, BatchPlan
from scripts.eagle_head import add_eagle
from scripts.mtp_head import NEMOTRON, add_head
from scripts.nextn_head import add_nextn
from scripts.sweep.vision_models import build_vision_model
from scripts.tiny_drafters import GEMMA4, LAGUNA, MUSE, add_assistant, add_block
from scripts.tiny_models import FAMILIES, build

pytestmark = pytest.mark.mlx

GLM = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "rope_scaling": None,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
}
DSA = {
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
}
# Heads by the families that they draft for: the script, a family of tiny models, changes to it.
HEADS = {
    "qwen3_5": (add_head, "qwen3_5", {}),
    "qwen3_next": (add_head, "qwen3_next", {}),
    "glm4_moe": (add_nextn, "qwen3_moe", {"model_type": "glm4_moe", **GLM}),
    "glm4_moe_lite": (add_nextn, "deepseek_v3", {"model_type": "glm4_moe_lite"}),
    "deepseek_v32": (add_nextn, "deepseek_v32", {}),
    "glm_moe_dsa": (
        add_nextn,
        "deepseek_v32",
        {"model_type": "glm_moe_dsa", **DSA},
    ),
    # Split off by mlx-vlm.
    "glm_moe_dsa_apart": (partial(add_nextn), "deepseek_v32", {"model_type": "glm_moe_dsa", **DSA}),
    "llama": (add_eagle, "llama", {"num_hidden_layers": 4}),
    "gpt_oss": (
        add_eagle,
        "gpt_oss",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "nemotron_h": (add_head, "nemotron_h", NEMOTRON),
    "glm5_next": (add_head, "glm5_next", {}),
    "gemma4": (add_assistant, "llama", GEMMA4),
    "gemma4_shared": (
        partial(add_assistant, has_clusters=True),
        "llama",
        {**GEMMA4, "num_kv_shared_layers": 2},
    ),
    "dflash": (partial(add_block, kind="dflash"), "qwen3", {}),
    "hybrid_dflash": (partial(add_block, kind="dflash"), "qwen3_5", {}),
    "dflash2": (partial(add_block, kind="dflash2"), "qwen3", {}),
    "dspark": (partial(add_block, kind="dspark"), "qwen3", {}),
    "gemma4_dspark": (partial(add_block, kind="gemma4_dspark"), "llama", GEMMA4),
    "muse": (partial(add_block, kind="muse"), "llama", MUSE),
    "laguna": (partial(add_block, kind="laguna"), "llama", LAGUNA),
}
KINDS = ("qwen3_5", "glm4_moe_lite", "llama", "gemma4", "dflash")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a network, and a head for it that is always right or hardly ever."""
    made = {}

    def pair(family, *, is_right=False):
        if (family, is_right) not in made:
            directory = tmp_path_factory.mktemp(family)
            add, base, changes = HEADS[family]
            make = build if base in FAMILIES else build_vision_model
            make(base, directory, **changes)
            head = directory if add is add_nextn else directory / "head"
            add(directory, None if add is add_nextn else head, is_right=is_right)
            made[family, is_right] = head_pair(directory, head)
        return made[family, is_right]

    return pair


@pytest.mark.parametrize(
    ("family", "is_right"),
    [
        *[("qwen3_5", False), ("qwen3_5", True), ("qwen3_next", True)],
        *[("glm4_moe", False), ("glm4_moe_lite", False), ("glm4_moe_lite", True)],
        *[("deepseek_v32", False), ("glm_moe_dsa", True), ("glm_moe_dsa_apart", True)],
        *[("llama", False), ("llama", True), ("gpt_oss", False)],
        *[("nemotron_h", False), ("nemotron_h", True)],
        *[("glm5_next", False), ("glm5_next", True)],
        *[("gemma4", False), ("gemma4", True), ("gemma4_shared", False)],
        *[("dflash", False), ("dflash", True), ("hybrid_dflash", False), ("dflash2", True)],
        *[("dspark", True), ("gemma4_dspark", False), ("muse", True), ("laguna", True)],
    ],
)
# Together they have every sampling.
@pytest.mark.parametrize(("rows", "seed"), [(1, 4), (5, 5)])
@pytest.mark.one_in(8)
def test_a_reply_is_the_same_whether_the_head_is_right_or_not(pairs, family, rows, seed, is_right):
    pair = pairs(family, is_right=is_right)
    requests = requests_of(seed, rows, longest=28 if rows == 1 else 20)
    expected = Driver(pair[0]).run(*requests)
    # Of a long draft that is wrong, all but the beginning is work for nothing.
    driver = head_driver(pair, max_draft_tokens=16 if is_right else 4)
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["drafted_tokens"] > 10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=5)]
)
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.one_in(5)
def test_a_head_that_knows_the_model_is_nearly_always_right(pairs, rows, sampling, family):
    pair = pairs(family, is_right=True)
    requests = [
        make_request(f"r{n}", prompt_of(30 + 9 * n, n), max_tokens=32, sampling=sampling)
        for n in range(rows)
    ]
    expected = Driver(pair[0]).run(*requests)
    driver = head_driver(pair)
    assert_same(driver.run(*requests), expected)
    status = driver.loop.status()
    assert status.metrics["accepted_tokens"] > 24 * rows
    # One token of 64 is unknown to this head, and ends a draft.
    assert (
        status.metrics["accepted_tokens"]
        > (0.8 if family == "llama" else 0.95) * status.metrics["drafted_tokens"]
    )


@pytest.mark.parametrize("family", [*KINDS, "glm_moe_dsa", "glm5_next"])
@pytest.mark.one_in(4)
def test_it_is_the_same_while_rows_come_go_and_pause(pairs, family):
    network, head = pairs(family, is_right=True)
    rng = random.Random(4)
    shared = prompt_of(70)
    requests = [
        make_request(
            f"r{n}",
            [*shared[: rng.randint(8, 70)], *prompt_of(rng.randint(1, 60), n)],
            max_tokens=rng.randint(5, 40),
            sampling=replace(samplings(n)[n % 6], logit_bias=FEW if n % 2 else {}),
        )
        for n in range(9)
    ]
    # All at once; that each gets them alone too is in test_loop and test_speculation.
    plain = Driver(network)
    plain.run(*requests)
    expected = {name: outcome.token_ids for name, outcome in plain.outcomes.items()}
    # The keys of this head are larger than the model's.
    budget = room_for(network, 300, rows=9 if family == "dflash" else 3)
    driver = head_driver((network, head), speculation="auto", max_kv_bytes=budget)
    left = list(requests)
    while left or not driver.loop.is_idle or driver.loop.status().metrics["waiting"]:
        if left and rng.random() < 0.3:
            driver.loop.requests.submit(left.pop())
        driver.turn()
    assert {name: driver.outcomes[name].token_ids for name in expected} == expected
    assert driver.loop.status().metrics["accepted_tokens"] > 10


@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_that_was_stored_is_drafted_for_from_its_reply_on(pairs, family):
    pair = pairs(family, is_right=True)
    driver = head_driver(pair, max_kv_bytes=2**30)
    prompt = prompt_of(200)
    first, again = (make_request(name, prompt, max_tokens=40) for name in "ab")
    (one,) = driver.run(first)
    accepted = driver.loop.status().metrics["accepted_tokens"]
    (other,) = driver.run(again)
    assert other.token_ids == one.token_ids
    assert driver.loop.status().metrics["accepted_tokens"] - accepted > 25


def test_a_deepseek_in_8_bits_brings_its_head(tmp_path):
    # mlx-lm leaves out only a head that follows 61 layers.
    directory = build("deepseek_v3", tmp_path, num_hidden_layers=61)
    store_fp8(add_nextn(directory, is_right=True))
    pair = head_pair(directory, directory)
    requests = [make_request(f"r{n}", prompt_of(30 + 9 * n, n), max_tokens=17) for n in range(2)]
    # That of all of the family: to find it takes longer than the replies.
    plan = BatchPlan(Batching.LATENT)
    expected = Driver(pair[0], plan=plan).run(*requests)
    driver = head_driver(pair, plan=plan)
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 20


def test_a_head_that_fails_is_left_out_and_costs_no_reply(pairs, caplog):
    network, head = pairs("qwen3_5", is_right=True)

    class Failing:
        passes = 0

        def __getattr__(self, name):
            return getattr(head.model.network, name)

        def __call__(self, inputs, cache):
            self.passes += 1
            if self.passes > 20:
                raise RuntimeError("out of memory")
            return head.model.network(inputs, cache)

    requests = [make_request(f"r{n}", prompt_of(30, n), max_tokens=80) for n in range(2)]
    expected = Driver(network).run(*requests)
    failing = replace(head, model=replace(head.model, network=Failing()))
    driver = head_driver((network, failing))
    assert_same(driver.run(*requests), expected)
    assert driver.loop.status().metrics["accepted_tokens"] > 5
    assert caplog.text.count("the draft model fails, and drafts no more") == 1
