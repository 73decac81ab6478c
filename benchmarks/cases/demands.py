"""Requests that constrain their replies, and the same ones without constraints."""

import json
from dataclasses import dataclass
from enum import StrEnum

from backend.pb import backend_pb2 as pb
from benchmarks.harness.models import ROOT

_JSON_GRAMMAR = ROOT / "tests" / "golden" / "gbnf" / "json_object.gbnf"
_JSON_ROOT = "root   ::= object"
_LEAST_ITEMS = 1000  # no reply reaches its end
_ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "text": {"type": "string", "maxLength": 40},
        "state": {"enum": ["on", "off"]},
    },
    "required": ["id", "text", "state"],
}


class Demand(StrEnum):
    """The constraint of a request."""

    SCHEMA = "JSON schema"
    GBNF = "JSON grammar of the host"
    TOOL = "required tool"


@dataclass(frozen=True, slots=True)
class Reply:
    """The kind of reply requested.

    Attributes:
        variant: Distinguishes its tool and grammar from others.
        new_tokens: Its exact length.
        seed: Of its draws.
    """

    variant: int
    new_tokens: int
    seed: int


def request(question: str, reply: Reply, demand: Demand | None) -> pb.PredictOptions:
    """Return a chat request; it always offers a tool, so that all prompts are alike."""
    schema = _schema(reply.variant)
    function = {"name": f"report_{reply.variant}", "parameters": schema}
    grammars = {Demand.SCHEMA: json.dumps(schema), Demand.GBNF: _json_grammar(reply.variant)}
    return pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content=question)],
        Tools=json.dumps([{"type": "function", "function": function}]),
        ToolChoice="required" if demand is Demand.TOOL else "",
        Grammar=grammars.get(demand, "") if demand else "",
        Tokens=reply.new_tokens,
        IgnoreEOS=True,
        Temperature=1.0,
        Seed=reply.seed,
    )


def _schema(variant: int) -> dict[str, object]:
    items = {"type": "array", "items": _ITEM, "minItems": _LEAST_ITEMS}
    name = f"items_{variant}"
    return {"type": "object", "properties": {name: items}, "required": [name]}


def _json_grammar(variant: int) -> str:
    """Return the host's grammar, with a sequence of objects instead of one."""
    text = _JSON_GRAMMAR.read_text(encoding="utf-8")
    others = f'("," ws object){{{_LEAST_ITEMS + variant}}}'
    return text.replace(_JSON_ROOT, f"{_JSON_ROOT} {others}", 1)
