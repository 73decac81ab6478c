"""Text of a family through the server: alone, from the prompt cache, on a second turn, together."""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
from grpc.aio import AioRpcError
from transformers import PreTrainedTokenizerFast

from backend.model.checkpoint.upstream import HfTokenizer, import_mlx_lm
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from scripts.sweep.variants import adapted
from scripts.sweep.verdict import Expected, Outcome, Verdict, worst

# Tokens with the log-probabilities that they were drawn from.
Steps: TypeAlias = Iterable[tuple[int, mx.array]]
Generate: TypeAlias = Callable[..., Steps]

_WHOLE, _PIECE = 2048, 16
_IN_PIECES = "in pieces"

TOKENS = 24
_CANCELLED_AFTER = 4
_LENGTHS = {"short": 5, "middle": 40, "long": 300, "other": 45}
_NEXT_TURN = " and now the next turn of it."


def prompts() -> Mapping[str, str]:
    """Return texts of printable characters, which the tiny models read one by one."""
    texts = {}
    for seed, (name, length) in enumerate(_LENGTHS.items()):
        rng = random.Random(seed)
        texts[name] = "".join(chr(rng.randint(ord("!"), ord("~"))) for _ in range(length))
    return texts


def text_reference(
    directory: Path, library: str, adapters: Sequence[Path] = ()
) -> dict[str, Expected]:
    """Return a library's replies to each prompt, and a second turn; mlx-lm with adapters."""
    is_lm = library == "mlx-lm"
    steps, tokenizer = _from_mlx_lm(directory, adapters) if is_lm else _from_mlx_vlm(directory)
    texts = dict(prompts())
    replies = {name: _generated(steps(tokenizer.encode(text))) for name, text in texts.items()}
    middle = texts["middle"] + tokenizer.decode(list(replies["middle"].tokens)) + _NEXT_TURN
    replies["second turn"] = _generated(steps(tokenizer.encode(middle)))
    pieces = steps(tokenizer.encode(texts["long"]), _PIECE)
    return {**replies, _IN_PIECES: _generated(pieces)}


def _from_mlx_lm(directory: Path, adapters: Sequence[Path]) -> tuple[Generate, HfTokenizer]:
    network, _ = import_mlx_lm().load_model(directory)
    network = adapted(network, adapters)
    from mlx_lm.generate import generate_step

    # Without reading config.json, whose unknown values transformers refuses.
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    def steps(ids: Sequence[int], piece: int = _WHOLE) -> Steps:
        return generate_step(mx.array(ids), network, max_tokens=TOKENS, prefill_step_size=piece)

    return steps, tokenizer


def _from_mlx_vlm(directory: Path) -> tuple[Generate, HfTokenizer]:
    import mlx_vlm
    from mlx_vlm.generate.ar import generate_step

    network, processor = mlx_vlm.load(str(directory))

    def steps(ids: Sequence[int], piece: int = _WHOLE) -> Steps:
        tokens = mx.array([ids])
        mask, options = mx.ones_like(tokens), {"prefill_step_size": piece}
        found = generate_step(tokens, network, None, mask, max_tokens=TOKENS, **options)
        return islice(found, TOKENS)

    return steps, getattr(processor, "tokenizer", processor)


def _generated(steps: Steps) -> Expected:
    tokens, gaps = [], []
    for token, logprobs in steps:
        second, first = mx.sort(logprobs.astype(mx.float32))[-2:].tolist()
        tokens.append(int(token))
        gaps.append(first - second)
    return Expected(tokens, gaps)


async def check_text(
    stub: backend_pb2_grpc.BackendStub, expected: Mapping[str, Expected]
) -> Verdict:
    """Compare the loaded model's replies with those of its library.

    A difference is not an error if the library's own replies depend on how it splits a prompt.
    """
    verdict = await _compared(stub, expected)
    whole, pieces = expected["long"], expected[_IN_PIECES]
    if verdict.outcome is Outcome.WRONG and not whole.is_like(pieces):
        detail = f"{verdict.detail}; the library's own replies depend on how it cuts a prompt"
        return Verdict(Outcome.TIE, detail)
    return verdict


async def _compared(
    stub: backend_pb2_grpc.BackendStub, expected: Mapping[str, Expected]
) -> Verdict:
    texts = dict(prompts())
    verdicts = [
        await _judged(stub, f"{name}, alone", texts[name], expected[name])
        for name in ("short", "middle", "long")
    ]
    if any(verdict.outcome is Outcome.WRONG for verdict in verdicts):
        return worst(verdicts)
    reply = await _reply(stub, texts["middle"])
    texts["second turn"] = texts["middle"] + reply.text + _NEXT_TURN
    verdicts += [
        await _judged(stub, f"{name}, warm", texts[name], expected[name])
        for name in ("long", "second turn")
    ]
    await _reply(stub, texts["other"] + "!", cancelled_after=_CANCELLED_AFTER)
    together = [
        _judged(stub, f"{name}, in a batch", texts[name], expected[name])
        for name in ("long", "other", "short", "second turn")
    ]
    return worst([*verdicts, *await asyncio.gather(*together)])


async def _judged(
    stub: backend_pb2_grpc.BackendStub, case: str, text: str, expected: Expected
) -> Verdict:
    try:
        reply = await _reply(stub, text)
    except AioRpcError as error:
        return Verdict(Outcome.WRONG, f"{case}: {error.code().name}: {error.details()}")
    return expected.compared(case, reply.tokens)


class _Reply:
    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []


async def _reply(
    stub: backend_pb2_grpc.BackendStub, text: str, *, cancelled_after: int | None = None
) -> _Reply:
    request = pb.PredictOptions(Prompt=text, IgnoreEOS=True, Tokens=TOKENS, Logprobs=1)
    reply = _Reply()
    call = stub.PredictStream(request)
    async for part in call:
        reply.text += part.message.decode()
        if part.logprobs:
            reply.tokens = [entry["id"] for entry in json.loads(part.logprobs)["content"]]
        if cancelled_after is not None and part.tokens >= cancelled_after:
            call.cancel()
            break
    return reply
