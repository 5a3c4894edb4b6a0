"""Engines with faults: each fires once, at the call of a stage that the plan names. For tests alone.

They are told by environment variables: FAULTS, a JSON list of {kind, stage, call}, FAULTS_FOLDER, where a file says
which have fired, FAULTS_PARENT, the search's process, and FAULTS_DATABASE, its file.
"""

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path

import msgspec

from search.engine import simulated

LOCK_S = 1.5
NAN = float("nan")
# Whose fault leaves every trial as it would have been.
HARMLESS = {
    "kill worker",
    "kill parent",
    "kill both",
    "interrupt",
    "terminate",
    "lock database",
    "fill disk",
    "write-protect",
    "truncate log and die",
}
FAULTS_OF_STAGE = {
    "build": ["kill worker", "kill parent", "kill both", "interrupt", "out of memory", "raise", "hang", "exit"],
    "apply": [*sorted(HARMLESS), "out of memory", "raise", "hang", "stop", "exit", "wrong read-back"],
    "gate": [*sorted(HARMLESS), "out of memory", "raise", "hang", "stop", "exit", "nan", "too few tokens"],
    "speed": [*sorted(HARMLESS), "out of memory", "raise", "hang", "stop", "exit", "nan", "too few tokens"],
}


class Faulty:
    """Mixed into an engine: does what that one does, until the plan says otherwise."""

    def __init__(self):
        self._folder = Path(os.environ["FAULTS_FOLDER"])
        self._plan = json.loads(os.environ["FAULTS"])
        self._calls = dict.fromkeys(FAULTS_OF_STAGE, 0)

    def load(self, request):
        self._fault("build")
        return super().load(request)

    def apply(self, request):
        fault = self._fault("apply")
        reply = super().apply(request)
        if fault == "wrong read-back":
            return msgspec.structs.replace(reply, effective={**reply.effective, "sliding_window": 7})
        return reply

    def score(self, request):
        reply, fault = super().score(request), self._fault("gate")
        if fault == "nan":
            return msgspec.structs.replace(reply, nll=NAN)
        return msgspec.structs.replace(reply, tokens=1) if fault == "too few tokens" else reply

    def decode(self, request):
        reply, fault = super().decode(request), self._fault("speed")
        if fault == "nan":
            return msgspec.structs.replace(reply, latency_s=NAN)
        return msgspec.structs.replace(reply, tokens=1) if fault == "too few tokens" else reply

    def _fault(self, stage):
        """Fire what is due; those that concern the answer alone are returned."""
        self._calls[stage] += 1
        for number, fault in enumerate(self._plan):
            if fault["stage"] != stage or self._calls[stage] < fault["call"]:
                continue
            try:
                (self._folder / f"fired-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return self._fire(fault["kind"])
        return None

    def _fire(self, kind):
        parent = int(os.environ["FAULTS_PARENT"])
        match kind:
            case "kill worker":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill parent":
                os.kill(parent, signal.SIGKILL)
                time.sleep(60)
            case "kill both":
                os.kill(parent, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(parent, signal.SIGINT)
            case "terminate":
                os.kill(parent, signal.SIGTERM)
            case "lock database":
                locked = threading.Event()
                threading.Thread(target=_lock, args=(locked,)).start()
                locked.wait()
            case "fill disk" | "write-protect":
                (self._folder / kind).touch()  # the driver, whose connections these are, does it
            case "truncate log and die":
                os.ftruncate(sys.stdout.fileno(), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            case "out of memory":
                raise MemoryError("injected")
            case "raise":
                raise RuntimeError("injected")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
        return kind


class FaultyEngine(Faulty, simulated.SimulatedEngine):
    """On a machine that neither drifts nor has noise, so that an undisturbed search gives the same figures."""

    def __init__(self):
        super().__init__()
        simulated.DRIFT = simulated.LATENCY_NOISE = 0.0


def _lock(locked):
    database = sqlite3.connect(os.environ["FAULTS_DATABASE"], timeout=60, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    locked.set()
    time.sleep(LOCK_S)
    database.execute("ROLLBACK")
    database.close()
