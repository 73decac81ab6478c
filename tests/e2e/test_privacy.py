"""The words of callers stay out of the log at its most detailed level, however their calls end."""

import base64
import contextlib
import json
import os

import grpc
import pytest
from real_process import TIMEOUT_S, RealBackend, real_backend

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

MARK = "zebracrossing"
ENVIRONMENT = os.environ | {"MLX_BACKEND_LOG_LEVEL": "debug"}


def raw(**fields):
    return pb.PredictOptions(**{"Prompt": f"{MARK} ba", "Tokens": 4, **fields})


def chat(*, role="user", content=MARK, **fields):
    messages = [
        pb.Message(role=role, content=content, name=MARK, tool_calls=fields.pop("calls", ""))
    ]
    return pb.PredictOptions(UseTokenizerTemplate=True, Messages=messages, Tokens=4, **fields)


def tool(name=MARK, **parameters):
    function = {"name": name, "description": MARK, "parameters": {"type": "object", **parameters}}
    return json.dumps([{"type": "function", "function": function}])


# The log names the tool and the place of a rule that is not enforced, and nothing else.
ODD_SCHEMAS = (
    {"properties": {"a": {"pattern": f"(?<={MARK})x"}}},
    {"properties": {"a": {"type": MARK, "pattern": f"({MARK}"}}, "required": [MARK]},
    {"$ref": f"#/{MARK}"},
    {"not": {"const": MARK}},
)
PREDICTIONS = [
    raw(),
    raw(StopPrompts=[MARK], Logprobs=1),
    raw(Prompt=MARK * 5000),
    raw(Grammar=f'root ::= "{MARK}"'),
    raw(Grammar=f"root ::= {MARK}"),
    raw(Grammar=json.dumps({"const": MARK})),
    raw(Grammar=json.dumps({"type": MARK})),
    raw(Grammar="{" + MARK),
    raw(LogitBias=json.dumps({MARK: 1})),
    raw(NegativePrompt=MARK, ModelIdentity=MARK),
    raw(Images=[MARK, f"/{MARK}.png", base64.b64encode(MARK.encode())]),
    raw(Metadata={"json_schema": json.dumps({"enum": [MARK]}), "enable_thinking": MARK}),
    chat(),
    chat(role=MARK),
    chat(content=f"{MARK}\ud7ff\u0000"),
    chat(role="assistant", calls=MARK),
    chat(role="assistant", calls=json.dumps([{"function": {"name": MARK, "arguments": MARK}}])),
    chat(Tools=MARK),
    chat(Tools=tool()),
    chat(Tools=tool(), ToolChoice="required"),
    chat(Tools=tool(), ToolChoice=MARK),
    *(chat(Tools=tool("odd", **schema)) for schema in ODD_SCHEMAS),
    *(chat(Tools=tool("odd", **schema), ToolChoice="required") for schema in ODD_SCHEMAS),
    chat(Metadata={"chat_template_kwargs": json.dumps({MARK: MARK})}),
    chat(Metadata={"chat_template_kwargs": MARK, "reasoning_effort": MARK}),
]


def send(backend: RealBackend, method, request):
    """Make a call that may fail."""
    with contextlib.suppress(grpc.RpcError):
        replies = getattr(backend.stub, method)(request, timeout=TIMEOUT_S)
        if method == "PredictStream":
            list(replies)


def test_no_call_leaves_what_it_says_in_the_log_unless_it_asks_for_its_own_prompt_there(
    tiny_models, tmp_path
):
    with real_backend(tmp_path / "log", ENVIRONMENT) as backend:
        backend.load(tiny_models("llama"))
        for request in PREDICTIONS:
            for method in ("Predict", "PredictStream", "TokenizeString"):
                send(backend, method, request)
        send(backend, "Embedding", pb.PredictOptions(Embeddings=MARK))
        send(backend, "Score", pb.ScoreRequest(prompt=MARK, candidates=[MARK, MARK * 9999]))
        send(backend, "Rerank", pb.RerankRequest(query=MARK, documents=[MARK]))
        backend.stub.Predict(raw(CorrelationId="loud", Debug=True), timeout=TIMEOUT_S)
        backend.stub.Predict(raw(CorrelationId="the-last"), timeout=TIMEOUT_S)
        backend.process.stop()
        assert "request id=the-last" in backend.log_text
        (line,) = [line for line in backend.log_text.splitlines() if MARK in line]
        assert "request id=loud" in line
