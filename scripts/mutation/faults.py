"""Small faults for modules, one at a time: cosmic-ray's, and two more kinds."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import TypeAlias

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Keyword, PythonNode
from parso.tree import NodeOrLeaf

Place: TypeAlias = tuple[int, int]

# In annotations and decorators, or of another type: any test would notice them at once.
_LEFT_OUT = (
    *("*/RemoveDecorator", "*BinaryOperator_BitOr_*"),
    *(f"*BinaryOperator_*_{bits}" for bits in ("BitOr", "BitAnd", "BitXor", "LShift", "RShift")),
    *("*Operator_[!I]*_Is", "*Operator_[!I]*_IsNot", "*Operator_Is_[!I]*", "*Operator_IsNot_[!I]*"),
)


class RemoveStatement(Operator):
    """Removes a call or an assignment made for its effect; log lines stay."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Place, Place]]:
        """Yield the position of a statement with an effect."""
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, _index: int) -> NodeOrLeaf:
        """Put `pass` in its place."""
        first = node.get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return an example."""
        return (Example("self.x = 1\n", "pass\n"), Example("f(x)\n", "pass\n"))


class NegateCondition(Operator):
    """Inverts the condition of a comprehension, which cosmic-ray leaves alone."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Place, Place]]:
        """Yield the position of a condition."""
        if node.type == "comp_if":
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: NodeOrLeaf, _index: int) -> NodeOrLeaf:
        """Put `not` before it."""
        node.children[1] = parso.parse(f" not ({node.children[1].get_code().strip()})")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return an example."""
        return (Example("[x for x in y if x > 1]", "[x for x in y if not (x > 1)]"),)


def _operators() -> Mapping[str, Operator]:
    names = [name for name in operator_names() if not any(fnmatch(name, p) for p in _LEFT_OUT)]
    kinds = {name: get_operator(name) for name in names}
    plain = {name: kind() for name, kind in kinds.items() if not kind.arguments()}
    own = {kind.__name__: kind() for kind in (RemoveStatement, NegateCondition)}
    return {name.rpartition("/")[2]: kind for name, kind in (plain | own).items()}


OPERATORS = _operators()


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one module.

    Attributes:
        path: Of the module, relative to the repository.
        line: Its line.
        operator: The operator applied.
        occurrence: The index among the positions where the operator applies.
    """

    path: Path
    line: int
    operator: str
    occurrence: int

    def made(self, tree: Path) -> AbstractContextManager[tuple[str, str]]:
        """Apply it to a file of a tree temporarily; yields the text before and after."""
        return use_mutation(tree / self.path, OPERATORS[self.operator], self.occurrence)


def sample(root: Path, paths: list[Path], count: int, seed: int) -> list[Fault]:
    """Choose random places in some modules, with one fault for each."""
    rng = Random(f"{seed} {paths}")
    places = [place for path in paths for place in _by_place(root, path).values()]
    return [rng.choice(each) for each in rng.sample(places, min(count, len(places)))]


def _by_place(root: Path, path: Path) -> Mapping[Place, list[Fault]]:
    """Return all faults of a module by place."""
    nodes = list(ast_nodes(get_ast((root / path).read_text(encoding="utf-8"))))
    found: defaultdict[Place, list[Fault]] = defaultdict(list)
    for name, operator in OPERATORS.items():
        places = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(places):
            if not _is_in_decorator(node):
                found[start].append(Fault(path, start[0], name, occurrence))
    return dict(sorted(found.items()))


def _is_in_decorator(node: NodeOrLeaf | None) -> bool:
    while node is not None and node.type != "decorator":
        node = node.parent
    return node is not None


def _has_effect(statement: NodeOrLeaf) -> bool:
    if not isinstance(statement, PythonNode) and statement.type != "expr_stmt":
        return False
    code = statement.get_code().strip()
    if statement.type == "expr_stmt":
        target, operation = statement.children[:2]
        is_changed = getattr(operation, "value", "") not in ("=", "") or target.type != "name"
        return is_changed and operation.type != "annassign"
    return code.endswith(")") and not code.startswith("log.")
