"""The forms of groups, their refusals, and the agreements of their ranks."""

import json
import socket

import pytest
from groups import build_divisible, grouped
from hypothesis import given
from hypothesis import strategies as st

from backend.config import TuningOptions
from backend.core.engine_status import EngineStatus
from backend.engine.distributed.gathering import Ready, Report, Start
from backend.engine.distributed.linking import agreement, usable_backend
from backend.engine.distributed.members import (
    TokenCheck,
    divisible_families,
    layer_shares,
    require_divisible,
)
from backend.engine.distributed.topology import (
    FIRST_PORT,
    Parallelism,
    Topology,
    local_hosts,
    topology_of,
)
from backend.errors import GroupLostError, InvalidRequestError, UnsupportedModelError
from backend.model.checkpoint.config_file import read_config
from backend.model.loader import look

pytestmark = pytest.mark.mlx


def endpoints(topology):
    return [[str(endpoint) for endpoint in host.endpoints] for host in topology.hosts]


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 1}, {"hosts": "127.0.0.1"}])
def test_one_process_is_no_group(options):
    assert topology_of(TuningOptions.of(**options)) is None


def test_hosts_without_ports_are_numbered_as_mlx_launch_does():
    topology = topology_of(TuningOptions.of(hosts="127.0.0.1, 10.0.0.2,10.0.0.3:99"))
    assert endpoints(topology) == [
        [f"127.0.0.1:{FIRST_PORT}"],
        [f"10.0.0.2:{FIRST_PORT + 1}"],
        ["10.0.0.3:99"],
    ]


@pytest.mark.parametrize(
    "content",
    [
        [["127.0.0.1:7001"], ["10.0.0.2:7002"]],
        {
            "hosts": [
                {"ssh": "a", "ips": ["127.0.0.1:7001"]},
                {"ssh": "b", "ips": ["10.0.0.2:7002"]},
            ]
        },
        [{"ssh": "a", "ips": ["127.0.0.1:7001"]}, {"ssh": "b", "ips": ["10.0.0.2:7002"]}],
    ],
)
def test_hostfiles_of_both_forms_are_read(tmp_path, content):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(content))
    topology = topology_of(TuningOptions.of(hostfile=str(path)))
    assert endpoints(topology) == [["127.0.0.1:7001"], ["10.0.0.2:7002"]]
    assert str(topology.control) == "127.0.0.1:8001"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "127.0.0.1,127.0.0.1", "hostfile": "x"}, "both"),
        ({"hostfile": "nowhere.json"}, "nowhere"),
        ({"hosts": "127.0.0.1:port,127.0.0.1"}, "port"),
        ({"hosts": "192.0.2.7,127.0.0.1"}, "192.0.2.7"),
        ({"hosts": "127.0.0.1:0,127.0.0.1"}, "127.0.0.1:0' is no address"),
        ({"hosts": "127.0.0.1,127.0.0.1:65536"}, "127.0.0.1:65536' is no address"),
        ({"hosts": "127.0.0.1,127.0.0.1:-5"}, "127.0.0.1:-5' is no address"),
        ({"hosts": "127.0.0.1,a\0b"}, "is no address"),
        ({"hosts": "::1,::1"}, "'::1' is no address.*IPv6"),
        ({"hosts": "127.0.0.1:7001,127.0.0.1:7001"}, "127.0.0.1:7001 stands twice"),
        ({"hosts": "127.0.0.1,127.0.0.1", "tensor_parallel_size": 4}, "4"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(InvalidRequestError, match=words):
        topology_of(TuningOptions.of(**options))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "null",
        "5",
        "[" * 100_000,
        '["127.0.0.1", "127.0.0.1"]',
        '[{"ssh": "a"}, {"ssh": "b"}]',
        '[{"ips": [1]}, {"ips": [2]}]',
        '[{"ips": "127.0.0.1"}, {"ips": "127.0.0.1"}]',
        '[["127.0.0.1"], []]',
        '{"host": ["127.0.0.1"]}',
        '{"hosts": "127.0.0.1"}',
    ],
)
def test_a_hostfile_of_another_form_is_refused_by_name(tmp_path, content):
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=r"hostfile: .*hosts\.json cannot be used: \w"):
        topology_of(TuningOptions.of(hostfile=str(path)))


