"""Many searchers on one study: Ray places one on each card, starts it again where it died, and says how it ended.

A searcher is `search.study.search`, in a process of its own that sees one card. All that searchers share is the study's
database: what each has claimed, what gates remember, what stands measured. Nothing is decided here but how many there
are; finalists are confirmed at the end, by one searcher on one card.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from kernels.plugin import PATCHES
from search.card import SHARE
from search.errors import SearchError, UsageError
from search.fleet import Fleet, check_fleet
from search.inputs import check_inputs
from search.ray_running import ray_running
from search.recovery import open_study, recover
from search.samplers import check_sampler
from search.searcher import Board, End, Start, run_searcher
from search.spec import StudySpec
from search.store import Store, open_engine
from search.study import Options, StudyObserver, definition, study_name
from search.summary import Summary, summarize

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RESTARTS = 20  # of one searcher; a host that is taken away does not count
POLL_S = 0.5
STOP_S = 4.0  # in which searchers that were told to stop have to be done


def search_together(spec: StudySpec, options: Options, fleet: Fleet, observer: StudyObserver) -> Summary:
    """Run the study on every card of the fleet until `options.trials` trials stand finished, or time is up.

    Raises:
        UsageError: as `search`; or Ray, a GPU or a shared database is missing.
        SearchError: as `search`, or Ray cannot be reached, or no searcher is left.
    """
    started = time.perf_counter()
    check_fleet(fleet, options.storage)
    if options.engine == "vllm":
        check_inputs(spec)
    database = open_engine(options.storage)
    store = Store(database, study_name(spec, options.engine), note=observer.note)
    check_sampler(spec.objectives, options.sampler, options.stop_early)
    store.define(definition(spec), options.to_store())
    with ray_running(fleet, options.logs):
        searchers = Searchers(spec, options, fleet, store, observer, started)
        try:
            observer.opened(store.finished(), options.trials)
            if store.finished() < options.trials:
                searchers.run(options.trials)
            if options.confirm and options.engine == "vllm" and store.front():
                observer.searched(summarize(store, searchers.engine_starts, time.perf_counter() - started))
                searchers.confirm()
        finally:
            searchers.end()
            with suppress(SQLAlchemyError, SearchError):
                recover(open_study(options.storage, store.study, database, spec.objectives), store)
    return summarize(store, searchers.engine_starts, time.perf_counter() - started)


class Searchers:
    """The searchers of one command: started, followed, ended."""

    def __init__(
        self, spec: StudySpec, options: Options, fleet: Fleet, store: Store, observer: StudyObserver, started: float
    ) -> None:
        import ray

        self._spec, self._options, self._fleet, self._store = spec, options, fleet, store
        self._observer, self._started = observer, started
        self._run = secrets.token_hex(4)
        self._running: dict[ObjectRef[End], str] = {}
        self._names: list[str] = []
        self._failed: list[End] = []
        self._told = {outcome.trial for outcome in store.outcomes()}
        self._board: ActorHandle[Board] = ray.remote(num_cpus=0)(Board).remote()
        needs = {"num_cpus": 1} if fleet.cpus else {"num_cpus": 1, "num_gpus": 1}
        self._task = ray.remote(max_retries=RESTARTS, **needs)(run_searcher)
        self.engine_starts = 0

    def run(self, trials: int) -> None:
        """Search on every card, also on those that join meanwhile, until there is nothing to do.

        Raises:
            SearchError: searchers failed until none was left.
        """
        while True:
            missing = trials - self._store.finished()
            while len(self._running) < min(self._wanted() - len(self._failed), missing) and self._time_left() != 0:
                self._start(replace(self._options, confirm=0, timeout_s=self._time_left()))
            self._follow()
            if not self._running:
                break
        if self._failed and self._store.finished() < trials:
            raise _error(self._failed[0])

    def confirm(self) -> None:
        """Confirm the finalists, on one card.

        Raises:
            SearchError: they could not be confirmed.
        """
        self._start(replace(self._options, timeout_s=None))
        while self._running:
            self._follow()
        if self._failed:
            raise _error(self._failed[-1])

    def end(self) -> None:
        """Stop those that run, gently and then not, and give back what they held."""
        import ray

        left = list(self._running)
        for task in left:
            ray.cancel(task, force=False)
        if left:
            _, left = ray.wait(left, num_returns=len(left), timeout=STOP_S)
        for task in left:
            ray.cancel(task, force=True)
        with suppress(SQLAlchemyError):
            self._store.searchers_ended(self._names)

    def _wanted(self) -> int:
        """How many searchers there should be."""
        import ray

        fleet = self._fleet
        return fleet.cpus or len(fleet.gpus) or fleet.searchers or int(ray.cluster_resources().get("GPU", 0))

    def _time_left(self) -> float | None:
        if self._options.timeout_s is None:
            return None
        return max(0.0, self._options.timeout_s - (time.perf_counter() - self._started))

    def _start(self, options: Options) -> None:
        number = len(self._names)
        name = f"{self._run} searcher {number}"
        share = number % self._fleet.cpus if self._fleet.cpus else None
        environment: dict[str, str | None] = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}  # Ray sets it to 1
        environment |= {k: v for k, v in os.environ.items() if k in PATCHES or k.startswith("VLLM_")}
        environment[SHARE] = None if share is None else f"share {share}"
        start = Start(
            self._spec,
            replace(options, searcher=name, logs=options.logs.absolute() / f"searcher-{number}"),
            Path.cwd(),
            environment,
            _cores(share, self._fleet) if share is not None else (),
        )
        self._running[self._task.remote(start, self._board)] = name
        self._names.append(name)

    def _follow(self) -> None:
        """Wait a little; pass on what was said and measured meanwhile."""
        import ray

        done, _ = ray.wait(list(self._running), timeout=POLL_S) if self._running else ([], [])
        for task in done:
            name = self._running.pop(task).partition(" ")[2]
            end = _end_of(task)
            self.engine_starts += end.engine_starts
            if end.error is not None:
                self._failed.append(end)
                if self._running:
                    self._observer.note(f"{name} ended: {end.error}")
        with suppress(ray.exceptions.RayError):  # whatever was said is lost with the board's host
            for said in ray.get(self._board.take.remote(), timeout=10):
                if isinstance(said, str):
                    self._observer.note(said)
                else:
                    self._observer.stage(*said)
        self._tell_new()

    def _tell_new(self) -> None:
        new = self._store.outcomes(without=self._told)
        finished = self._store.finished() - len(new)
        front = self._store.front() if new else []
        for outcome in new:
            self._told.add(outcome.trial)
            finished += 1
            if outcome.state != "FAIL":
                self._observer.finished(outcome, finished, front)


def _error(end: End) -> SearchError:
    error = UsageError if end.exit_code == UsageError.exit_code else SearchError
    return error(end.error)


def _end_of(task: ObjectRef[End]) -> End:
    import ray

    try:
        end: End = ray.get(task)
    except ray.exceptions.RayTaskError as error:  # a bug, not a SearchError
        if os.environ.get("RAY_BACKEND_LOG_LEVEL") == "debug":
            raise
        return End(error=f"The searcher failed: {str(error.cause or error).splitlines()[0]}", exit_code=1)
    except ray.exceptions.RayError as error:
        what = str(error).strip().splitlines()[0]
        return End(error=f"Ray gave the searcher up after {RESTARTS} restarts: {what}", exit_code=1)
    return end


def _cores(share: int, fleet: Fleet) -> tuple[int, ...]:
    """The cores of one of several searchers on this host's processor; none (all) where there are too few to divide."""
    cores = sorted(os.sched_getaffinity(0))
    divide = fleet.address is None and 1 < fleet.cpus <= len(cores)
    return tuple(cores[share :: fleet.cpus]) if divide else ()
