"""A loop that follows another one's plan does the same, whatever its own clock says."""

import random

import pytest
from engine_driver import Driver, make_request, prompt_of

from backend.core.metric_table import nested
from backend.core.prompt import MediaKind, Prompt
from backend.core.request import SamplingParams
from backend.core.scoring import ScoreRequest
from backend.engine.distributed.gathering import Turn, make_codec
from backend.engine.messages.protocol import Cancel, Job, PrepareMedium, Submit
from backend.engine.port import Pace
from backend.engine.rows.pacing import ChunkLimit, PrefillPace

pytestmark = pytest.mark.mlx


class Ranks:
    """Two loops: one decides, the other one gets its decisions, encoded and decoded."""

    def __init__(self, network, rng):
        # Like those of a group, they take the pace of their port.
        self.decides, self.follows = (
            Driver(network, is_replicated=True, max_cache_bytes=40_000, max_slots=4)
            for _ in range(2)
        )
        self.codec = make_codec()
        self.rng = rng
        self.turns = 0

    def pace(self):
        """Draw a pace that a clock may give."""
        tokens = self.rng.randint(1, 40)
        chunk = ChunkLimit(tokens, rest=self.rng.randint(tokens, 2 * tokens))
        prefill = PrefillPace(self.rng.random() < 0.5, shared=chunk, alone=chunk)
        return Pace(prefill, self.decides.loop.background.pace())

    def turn(self, *commands):
        self.turns += 1
        turn = Turn(self.turns, commands, self.pace())
        heard = self.codec.decode(self.codec.encode(turn))
        for driver, plan in ((self.decides, turn), (self.follows, heard)):
            driver.desk.commands += plan.commands
            driver.desk.paces.append(plan.pace)
            driver.loop.turn()
            driver.loop.check()
            assert not driver.desk.paces

    def state(self, driver):
        status = driver.loop.status()
        rows = [
            (r.request_id, r.phase, r.prefilled_tokens, r.cached_tokens) for r in status.requests
        ]
        return driver.loop.counters.checksum, nested(status.metrics)["prompt_cache"], rows


def test_a_command_that_raises_costs_the_next_ones_nothing(networks):
    driver = Driver(networks("llama"))
    medium = PrepareMedium(kind=MediaKind.AUDIO, content=b"", fps=1.0, digest=b"")
    score = ScoreRequest(request_id="b", prompt=Prompt((1, 2)), continuations=((3,), (4,)))
    driver.turn(Job(1, medium), Submit(make_request("a", prompt_of(5))), Job(2, score))
    while not driver.loop.is_idle:
        driver.turn()
    assert len(driver.outcomes["a"].token_ids) == 12
    assert list(driver.desk.results) == [2]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_a_plan_leaves_nothing_to_decide(networks, family, seed):
    rng = random.Random(seed)
    ranks = Ranks(networks(family), rng)
    trunk = prompt_of(60, seed)
    for number in range(14):
        prompt = [*trunk[: rng.randint(0, 60)], *prompt_of(rng.randint(1, 30), number)]
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=number)
        request = make_request(
            f"r{number}", prompt, sampling=sampling, max_tokens=rng.randint(1, 20)
        )
        ranks.turn(Submit(request))
        for _ in range(rng.randint(0, 6)):
            ranks.turn()
        if rng.random() < 0.3:
            ranks.turn(Cancel(f"r{rng.randint(0, number)}"))
        assert ranks.state(ranks.follows) == ranks.state(ranks.decides)
    while not ranks.decides.loop.is_idle:
        ranks.turn()
    assert ranks.follows.loop.is_idle
    assert ranks.state(ranks.follows) == ranks.state(ranks.decides)
    assert ranks.decides.loop.counters.checksum != 0
