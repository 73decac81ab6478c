"""TokenClassify on a tiny BERT with random weights, against the network itself."""

import asyncio
import random

import grpc
import pytest
from serving import code_of, served

from backend.config import MAX_CHARS_PER_TOKEN, MAX_TOKEN_IDS
from backend.pb import backend_pb2 as pb
from scripts.tiny_encoders import build_token_classifier

pytestmark = pytest.mark.mlx
CODE = grpc.StatusCode
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TEXT = "bo ba 3 ki ne, me! " * 4


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return build_token_classifier(tmp_path_factory.mktemp("tagger"), LABELS)


def expected(directory, text):
    """Label the tokens of a text with the network alone, as pairs of place and group."""
    from mlx_vlm.token_classification import load_token_classifier

    spans = load_token_classifier(str(directory))(text).spans
    return [(span.start, span.end, span.label) for span in spans]


async def test_entities_are_those_of_the_network_alone_and_in_company(shared, classifier):
    async with shared(classifier) as backend:
        texts = [TEXT, "ba bo", "ki 3 ne, " * 9]
        answers = await asyncio.gather(
            *(backend.stub.TokenClassify(pb.TokenClassifyRequest(text=text)) for text in texts)
        )
    for text, answer in zip(texts, answers, strict=True):
        covered = set()
        for entity in answer.entities:
            assert text.encode()[entity.start : entity.end].decode() == entity.text
            assert 0.0 < entity.score <= 1.0
            covered |= {(at, entity.entity_group) for at in range(entity.start, entity.end)}
        wanted = {
            (at, label)
            for start, end, label in expected(classifier, text)
            for at in range(start, end)
        }
        # Upstream joins words that touch, here only words of one entity are joined.
        assert {pair for pair in covered if not text[pair[0]].isspace()} == {
            pair for pair in wanted if not text[pair[0]].isspace()
        }
    assert any(answer.entities for answer in answers)


async def test_a_text_beyond_the_context_is_read_in_parts(shared, classifier):
    async with shared(classifier) as backend:
        answer = await backend.stub.TokenClassify(pb.TokenClassifyRequest(text="bo ba ki " * 200))
    assert max(entity.end for entity in answer.entities) > 1000


async def test_every_token_of_a_long_text_is_read_with_those_around_it(classifier):
    words = random.Random(0).choices(["bo", "ba", "ki", "ne", "me", "do"], k=70)
    async with served(classifier, MaxModelLen=34) as backend:
        request = pb.TokenClassifyRequest(text=" ".join(words))
        entities = (await backend.stub.TokenClassify(request)).entities
    found = ["O"] * len(words)
    for entity in entities:
        for word in range(entity.start // 3, entity.end // 3 + 1):
            found[word] = entity.entity_group
    # Of 32 words in each part, the first and the last four only surround the others.
    for start, first in ((0, 0), (24, 20), (48, 44)):
        seen = words[first : start + 28]
        labels = ["O"] * len(seen)
        for at, end, label in expected(classifier, " ".join(seen)):
            labels[at // 3 : end // 3 + 1] = [label] * (end // 3 + 1 - at // 3)
        assert found[start : start + 24] == labels[start - first : start - first + 24]
    assert len(set(found)) > 1


async def test_parts_of_a_long_text_wait_for_each_other_not_in_the_queue(classifier):
    async with served(classifier, Options=["max_waiting:2"]) as backend:
        request = pb.TokenClassifyRequest(text="bo ba ki " * 600)
        answer = await backend.stub.TokenClassify(request)
    assert max(entity.end for entity in answer.entities) > 4000


async def test_a_context_without_room_for_a_token_is_refused(classifier):
    async with served(classifier, MaxModelLen=2) as backend:
        code, details = await code_of(backend.stub.TokenClassify(pb.TokenClassifyRequest(text="a")))
    assert (code, details) == (
        CODE.INVALID_ARGUMENT,
        "text: the context of 2 tokens leaves no room for text",
    )


async def test_a_text_that_would_take_minutes_to_tokenise_is_refused(shared, classifier):
    text = "a" * (MAX_CHARS_PER_TOKEN * MAX_TOKEN_IDS + 1)
    async with shared(classifier) as backend:
        code, details = await code_of(
            backend.stub.TokenClassify(pb.TokenClassifyRequest(text=text))
        )
    assert code is CODE.INVALID_ARGUMENT
    assert details.startswith(f"text: holds {len(text)} characters")


async def test_entities_below_the_threshold_are_left_out(shared, classifier):
    async with shared(classifier) as backend:
        every = await backend.stub.TokenClassify(pb.TokenClassifyRequest(text=TEXT))
        median = sorted(entity.score for entity in every.entities)[len(every.entities) // 2]
        some = await backend.stub.TokenClassify(
            pb.TokenClassifyRequest(text=TEXT, threshold=median)
        )
    assert list(some.entities) == [entity for entity in every.entities if entity.score >= median]


async def test_what_cannot_be_classified_is_refused(classifier, tiny_models):
    async with served(classifier) as backend:
        wrong = pb.TokenClassifyRequest(text="a", threshold=2.0)
        code, details = await code_of(backend.stub.TokenClassify(wrong))
        assert (code, details) == (
            CODE.INVALID_ARGUMENT,
            "threshold: must be between 0 and 1, not 2",
        )
        code, details = await code_of(backend.stub.Embedding(pb.PredictOptions(Embeddings="a")))
        assert (code, "finds entities" in details) == (CODE.UNIMPLEMENTED, True)
        assert not (await backend.stub.TokenClassify(pb.TokenClassifyRequest(text=""))).entities
        await backend.load(tiny_models("llama"))
        code, details = await code_of(backend.stub.TokenClassify(pb.TokenClassifyRequest(text="a")))
        assert code is CODE.UNIMPLEMENTED
        assert "does not label tokens" in details
