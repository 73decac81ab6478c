"""Replays of agents in little room: the tokens computed again, against other policies."""

from itertools import count
from random import Random

import pytest

from backend.core.prompt import Prompt
from benchmarks.agents.cache_play import FillingNetwork, Trace, Turn, play, written_share
from benchmarks.agents.forecasts import Clairvoyant, LeastRecent
from benchmarks.agents.tables import FAMILIES

pytestmark = pytest.mark.mlx

SYSTEM_TOKENS = 100


def agents_in_turn(seed, *, agents, turns=16):
    """Agents on one system prompt that call a tool every time, but for some last replies."""
    rng, fresh = Random(seed), count(SYSTEM_TOKENS)

    def said(least, most):
        return tuple(next(fresh) for _ in range(rng.randint(least, most)))

    asked = [(*range(SYSTEM_TOKENS), *said(20, 60)) for _ in range(agents)]
    waves = []
    for number in range(turns):
        for agent in range(agents):
            prompt = Prompt(asked[agent], boundaries=(SYSTEM_TOKENS,), system_tokens=SYSTEM_TOKENS)
            reply = said(10, 30)
            waves.append([Turn(prompt, reply, calls_tools=number % 6 != 5)])
            asked[agent] += (*reply, *said(20, 80))
    return Trace(waves)


@pytest.mark.parametrize("agents", [3, 4])
@pytest.mark.parametrize("layers", [[("kv", 4)], [("kv", 4), ("state", 160)]])
def test_agents_that_do_not_fit_together_keep_most_of_what_a_clairvoyant_cache_keeps(
    agents, layers
):
    network = FillingNetwork(layers)
    room, trace = network.bytes_of(2500), agents_in_turn(1, agents=agents)
    known = Clairvoyant(trace.prompts, has_snapshots=network.has_states)
    least, recent = (sum(play(trace, network, room, each)) for each in (known, LeastRecent()))
    computed = sum(play(trace, network, room))
    assert computed <= 1.25 * least
    assert computed <= 0.75 * recent


def test_what_does_not_fit_is_written_to_disk_once(tmp_path):
    network = FillingNetwork([("kv", 4), ("state", 160)])
    trace = agents_in_turn(2, agents=3, turns=6)
    assert 1.0 <= written_share(trace, network, network.bytes_of(1500), tmp_path) <= 1.2


def test_a_state_of_the_replay_takes_as_many_tokens_as_its_family_says():
    network = FillingNetwork(FAMILIES["hybrid, a state of 2,000 tokens"])
    assert network.state_bytes == network.bytes_of(2000)
