"""Layers that became float32 keep the weights of their checkpoint beside, for a few tokens."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from backend.cpu.kernels import kernels
from backend.cpu.products import prepare_products
from backend.cpu.stored_products import MOST_TOKENS, multiply
from backend.model.checkpoint.weights import STORED, weights_bytes

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(kernels() is None, reason="there is no C compiler"),
    pytest.mark.usefixtures("openblas", "any_size"),
]

WIDTH, TOKENS = 128, 96
FORMS = [16, 8, 4]


class Decoder(nn.Module):
    """An embedding, a layer, and a head unless the embedding is the head."""

    def __init__(self, *, is_tied=True):
        super().__init__()
        mx.random.seed(7)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        if not is_tied:
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def __call__(self, tokens):
        states = self.layer(self.embedding(tokens))
        return self.head(states) if "head" in self else self.embedding.as_linear(states)


def stored(bits=16, dtype=mx.bfloat16, **form):
    made = Decoder(**form)
    if bits < 16:
        nn.quantize(made, group_size=64, bits=bits)
    made.set_dtype(dtype)
    return made


def prepared(*args, **form):
    made = stored(*args, **form)
    prepare_products(made, keeps_type=False)
    mx.eval(made.state)
    return made


def close(found, expected):
    return np.allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("tokens", [*range(1, MOST_TOKENS + 2), 64])
def test_any_number_of_tokens_has_the_logits_of_float32(bits, tokens):
    plain, made = stored(bits), prepared(bits)
    plain.set_dtype(mx.float32)
    assert made.layer.weight.dtype == made.embedding.weight.dtype == mx.float32
    given = mx.arange(tokens)[None] % TOKENS
    assert close(made(given), plain(given))


@pytest.mark.parametrize("bits", FORMS)
def test_a_token_has_the_same_product_alone_and_among_any_few(bits):
    layer = prepared(bits).layer
    given = mx.random.normal((MOST_TOKENS, WIDTH))
    alone = [multiply(layer, row[None]) for row in given]
    for count in range(1, MOST_TOKENS + 1):
        assert mx.array_equal(multiply(layer, given[:count]), mx.concatenate(alone[:count]))


@pytest.mark.parametrize("bits", FORMS)
def test_a_few_tokens_meet_stored_weights_and_many_those_of_float32(bits):
    layer = prepared(bits).layer
    assert multiply(layer, mx.ones((MOST_TOKENS, WIDTH))) is not None
    assert multiply(layer, mx.ones((MOST_TOKENS + 1, WIDTH))) is None


def test_an_embedding_is_kept_only_where_it_is_the_head():
    assert STORED in prepared().embedding
    separate = prepared(is_tied=False)
    assert STORED in separate.head
    assert STORED not in separate.embedding


def test_weights_that_are_exchanged_are_those_of_the_product():
    layer, given = prepared().layer, mx.ones((2, WIDTH))
    layer(given)
    layer.weight = mx.zeros((WIDTH, WIDTH))
    assert multiply(layer, given) is None
    assert mx.array_equal(layer(given), mx.broadcast_to(layer.bias, (2, WIDTH)))
    untouched = prepared().layer
    untouched.weight = mx.zeros((WIDTH, WIDTH))
    assert multiply(untouched, given) is None


@pytest.mark.parametrize(("bits", "share"), [(16, 0.5), (4, 0.25)])
def test_they_are_kept_if_they_fit_into_the_same_part_of_memory(set_memory, bits, share):
    needed = weights_bytes(prepared(bits))
    set_memory(int(needed / share))
    assert weights_bytes(prepared(bits)) == needed
    set_memory(int((needed - 4) / share))
    only_wide = prepared(bits)
    assert STORED not in only_wide.layer
    assert only_wide.layer.weight.dtype == mx.float32
    assert weights_bytes(only_wide) < needed


@pytest.mark.parametrize(
    "options", [{"has_gradients": True}, {"least_bytes": 0}, {"keeps_type": True}]
)
def test_trainings_encoders_and_chosen_types_keep_nothing_beside(options):
    made = stored()
    prepare_products(made, **{"keeps_type": False, **options})
    assert STORED not in made.layer
    assert type(made.layer) is nn.Linear


def test_towers_which_see_many_tokens_at_once_keep_nothing_beside():
    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model, self.tower = stored(), stored()

    made = Seeing()
    prepare_products(made, keeps_type=False)
    assert STORED in made.language_model.layer
    assert STORED not in made.tower.layer


def test_float16_is_cast_alone():
    assert STORED not in prepared(dtype=mx.float16).layer
    assert STORED in prepared(4, mx.float16).layer
