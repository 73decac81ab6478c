"""Networks around another one: subclasses count or change its passes, or make them fail."""

from typing import Any


class WrappedNetwork:
    """Computes as the network inside does, with its caches."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.layers = network.layers
        if hasattr(network, "make_cache"):
            self.make_cache = network.make_cache

    def parameters(self) -> Any:
        return self.network.parameters()

    def __call__(self, inputs: Any, cache: Any) -> Any:
        return self.network(inputs, cache=cache)


class CountingNetwork(WrappedNetwork):
    """Counts its passes."""

    passes = 0

    def __call__(self, inputs: Any, cache: Any) -> Any:
        self.passes += 1
        return super().__call__(inputs, cache)
