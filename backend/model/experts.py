"""Mixtures whose experts stay on disk: a pass reads those it needs, and the latest stay in memory.

A linear layer of all experts is replaced by one that computes expert by expert, with upstream's
own layer, so that its output does not depend on the experts in memory.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten

from backend.config import EXPERT_MEMORY_SHARE, ModelOptions
from backend.core.metric_table import Values
from backend.model.checkpoint.expert_store import ExpertLayer, Key, ReadAhead, open_store
from backend.model.checkpoint.extras import no_experts
from backend.model.checkpoint.gate import weights_fingerprint
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import memory_bytes, weight_types, weights_bytes

# Upstream's layers of many matrices, each token using a few of them.
_KINDS = frozenset({"SwitchLinear", "QuantizedSwitchLinear"})
_HALVES = (mx.bfloat16, mx.float16)

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Experts:
    """All experts of a network; belongs to the main thread, as the network does.

    Attributes:
        budget_bytes: The most that those in memory take, if not a single one takes more.
        hits: Experts that were in memory when a layer needed them.
        misses: Those that had to be read.
        read_bytes: Read from the store.
        read_s: The time that passes have waited for that.
    """

    def __init__(self) -> None:
        self.layers: list[ExpertLayer] = []
        self.budget_bytes = 0
        self.hits = self.misses = self.read_bytes = 0
        self.read_s = 0.0
        self._sources: list[dict[str, mx.array]] = []
        self._modules: list[ExpertLinear] = []
        self._reading: ReadAhead | None = None
        self._held = HeldExperts([], 0)
        # Experts that the present graph needs, and the ends of that graph.
        self._in_use: set[Key] = set()
        # Whether the network computes float32, and experts of 16 bits have to be cast.
        self._is_wide = False
        self._pending: list[mx.array] = []
        self._latest: tuple[mx.array, Numbers] | None = None
        # The layers that ask for the same experts, in their order, by the first of them.
        self._blocks: dict[int, list[int]] = {}
        self._block: list[int] = []

    def _in_memory(self, layer: ExpertLayer) -> int:
        """Return the size of one expert of a layer in memory."""
        return sum(
            2 * layer.sizes[name] if self._is_wide and dtype in _HALVES else layer.sizes[name]
            for name, (dtype, _) in layer.types.items()
        )

    @property
    def store_bytes(self) -> int:
        """The size of all experts on disk."""
        return sum(layer.count * layer.record_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """The bytes that a token reads if no expert is in memory; known after a lazy pass."""
        return sum(layer.used * layer.record_bytes for layer in self.layers)

    @property
    def metrics(self) -> Values:
        """The numbers of the table of metrics."""
        return {
            "experts.used": self.hits + self.misses,
            "experts.hits": self.hits,
            "experts.misses": self.misses,
            "experts.read_bytes": self.read_bytes,
            "experts.read_s": self.read_s,
            "experts.bytes": self._held.nbytes,
        }

    def take_out(self, network: Network) -> None:
        """Replace the layers of experts of a network, whose weights are still lazy."""
        found = layers_of_experts(network)
        for path, module in found:
            count = len(module["weight"])
            arrays = {name: module.pop(name) for name in _divided(module, count)}
            self.layers.append(ExpertLayer(path, arrays))
            self._sources.append(arrays)
            self._modules.append(ExpertLinear(self, len(self._modules), _Shell(module, arrays)))
        paths = [path for path, _ in found]
        network.update_modules(tree_unflatten(list(zip(paths, self._modules, strict=True))))

    def foresee(self, options: ModelOptions, network: Network) -> None:
        """Decide how much of the experts may be in memory.

        Args:
            network: With all other weights, which may still be lazy.

        Raises:
            LoadError: There are no experts.
        """
        if not self.layers:
            raise no_experts()
        self._is_wide = not set(weight_types(network)) & {str(each) for each in _HALVES}
        asked = options.tuning.memory.expert_bytes
        if asked is None:
            usable = memory_bytes() * options.memory_utilization * EXPERT_MEMORY_SHARE
            asked = max(int(usable) - weights_bytes(network), 0)
        least = max(map(self._in_memory, self.layers))
        sizes = [layer.count * self._in_memory(layer) for layer in self.layers]
        self.budget_bytes = min(max(asked, least), sum(sizes))
        self._held = HeldExperts(sizes, self.budget_bytes)

    def open(self, options: ModelOptions, directory: Path, folders: Sequence[Path]) -> None:
        """Open the store, which is written if there is none.

        Args:
            directory: Of the checkpoint.
            folders: Where the store may be, see `open_store`.
        """
        layout = [layer.described for layer in self.layers]
        key = weights_fingerprint(options, directory, layout)
        self._reading = ReadAhead(open_store(folders, self.layers, self._sources, key))
        for arrays in self._sources:
            arrays.clear()

    def chosen(self, layer: int, indices: mx.array) -> Numbers:
        """Return the numbers of the experts that a layer is to use, [..., experts per token].

        All that was begun before is computed first. The layers of one block ask for the same, and
        the first has them read for all: which these are, the first pass has shown.
        """
        if self._latest is None or self._latest[0] is not indices:
            self.land()
            self._latest = indices, np.array(indices)
            self._block = self._blocks.setdefault(layer, [layer])
            self._read_ahead(np.unique(self._latest[1]).tolist())
        elif layer not in self._block:
            self._block.append(layer)
        return self._latest[1]

    @property
    def _store(self) -> ReadAhead:
        if self._reading is None:
            raise AssertionError("the experts have no store yet")
        return self._reading

    def _read_ahead(self, experts: Sequence[int]) -> None:
        """Have those of a block read that are missing, and let no other take a place from it."""
        keys = [(layer, expert) for layer in self._block for expert in experts]
        self._store.plan([key for key in keys if key not in self._held])
        for key in keys:
            if key in self._held:
                self._held.touch(key)

    def land(self) -> None:
        """Compute the begun outputs: they need no expert any longer."""
        mx.eval(self._pending)
        self._pending.clear()
        self._in_use.clear()

    def begin(self, output: mx.array) -> None:
        """Note the output of experts, which is not computed yet."""
        self._pending.append(output)

    def fetch(
        self, layer: int, experts: Iterable[int]
    ) -> Iterator[tuple[int, dict[str, mx.array]]]:
        """Yield each expert with its arrays, [1, ...]: first those that are in memory.

        The output of one has to be noted before the next is asked for.

        Args:
            layer: Its number.
            experts: Their numbers.
        """
        keys = [(layer, expert) for expert in experts]
        missing = [key for key in keys if key not in self._held]
        for key in keys:
            if key in self._held:
                self.hits += 1
                yield key[1], self._use(key)
        for key in missing:
            # While this one is being read.
            mx.async_eval(self._pending)
            self._take_in(key)
            yield key[1], self._use(key)

    def _use(self, key: Key) -> dict[str, mx.array]:
        self._in_use.add(key)
        return self._held.touch(key)

    def _take_in(self, key: Key) -> None:
        """Put an expert that is being read in the place of the longest unused ones."""
        started_at = time.monotonic()
        record = self._store.take(key)
        self.misses += 1
        self.read_bytes += len(record)
        self.read_s += time.monotonic() - started_at
        arrays = self.layers[key[0]].arrays(record)
        if self._is_wide:
            # Not with every pass.
            arrays = {name: _widened(each) for name, each in arrays.items()}
        while (oldest := self._held.in_the_way(key, _size(arrays))) is not None:
            if oldest in self._in_use:
                self.land()
            self._held.drop(oldest)
        mx.eval(arrays)
        self._held.add(key, arrays)


class HeldExperts:
    """The experts in memory: each layer has a share of the budget, which others use until then.

    A pass visits one layer after another. If its experts exceed the budget, the longest unused ones
    of all are those that come next, and none would ever be found.
    """

    def __init__(self, sizes: Sequence[int], budget: int) -> None:
        """Start empty.

        Args:
            sizes: Bytes of all experts of each layer.
            budget: Bytes of those that may be in memory at the same time.
        """
        self.nbytes = 0
        self._budget = budget
        self._shares = [budget * size / sum(sizes) for size in sizes]
        self._taken = [0] * len(sizes)
        # The longest unused ones come first.
        self._layers: list[OrderedDict[int, dict[str, mx.array]]] = [OrderedDict() for _ in sizes]

    def __contains__(self, key: Key) -> bool:
        return key[1] in self._layers[key[0]]

    def touch(self, key: Key) -> dict[str, mx.array]:
        """Return an expert's arrays, now the latest used of its layer."""
        layer, expert = key
        self._layers[layer].move_to_end(expert)
        return self._layers[layer][expert]

    def in_the_way(self, key: Key, size: int) -> Key | None:
        """Return the one to drop before another of so many bytes is added; `None` if all fit."""
        if not self.nbytes or self.nbytes + size <= self._budget:
            return None
        layer = key[0]
        if not self._layers[layer] or self._taken[layer] + size <= self._shares[layer]:
            filled = (n for n, held in enumerate(self._layers) if held)
            layer = max(filled, key=lambda n: self._taken[n] - self._shares[n])
        return layer, next(iter(self._layers[layer]))

    def add(self, key: Key, arrays: dict[str, mx.array]) -> None:
        """Add an expert."""
        self._layers[key[0]][key[1]] = arrays
        self._count(key[0], _size(arrays))

    def drop(self, key: Key) -> None:
        """Remove an expert."""
        self._count(key[0], -_size(self._layers[key[0]].pop(key[1])))

    def _count(self, layer: int, size: int) -> None:
        self._taken[layer] += size
        self.nbytes += size


