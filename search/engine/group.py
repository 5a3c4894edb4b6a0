"""A command in a process group of its own: on a leash, ended whole, and known by a mark that all it starts carries."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from search.engine import gpu

MARK = "VLLM_PARETO_MARK"  # environment key; its value is drawn anew for every group
KILL_WAIT_S = 30.0
LOG_TAIL_LINES = 5


class Ledger(Protocol):
    """Who keeps a list of the process groups that may be running."""

    def process_started(self, mark: str, what: str) -> None:
        """A group is about to be started; `what` it is, in a word."""

    def process_ended(self, mark: str) -> None:
        """All of a group is gone."""


class ProcessGroup:
    """A running command; `end` ends everything that it started.

    Args:
        command: what to run.
        log: file that receives its output, appended to.
        env: its environment.
        what: a word for the ledger.
        ledger: told before the start and after the end.
        cwd: folder to run in.
        pass_fds: file descriptors that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        what: str,
        ledger: Ledger | None = None,
        *,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        self._ledger = ledger
        self._mark = secrets.token_hex(8)
        self._memory_before = gpu.memory_used()
        log.parent.mkdir(parents=True, exist_ok=True)
        if ledger is not None:
            ledger.process_started(self._mark, what)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "search.engine.leash", str(os.getpid()), *command],
                cwd=cwd,
                env={**env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the leash, which is also the group's and the session's id."""
        return self._process.pid

    def members(self) -> set[int]:
        """Every living process of the group, and whatever it started that left the group."""
        return _in_group(self.pid) | marked({self._mark})

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """How the command ended (minus the signal that ended it), or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s) if wait_s else self._process.poll()
        return None

    def end(self, patience_s: float = 0.0) -> dict[str, int]:
        """End all members and wait until they are gone; safe to call again.

        Args:
            patience_s: how long they may take to end on SIGTERM before they are killed.

        Returns:
            Bytes that GPUs have not got back, by uuid; empty where all is well.
        """
        if patience_s and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience_s
            while self.members() and time.monotonic() < deadline:
                time.sleep(0.05)
        _kill(self.members)
        self._process.wait()
        if self._ledger is not None and not self.members():
            self._ledger.process_ended(self._mark)
        return gpu.wait_for_memory(self._memory_before)

    def last_lines(self) -> list[str]:
        """The last lines of the log that say something."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return [line.strip() for line in lines if line.strip()][-LOG_TAIL_LINES:]
        return []


def marked(marks: set[str]) -> set[int]:
    """Living processes whose environment carries one of `marks`: ours, whoever their parent is by now."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended just now, or belongs to someone else
            if wanted.intersection((folder / "environ").read_bytes().split(b"\0")):
                found.add(int(folder.name))
    return {pid for pid in found if _state_and_group(pid)[0] not in "ZX"}


def end_marked(marks: set[str]) -> bool:
    """Kill every process that carries one of `marks`; whether all are gone."""
    return _kill(lambda: marked(marks))


def _kill(members: Callable[[], set[int]]) -> bool:
    """Kill what `members()` names, until it names nothing; whether that came about in time."""
    deadline = time.monotonic() + KILL_WAIT_S
    while living := members():
        if time.monotonic() > deadline:
            return False
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return True


def _in_group(group: int) -> set[int]:
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return {pid for pid in pids if (found := _state_and_group(pid))[1] == group and found[0] not in "ZX"}


def _state_and_group(pid: int) -> tuple[str, int]:
    """State letter and process group; "X" for a process that is not there."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return "X", 0
    return state, int(group)
