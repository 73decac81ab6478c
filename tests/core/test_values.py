import dataclasses
import importlib
import pkgutil

import pytest

import backend.core
import backend.engine.messages.protocol

MODULES = [
    *(
        importlib.import_module(f"backend.core.{m.name}")
        for m in pkgutil.iter_modules(backend.core.__path__)
    ),
    backend.engine.messages.protocol,
]
VALUES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type)
    and dataclasses.is_dataclass(value)
    and value.__module__ == module.__name__
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_what_crosses_a_layer_cannot_be_changed_on_the_way(value):
    assert value.__dataclass_params__.frozen
    assert "__slots__" in vars(value)
