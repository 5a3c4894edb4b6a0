"""The parent's side of a worker: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from search.engine.group import Ledger, ProcessGroup
from search.engine.preload import with_preload
from search.engine.protocol import Failed, Reply, Request, decode_reply, encode
from search.secrets import redact

R = TypeVar("R", bound=Reply)
EXIT_WAIT_S = 10.0  # for a worker whose pipe closed to be gone
LOOK_S = 1.0  # between two looks at the log, while an answer is waited for
# Signals that come from outside: an operator, a batch system, a container that is stopped. A worker's own mistakes end
# it by others.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class WorkerError(Exception):
    """A request did not get its answer: `kind` is one of the protocol's FAILURE_KINDS.

    `fatal` says whether the worker is gone (crash, hang) or can go on with the next request; `stage` is what it was
    asked for, where that is known.
    """

    def __init__(self, kind: str, reason: str, log: Path, *, fatal: bool) -> None:
        super().__init__(redact(reason))
        self.kind = kind
        self.log = log
        self.fatal = fatal
        self.stage = ""


class Worker:
    """One child process; its stdout and stderr go to `log`.

    Usable as a context manager; leaving it ends all its processes and waits until they are gone.

    Args:
        engine: a key of `search.engine.worker.ENGINES`, or module:Class of another engine.
        log: file that receives the child's output, appended to.
        ledger: told of its processes.
        environment: what it finds there besides this process's own.
    """

    def __init__(
        self, engine: str, log: Path, ledger: Ledger | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        request_read, self._request_write = os.pipe()
        self._reply_read, reply_write = os.pipe()
        command = [sys.executable, "-m", "search.engine.worker", engine, str(request_read), str(reply_write)]
        self._oom_kills = _oom_kills()
        env = with_preload({**os.environ, **(environment or {})})
        self._group = ProcessGroup(command, log, env, "worker", ledger, pass_fds=(request_read, reply_write))
        os.close(request_read)
        os.close(reply_write)
        self._buffer = b""
        self.log = log
        self.left_on_gpu: dict[str, int] = {}  # bytes by uuid that were not given back when it ended

    @property
    def members(self) -> set[int]:
        """Process ids of the worker and all that it started."""
        return self._group.members()

    def ask(self, request: Request, expect: type[R], stall_s: float, deadline: float | None = None) -> R:
        """Send one request and wait for its answer.

        Args:
            request: what to do.
            expect: the type of its answer.
            stall_s: how long the worker may neither answer nor write to its log.
            deadline: on the monotonic clock, when the answer must be there.

        Raises:
            WorkerError: the worker refused, failed, ended, or was not heard of in time.
        """
        try:
            os.write(self._request_write, encode(request))
            line = self._read_line(stall_s, deadline)
        except BrokenPipeError:
            line = b""
        name = type(request).__name__.lower()
        if line is None:
            late = deadline is not None and time.monotonic() >= deadline
            self.end()
            what = "its time was up" if late else f"it was silent for {stall_s:.0f} s"
            raise self._error("hang", f"The worker did not answer ({name}): {what}", fatal=True)
        if not line:
            kind, how = self._how_it_ended()
            self.end()
            raise self._error(kind, f"The worker ended unexpectedly ({name}; {how})", fatal=True)
        try:
            reply = decode_reply(line)
        except msgspec.ValidationError as error:  # not a number, above all
            raise WorkerError(
                "impossible-figure", f"The worker's answer ({name}): {error}", self.log, fatal=False
            ) from error
        except msgspec.DecodeError as error:
            self.end()
            raise self._error("crash", f"The worker sent an unreadable answer: {error}", fatal=True) from error
        if isinstance(reply, Failed):
            raise WorkerError(reply.kind, reply.reason, self.log, fatal=False)
        if not isinstance(reply, expect):
            self.end()  # whatever it answers next would belong to another request
            raise self._error("crash", f"The worker answered with a {type(reply).__name__}", fatal=True)
        return reply

    def end(self) -> None:
        """Kill the worker and all that it started, and wait until they are gone. Safe to call again."""
        for fd in (self._request_write, self._reply_read):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._request_write = self._reply_read = -1
        self.left_on_gpu = self._group.end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _read_line(self, stall_s: float, deadline: float | None) -> bytes | None:
        """The next line, b"" at end of file, None when it did not come in time."""
        heard, log_size = time.monotonic(), self._log_size()
        while b"\n" not in self._buffer:
            now = time.monotonic()
            until = min(heard + stall_s, deadline if deadline is not None else now + stall_s)
            if now >= until:
                return None
            if select.select([self._reply_read], [], [], min(LOOK_S, until - now))[0]:
                chunk = os.read(self._reply_read, 1 << 16)
                if not chunk:
                    return b""
                self._buffer += chunk
            elif (size := self._log_size()) != log_size:
                heard, log_size = time.monotonic(), size
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.log.stat().st_size
        return 0

    def _how_it_ended(self) -> tuple[str, str]:
        """Failure kind and words for a worker whose pipe has closed."""
        code = self._group.exit_code(EXIT_WAIT_S)
        if code is None:
            return "crash", "it closed its pipe"
        if code >= 0:
            return "crash", f"exit code {code}"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            return "out-of-memory", f"killed by {name}: the machine had no memory left"
        return "infrastructure" if -code in FROM_OUTSIDE else "crash", f"killed by {name}"

    def _error(self, kind: str, what: str, *, fatal: bool) -> WorkerError:
        lines = self._group.last_lines()
        tail = f" Its last words: {lines[-1][:200]}" if lines else ""
        return WorkerError(kind, f"{what}.{tail} (log: {self.log})", self.log, fatal=fatal)


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this container or on this machine."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
