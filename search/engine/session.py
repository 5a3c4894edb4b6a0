"""A worker that is started when it is needed, and started again when it was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from search.engine.group import Ledger
from search.engine.process import R, Worker, WorkerError
from search.engine.protocol import KnobValue, Load, Loaded, Request, Setting
from search.errors import SearchError
from search.spec import LimitSpec

T = TypeVar("T")
ATTEMPTS = 3  # where the machine is at fault, not what is asked of it
START_PAUSE_S = 2.0  # before the engine is started again


def insist(attempt: Callable[[], T], before_another: Callable[[WorkerError], None]) -> T:
    """The result of `attempt`, which is made again where the machine is at fault and not what is asked of it.

    Raises:
        WorkerError: it failed for another cause, or too often.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            return attempt()
        except WorkerError as error:
            if error.kind != "infrastructure" or not left:
                raise
            before_another(error)
    raise AssertionError("unreachable")


class EngineSession:
    """At most one worker with one engine; whoever made it calls `end`.

    Args:
        engine: what `search.engine.process.Worker` takes.
        load_of: how to build the engine that a setting needs.
        first: the setting that the first engine is for.
        limits: how long each stage may take, and how long the worker may be silent.
        logs: folder for the workers' logs.
        ledger: told of the workers' processes.
        on_start: called before an engine starts.
        on_loaded: called with what the engine said of itself and its log; returns the id of its environment row.
        on_end: called with the id of the environment row before the worker is ended.
        note: called with what is worth a line.
    """

    def __init__(
        self,
        engine: str,
        load_of: Callable[[Mapping[str, KnobValue]], Load],
        first: Mapping[str, KnobValue],
        limits: LimitSpec,
        logs: Path,
        ledger: Ledger,
        on_start: Callable[[], None],
        on_loaded: Callable[[Loaded, Path], int],
        on_end: Callable[[int], None],
        note: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._load_of = load_of
        self._load = load_of(first)
        self._limits = limits
        self._logs = logs
        self._ledger = ledger
        self._on_start = on_start
        self._on_loaded = on_loaded
        self._on_end = on_end
        self._note = note
        self._worker: Worker | None = None
        self._loaded: Loaded | None = None
        self._deadline: float | None = None
        self.environment_id = 0
        self.starts = 0

    @property
    def build(self) -> Setting:
        """The values of the build knobs that the engine has, or will have."""
        return self._load.build

    def use(self, setting: Mapping[str, KnobValue]) -> None:
        """Be ready for a setting: an engine that was built for another one's build knobs is ended."""
        load = self._load_of(setting)
        if load != self._load:
            self.end()
            self._load = load

    def loaded(self) -> Loaded:
        """What the running engine said of itself; starts one if there is none.

        Raises:
            SearchError: the engine does not start.
        """
        try:
            return self.require()
        except WorkerError as error:
            raise SearchError(f"The engine did not start ({error.kind}): {error} (log: {error.log})") from error

    def require(self) -> Loaded:
        """The same where an engine that does not start is the setting's fault.

        Raises:
            WorkerError: the engine does not start.
        """
        if self._loaded is not None:
            return self._loaded

        def before_another(error: WorkerError) -> None:
            self._note(f"The engine did not start, and is tried again: {error}")
            time.sleep(START_PAUSE_S)

        try:
            return insist(self._start, before_another)
        except WorkerError as error:
            error.stage = error.stage or "build"
            raise

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """A stage of a trial: requests inside have to be answered before its time is up."""
        self.loaded()  # which has a deadline of its own
        self._deadline = time.monotonic() + self._limits.seconds(stage)
        try:
            yield
        except WorkerError as error:
            error.stage = error.stage or stage
            raise
        finally:
            self._deadline = None

    def ask(self, request: Request, expect: type[R]) -> R:
        """One request to the running engine; a worker that was lost over it is ended.

        Raises:
            WorkerError: the request was not answered as it should be.
        """
        self.loaded()
        assert self._worker is not None
        try:
            return self._worker.ask(request, expect, self._limits.stall_s, self._deadline)
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
        worker, loaded = self._worker, self._loaded
        self._worker = self._loaded = None
        if worker is not None:
            if loaded is not None:
                self._on_end(self.environment_id)
            worker.end()
            for uuid, size in worker.left_on_gpu.items():
                self._note(f"The worker is gone, but {size >> 20} MiB more are in use on {uuid} than before it.")

    def _start(self) -> Loaded:
        self._on_start()
        self.starts += 1
        self._deadline = time.monotonic() + self._limits.build_s
        log = self._logs / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{self.starts}.log"
        self._worker = Worker(self._engine, log, self._ledger, self._load.environment)
        try:
            loaded = self._worker.ask(self._load, Loaded, self._limits.stall_s, self._deadline)
        except BaseException:
            self.end()
            raise
        self.environment_id = self._on_loaded(loaded, log)
        self._loaded, self._deadline = loaded, None
        return loaded
