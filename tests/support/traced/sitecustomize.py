"""Put on a process's path, it writes down which of our functions it calls, round by round."""

import json
import os
import sys
import threading
from pathlib import Path

WANTED = "MLX_TRACED_TURNS"
"""The environment variable with the file to write, and the number of turns."""

WANTED_REPLIES = "MLX_TRACED_REPLIES"
"""The same for the replies of the server."""

WANTED_LOAD = "MLX_TRACED_LOAD"
"""The environment variable with the folder for the modules that walks visit, a file for each."""

LOADS = {
    "engine": (("backend.engine.leading.boot", "_load"), ("backend.engine.loop", "run")),
    "server": (("backend.rpc.servicer", "LoadModel"), ("backend.pipeline.generate", "tell_format")),
}
"""By the name of a process: the calls that begin and end a load."""

REQUEST = (("backend.rpc.servicer", "PredictStream"), ("backend.engine.engine", "submit"))
"""The calls that begin and end the walk of a request in the server."""

TURN = ("backend.engine.loop", "turn")
REPLY = ("backend.rpc.replies", "increment_reply")
SUBMIT = ("backend.engine.engine", "submit")


class Tracer:
    """Keeps the calls of each turn as names of modules and functions, in their order.

    A turn begins with a call of its mark.
    """

    def __init__(self, file, turns, mark=TURN):
        self.file, self.left, self.mark = file, turns, mark
        self.turns = []

    def note(self, frame, event, _argument):
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("backend.", "common.")):
            return
        call = module, frame.f_code.co_name
        if call == self.mark:
            self.begin()
        elif self.turns:
            self.turns[-1].append(call)

    def begin(self):
        if self.left == len(self.turns):
            sys.setprofile(None)
            # Where there is a file, it is whole.
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.turns), encoding="utf-8")
            part.rename(self.file)
        self.turns.append([self.mark])


class ServerTracer(Tracer):
    """Keeps the calls between replies that have one token more than the last; and of a submit."""

    def __init__(self, file, turns):
        super().__init__(file, turns, REPLY)
        self.tokens, self.submit, self.is_submitting = 0, [], None

    def note(self, frame, event, argument):
        if self.is_submitting is frame and event == "return":
            self.is_submitting = None
        call = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and call == SUBMIT:
            self.is_submitting = frame
        if self.is_submitting and event == "call" and call[0].startswith(("backend.", "common.")):
            self.submit.append(call)
        if event == "call" and call == REPLY:
            tokens = frame.f_locals["increment"].usage.completion_tokens
            if self.turns and tokens != self.tokens + 1:
                # Several tokens: the server was slower than the engine.
                self.turns.pop()
            self.tokens = tokens
        super().note(frame, event, argument)

    def begin(self):
        if self.left == len(self.turns):
            self.turns.append(self.submit)
            self.left += 1
        super().begin()


class WalkTracer:
    """Keeps the modules that a walk visits, on all threads, in the order of the first visits."""

    def __init__(self, file, first, last):
        self.file, self.first, self.last = file, first, last
        self.modules = None

    def note(self, frame, event, _argument):
        if event != "call":
            return
        call = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not call[0].startswith(("backend.", "common.")):
            return
        if call == self.first and self.modules is None:
            # A coroutine that goes on is called again.
            self.modules = {}
        if self.modules is None or call[1] == "<module>":
            return
        self.modules[call[0]] = None
        if call == self.last:
            self.file.write_text(json.dumps(list(self.modules)), encoding="utf-8")
            self.modules = None


if folder := os.environ.get(WANTED_LOAD):
    name = "engine" if "--server-fd" in sys.orig_argv else "server"
    tracers = [WalkTracer(Path(folder, name), *LOADS[name])]
    if name == "server":
        tracers.append(WalkTracer(Path(folder, "request"), *REQUEST))

    def note_all(frame, event, argument):
        for each in tracers:
            each.note(frame, event, argument)

    threading.setprofile(note_all)
    sys.setprofile(note_all)

if "--server-fd" not in sys.orig_argv and (wanted := os.environ.get(WANTED_REPLIES)):
    path, _, count = wanted.rpartition(":")
    sys.setprofile(ServerTracer(Path(path), int(count)).note)

if "--server-fd" in sys.orig_argv and (wanted := os.environ.get(WANTED)):
    path, _, count = wanted.rpartition(":")
    sys.setprofile(Tracer(Path(path), int(count)).note)
