"""What do fewer bits for keys and values change? `python -m benchmarks.prompt_cache.kv_loss`.

Each model continues prompts greedily with its own KV cache. Then it reads the same tokens again
with a quantised KV cache, or with one restored from a prompt cache that stores fewer bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import mlx.core as mx
from mlx_lm import load

from backend.cache.kv import Packing, Piece, Segment, evaluate
from backend.cache.layout import CacheLayout
from backend.config import TuningOptions
from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.engine.passes.caches import make_cache_factory
from backend.engine.plan import Caches, Decoder
from scripts.tiny_models import VOCAB_SIZE, build

REPLY_TOKENS = 64
CITIES = ("Oslo", "Lima", "Cairo", "Nagoya", "Zagreb", "Quito", "Tbilisi", "Windhoek")
QUESTIONS = ("What is the weather in {}?", "Say hello to {}.", "Tell me a story about {}.")
RANDOM_PROMPTS = 8
RANDOM_PROMPT_TOKENS = 500
VARIANTS = {
    "kv_bits:8": TuningOptions.of(kv_bits=8),
    "kv_bits:4": TuningOptions.of(kv_bits=4),
    "cache_bits:8": TuningOptions.of(cache_bits=8),
    "cache_bits:4": TuningOptions.of(cache_bits=4),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, the prompts it continues, and the token that ends a reply, if one does."""

    network: Decoder
    prompts: list[list[int]]
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a prompt, and the log-probabilities [T, V] it was drawn from."""

    prompt: list[int]
    tokens: list[int]
    logprobs: mx.array


@dataclass(frozen=True, slots=True)
class Loss:
    """The difference between reading all replies and generating them.

    Attributes:
        tokens: Of all replies.
        agreement: Share of them that would be drawn again, greedily.
        mean: Mean distance of the drawn tokens' log-probabilities.
        largest: The largest of these distances.
        size: Stored bytes of a token, relative to those without the option.
    """

    tokens: int
    agreement: float
    mean: float
    largest: float
    size: float

    def __str__(self) -> str:
        figures = (f"{value:8.4f}" for value in (self.mean, self.largest))
        return f"{self.tokens:6} {self.agreement:7.1%} {' '.join(figures)} {self.size:6.2f}"


def losses(subject: Subject) -> Iterator[tuple[str, Loss]]:
    """Yield every option and its loss."""
    plain = TuningOptions()
    replies = [_continued(subject, prompt) for prompt in subject.prompts]
    said = mx.concatenate([reply.logprobs for reply in replies])
    tokens = mx.argmax(said, axis=-1, keepdims=True)
    full_bytes = _prefilled(subject.network, plain, subject.prompts[0])[1]
    for option, tuning in VARIANTS.items():
        read = mx.concatenate([_read(subject.network, tuning, reply) for reply in replies])
        distance = mx.abs(mx.take_along_axis(said - read, tokens, axis=-1))
        again = mx.argmax(read, axis=-1, keepdims=True)
        stored_bytes = _prefilled(subject.network, tuning, subject.prompts[0])[1]
        yield (
            option,
            Loss(
                tokens=said.shape[0],
                agreement=mx.mean(again == tokens).item(),
                mean=mx.mean(distance).item(),
                largest=mx.max(distance).item(),
                size=stored_bytes / full_bytes,
            ),
        )


def _prefilled(network: Decoder, tuning: TuningOptions, prompt: list[int]) -> tuple[Caches, int]:
    """Restore all of a prompt but its last token; return its caches and its stored bytes."""
    fresh_caches = make_cache_factory(network, tuning)
    computed, restored = fresh_caches(), fresh_caches()
    layout = CacheLayout.of(computed, Packing(tuning.prompt_cache.cache_bits))
    if layout is None:
        raise click.ClickException("this model has no prompt cache")
    length = len(prompt) - 1
    network(mx.array([prompt[:length]]), cache=computed)
    segment = Segment(layout.capture(computed, 0, length), layout.snapshot(computed))
    evaluate([segment])
    layout.restore(restored, [Piece(segment, length)], length, length + REPLY_TOKENS)
    return restored, segment.nbytes


def _continued(subject: Subject, prompt: list[int]) -> Reply:
    caches, _ = _prefilled(subject.network, TuningOptions(), prompt)
    tokens: list[int] = []
    rows = []
    while len(tokens) < REPLY_TOKENS and subject.end not in tokens:
        rows.append(_logprobs(subject.network, caches, [*prompt, *tokens][-1]))
        tokens.append(int(mx.argmax(rows[-1]).item()))
    return Reply(prompt, tokens, mx.concatenate(rows))


def _read(network: Decoder, tuning: TuningOptions, reply: Reply) -> mx.array:
    caches, _ = _prefilled(network, tuning, reply.prompt)
    fed = [reply.prompt[-1], *reply.tokens[:-1]]
    return mx.concatenate([_logprobs(network, caches, token) for token in fed])


def _logprobs(network: Decoder, caches: Caches, token: int) -> mx.array:
    logits = network(mx.array([[token]]), cache=caches)[:, -1].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    return logprobs


def _demo() -> Subject:
    network, tokenizer = load(str(MODEL_DIR))[:2]
    questions = [question.format(city) for question in QUESTIONS for city in CITIES]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tools=[WEATHER_TOOL],
            add_generation_prompt=True,
        )
        for question in questions
    ]
    return Subject(network, prompts, tokenizer.eos_token_id)


def _random(family: str) -> Subject:
    with TemporaryDirectory() as directory:
        network = load(str(build(family, Path(directory))))[0]
        mx.eval(network.parameters())
    mx.random.seed(0)
    prompts = mx.random.randint(0, VOCAB_SIZE, (RANDOM_PROMPTS, RANDOM_PROMPT_TOKENS)).tolist()
    return Subject(network, prompts)


@click.command()
def main() -> None:
    """Print the loss of each width on the demo model, and on random weights."""
    subjects = {
        "demo": _demo(),
        "random llama": _random("llama_wide"),
        "random gemma 3": _random("gemma3_wide"),
    }
    for name, subject in subjects.items():
        click.echo(f"{name}: tokens, same token, mean and largest distance, share of the bytes")
        for option, loss in losses(subject):
            click.echo(f"  {option:12} {loss}")


if __name__ == "__main__":
    main()
