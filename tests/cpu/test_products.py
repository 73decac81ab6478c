"""On a CPU with OpenBLAS weights are float32, and several tokens meet dequantised ones."""

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import switch_layers
from mlx_vlm.models import switch_layers as vlm_switch_layers

from backend.cpu import products
from backend.cpu.install import install
from backend.cpu.products import prepare_products
from backend.model.device import Device
from backend.model.heads import HeadWeights

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("openblas", "any_size")]

WIDTH = 64
# Forms that our kernel does not know.
MODES = [("affine", 32, 4), ("affine", 64, 6), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]


class Network(nn.Module):
    """An embedding, which is the last layer too, and a layer with and one without a bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)]

    def __call__(self, tokens):
        states = self.embedding(tokens)
        for layer in self.layers:
            states = states + layer(states)
        return self.embedding.as_linear(states)


def network(dtype=mx.float32, quantisation=None):
    mx.random.seed(3)
    made = Network()
    if quantisation:
        mode, group_size, bits = quantisation
        nn.quantize(made, group_size=group_size, bits=bits, mode=mode)
    made.set_dtype(dtype)
    return made


def types(made):
    return {weight.dtype for _, weight in tree_flatten(made.parameters())}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(products, "PIECE_WEIGHTS", 7 * WIDTH)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_weights_of_16_bits_are_cast_to_float32(dtype, caplog):
    made = network(dtype)
    with caplog.at_level("INFO"):
        prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32}
    name = str(dtype).removeprefix("mlx.core.")
    assert f"{name} is cast to float32" in caplog.text
    assert f"DType {name} keeps it" in caplog.text


def test_the_scales_of_quantised_weights_are_cast_and_the_weights_stay():
    made = network(mx.bfloat16, ("affine", 32, 4))
    prepare_products(made, keeps_type=False, dequantises=False)
    assert types(made) == {mx.float32, mx.uint32}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_quantised_weights_are_dequantised_if_a_quarter_of_the_memory_holds_them(
    dtype, set_memory, caplog
):
    made = network(dtype, ("affine", 32, 4))
    wide_bytes = 4 * sum(array.size for _, array in tree_flatten(network(mx.float32).parameters()))
    set_memory(4 * wide_bytes - 1)
    with caplog.at_level("INFO"):
        prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32, mx.uint32}
    assert "the weights stay quantised" in caplog.text
    plain = network(dtype, ("affine", 32, 4))
    set_memory(4 * wide_bytes)
    made = network(dtype, ("affine", 32, 4))
    with caplog.at_level("INFO"):
        prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32}
    assert [type(layer) for layer in made.layers] == [nn.Linear, nn.Linear]
    assert "option dequantize:false keeps them" in caplog.text
    plain.set_dtype(mx.float32)
    tokens = mx.random.randint(0, 96, (2, 9))
    assert mx.allclose(plain(tokens), made(tokens), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantisation", MODES, ids=str)
def test_the_weights_of_every_kind_are_dequantised(quantisation):
    plain, made = network(quantisation=quantisation), network(quantisation=quantisation)
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32}
    inputs = mx.random.normal((3, WIDTH))
    for ours, theirs in zip(made.layers, plain.layers, strict=True):
        assert mx.allclose(ours(inputs), theirs(inputs), rtol=1e-4, atol=1e-4)
    ours, theirs = made.embedding, plain.embedding
    assert mx.allclose(ours(mx.arange(96)), theirs(mx.arange(96)), rtol=1e-2, atol=1e-2)
    assert mx.allclose(ours.as_linear(inputs), theirs.as_linear(inputs), rtol=1e-4, atol=1e-4)


def test_a_chosen_type_keeps_quantised_weights_too():
    made = network(mx.bfloat16, ("affine", 32, 4))
    prepare_products(made, keeps_type=True)
    assert types(made) == {mx.bfloat16, mx.uint32}


class Experts(nn.Module):
    """Three experts, of which each token asks two."""

    def __init__(self, module, **options):
        super().__init__()
        mx.random.seed(5)
        self.experts = module.QuantizedSwitchLinear(
            WIDTH, WIDTH, 3, group_size=32, bits=4, **options
        )


@pytest.mark.parametrize("module", [switch_layers, vlm_switch_layers])
def test_quantised_experts_are_dequantised(module):
    plain, made = Experts(module).experts, Experts(module)
    prepare_products(made, keeps_type=False)
    assert type(made.experts) is module.SwitchLinear
    inputs = mx.random.normal((1, 7, 1, 1, WIDTH))
    asked = mx.random.randint(0, 3, (1, 7, 2))
    assert mx.allclose(made.experts(inputs, asked), plain(inputs, asked), rtol=1e-4, atol=1e-4)


def test_experts_with_a_scale_for_all_weights_stay_quantised():
    made = Experts(switch_layers)
    made.experts.global_scale = mx.array(2.0)
    prepare_products(made, keeps_type=False)
    assert type(made.experts) is switch_layers.QuantizedSwitchLinear


def test_so_few_weights_that_nobody_notices_stay_as_mlx_lm_computes_them(monkeypatch):
    made = network(mx.bfloat16)
    size = sum(weight.nbytes for _, weight in tree_flatten(made.parameters()))
    monkeypatch.setattr(products, "FLOAT32_MIN_BYTES", size + 1)
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.bfloat16}
    prepare_products(made, keeps_type=False, least_bytes=size)
    assert types(made) == {mx.float32}
    monkeypatch.setattr(products, "FLOAT32_MIN_BYTES", size)
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32}


def test_a_type_that_the_host_chose_is_kept(caplog):
    made = network(mx.bfloat16)
    prepare_products(made, keeps_type=True)
    assert types(made) == {mx.bfloat16}
    assert not caplog.text


def test_without_openblas_nothing_changes(monkeypatch):
    monkeypatch.setattr(products, "has_openblas", lambda: False)
    made = network(mx.bfloat16, ("affine", 32, 4))
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.bfloat16, mx.uint32}
    assert type(made.layers[0]) is nn.QuantizedLinear


def test_weights_that_would_take_more_than_half_of_the_memory_stay(set_memory, caplog):
    made = network(mx.bfloat16)
    wide_bytes = 2 * sum(weight.nbytes for _, weight in tree_flatten(made.parameters()))
    set_memory(2 * wide_bytes - 1)
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.bfloat16}
    assert "the weights stay bfloat16" in caplog.text
    set_memory(2 * wide_bytes)
    prepare_products(made, keeps_type=False)
    assert types(made) == {mx.float32}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("quantisation", MODES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (1, 5), (3, 2), (2, 40)], ids=str)
def test_any_number_of_tokens_has_the_logits_of_mlx(quantisation, shape):
    plain, prepared = network(quantisation=quantisation), network(quantisation=quantisation)
    prepare_products(prepared, keeps_type=False, dequantises=False)
    tokens = mx.random.randint(0, 96, shape)
    assert mx.allclose(plain(tokens), prepared(tokens), rtol=1e-4, atol=1e-3)


def test_only_several_tokens_are_worth_dequantising_weights(monkeypatch):
    made = network(quantisation=("affine", 32, 4))
    prepare_products(made, keeps_type=False, dequantises=False)
    asked = []
    product = products.dequantised_product
    monkeypatch.setattr(
        products,
        "dequantised_product",
        lambda module, inputs, *rest: asked.append(inputs.shape) or product(module, inputs, *rest),
    )
    made(mx.array([[1, 2, 3, 4]]))
    assert not asked
    made(mx.array([[1], [2], [3], [4], [5]]))
    assert len(asked) == 3


def test_a_layer_of_another_class_keeps_its_products():
    class Turned(nn.QuantizedLinear):
        pass

    made = network()
    made.layers[1] = Turned(WIDTH, WIDTH, bias=False, group_size=32)
    prepare_products(made, keeps_type=False)
    assert type(made.layers[1]) is Turned


@pytest.mark.parametrize("quantisation", [None, ("affine", 32, 4)])
def test_a_network_in_training_is_cast_and_keeps_its_gradients(quantisation):
    tokens = mx.arange(8)[None]
    made, plain = network(mx.bfloat16, quantisation), network(mx.bfloat16, quantisation)
    device = Device()
    install(device, mx.Device(mx.cpu))
    device.prepare_training(made)
    plain.set_dtype(mx.float32)
    assert types(made) <= {mx.float32, mx.uint32}
    for each in (made, plain):
        each.freeze()
        each.layers[0].unfreeze(keys="bias", recurse=False)
    found, expected = (
        nn.value_and_grad(each, lambda ids, one=each: one(ids).square().mean())(tokens)
        for each in (made, plain)
    )
    assert mx.allclose(found[0], expected[0], rtol=1e-5)
    bias, same = (each[1]["layers"][0]["bias"] for each in (found, expected))
    assert mx.allclose(bias, same, rtol=1e-4)
    assert mx.abs(bias).max() > 0


@pytest.mark.parametrize(
    ("form", "is_quantised"),
    [
        (HeadWeights(), False),
        (HeadWeights(dequantises=False), True),
        (HeadWeights(dtype="float32"), False),
        (HeadWeights(dtype="bfloat16"), True),
    ],
)
def test_the_weights_of_a_head_are_dequantised_as_those_of_a_model_are(form, is_quantised):
    install(device := Device(), mx.Device(mx.cpu))
    form.settle(head := network(mx.bfloat16, ("affine", 32, 4)), device)
    assert (mx.uint32 in types(head)) == is_quantised
