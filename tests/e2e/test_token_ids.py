"""Token ids through the socket are those of the checkpoint's own tokenizer.json."""

import json
import shutil
from pathlib import Path

import grpc
import pytest
from published_tokenizers import TEXTS, TURN_END, TURN_START, write
from serving import Served, code_of, served
from tokenizers import Tokenizer as FastTokenizer

from backend.pb import backend_pb2 as pb
from scripts.tiny_encoders import (
    build_cross_encoder,
    build_decider,
    build_encoder,
    build_extractor,
    build_token_classifier,
)

pytestmark = pytest.mark.mlx

# Classes that transformers rebuilds, and one of each kind of decoder.
KINDS = [
    "single digits",
    "runs of spaces",
    "folded width",
    "sentencepiece",
    "unigram",
    "word piece",
]
LONG = " ".join(f"rule {n}: no more than {n * 37} words, naïve or not;" for n in range(60))


@pytest.fixture(scope="module")
def checkpoint(tiny_models, tmp_path_factory) -> Path:
    return Path(shutil.copytree(tiny_models("llama"), tmp_path_factory.mktemp("ids") / "llama"))


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_the_file(checkpoint: Path, kind: str):
    published = write(kind, checkpoint, bos_token=TURN_START)
    async with served(checkpoint) as backend:
        for text in [*TEXTS, LONG]:
            await compare(backend, published, text)
        ids = list(range(published.get_vocab_size()))
        decoded = await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=ids))
        assert decoded.content == published.decode(ids, skip_special_tokens=False)


async def compare(backend: Served, published: FastTokenizer, text: str) -> None:
    ids = published.encode(text, add_special_tokens=False).ids
    if not ids:
        return
    answer = await backend.stub.TokenizeString(pb.PredictOptions(Prompt=text))
    assert list(answer.tokens) == ids
    reply = await backend.stub.Predict(pb.PredictOptions(Prompt=text, Tokens=1, IgnoreEOS=True))
    assert reply.prompt_tokens == len(published.encode(text).ids)


async def test_a_template_and_a_grammar_use_the_same_tokens(checkpoint: Path):
    published = write("single digits", checkpoint)
    messages = [pb.Message(role="user", content=TEXTS[0])]
    request = pb.PredictOptions(UseTokenizerTemplate=True, Messages=messages, Tokens=60)
    async with served(checkpoint) as backend:
        assert not (await backend.stub.TokenizeString(pb.PredictOptions())).tokens
        ids = list((await backend.stub.TokenizeString(request)).tokens)
        prompt = published.decode(ids, skip_special_tokens=False)
        assert ids == published.encode(prompt, add_special_tokens=False).ids
        assert prompt.count(TURN_END) >= 1
        request.Metadata["enable_thinking"] = "false"
        request.Metadata["json_schema"] = json.dumps({"enum": [TEXTS[0]]})
        reply = await backend.stub.Predict(request)
        assert json.loads(reply.message) == TEXTS[0]


FAR = "zyx"


def chatting(**fields):
    message = pb.Message(role="user", content=f"ba {FAR}")
    return pb.PredictOptions(UseTokenizerTemplate=True, Messages=[message], **fields)


SCORED = {"prompt": "ba ", "candidates": ["bo", f"{FAR} be"]}
CALLS_WITH_IT = {
    "llama": [
        ("Prompt", "Predict", pb.PredictOptions(Prompt=f"ba {FAR}", Tokens=1)),
        ("Messages", "Predict", chatting(Tokens=1)),
        ("Embeddings", "Embedding", pb.PredictOptions(Embeddings=FAR)),
        ("candidates[1]", "Score", pb.ScoreRequest(**SCORED)),
    ],
    "encoder": [("Embeddings", "Embedding", pb.PredictOptions(Embeddings=FAR))],
    "cross-encoder": [
        ("documents[1]", "Rerank", pb.RerankRequest(query="ba", documents=["bo", FAR]))
    ],
    "tagger": [("text", "TokenClassify", pb.TokenClassifyRequest(text=f"ba {FAR} bo"))],
    "extractor": [("text", "TokenClassify", pb.TokenClassifyRequest(text=FAR, labels=["b"]))],
    "decider": [("prompt", "Score", pb.ScoreRequest(prompt=FAR, question_type="bool"))],
}


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    builds = {
        "encoder": lambda place: build_encoder("bert", place),
        "cross-encoder": lambda place: build_cross_encoder("bert", place),
        "tagger": lambda place: build_token_classifier(place, ("O", "B-PER")),
        "extractor": build_extractor,
        "decider": build_decider,
    }
    return lambda kind: tiny_models("llama") if kind == "llama" else builds[kind](directory / kind)


@pytest.mark.parametrize("kind", CALLS_WITH_IT)
async def test_a_token_that_the_model_lacks_is_refused(models, tmp_path, kind):
    directory = Path(shutil.copytree(models(kind), tmp_path / "larger"))
    path = directory / "tokenizer.json"
    tokenizer = FastTokenizer.from_file(str(path))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<{n}>" for n in range(tokenizer.get_vocab_size(), size)])
    tokenizer.add_tokens([FAR])
    tokenizer.save(str(path))
    async with served(directory) as backend:
        for field, name, request in CALLS_WITH_IT[kind]:
            code, details = await code_of(getattr(backend.stub, name)(request))
            problem = f"{field}: token id {size} is outside the vocabulary of {size} tokens"
            assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, problem)
