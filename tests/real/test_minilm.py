"""all-MiniLM-L6-v2 through the socket: the vectors of llama.cpp."""

import numpy as np
import pytest
from real_answers import FINDINGS
from serving import served

from backend.pb import backend_pb2 as pb
from scripts.real_models.prompts import TEXTS

pytestmark = pytest.mark.mlx

# llama.cpp approximates GELU.
LEAST_COSINE = 0.9999


async def test_vectors_are_those_of_llama_cpp(real_models, reference):
    expected = reference("minilm")
    async with served(real_models("minilm"), findings=FINDINGS, Embeddings=True) as backend:
        results = [
            await backend.stub.Embedding(pb.PredictOptions(Embeddings=text)) for text in TEXTS[::2]
        ]
    assert [result.prompt_tokens for result in results] == list(map(len, expected["ids"]))
    ours = np.array([result.embeddings for result in results])
    assert np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    assert (ours * expected["vectors"]).sum(axis=1).min() > LEAST_COSINE
