"""Gemma 3 270M through the socket, with its windows and large vocabulary: equal to llama.cpp."""

import pytest
from real_answers import FINDINGS, asked, require_ids, require_ids_of_the_file, require_reply
from serving import served

from scripts.real_models.prompts import PROMPTS

pytestmark = pytest.mark.mlx

# Of a log-probability from that of llama.cpp. Raw mlx-lm differs by up to 0.025, with the same
# tokens; the reason has not been looked for.
BOUND = 5e-2
# A base model: the marks of SmolLM2's turns are text to it.
NAMES = [name for name in PROMPTS if name != "chat"]


async def test_ids_and_greedy_replies_are_those_of_llama_cpp(real_models, reference):
    checkpoint, expected = real_models("gemma3-bf16"), reference("gemma3")
    async with served(checkpoint, findings=FINDINGS) as backend:
        await require_ids_of_the_file(backend, checkpoint)
        await require_ids(backend, expected["texts"])
        for name in NAMES:
            reply = expected["replies"][name]
            answer = await backend.stub.Predict(asked(name, len(reply["reply"])))
            require_reply(answer, reply, BOUND)
