"""Start as a backend does, answer Health, and leave as told: `MODE --addr HOST:PORT`."""
# ruff: noqa: N802 - the methods have the names of the RPCs

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

mode, _, address = sys.argv[1:]


class Servicer(backend_pb2_grpc.BackendServicer):
    def Health(self, _request, _context):
        return pb.Reply(message=b"OK")


if mode == "fail":
    sys.exit("no luck today")
# Blocked, so that one that comes before the last line is not lost.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
server = grpc.server(ThreadPoolExecutor(1))
backend_pb2_grpc.add_BackendServicer_to_server(Servicer(), server)
server.add_insecure_port(address)
server.start()
signal.sigwait({signal.SIGUSR1} if mode == "stubborn" else {signal.SIGTERM})