def layers_of_experts(network: Network) -> list[tuple[str, Network]]:
    """Return upstream's layers of a network that may stay on disk, with their places."""
    modules = network.named_modules()
    return [(path, module) for path, module in modules if type(module).__name__ in _KINDS]


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype in _HALVES else array


def _size(arrays: dict[str, mx.array]) -> int:
    return sum(each.nbytes for each in arrays.values())


def _divided(module: Network, count: int) -> list[str]:
    """Return the names of a layer's arrays that have a part for each expert."""
    arrays = ((name, each) for name, each in module.items() if isinstance(each, mx.array))
    return [name for name, each in arrays if each.ndim and len(each) == count]


class _Shell:
    """Upstream's layer without its arrays, out of sight of the network's parameters.

    Attributes:
        lazy: Its arrays before the store is open; none afterwards.
    """

    def __init__(self, module: Network, lazy: dict[str, mx.array]) -> None:
        self._module = module
        self.lazy = lazy

    def __call__(
        self, arrays: dict[str, mx.array], inputs: mx.array, indices: mx.array, *, is_sorted: bool
    ) -> mx.array:
        """Compute with these arrays, each [experts, ...]."""
        for name, array in arrays.items():
            self._module[name] = array
        output: mx.array = self._module(inputs, indices, sorted_indices=is_sorted)
        for name in arrays:
            self._module.pop(name)
        return output


