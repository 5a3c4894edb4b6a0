"""The parent's side of a worker: start it, ask it, end it and everything it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from search.engine.preload import with_preload
from search.engine.protocol import Failed, Reply, Request, decode_reply, encode

R = TypeVar("R", bound=Reply)
LOG_TAIL_LINES = 5
END_WAIT_S = 10.0


class WorkerError(Exception):
    """A request did not get its answer: `kind` is one of the protocol's FAILURE_KINDS.

    `fatal` says whether the worker is gone (crash, hang) or can go on with the next request.
    """

    def __init__(self, kind: str, reason: str, log: Path, *, fatal: bool) -> None:
        super().__init__(reason)
        self.kind = kind
        self.log = log
        self.fatal = fatal


class Worker:
    """One child process in a session of its own; its stdout and stderr go to `log`.

    Usable as a context manager; leaving it ends the whole process group and waits until it is gone.

    Args:
        engine: a key of `search.engine.worker.ENGINES`.
        log: file that receives the child's output, appended to.
    """

    def __init__(self, engine: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        request_read, self._request_write = os.pipe()
        self._reply_read, reply_write = os.pipe()
        command = [sys.executable, "-m", "search.engine.worker", engine]
        command += [str(request_read), str(reply_write), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=with_preload(dict(os.environ)),
                pass_fds=(request_read, reply_write),
                start_new_session=True,
            )
        os.close(request_read)
        os.close(reply_write)
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Process id of the child, which is also its group and session id."""
        return self._process.pid

    def ask(self, request: Request, expect: type[R], timeout_s: float) -> R:
        """Send one request and wait for its answer.

        Raises:
            WorkerError: the worker refused, failed, ended, or said nothing for `timeout_s` seconds.
        """
        try:
            os.write(self._request_write, encode(request))
            line = self._read_line(timeout_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.end()
            name = type(request).__name__.lower()
            raise self._error("hang", f"The worker did not answer ({name}) within {timeout_s:.0f} s", fatal=True)
        if not line:
            code = self._process.wait()
            self.end()
            raise self._error("crash", f"The worker ended unexpectedly ({_exit_words(code)})", fatal=True)
        try:
            reply = decode_reply(line)
        except msgspec.DecodeError as error:
            self.end()
            raise self._error("crash", f"The worker sent an unreadable answer: {error}", fatal=True) from error
        if isinstance(reply, Failed):
            raise WorkerError(reply.kind, reply.reason, self.log, fatal=False)
        if not isinstance(reply, expect):
            raise self._error("crash", f"The worker answered with a {type(reply).__name__}", fatal=False)
        return reply

    def end(self) -> None:
        """Kill the worker's whole process group and wait until it is gone. Safe to call again."""
        for fd in (self._request_write, self._reply_read):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + END_WAIT_S
        while group_lives(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _read_line(self, timeout_s: float) -> bytes | None:
        """The next line, b"" at end of file, None when `timeout_s` passed."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reply_read], [], [], left)[0]:
                return None
            chunk = os.read(self._reply_read, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _error(self, kind: str, what: str, *, fatal: bool) -> WorkerError:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        tail = f" Its last words: {lines[-1].strip()[:200]}" if lines else ""
        return WorkerError(kind, f"{what}.{tail} (log: {self.log})", self.log, fatal=fatal)


def _exit_words(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def group_lives(group: int) -> bool:
    """Whether any process of the group still runs; one that ended and waits to be reaped does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