def test_a_backend_that_mlx_has_not_is_refused():
    topology = topology_of(TuningOptions.of(tensor_parallel_size=2, distributed_backend="mpi"))
    with pytest.raises(InvalidRequestError, match=r"mpi.*ring"):
        usable_backend(topology)


def test_places_on_this_machine_are_free():
    topology = Topology(local_hosts(3))
    for host in topology.hosts:
        with socket.create_server((host.endpoints[0].address, host.endpoints[0].port)):
            pass


@pytest.mark.parametrize(
    ("family", "kind", "size", "words"),
    [
        ("gemma3_text", "tensor", 2, r"gemma3_text has no tensor .*llama"),
        ("llama", "pipeline", 2, r"llama has no pipeline .*qwen3_moe"),
        ("llama", "tensor", 3, r"4 and 4 heads; sizes that work: 2, 4"),
        ("qwen3_moe", "pipeline", 4, r"sizes that work: 2 to 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(tmp_path, family, kind, size, words):
    layers = 3 if family == "gemma3_text" else 2
    directory = build_divisible(family, tmp_path, layers)
    network = look(grouped(directory, 1), directory).network
    topology = Topology(local_hosts(size), Parallelism(kind))
    with pytest.raises(UnsupportedModelError, match=words):
        require_divisible(network, read_config(directory), topology)


def test_the_families_are_those_of_the_installed_mlx_lm():
    assert {"llama", "qwen3", "gpt_oss", "deepseek_v3"} <= set(
        divisible_families(Parallelism.TENSOR)
    )
    assert {"qwen3_moe", "deepseek_v3"} <= set(divisible_families(Parallelism.PIPELINE))


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=8), st.integers(0, 100))
def test_every_rank_gets_layers_in_proportion_and_one_at_least(weights, spare):
    layers = len(weights) + spare
    counts = layer_shares(layers, weights)
    assert sum(counts) == layers
    assert min(counts) >= 1
    exact = [spare * weight / sum(weights) for weight in weights]
    assert all(abs(count - 1 - share) < 1 for count, share in zip(counts, exact, strict=True))


def ready(layers, kinds, budget=1000):
    return Ready(
        layers=layers, cache_kinds=kinds, kv_budget_bytes=4 * budget, cache_budget_bytes=budget
    )


def test_ranks_agree_on_the_smallest_budget_per_layer():
    plain = [ready(4, ("KVCache:",) * 4), ready(2, ("KVCache:",) * 2, 800)]
    assert agreement(plain) == Start(kv_bytes_per_layer=1000, cache_bytes_per_layer=250)


def test_ranks_with_unlike_layers_keep_nothing():
    mixed = [ready(2, ("ArraysCache:", "KVCache:")), ready(2, ("KVCache:", "KVCache:"))]
    assert agreement(mixed).cache_bytes_per_layer == 0
    alike = [ready(2, ("ArraysCache:", "KVCache:"))] * 2
    assert agreement(alike).cache_bytes_per_layer == 500


def test_a_rank_that_draws_other_tokens_ends_the_group():
    check = TokenCheck({1: Report(0, 0, EngineStatus()), 2: Report(0, 0, EngineStatus())})
    check.note(32, 77)
    check.compare(2, Report(32, 77, EngineStatus()))
    with pytest.raises(GroupLostError, match="rank 1 has drawn other tokens"):
        check.compare(1, Report(32, 78, EngineStatus()))


def test_a_rank_that_stops_at_a_turn_at_which_rank_0_goes_on_has_drawn_other_tokens():
    check = TokenCheck({1: Report(0, 0, EngineStatus())})
    with pytest.raises(GroupLostError, match="rank 1 has drawn other tokens than rank 0 by turn 7"):
        check.compare(1, Report(7, 78, EngineStatus()))