class ExpertLinear(nn.Module):  # type: ignore[misc]
    """A linear layer of all experts, in the place of upstream's."""

    def __init__(self, experts: Experts, number: int, shell: _Shell) -> None:
        super().__init__()
        self._experts, self._number, self._shell = experts, number, shell

    @property
    def num_experts(self) -> int:
        """As upstream's layer has it."""
        return self._experts.layers[self._number].count

    @property
    def is_quantised(self) -> bool:
        """Whether its matrices are packed."""
        return "scales" in self._experts.layers[self._number].types

    @property
    def types(self) -> set[mx.Dtype]:
        """The data types of its arrays."""
        return {dtype for dtype, _ in self._experts.layers[self._number].types.values()}

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        sorted_indices: bool = False,  # noqa: FBT001, FBT002 (upstream's own)
    ) -> mx.array:
        """Return the products [..., experts per token, 1, outputs]; see upstream's layer."""
        if self._shell.lazy:
            self._experts.layers[self._number].used = indices.shape[-1]
            return self._shell(self._shell.lazy, x, indices, is_sorted=sorted_indices)
        chosen = self._experts.chosen(self._number, indices)
        lead = np.broadcast_shapes(x.shape[:-2], chosen.shape)
        rows = np.arange(int(np.prod(x.shape[:-2]))).reshape(x.shape[:-2])
        places, routes = (np.broadcast_to(each, lead).reshape(-1) for each in (rows, chosen))
        joined = self._products(x.reshape(-1, *x.shape[-2:]), places, routes)
        self._experts.begin(joined)
        return joined.reshape(*lead, *joined.shape[1:])

    def _products(self, rows: mx.array, places: Numbers, routes: Numbers) -> mx.array:
        """Return the products of some rows with an expert each.

        Args:
            rows: The inputs [rows, 1, inputs].
            places: Indices of rows, one for each product.
            routes: The experts, one for each product.
        """
        order, outputs = [], []
        for expert, arrays in self._experts.fetch(self._number, np.unique(routes).tolist()):
            own = np.flatnonzero(routes == expert)
            zeros = mx.zeros(len(own), mx.uint32)
            output = self._shell(arrays, rows[mx.array(places[own])], zeros, is_sorted=True)
            self._experts.begin(output)
            order.append(own)
            outputs.append(output)
        return mx.concatenate(outputs)[mx.array(np.argsort(np.concatenate(order)))]
