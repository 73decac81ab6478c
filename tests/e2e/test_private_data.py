"""TokenClassify on a tiny OpenAI Privacy Filter with random weights, against mlx-vlm's own."""

import asyncio
import json
import shutil

import grpc
import numpy as np
import pytest
from serving import code_of, require_others_pass_and_leaving_ends, served

from backend.config import MAX_LABEL_CHARS, MAX_LABELS
from backend.pb import backend_pb2 as pb
from scripts.tiny_encoders import POSITIONS, PRIVATE, build_privacy_filter

pytestmark = pytest.mark.mlx
CODE = grpc.StatusCode
TEXTS = [
    "ba be bi, bo! Äöü 12 " * 3,
    "ku\n  ki",
    "Ölbach 漢字 de da " * 4,
    "x",
    "be bi ba bo du 7 " * 5,
    "🙂 na 🙂🙂",
]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def privacy_filter(tmp_path_factory):
    return build_privacy_filter(tmp_path_factory.mktemp("private"))


def expected(directory, text):
    """Return mlx-vlm's spans of one pass: group, bytes and the mean probability of the path."""
    from mlx_vlm.privacy_filter import load_privacy_filter
    from mlx_vlm.token_classification import decode_spans, token_spans

    alone = load_privacy_filter(str(directory))
    read = alone.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = read["offset_mapping"]
    assert len(offsets) < alone.window
    scores = alone.scores(read["input_ids"])
    path = alone.decode_path(scores, "viterbi")
    runs = token_spans(path, alone.label_info)
    spans = decode_spans(text, path, offsets, alone.label_info)
    assert spans == alone(text).spans
    found = []
    for span in spans:
        first, last = next(
            (first, last)
            for group, first, last in runs
            if alone.label_info.span_names[group] == span.label
            and offsets[first][0] <= span.start
            and span.end <= offsets[last - 1][1]
        )
        probability = np.exp(scores[range(first, last), path[first:last]]).mean()
        before = len(text[: span.start].encode())
        found.append((span.label, before, before + len(span.text.encode()), probability))
    return found


async def classify(backend, text, **fields):
    return await backend.stub.TokenClassify(pb.TokenClassifyRequest(text=text, **fields))


def places(entities):
    return [(entity.entity_group, entity.start, entity.end) for entity in entities]


async def test_entities_are_those_of_the_library_alone_and_in_company(shared, privacy_filter):
    async with shared(privacy_filter) as backend:
        alone = [await classify(backend, text) for text in TEXTS]
        together = await asyncio.gather(*(classify(backend, text) for text in TEXTS))
    for text, single, answer in zip(TEXTS, alone, together, strict=True):
        wanted = expected(privacy_filter, text)
        assert places(answer.entities) == places(single.entities) == [each[:3] for each in wanted]
        for entity, (*_, probability) in zip(answer.entities, wanted, strict=True):
            assert text.encode()[entity.start : entity.end].decode() == entity.text
            assert entity.score == pytest.approx(probability, abs=TOLERANCE)
    assert {entity.entity_group for each in alone for entity in each.entities} == set(PRIVATE)


async def test_the_parts_of_a_long_text_overlap_so_that_none_is_read_apart(shared, privacy_filter):
    text = "".join(f"ba be bi, bo! {i} ku kö. " for i in range(POSITIONS // 4))
    async with shared(privacy_filter) as backend:
        answer = await classify(backend, text)
    wanted = expected(privacy_filter, text)
    assert wanted[-1][2] > 6 * POSITIONS
    assert places(answer.entities) == [each[:3] for each in wanted]
    scores = [entity.score for entity in answer.entities]
    assert scores == pytest.approx([each[3] for each in wanted], abs=TOLERANCE)


async def test_a_call_that_leaves_ends_its_work_and_others_pass_a_long_text(shared, privacy_filter):
    async with shared(privacy_filter) as backend:
        await require_others_pass_and_leaving_ends(
            backend,
            lambda: classify(backend, TEXTS[0]),
            lambda: classify(backend, "ba be bi, bo! " * 8000),
        )


async def test_asked_labels_are_the_only_ones_found(shared, privacy_filter):
    async with shared(privacy_filter) as backend:
        every = (await classify(backend, TEXTS[0])).entities
        for group in PRIVATE:
            some = (await classify(backend, TEXTS[0], labels=[group, group])).entities
            assert list(some) == [each for each in every if each.entity_group == group]
        both = (await classify(backend, TEXTS[0], labels=PRIVATE)).entities
    assert list(both) == list(every)


async def test_labels_that_cannot_be_found_are_refused_by_number(shared, privacy_filter):
    wrong = {
        "labels[1]: is not found by this model: its labels are email, person": ["email", "B-email"],
        "labels[0]: must not be empty": [" "],
        "labels[0]: must be at most": ["x" * (MAX_LABEL_CHARS + 1)],
        f"labels: holds {MAX_LABELS + 1} values": ["email"] * (MAX_LABELS + 1),
    }
    async with shared(privacy_filter) as backend:
        for problem, labels in wrong.items():
            code, details = await code_of(classify(backend, "ba", labels=labels))
            assert (code, details.startswith(problem)) == (CODE.INVALID_ARGUMENT, True), details
        call = backend.channel.unary_unary("/backend.Backend/TokenClassify")
        code, details = await code_of(call(b"\x0a\x01t\x20\x01"))
        assert (code, details) == (CODE.INVALID_ARGUMENT, "labels: is not text")


async def test_a_quantised_checkpoint_finds_as_the_library_does(privacy_filter, tmp_path):
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import load_model

    small = shutil.copytree(privacy_filter, tmp_path / "small")
    network = load_model(small)
    nn.quantize(network, **(quantised := {"group_size": 32, "bits": 8}))
    mx.save_safetensors(str(small / "model.safetensors"), dict(tree_flatten(network.parameters())))
    config = json.loads((small / "config.json").read_text("utf-8")) | {"quantization": quantised}
    (small / "config.json").write_text(json.dumps(config), encoding="utf-8")
    async with served(small) as backend:
        answer = await classify(backend, TEXTS[0])
    wanted = expected(small, TEXTS[0])
    assert places(answer.entities) == [each[:3] for each in wanted]
    assert [each.score for each in answer.entities] == pytest.approx(
        [each[3] for each in wanted], abs=0.01
    )
    assert wanted != expected(privacy_filter, TEXTS[0])


async def test_without_a_calibration_steps_have_no_bias(privacy_filter, tmp_path):
    bare = shutil.copytree(privacy_filter, tmp_path / "bare")
    (bare / "viterbi_calibration.json").unlink()
    assert expected(bare, TEXTS[0]) != expected(privacy_filter, TEXTS[0])
    async with served(bare) as backend:
        answer = await classify(backend, TEXTS[0])
    assert places(answer.entities) == [each[:3] for each in expected(bare, TEXTS[0])]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("viterbi_calibration.json", {"operating_points": {}}, "no default operating point"),
        ("config.json", {"id2label": {"0": "O", "1": "B-email"}}, "B, I, E and S of each group"),
        ("config.json", {"id2label": {}}, "has no id2label"),
    ],
)
async def test_a_checkpoint_without_whole_paths_is_refused(
    shared, privacy_filter, tmp_path, file, content, problem
):
    copy = shutil.copytree(privacy_filter, tmp_path / "copy")
    config = json.loads((copy / file).read_text("utf-8")) | content
    (copy / file).write_text(json.dumps(config), encoding="utf-8")
    async with shared() as backend:
        code, details = await code_of(backend.load(copy))
    assert code is CODE.INVALID_ARGUMENT
    assert problem in details
