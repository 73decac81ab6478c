"""TokenClassify with labels of the caller's, on a tiny GLiNER 2.5, against mlx-vlm's own."""

import asyncio
import json
import shutil
from itertools import pairwise

import grpc
import pytest
from serving import code_of, require_others_pass_and_leaving_ends, served
from transformers import AutoTokenizer

from backend.config import MAX_LABELS
from backend.pb import backend_pb2 as pb
from scripts.tiny_encoders import POSITIONS, build_extractor

pytestmark = pytest.mark.mlx
CODE = grpc.StatusCode
LABELS = ["ba", "name of ki", "du-da"]
TEXTS = [
    "Ba be-bi, bo! äöü 12 ba@ki.de www.ba.bi @ku " * 2,
    "ku\n  ki",
    "Ölbach 漢字 de da " * 4,
    "x",
    "be bi ba bo du 7 " * 4,
    "🙂 na 🙂🙂 https://ba.be/bi.",
]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def extractor(tmp_path_factory):
    return build_extractor(tmp_path_factory.mktemp("extractor"))


@pytest.fixture(scope="module")
def alone(extractor):
    """Return a function to mlx-vlm's entities of a text: label, bytes and probability, in order."""
    from mlx_vlm.utils import load_model

    network, tokenizer = load_model(extractor), AutoTokenizer.from_pretrained(extractor)

    def find(text, labels=LABELS, threshold=0.5, **limits):
        found = network.extract_entities(
            tokenizer,
            text,
            labels,
            threshold,
            include_confidence=True,
            include_spans=True,
            **limits,
        )["entities"]
        spans = [
            (
                label,
                len(text[: each["start"]].encode()),
                len(text[: each["end"]].encode()),
                each["confidence"],
            )
            for label in labels
            for each in found[label]
        ]
        return sorted(spans, key=lambda span: (*span[1:3], labels.index(span[0])))

    return find


async def find(backend, text, labels=LABELS, **fields):
    request = pb.TokenClassifyRequest(text=text, labels=labels, **fields)
    return (await backend.stub.TokenClassify(request)).entities


def require_equal(text, entities, wanted):
    assert [(each.entity_group, each.start, each.end) for each in entities] == [
        each[:3] for each in wanted
    ]
    scores = [each.score for each in entities]
    assert scores == pytest.approx([each[3] for each in wanted], abs=TOLERANCE)
    for entity in entities:
        assert text.encode()[entity.start : entity.end].decode() == entity.text


async def test_spans_are_those_of_the_library_alone_and_in_company(shared, extractor, alone):
    async with shared(extractor) as backend:
        for labels in (LABELS, LABELS[1:]):
            single = [await find(backend, text, labels) for text in TEXTS]
            together = await asyncio.gather(*(find(backend, text, labels) for text in TEXTS))
            for text, one, other in zip(TEXTS, single, together, strict=True):
                require_equal(text, one, alone(text, labels))
                require_equal(text, other, alone(text, labels))
            assert any(single)


async def test_calls_of_different_labels_and_thresholds_share_passes(shared, extractor, alone):
    async with shared(extractor) as backend:
        calls = [(text, [*LABELS[i % 3 :]], 0.3 + 0.1 * i) for i, text in enumerate(TEXTS)]
        found = await asyncio.gather(
            *(find(backend, text, labels, threshold=least) for text, labels, least in calls)
        )
    for (text, labels, least), entities in zip(calls, found, strict=True):
        require_equal(text, entities, alone(text, labels, least))


async def test_a_text_beyond_the_context_is_read_whole_in_parts(shared, extractor, alone):
    text = "ba be ki, du! " * POSITIONS
    async with shared(extractor) as backend:
        entities = await find(backend, text)
        in_first = [each for each in alone(text) if each[2] < 100]
        assert in_first == alone(text)[: len(in_first)] != []
        assert max(each.end for each in entities) > len(text) - 100
        for label in LABELS:
            own = [each for each in entities if each.entity_group == label]
            for one, other in pairwise(own):
                assert one.end <= other.start
        # A word that exceeds a part is no end of the text; and no words at all.
        longer = "be" * 50 * POSITIONS + " ba be ki, du!" * 20
        assert any(each.start > 100 * POSITIONS for each in await find(backend, longer))
        assert not await find(backend, " \n")


async def test_a_call_that_leaves_ends_its_work_and_others_pass_a_long_text(shared, extractor):
    async with shared(extractor) as backend:
        await require_others_pass_and_leaving_ends(
            backend,
            lambda: find(backend, TEXTS[0]),
            lambda: find(backend, "ba be ki, du! " * 4000),
        )


async def test_what_cannot_be_looked_for_is_refused(shared, extractor):
    wrong = {
        "labels: is empty: this model finds those that a call names": [],
        "labels[1]: contains '[E]', a token of the model": ["ba", "a[E]b"],
        "labels[0]: must not be empty": [" "],
        f"labels: holds {MAX_LABELS + 1} values": ["ba"] * (MAX_LABELS + 1),
        f"labels: takes 142 tokens, at most {POSITIONS // 2} of the context": [
            "ba be " * 20 + str(i) for i in range(3)
        ],
    }
    async with shared(extractor) as backend:
        for problem, labels in wrong.items():
            code, details = await code_of(find(backend, "ba", labels))
            assert (code, details.startswith(problem)) == (CODE.INVALID_ARGUMENT, True), details
        code, details = await code_of(backend.stub.Embedding(pb.PredictOptions(Embeddings="a")))
        assert (code, "finds the labels of a call" in details) == (CODE.UNIMPLEMENTED, True)
        code, details = await code_of(backend.stub.Predict(pb.PredictOptions(Prompt="a")))
        assert (code, "entity extractor" in details) == (CODE.UNIMPLEMENTED, True)


async def test_words_without_number_fail_alone(extractor, tmp_path):
    import mlx.core as mx

    broken = shutil.copytree(extractor, tmp_path / "broken")
    weights = mx.load(str(broken / "model.safetensors"))
    name = "encoder.embeddings.word_embeddings.weight"
    tokenizer = AutoTokenizer.from_pretrained(broken)
    weights[name][tokenizer.convert_tokens_to_ids("▁9")] = float("nan")
    mx.save_safetensors(str(broken / "model.safetensors"), weights)
    async with served(broken) as backend:
        good, bad = await asyncio.gather(
            find(backend, TEXTS[4]), code_of(find(backend, "ba 9 " * 12)), return_exceptions=True
        )
    assert good
    assert (bad[0], "NaN or infinity" in bad[1]) == (CODE.INTERNAL, True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"architecture": "span"}, "architecture 'span'"),
        (
            {"boundary_head": {"query_attention_layers": 1}},
            "boundary_head.query_attention_layers 1, not 0",
        ),
    ],
)
async def test_a_checkpoint_of_another_design_is_refused(
    shared, extractor, tmp_path, settings, problem
):
    copy = shutil.copytree(extractor, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text("utf-8")) | settings
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    async with shared() as backend:
        code, details = await code_of(backend.load(copy))
    assert code is CODE.INVALID_ARGUMENT
    assert problem in details


async def test_a_tokenizer_without_the_marks_is_refused(shared, extractor, tmp_path):
    copy = shutil.copytree(extractor, tmp_path / "copy")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (copy / file).read_text("utf-8").replace("[SEP_TEXT]", "[OTHER]")
        (copy / file).write_text(text, encoding="utf-8")
    async with shared() as backend:
        code, details = await code_of(backend.load(copy))
    assert (code, details) == (CODE.INVALID_ARGUMENT, "Model: the tokenizer has no [SEP_TEXT]")
