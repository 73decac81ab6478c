"""Fuzzes the parsers with atheris, which follows their branches.

    pip install atheris
    python scripts/fuzz/parsers.py formats -max_total_time=60

The first argument is a name of `TARGETS`; the rest are libFuzzer's. A finding is written to a file
`crash-*`; pass that file's name in place of the options to reproduce it.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["backend", "common"]):
    from backend.config import TuningOptions
    from backend.core.prompt import MediaKind, Medium
    from backend.core.step import FinishReason
    from backend.errors import InvalidRequestError
    from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
    from backend.media.decode import decode_payload
    from backend.output.replay import cut_randomly, fold, stream
    from backend.output.reply import ReplySpec
    from backend.output.reply_format import OutputFormat
    from backend.pb import backend_pb2 as pb
    from backend.rpc.decoding import decode_request
    from backend.rpc.parsing.generation_fields import sampling_params
    from backend.rpc.parsing.load_options import tuning_options
    from backend.rpc.parsing.message_fields import tool_use
    from backend.sampling.grammar.gbnf import gbnf_to_lark
    from backend.sampling.grammar.schema import schema_to_lark
    from backend.sampling.grammar.vocabulary import Vocabulary

MAX_PIECES = 16
MAX_CHARS = 200
EOS = 256
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}
# Pieces of calls and grammars; the markers of a format come from its own row.
PIECES = [
    *('{"name": "f", "arguments": {', '"a": "b"', "}", "{", "[", "]", '"', "\\", "'", ":", ", "),
    *("f", "a", "n", "1", "null", "<", ">", "</", "=", "/", "\n", " ", "```", "(", ")", "\\u00"),
]
GRAMMAR_PIECES = [
    *("root", " ::= ", '"a"', "[a-z]", "[^x]", "(", ")", "*", "+", "?", "{2,5}", "|", "\n", "#"),
    *("\\x41", "\\u0041", '"', ".", "b", "b ::= ", "\\", "-", "]", "{", "}"),
]
URI_PIECES = ["data:", ";base64,", "%2B", "=", "/9j/", "AAAA", "-_", "file:"]


def formats(data: atheris.FuzzedDataProvider) -> None:
    """Any reply is parsed in any format to its end, with the same result for any cut."""
    reasoning = data.PickValueInList(list(REASONING_FORMATS))
    row = data.PickValueInList(list(TOOL_FORMATS))
    markers = (reasoning.start, reasoning.end, *row.openers, row.closer)
    text = _text(data, [*filter(None, markers), *PIECES])
    stop = FinishReason.STOP if data.ConsumeBool() else FinishReason.LENGTH
    spec = ReplySpec(format=OutputFormat(reasoning, row), tools=TOOLS)
    whole, cut = (
        fold(stream(spec, chunks, stop)) for chunks in ([text], cut_randomly(text, text[:9]))
    )
    if (whole.content, whole.reasoning) != (cut.content, cut.reasoning):
        raise AssertionError(f"{reasoning.name}, {row.name}: {text!r} depends on how it is cut")


def grammars(data: atheris.FuzzedDataProvider) -> None:
    """Any grammar is translated or refused."""
    text = _text(data, GRAMMAR_PIECES)
    if text.lstrip().startswith("{"):
        schema_to_lark(text)
    else:
        gbnf_to_lark(text, VOCABULARY)


def fields(data: atheris.FuzzedDataProvider) -> None:
    """Texts in fields are parsed or refused."""
    tools, choice = _text(data, PIECES), _text(data, PIECES)
    tool_use(pb.PredictOptions(Tools=tools, ToolChoice=choice))
    sampling_params(pb.PredictOptions(LogitBias=_text(data, PIECES)), TuningOptions().requests)
    name = data.PickValueInList(list(TuningOptions().by_name()))
    tuning_options([f"{name}:{_text(data, PIECES)}"], _text(data, PIECES))


def payloads(data: atheris.FuzzedDataProvider) -> None:
    """A medium is bytes or refused."""
    decode_payload(Medium(MediaKind.IMAGE, "Images[0]", _text(data, URI_PIECES)))


def messages(data: atheris.FuzzedDataProvider) -> None:
    """Bytes are a message, or explained."""
    decode_request(
        pb.PredictOptions.FromString,
        pb.PredictOptions.DESCRIPTOR,
        data.ConsumeBytes(data.remaining_bytes()),
    )


TARGETS: Mapping[str, Callable[[atheris.FuzzedDataProvider], None]] = {
    target.__name__: target for target in (formats, grammars, fields, payloads, messages)
}
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), b"<eos>"], markers={}, eos_ids=[EOS], size=EOS + 1
)


class Strict(logging.Handler):
    """Raises errors of parsers that the backend would only log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise."""
        raise AssertionError(record.getMessage())


def main() -> None:
    """Fuzz the target named on the command line."""
    target = TARGETS[sys.argv.pop(1)]
    logging.getLogger("backend").addHandler(Strict(logging.ERROR))

    def run(data: bytes) -> None:
        with contextlib.suppress(InvalidRequestError):
            target(atheris.FuzzedDataProvider(data))

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


def _text(data: atheris.FuzzedDataProvider, pieces: list[str]) -> str:
    """Return a text of known pieces and unknown characters."""
    parts = []
    for _ in range(data.ConsumeIntInRange(0, MAX_PIECES)):
        is_known = data.ConsumeIntInRange(0, 7) > 0
        parts.append(
            data.PickValueInList(pieces) if is_known else data.ConsumeUnicodeNoSurrogates(4)
        )
    return "".join(parts)[:MAX_CHARS]


if __name__ == "__main__":
    main()
