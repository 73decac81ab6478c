from backend.sampling.grammar.gbnf_rules import components, is_cycle, longest_chain, reachable

EDGES = {"a": ["b", "c"], "b": ["d"], "c": ["d", "e"], "d": ["b"], "e": ["e"], "f": ["a"]}


def test_components_come_after_those_they_point_to():
    found = [frozenset(component) for component in components(EDGES)]
    assert sorted(map(sorted, found)) == [["a"], ["b", "d"], ["c"], ["e"], ["f"]]
    place = {node: index for index, component in enumerate(found) for node in component}
    assert all(place[target] <= place[node] for node in EDGES for target in EDGES[node])


def test_a_cycle_is_more_than_one_node_or_a_node_that_points_to_itself():
    cycles = [sorted(c) for c in components(EDGES) if is_cycle(c, EDGES)]
    assert sorted(cycles) == [["b", "d"], ["e"]]


def test_a_cycle_weighs_what_its_nodes_weigh():
    assert longest_chain(EDGES, dict.fromkeys(EDGES, 1)) == 5  # f, a, c, and b with d
    assert longest_chain(EDGES, {**dict.fromkeys(EDGES, 0), "e": 7}) == 7


def test_what_is_reachable_includes_the_start():
    assert reachable(["c"], EDGES) == {"c", "d", "b", "e"}
    assert reachable([], EDGES) == set()


def test_a_long_chain_is_no_recursion():
    chain = {str(n): [str(n + 1)] for n in range(5000)} | {"5000": []}
    assert longest_chain(chain, dict.fromkeys(chain, 1)) == 5001
