"""The requests of the host's end-to-end suite for each capability, and its assertions.

Requests have only the fields that the host's suite sets. `vision` is ours: the host's
suite has no such step for this backend.
"""

import json
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from backend.pb import backend_pb2 as pb

HOST_SYSTEM = "You are a helpful assistant. Use the provided tool when the user asks about weather."
HOST_QUESTION = "What's the weather like in Paris, France?"
HOST_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                }
            },
            "required": ["location"],
        },
    },
}
HOST_TOOLS = json.dumps([HOST_TOOL])


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
    """An answer fails an assertion of the host's suite; the message names it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a test: a model, and its capabilities.

    Attributes:
        model: A directory, or a name that the backend looks up itself.
        directory: For the files of the requests.
    """

    model: str
    capabilities: Sequence[str]
    directory: Path

    def new_directory(self) -> Path:
        """Return an empty directory for the files of one request."""
        return Path(tempfile.mkdtemp(dir=self.directory))


@dataclass(frozen=True, slots=True)
class Capability:
    """One step of the suite.

    Attributes:
        method: An RPC of the service `backend.Backend`.
        check: Gets all messages of the answer; raises UnmetError.
        baseline: A request to compare with; its answer comes first in the input of `check`.
        opening: Another method and its request, called first; its answer is ignored.
    """

    method: str
    request: Callable[[Subject], Message]
    check: Callable[[Sequence[Any]], None]
    timeout_s: float = field(default=ANSWER_TIMEOUT_S, kw_only=True)
    baseline: Callable[[Subject], Message] | None = field(default=None, kw_only=True)
    opening: tuple[str, Callable[[Subject], Message]] | None = field(default=None, kw_only=True)


def model_options(subject: Subject) -> pb.ModelOptions:
    """Return the load options of the host's suite: a directory by its path, others by name."""
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
    """Return a raw request for any subject; `fields` are added or replaced."""
    return lambda _: pb.PredictOptions(**{"Prompt": PROMPT, **SAMPLING, **fields})


def tool_request(_: Subject) -> pb.PredictOptions:
    """Return a conversation that needs a tool; its `ToolChoice` is not JSON, as in the host."""
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
    """Return a question about images, as bare base64."""
    return lambda _: pb.PredictOptions(
        Messages=[pb.Message(role="user", content=IMAGE_QUESTION)],
        Images=images,
        UseTokenizerTemplate=True,
        Tokens=20,
        Temperature=0.1,
    )


def transcription_request(subject: Subject) -> pb.TranscriptRequest:
    """Return a request for two seconds of a tone, in a file."""
    path = subject.new_directory() / "tone.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\x00\x20\x00\xe0" * 8000)
    return pb.TranscriptRequest(dst=str(path), language="en")


def covers_the_recording(results: Sequence[pb.TranscriptResult]) -> None:
    """Demand one segment of two seconds."""
    (result,) = results
    ends = [segment.end for segment in result.segments]
    _demand(ends == [2_000_000_000], f"segments end at {ends} ns")


def has_placed_entities(answers: Sequence[pb.TokenClassifyResponse]) -> None:
    """Demand that every entity is the text at its bytes."""
    for entity in answers[0].entities:
        text = STORY.encode()[entity.start : entity.end].decode()
        _demand(text == entity.text, f"{entity.text!r} does not stand at its bytes: {text!r}")


def quantisation_request(subject: Subject) -> pb.QuantizationRequest:
    """Return a request for 8 bits, into a directory created by the host."""
    return pb.QuantizationRequest(
        model=subject.model,
        quantization_type="q8",
        output_dir=str(subject.new_directory()),
        job_id="mlx-quantize",
    )


def training_request(subject: Subject) -> pb.FineTuneRequest:
    """Return a request for one step of training on four short conversations."""
    directory = subject.new_directory()
    dataset = directory / "dataset.jsonl"
    row = {"prompt": PROMPT, "completion": "Paris."}
    dataset.write_text("\n".join([json.dumps(row)] * 4), encoding="utf-8")
    return pb.FineTuneRequest(
        model=subject.model,
        training_type="lora",
        training_method="sft",
        max_steps=1,
        gradient_accumulation_steps=1,
        dataset_source=str(dataset),
        output_dir=str(directory / "output"),
        job_id="mlx-finetune",
    )


def completes(updates: Sequence[Any]) -> None:
    """Demand progress up to completion, with the output."""
    last = updates[-1]
    _demand(last.status == "completed", f"ended as {last.status}: {last.message}")
    is_training = isinstance(last, pb.FineTuneProgressUpdate)
    _demand(last.checkpoint_path if is_training else last.output_file, "nothing was written")


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
    """Demand increments: repeating the whole text would start with equal ones."""
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
    "tokenclassify": Capability(
        "TokenClassify",
        lambda _: pb.TokenClassifyRequest(text=STORY),
        has_placed_entities,
    ),
    "transcription": Capability(
        "AudioTranscription",
        transcription_request,
        covers_the_recording,
        timeout_s=300.0,
    ),
    "quantize": Capability(
        "QuantizationProgress",
        lambda _: pb.QuantizationProgressRequest(job_id="mlx-quantize"),
        completes,
        timeout_s=300.0,
        opening=("StartQuantization", quantisation_request),
    ),
    "finetune": Capability(
        "FineTuneProgress",
        lambda _: pb.FineTuneProgressRequest(job_id="mlx-finetune"),
        completes,
        timeout_s=300.0,
        opening=("StartFineTune", training_request),
    ),
}

TEXT_CAPABILITIES = tuple(
    name for name in CAPABILITIES if name not in ("vision", "transcription", "tokenclassify")
)
