"""Token ids through the socket are those of the checkpoint's own tokenizer.json."""

import json
import shutil
from pathlib import Path

import pytest
from published_tokenizers import TEXTS, TURN_END, TURN_START, write
from serving import Served, served
from tokenizers import Tokenizer as FastTokenizer

from backend.pb import backend_pb2 as pb

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
