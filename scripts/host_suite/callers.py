"""Ways of making a call: the generated stubs, and grpcurl, which is independent of our code."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Backend"]
PROCESS_MARGIN_S = 10.0


class CallFailedError(Exception):
    """A call ended with an error; the message is the status and its text."""


class Caller(Protocol):
    """Makes one call and returns all messages of its answer."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    def call(self, method: str, request: Message, timeout_s: float) -> Sequence[Message]:
        """Return the answer.

        Raises:
            CallFailedError: There is none.
        """


class StubCaller:
    """Calls through the generated stubs, over a connection per call as the host does."""

    name = "grpc"

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, request: Message, timeout_s: float) -> Sequence[Message]:
        """Return the answer; see `Caller`."""
        options = (("grpc.enable_http_proxy", 0),)
        with grpc.insecure_channel(self._address, options=options) as channel:
            ask: Any = getattr(backend_pb2_grpc.BackendStub(channel), method)
            try:
                answer = ask(request, timeout=timeout_s)
                streamed = SERVICE.methods_by_name[method].server_streaming
                return list(answer) if streamed else [answer]
            except grpc.RpcError as error:
                raise CallFailedError(f"{error.code().name}: {error.details()}") from None


class GrpcurlCaller:
    """Calls through grpcurl, with JSON both ways."""

    def __init__(self, program: str, address: str, *, proto: Path | None = None) -> None:
        """Take grpcurl's path; without a proto file it asks the server's reflection."""
        self._command = [program, "-plaintext"]
        if proto is not None:
            self._command += ["-import-path", str(proto.parent), "-proto", proto.name]
        self._address = address
        self.name = "grpcurl, reflection" if proto is None else f"grpcurl, {proto.name}"

    def call(self, method: str, request: Message, timeout_s: float) -> Sequence[Message]:
        """Return the answer; see `Caller`."""
        target = [self._address, f"{SERVICE.full_name}/{method}"]
        done = subprocess.run(  # noqa: S603 - a program that the developer installed
            [*self._command, "-max-time", f"{timeout_s:g}", "-d", "@", *target],
            input=json_format.MessageToJson(request),
            capture_output=True,
            text=True,
            timeout=timeout_s + PROCESS_MARGIN_S,
            check=False,
        )
        if done.returncode != 0:
            raise CallFailedError(" ".join(done.stderr.split()))
        answer = GetMessageClass(SERVICE.methods_by_name[method].output_type)
        return [json_format.ParseDict(value, answer()) for value in json_values(done.stdout)]


def json_values(text: str) -> Iterator[Any]:
    """Yield concatenated JSON values, as grpcurl prints a stream."""
    decoder = json.JSONDecoder()
    rest = text.lstrip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()
