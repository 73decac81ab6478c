"""What the host's end-to-end suite sends for each capability, and what it asserts of the answer.

Requests carry the fields that the host's suite sets and no others. `vision` is ours: the host's
suite has no such step for this backend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from backend.pb import backend_pb2 as pb
from scripts.host_suite.weather import HOST_QUESTION, HOST_SYSTEM, HOST_TOOLS

PROMPT = "The capital of France is"
STORY = "Once upon a time"
IMAGE_QUESTION = "What is in this image?"
# A PNG of 64 x 64 red pixels.
RED_SQUARE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PQQkAAAgAsetfWiP4FgYrsKZeS0BA"
    "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEDgsqnc8OJg6Ln3AAAAAElFTkSu"
    "QmCC"
)
ANSWER_TIMEOUT_S = 120.0
SAMPLING: Mapping[str, Any] = {"Tokens": 20, "Temperature": 0.1, "TopK": 40, "TopP": 0.9}


class UnmetError(Exception):
    """An answer is not what the host's suite asserts; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested: a model, and the capabilities that are asked of it.

    Attributes:
        model: A directory, or a name that the backend looks up itself.
    """

    model: str
    capabilities: Sequence[str]


@dataclass(frozen=True, slots=True)
class Capability:
    """One step of the suite.

    Attributes:
        method: An RPC of the service `backend.Backend`.
        check: Takes all messages of the answer; raises UnmetError.
        baseline: A request to compare with; its answer comes first in what `check` takes.
    """

    method: str
    request: Callable[[Subject], Message]
    check: Callable[[Sequence[Any]], None]
    timeout_s: float = field(default=ANSWER_TIMEOUT_S, kw_only=True)
    baseline: Callable[[Subject], Message] | None = field(default=None, kw_only=True)


def model_options(subject: Subject) -> pb.ModelOptions:
    """Return how the host's suite loads a model: a directory by its path, all else by its name."""
    return pb.ModelOptions(
        Model=subject.model,
        ModelFile=subject.model if Path(subject.model).is_dir() else "",
        ContextSize=512,
        Threads=4,
        MMap=True,
        NBatch=128,
        Embeddings="embeddings" in subject.capabilities,
    )


def predict_options(**fields: Any) -> Callable[[Subject], pb.PredictOptions]:  # noqa: ANN401 - fields of any type
    """Return a raw request, whatever the subject; `fields` are added or replace."""
    return lambda _: pb.PredictOptions(**{"Prompt": PROMPT, **SAMPLING, **fields})


def tool_request(_: Subject) -> pb.PredictOptions:
    """Return the conversation that wants a tool; its `ToolChoice` is no JSON, as the host's."""
    return pb.PredictOptions(
        Messages=[
            pb.Message(role="system", content=HOST_SYSTEM),
            pb.Message(role="user", content=HOST_QUESTION),
        ],
        Tools=HOST_TOOLS,
        ToolChoice="auto",
        UseTokenizerTemplate=True,
        Tokens=200,
        Temperature=0.1,
    )


def image_request(*images: str) -> Callable[[Subject], pb.PredictOptions]:
    """Return a question about images, which come as bare base64."""
    return lambda _: pb.PredictOptions(
        Messages=[pb.Message(role="user", content=IMAGE_QUESTION)],
        Images=images,
        UseTokenizerTemplate=True,
        Tokens=20,
        Temperature=0.1,
    )


def has_text(replies: Sequence[pb.Reply]) -> None:
    """Demand visible text."""
    _demand(replies[0].message, "message is empty")


def has_logprobs(replies: Sequence[pb.Reply]) -> None:
    """Demand visible text and its logprobs."""
    has_text(replies)
    _demand(replies[0].logprobs, "logprobs are empty")


def is_loaded(results: Sequence[pb.Result]) -> None:
    """Demand success."""
    _demand(results[0].success, f"success is false: {results[0].message}")


def has_tokens(answers: Sequence[pb.TokenizationResponse]) -> None:
    """Demand token ids."""
    _demand(answers[0].tokens, "tokens are empty")


def streams(replies: Sequence[pb.Reply]) -> None:
    """Demand increments: the whole text sent again and again would begin with equal ones."""
    pieces = [reply.message for reply in replies if reply.message]
    _demand(pieces, "no reply has a message")
    _demand(len(pieces) < 2 or pieces[0] != pieces[1], f"the text {pieces[0]!r} came twice")


def has_vector(results: Sequence[pb.EmbeddingResult]) -> None:
    """Demand a vector whose size is the declared one."""
    (result,) = results
    _demand(result.embeddings, "embeddings are empty")
    expected = result.tokens * result.dim
    _demand(
        len(result.embeddings) == expected,
        f"{len(result.embeddings)} numbers where tokens * dim is {expected}",
    )


def calls_the_tool(replies: Sequence[pb.Reply]) -> None:
    """Demand a parsed call of the weather tool."""
    names = [call.name for delta in replies[0].chat_deltas for call in delta.tool_calls]
    _demand("get_weather" in names, f"no call of get_weather, but {names}")


def saw_the_image(replies: Sequence[pb.Reply]) -> None:
    """Demand text, and a longer prompt than that of the question alone."""
    blind, seeing = replies
    has_text([seeing])
    _demand(seeing.prompt_tokens > blind.prompt_tokens, "the prompt has no tokens of the image")


def _demand(condition: object, problem: str) -> None:
    if not condition:
        raise UnmetError(problem)


CAPABILITIES: Mapping[str, Capability] = {
    "health": Capability("Health", lambda _: pb.HealthMessage(), has_text, timeout_s=10.0),
    "load": Capability("LoadModel", model_options, is_loaded, timeout_s=600.0),
    "predict": Capability("Predict", predict_options(), has_text),
    "tokenize": Capability(
        "TokenizeString", lambda _: pb.PredictOptions(Prompt=PROMPT), has_tokens
    ),
    "stream": Capability("PredictStream", predict_options(Prompt=STORY), streams),
    "logprobs": Capability(
        "Predict", predict_options(Tokens=10, Logprobs=1, TopLogprobs=1), has_logprobs
    ),
    "logit_bias": Capability(
        "Predict", predict_options(Tokens=10, LogitBias='{"1":-100}'), has_text
    ),
    "embeddings": Capability(
        "Embedding", lambda _: pb.PredictOptions(Embeddings=PROMPT), has_vector
    ),
    "tools": Capability("Predict", tool_request, calls_the_tool, timeout_s=300.0),
    "vision": Capability(
        "Predict",
        image_request(RED_SQUARE),
        saw_the_image,
        timeout_s=300.0,
        baseline=image_request(),
    ),
}

TEXT_CAPABILITIES = tuple(name for name in CAPABILITIES if name != "vision")
