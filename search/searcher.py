"""One of several searchers, where Ray places it: what it is started with, what it says meanwhile, how it ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search.card import SHARE
from search.errors import SearchError, UsageError
from search.spec import StudySpec
from search.store import REFERENCE, FrontPoint, Outcome
from search.study import Options, search
from search.summary import Summary

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SAY_S = 1.0  # between two words on what a searcher is at


@dataclass(frozen=True)
class Start:
    """What one searcher is started with; `cores` are those of this host that it may use, none: all."""

    spec: StudySpec
    options: Options
    folder: Path
    environment: Mapping[str, str | None]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    """How a searcher ended; `error` is why it could not go on."""

    engine_starts: int = 0
    error: str | None = None
    exit_code: int = 0


class Board:
    """Holds what searchers say until it is read: notes (text), or stages (the arguments of `Observer.stage`)."""

    def __init__(self) -> None:
        self._said: list[str | tuple[Any, ...]] = []

    def say(self, what: str | tuple[Any, ...]) -> None:
        """Add something."""
        self._said.append(what)

    def take(self) -> list[str | tuple[Any, ...]]:
        """What was said since it was last asked for."""
        said, self._said = self._said, []
        return said


class Reporter:
    """A searcher's observer: says on the board what the database does not hold."""

    def __init__(self, name: str, board: ActorHandle[Board]) -> None:
        self._name = name
        self._board = board
        self._said_at = 0.0
        self._last: tuple[int, str] | None = None

    def note(self, text: str) -> None:
        """A line, with who says it."""
        self._board.say.remote(f"{self._name}: {text}")

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """What it is at, now and then; every stage of the reference, which takes long."""
        new = trial == REFERENCE and self._last != (trial, stage)
        if new or time.monotonic() - self._said_at > SAY_S:
            self._said_at, self._last = time.monotonic(), (trial, stage)
            self._board.say.remote((trial, dict(setting), stage, done, total))

    def opened(self, finished: int, total: int) -> None:
        """Nothing to say."""

    def finished(self, outcome: Outcome, finished: int, front: Sequence[FrontPoint]) -> None:
        """It is in the database."""

    def searched(self, summary: Summary) -> None:
        """It is in the database."""


def run_searcher(start: Start, board: ActorHandle[Board]) -> End:
    """One searcher, in a process that Ray has placed and that sees one card."""
    for name, value in start.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # see RAY_worker_niceness; a cluster's Ray may not have been told
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    report = Reporter(start.options.searcher.partition(" ")[2], board)
    host = socket.gethostname()
    try:
        if not start.folder.is_dir() or not start.spec.path.is_file():
            raise UsageError(f"{host} has no {start.spec.path}: the study has to lie at the same place on every host.")
        report.note(f"on {host}, card {os.environ.get('CUDA_VISIBLE_DEVICES') or start.environment.get(SHARE) or ''}")
        summary = search(start.spec, start.options, report)
    except SearchError as error:
        return End(error=str(error), exit_code=error.exit_code)
    return End(engine_starts=summary.engine_starts)
