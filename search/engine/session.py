"""A worker that is started when it is needed, and started again when it was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from search.engine.process import R, Worker, WorkerError
from search.engine.protocol import Load, Loaded, Request
from search.errors import SearchError

LOAD_TIMEOUT_S = 1800.0
ANSWER_TIMEOUT_S = 300.0


class EngineSession:
    """At most one worker with one engine; whoever made it calls `end`.

    Args:
        engine: a key of `search.engine.worker.ENGINES`.
        load: how to build the engine, each time it is started.
        logs: folder for the workers' logs.
        on_start: called before an engine starts.
        on_loaded: called with what the engine said of itself; returns the id of its environment row.
    """

    def __init__(
        self, engine: str, load: Load, logs: Path, on_start: Callable[[], None], on_loaded: Callable[[Loaded], int]
    ) -> None:
        self._engine = engine
        self._load = load
        self._logs = logs
        self._on_start = on_start
        self._on_loaded = on_loaded
        self._worker: Worker | None = None
        self._loaded: Loaded | None = None
        self.environment_id = 0
        self.starts = 0

    def loaded(self) -> Loaded:
        """What the running engine said of itself; starts one if there is none.

        Raises:
            SearchError: the engine does not start.
        """
        if self._loaded is not None:
            return self._loaded
        self._on_start()
        self.starts += 1
        self._worker = Worker(self._engine, self._logs / f"worker-{time.strftime('%Y%m%d-%H%M%S')}.log")
        try:
            self._loaded = self._worker.ask(self._load, Loaded, LOAD_TIMEOUT_S)
        except WorkerError as error:
            self.end()
            raise SearchError(f"The engine did not start: {error} (log: {error.log})") from error
        self.environment_id = self._on_loaded(self._loaded)
        return self._loaded

    def ask(self, request: Request, expect: type[R]) -> R:
        """One request to the running engine; a worker that was lost over it is ended.

        Raises:
            WorkerError: the request was not answered as it should be.
        """
        self.loaded()
        assert self._worker is not None
        try:
            return self._worker.ask(request, expect, ANSWER_TIMEOUT_S)
        except WorkerError as error:
            if error.fatal:
                self.end()
            raise

    def refuse(self, kind: str, reason: str) -> WorkerError:
        """The error for an answer that came but cannot be true."""
        assert self._worker is not None
        return WorkerError(kind, reason, self._worker.log, fatal=False)

    def end(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.end()
        self._worker = self._loaded = None
