"""Hypothesis strategies for protobuf messages: few fields at a time, with odd values of their type.

A field whose text means something to the backend also gets texts that nearly mean it.
"""

import base64
import json
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from backend.config import TuningOptions

MAX_FIELDS = 4

_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, -1, 2, 7, 255, 256, 2**31 - 1, -(2**31)])
    | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: st.sampled_from([0, -1, 2**63 - 1])
    | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e-30, 3e38])
    | st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 9),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=50),
}
_ODD_TEXTS = st.sampled_from(
    [
        *(" ", "\0", "\n", "\ufffd", "\u202e", "\U0010ffff", "e\u0301" * 40, "a\0b"),
        *("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://192.0.2.1/x", "~"),
        *("%s%n", "{0.__class__}", "{{ 7 * 7 }}", "<|im_start|>system", "</think><tool_call>"),
        *("x" * 100_000, "ba " * 30_000, "\U0001f600" * 3000, "1" * 5000),
    ]
)
_JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["now", "function", "object", "auto", 10**400, 1e308, -0.0])
)
_KEYS = st.sampled_from(
    [
        *("type", "function", "name", "parameters", "arguments", "id", "properties", "required"),
        *("enum", "items", "anyOf", "$ref", "pattern", "minLength", "maximum", "const", "1", "0"),
    ]
) | st.text(max_size=4)
_JSON = st.recursive(
    _JSON_LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=10,
)
_BAD_JSON = st.sampled_from(
    [
        *("{", "[", '"', "nul", "NaN", "[1e999]", '{"a": 1, "a": 2}', r'"\ud800"', r'["\udfff"]'),
        *("[" * 50_000, '{"a":' * 500 + "1" + "}" * 500, "[" * 120 + "]" * 120, "1" * 5000),
        *('"' + "\\" * 999, "[" + "0," * 20_000 + "0]"),
    ]
)
_JSON_TEXTS = _JSON.map(json.dumps) | _BAD_JSON
_TOOLS = st.lists(st.just(_TOOL) | _JSON, max_size=3).map(json.dumps) | _JSON_TEXTS
_GRAMMARS = st.sampled_from(
    [
        *('root ::= "a"', 'root ::= "a" root', "root ::= root", "root ::= [^\\x00-\\U0010FFFF]*"),
        *('root ::= ("a"? "a"?){200}', "root ::= a\na ::= b", 'root ::= "\\ud800"', "::=", "("),
        *('{"type": "integer"}', '{"type": 3}', '{"$ref": "#"}', '{"pattern": "(a+)+$"}'),
        *("root ::= " + "(" * 200 + '"a"' + ")" * 200, "root ::= [z-a]", 'root ::= "a"{9999999}'),
    ]
)
_METADATA = st.dictionaries(
    st.sampled_from(
        [
            *("enable_thinking", "reasoning_effort", "chat_template_kwargs", "json_schema"),
            *("parallel_tool_calls", "priority", "anything"),
        ]
    ),
    st.sampled_from(["true", "False", "high", "low", ""]) | _JSON_TEXTS | _ODD_TEXTS,
    max_size=3,
)
_BIASES = st.dictionaries(
    st.integers(-1, 300).map(str) | st.text(max_size=3), _JSON_LEAVES, max_size=4
).map(json.dumps)
_VALUES = st.sampled_from(
    [
        "true",
        "off",
        "0",
        "1",
        "4",
        "8",
        "64",
        "-1",
        "1e9",
        "q8_0",
        "float16",
        "mean",
        "nan",
        "/",
        "",
    ]
)
_PAYLOADS = st.binary(max_size=80).map(lambda data: base64.b64encode(data).decode())
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "Tools": _TOOLS,
    "ToolChoice": st.sampled_from(["auto", "none", "required", '"any"']) | _JSON_TEXTS,
    "tool_calls": _TOOLS,
    "LogitBias": _BIASES | _JSON_TEXTS,
    "EngineArgs": _JSON_TEXTS,
    "Grammar": _GRAMMARS | _JSON_TEXTS,
    "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
    "Options": st.tuples(st.sampled_from(list(TuningOptions().by_name())), _VALUES).map(":".join),
    "CacheTypeKey": _VALUES,
    "CacheTypeValue": _VALUES,
    "DType": _VALUES,
    "Images": _PAYLOADS,
    "Audios": _PAYLOADS,
    "Videos": _PAYLOADS,
}


def texts(name: str = "") -> st.SearchStrategy[str]:
    """Return texts for a field of a name."""
    plain = st.text(max_size=30) | _ODD_TEXTS
    return _BY_NAME[name] | plain if name in _BY_NAME else plain


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Return the arguments of a message's constructor: at most `MAX_FIELDS` of its fields."""
    if not descriptor.fields:
        return st.just({})
    known = st.sampled_from(list(descriptor.fields))
    chosen = st.lists(known, max_size=MAX_FIELDS, unique_by=lambda f: f.name)
    return chosen.flatmap(
        lambda few: st.fixed_dictionaries({field.name: _values(field) for field in few})
    )


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "Metadata":
        return _METADATA
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(_single(entry["key"]), _single(entry["value"]), max_size=3)
    if not field.is_repeated:
        return _single(field)
    few = st.lists(_single(field), max_size=3)
    many = st.tuples(_single(field), st.sampled_from([70, 2000])).map(lambda v: [v[0]] * v[1])
    return few | many


def _single(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return texts(field.name)
    if field.message_type is not None:
        return messages(field.message_type)
    return _SCALARS[field.type]
