"""A CPU gets functions of its own, CUDA an attention; on Metal all is MLX's and upstream's."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx import nn

from backend.config import METAL_PASS_S
from backend.core.request import SamplingParams
from backend.cpu import products
from backend.cpu.install import install
from backend.model import cuda
from backend.model.device import Device
from backend.sampling.sampler import Sampler

pytestmark = pytest.mark.mlx

# Everything of ours that a load leaves in MLX, in upstream's modules and in the network.
LEFT_BY_A_LOAD = """
import sys
from pathlib import Path

import mlx.core as mx

from backend.config import ModelOptions
from backend.cpu.install import install
from backend.model.device import DEVICE, Device
from backend.model.loader import load

install(DEVICE, mx.Device(getattr(mx, sys.argv[1])))
network = load(ModelOptions(model=sys.argv[2]), Path(sys.argv[2])).network
upstream = [m for name, m in sys.modules.items() if name.startswith(("mlx.", "mlx_lm", "mlx_vlm"))]
left = {
    name
    for module in upstream
    for name, value in vars(module).items()
    if "backend" in (getattr(value, "__module__", None) or type(value).__module__)
    or hasattr(value, "replaced_upstream_function")
}
left |= {type(m).__name__ for m in network.modules() if type(m).__module__.startswith("backend")}
print(*sorted(left), DEVICE == Device(rounds_float32_as=DEVICE.rounds_float32_as))
"""


def left_by_a_load(kind, directory):
    command = [sys.executable, "-c", LEFT_BY_A_LOAD, kind, str(directory)]
    return subprocess.check_output(command, env=os.environ, text=True).split()


def test_metal_gets_no_functions():
    device = Device()
    install(device, mx.Device(mx.gpu))
    assert device == Device(rounds_float32_as=mx.float16)


def test_cuda_gets_an_attention_and_nothing_else(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9})
    install(device := Device(), mx.Device(mx.gpu))
    attention = {
        "attend": cuda.attend_unplanned,
        "attend_from": 0,
        "attend_pieces": cuda.attend_pieces,
        "attend_quantised": cuda.attend_dequantised,
    }
    assert device == Device(rounds_float32_as=mx.float16, **attention)


@pytest.mark.parametrize(
    ("info", "limits"),
    [
        ({"resource_limit": 499_000}, (METAL_PASS_S, 499_000)),
        ({"total_memory": 1}, (math.inf, math.inf)),
    ],
)
def test_metal_limits_passes_and_arrays_and_cuda_does_not(info, limits):
    device = Device()
    device.adapt_to(info)
    assert (device.pass_limit_s, device.max_arrays) == limits


def test_a_cpu_gets_its_own_functions():
    device = Device()
    install(device, mx.Device(mx.cpu))
    assert device.blocks_dispatch
    assert device.prepare is not Device().prepare
    assert device.choose_threads is not Device().choose_threads


@pytest.mark.skipif(sys.platform != "linux", reason="exponentials are slow on Linux only")
def test_a_linux_cpu_gets_cheaper_exponentials_too():
    device = Device()
    install(device, mx.Device(mx.cpu))
    plain = Device()
    assert device.exp is not plain.exp
    assert device.log_sum_exp is not plain.log_sum_exp
    assert device.attend is not plain.attend


@pytest.mark.skipif(sys.platform != "linux", reason="exponentials are slow on Linux only")
def test_a_load_wraps_functions_and_layers_for_a_cpu_only(tiny_models):
    directory = tiny_models("llama")
    assert left_by_a_load("gpu", directory) == ["True"]
    wrapped = left_by_a_load("cpu", directory)
    assert "swiglu" in wrapped
    assert wrapped[-1] == "False"


def test_experts_of_16_bits_are_widened_for_a_cpu_only(monkeypatch):
    monkeypatch.setattr(products, "has_openblas", lambda: False)
    for kind, dtype in ((mx.gpu, mx.bfloat16), (mx.cpu, mx.float32)):
        device, network = Device(), nn.Module()
        network.experts = SwitchLinear()
        install(device, mx.Device(kind))
        device.prepare(network, keeps_type=True)
        assert network.experts.weight.dtype == dtype


class SwitchLinear(nn.Module):
    """By its name upstream's layer of experts."""

    def __init__(self):
        super().__init__()
        self.weight = mx.zeros((2, 4, 4), mx.bfloat16)


LOGITS = {
    "any": mx.random.normal((4, 5000), key=mx.random.key(1)) * 3,
    "ties": mx.round(mx.random.normal((4, 5000), key=mx.random.key(2))),
    "flat": mx.zeros((4, 5000)),
    "zeros of both signs": mx.array([[0.0, -0.0] * 2500] * 4),
    "masked": mx.array([[1.0, -float("inf"), 0.5, 0.25] * 1250] * 4),
    "one left": mx.array([[-float("inf")] * 4999 + [2.0]] * 4),
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_tokens_drawn_with_top_p_on_a_cpu_are_those_drawn_with_mlxs_sort(logits):
    install(device := Device(), mx.Device(mx.cpu))
    tops = (0.1, 0.5, 0.95, 0.999)
    params = [SamplingParams(temperature=0.8, top_p=top_p, seed=7) for top_p in tops]
    params[1] = replace(params[1], min_p=0.05)
    samplers = [Sampler(params, logits.shape[1], way) for way in (None, device.lowest_kept)]
    for position in range(8):
        plain, own = (sampler.draw(logits, [position] * 4).tolist() for sampler in samplers)
        assert plain == own
