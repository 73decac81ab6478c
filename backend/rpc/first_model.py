"""The model of the command line, loaded through the server's own socket as a host would."""

import logging

import grpc
import grpc.aio

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

log = logging.getLogger(__name__)

# A server that listens on all addresses is called on loopback.
_OWN = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


async def load(address: str, model: str, token: str) -> bool:
    """Load a model, and tell whether it can be served now.

    Args:
        address: Where this process listens.
        model: A path, a hub id or `demo`.
        token: The server's own bearer token; empty for none.
    """
    target = own_address(address)
    log.info("loading %s", model)
    try:
        message = await _ask(target, model, token)
    except grpc.aio.AioRpcError as error:
        log.critical("--model %s: %s", model, error.details())
        return False
    log.info("ready: %s at %s", message, target)
    return True


async def _ask(target: str, model: str, token: str) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as own:
        ask = backend_pb2_grpc.BackendStub(own).LoadModel
        result: pb.Result = await ask(pb.ModelOptions(Model=model), metadata=metadata)
    return result.message


def own_address(address: str) -> str:
    """Return where this process reaches an address that it listens on."""
    host, colon, port = address.rpartition(":")
    return f"{_OWN.get(host, host)}{colon}{port}"
