"""The child process: holds one engine, does what each request says, answers it. It decides nothing.

    python -m search.engine.worker ENGINE REQUEST_FD REPLY_FD      (started by search.engine.process)

It ends when the request pipe closes, or with its leash.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Protocol

from search.engine.protocol import (
    Applied,
    Apply,
    Decode,
    Decoded,
    DecodeTogether,
    EngineError,
    Failed,
    Load,
    Loaded,
    Pace,
    Paced,
    Reply,
    Request,
    Sample,
    Sampled,
    Score,
    Scored,
    Solve,
    Solved,
    decode_request,
    encode,
)

ENGINES = {"vllm": "search.engine.vllm:VllmEngine", "simulated": "search.engine.simulated:SimulatedEngine"}
# What CUDA and vLLM say when the fault is the machine's and not the setting's.
INFRASTRUCTURE = (
    "devices are busy or unavailable",
    "no cuda-capable device",
    "uncorrectable ecc",
    "fallen off the bus",
    "free memory on device",
    "driver shutting down",
    "device lost",
    "unknown nccl error",
    "no space left on device",
)


class Engine(Protocol):
    """What the worker drives. Each call raises EngineError where it cannot do what it is told."""

    def load(self, request: Load) -> Loaded:
        """Build the engine."""

    def apply(self, request: Apply) -> Applied:
        """Put the knobs to a setting and read them back."""

    def score(self, request: Score) -> Scored:
        """Score one record."""

    def decode(self, request: Decode) -> Decoded:
        """Decode one prompt and time it."""

    def decode_together(self, request: DecodeTogether) -> Decoded:
        """Decode several prompts at once and time them as one."""

    def solve(self, request: Solve) -> Solved:
        """Answer one task."""

    def sample(self, request: Sample) -> Sampled:
        """Sample one continuation."""

    def pace(self, request: Pace) -> Paced:
        """Say how fast the processor is."""


def answer(engine: Engine, request: Request) -> Reply:
    """Carry out one request; whatever goes wrong becomes a `Failed`."""
    try:
        match request:
            case Load():
                return engine.load(request)
            case Apply():
                return engine.apply(request)
            case Score():
                return engine.score(request)
            case Decode():
                return engine.decode(request)
            case DecodeTogether():
                return engine.decode_together(request)
            case Solve():
                return engine.solve(request)
            case Sample():
                return engine.sample(request)
            case Pace():
                return engine.pace(request)
    except EngineError as error:
        return Failed(kind=error.kind, reason=str(error))
    except MemoryError as error:
        return Failed(kind="out-of-memory", reason=str(error) or "out of memory")
    except Exception as error:
        import traceback

        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        return Failed(kind=classify(error), reason=f"{type(error).__name__}: {first_line}")


def classify(error: Exception) -> str:
    """The failure kind of an engine's exception."""
    text = f"{type(error).__name__}: {error}".lower()
    if "outofmemory" in text or "out of memory" in text:
        return "out-of-memory"
    return "infrastructure" if any(words in text for words in INFRASTRUCTURE) else "crash"


def lines(fd: int) -> Iterator[bytes]:
    """Complete lines read from `fd`, until it closes."""
    with os.fdopen(fd, "rb") as pipe:
        yield from iter(pipe.readline, b"")


def main() -> None:
    """Answer requests until there are no more."""
    engine_name, request_fd, reply_fd = sys.argv[1], *map(int, sys.argv[2:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, name = ENGINES.get(engine_name, engine_name).split(":")
    engine: Engine = getattr(importlib.import_module(module), name)()
    for line in lines(request_fd):
        os.write(reply_fd, encode(answer(engine, decode_request(line))))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's threads and atexit hooks must not keep the process
