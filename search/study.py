"""The search: Optuna asks, the laboratory measures, the store keeps, Optuna is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import optuna
from sqlalchemy.exc import SQLAlchemyError

from kernels.patches.base import PatchRefusedError
from kernels.plugin import switched_on
from search import builds
from search.confirm import confirm
from search.engine import gpu
from search.engine.protocol import Setting
from search.errors import LostClaimError, SearchError, SpooledError, UsageError
from search.inputs import check_inputs
from search.knobs import TOP_K, WINDOW, Knob
from search.lease import lease
from search.owner import owner_name
from search.recovery import close, end_orphans, open_study, recover, settle, tell
from search.samplers import PriorPoint, Problem, Reference, check_sampler, make_sampler, trial_seed
from search.samplers.gated import asked_on_all
from search.samplers.prior import enqueue, read_prior, safe_source
from search.spec import StudySpec
from search.stages import Observer
from search.storage import ask
from search.store import (
    REFERENCE,
    FrontPoint,
    Outcome,
    Spool,
    Store,
    cause_of,
    open_engine,
    patiently,
    safe_url,
    server_lost,
    setting_key,
)
from search.summary import Summary, summarize
from search.trial import Laboratory
from search.turns import Turns

PATCH_KEY = "environment.{}"  # of a study's definition
FAILURES_IN_A_ROW = 10  # of one cause
FAILURES_OF_ANY_CAUSE = 40  # in a row
NOT_WORTH = "Stopped after {} trials: another one is not expected to gain 0.2 %. Without --stop auto it goes on."
ASKS = 8  # for a setting that no other searcher is at, before that one is waited for
LOOK_S = 1.0  # between two looks at what other searchers do


@dataclass(frozen=True)
class Options:
    """How to search: `trials` in all should stand finished, `confirm` finalists are measured again.

    `prior` is a file or database of points from elsewhere. With `stop_early` the search ends when another trial is not
    worth it.
    """

    trials: int
    confirm: int
    storage: str
    engine: str
    sampler: str
    seed: int
    timeout_s: float | None
    logs: Path
    prior: str | None = None
    stop_early: bool = False
    searcher: str = ""  # the searcher's name, where several share the study

    def to_store(self) -> dict[str, Any]:
        """What the store keeps of them."""
        kept = {name: getattr(self, name) for name in ("engine", "sampler", "seed", "trials")}
        return kept | ({"prior": safe_source(self.prior)} if self.prior else {})


class StudyObserver(Observer, Protocol):
    """An observer that also follows whole trials."""

    def opened(self, finished: int, total: int) -> None:
        """The search begins; `finished` trials already stand."""

    def finished(self, outcome: Outcome, finished: int, front: Sequence[FrontPoint]) -> None:
        """A trial ended; `front` is what stands so far, slowest first."""

    def searched(self, summary: Summary) -> None:
        """The last trial ended; finalists are still to be confirmed."""


def patches_on(spec: StudySpec) -> dict[str, str]:
    """The patches that the environment switches on for every trial, as parts of the study's definition.

    Raises:
        UsageError: a key of the environment is neither on nor off.
    """
    searched = {knob.name for knob in spec.knobs}
    try:
        return {PATCH_KEY.format(key): "1" for key in switched_on(os.environ) if key not in searched}
    except PatchRefusedError as error:
        raise UsageError(str(error)) from error


def definition(spec: StudySpec) -> dict[str, Any]:
    """What must not change while the study goes on, the environment's patches among it."""
    return {**spec.definition(), **patches_on(spec)}


def study_name(spec: StudySpec, engine: str) -> str:
    """The study's name in the database; simulated studies never share one with measured ones."""
    return spec.name if engine == "vllm" else f"{spec.name}-simulated"


def search(spec: StudySpec, options: Options, observer: StudyObserver) -> Summary:
    """Run the study until `options.trials` trials stand finished (COMPLETE or PRUNED), or time is up.

    Raises:
        UsageError: the study in the database was started with other settings, or the sampler does not know the
            study's objectives.
        SearchError: the database cannot be used, the engine does not start, the reference is over the ceiling,
            or ten trials in a row failed.
    """
    started = time.perf_counter()
    check_sampler(spec.objectives, options.sampler, options.stop_early)
    if options.engine == "vllm":
        check_inputs(spec)
        if "energy_j" in spec.objectives and gpu.energy_j() is None:
            raise UsageError("The study's objectives name energy_j, and there is no GPU here that counts it.")
    name = study_name(spec, options.engine)
    database = open_engine(options.storage)
    spool = Spool(options.storage, name)
    store = Store(database, name, spool, observer.note)
    with _database_errors(options.storage):
        end_orphans(store, observer)
        store.define(definition(spec), options.to_store())
        if waiting := store.take_in_spool():
            observer.note(f"Taken in from the spool: {waiting} measurements that the database could not take before.")
        study = open_study(options.storage, store.study, database, spec.objectives)
        spool.reserve()
        try:
            with (
                lease(store, options.searcher),
                Laboratory(spec, options.engine, store, options.logs, observer, options.seed) as laboratory,
            ):
                patiently(lambda: recover(study, store), observer.note)
                return _search(spec, options, study, store, laboratory, observer, started)
        finally:
            spool.release()


def _search(
    spec: StudySpec,
    options: Options,
    study: optuna.Study,
    store: Store,
    laboratory: Laboratory,
    observer: StudyObserver,
    started: float,
) -> Summary:
    if store.finished() < options.trials:
        # Read before an engine starts, as what is wrong with it can be said then.
        prior = read_prior(options.prior, spec.knobs, spec.name) if options.prior else ()
        problem = _reference_first(spec, prior, study, store, laboratory, observer)
        observer.opened(store.finished(), options.trials)
        default = default_setting(spec, laboratory.native)
        turns = Turns(spec, options.trials, options.seed, problem, default, observer.note)
        _loop(options, turns, study, store, laboratory, observer, started)
    if options.confirm and options.engine == "vllm" and store.front():
        observer.searched(summarize(store, laboratory.engine_starts, time.perf_counter() - started))
        confirm(spec, store, laboratory, observer, options.confirm, options.logs)
    return summarize(store, laboratory.engine_starts, time.perf_counter() - started)


def _reference_first(
    spec: StudySpec,
    prior: tuple[PriorPoint, ...],
    study: optuna.Study,
    store: Store,
    laboratory: Laboratory,
    observer: StudyObserver,
) -> Problem:
    """Measure the reference setting, once a study: searchers that start together wait for the first of them.

    Returns:
        What samplers are told of the study.
    """
    native, owner = laboratory.native, owner_name()  # every engine starts meanwhile

    def begun() -> bool:
        return store.outcome(REFERENCE) is not None and bool(study.get_trials(deepcopy=False))

    while not begun():
        if store.claim_reference(owner) != owner:
            time.sleep(LOOK_S)
            recover(study, store)  # if that searcher died
            continue
        try:
            laboratory.measure_reference()
            if not study.get_trials(deepcopy=False):
                first = builds.base(spec.build_knobs)
                live = {k.name for k in spec.knobs_of(first)}
                default = default_setting(spec, native)
                study.enqueue_trial(first | {name: v for name, v in default.items() if name in live})
                enqueue(study, _problem(spec, prior, store), observer.note)
        finally:
            store.free_unfinished_slot(REFERENCE)
    laboratory.measure_reference()
    laboratory.recall()
    return _problem(spec, prior, store)


@contextmanager
def _database_errors(url: str) -> Iterator[None]:
    """Say in one sentence that the database gave up; what it had taken before is kept."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise SearchError(
            f"The study database {safe_url(url)} failed ({cause_of(error)}). Everything stored before is kept; run the "
            "same command again when it works."
        ) from error


def default_setting(spec: StudySpec, native: Mapping[str, Any]) -> Setting:
    """The setting tried first: each live knob's `default`, else the model's own value, else the middle."""
    return {k.name: k.default if k.default is not None else _own_value(k, native) for k in spec.knobs}


def _own_value(knob: Knob, native: Mapping[str, Any]) -> int:
    if knob.name in (WINDOW, TOP_K) and knob.name in native:
        return knob.nearest(int(native[knob.name]))
    return knob.nearest((knob.low + knob.high) // 2)


def _problem(spec: StudySpec, prior: tuple[PriorPoint, ...], store: Store) -> Problem:
    """What a sampler is told of the study; its reference must have been measured."""
    found = store.outcome(REFERENCE)
    assert found is not None and found.ceiling is not None and found.ppl is not None and found.tps is not None
    first = builds.base(spec.build_knobs)
    reference = Reference(found.setting, found.ppl, found.tps, found.figures or {})
    return Problem(spec.knobs_of(first), found.ceiling, reference, prior, first)


def _loop(
    options: Options,
    turns: Turns,
    study: optuna.Study,
    store: Store,
    laboratory: Laboratory,
    observer: StudyObserver,
    started: float,
) -> None:
    failed: list[Outcome] = []  # in a row
    owner, note = owner_name(), observer.note
    while options.timeout_s is None or time.perf_counter() - started < options.timeout_s:
        problem = turns.problem(study, laboratory.build, laboratory.slower, stop_early=options.stop_early)
        if problem is None:
            note(NOT_WORTH.format(store.finished()))
            return
        slot = store.take_slot(options.trials, owner)
        if slot is None:
            if store.finished() >= options.trials:
                return
            time.sleep(LOOK_S)  # others are at the last places: should one of them die, its place is taken here
            patiently(lambda: recover(study, store), note)
            continue
        trial: optuna.Trial | None = None
        try:
            for attempt in range(ASKS):
                seed = trial_seed(options.seed, slot, len(failed) + 100 * attempt)
                study.sampler = make_sampler(options.sampler, problem, seed)
                trial = patiently(partial(ask, study, partial(turns.distributions, problem)), note)
                key = setting_key(laboratory.spelled(trial.params))
                last = attempt == ASKS - 1
                elsewhere = store.claim(slot, owner, trial.number, key, wait=last)
                if elsewhere is None or last:
                    break
                close(study, trial.number)
            assert trial is not None
            if elsewhere is not None:  # there is hardly another setting left
                _wait_for(elsewhere, study, store)
            on_all = options.sampler == "gated" and asked_on_all(study, trial)
            outcome = laboratory.run(trial.number, trial.params, slot, on_all=on_all)
            _tell(study, store, outcome, trial, note)
        except SpooledError:
            raise  # the trial stays open until its outcome is taken in
        except LostClaimError as error:
            note(str(error))
            continue
        except BaseException:
            with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError):  # then the next start settles it
                if trial is not None:
                    settle(study, store, trial.number)
                store.free_unfinished_slot(slot)
            raise
        if outcome.state == "FAIL":
            store.free_unfinished_slot(slot)
            observer.note(f"Trial {outcome.trial} failed: {outcome.reason}")
            failed.append(outcome)
            _stop_if_hopeless(failed)
            continue
        failed.clear()
        observer.finished(outcome, store.finished(), store.front())


def _tell(
    study: optuna.Study, store: Store, outcome: Outcome, trial: optuna.Trial, note: Callable[[str], None]
) -> None:
    """Tell Optuna of an outcome that is stored; after a lost connection it is looked at what has been told."""
    objectives = store.objectives()
    try:
        tell(study, outcome, objectives, trial)
    except Exception as error:
        if not server_lost(error):
            raise
        patiently(partial(tell, study, outcome, objectives), note)


def _wait_for(trial: int, study: optuna.Study, store: Store) -> None:
    """Wait until a trial that another searcher measures has ended, or its searcher has."""
    while store.outcome(trial) is None and any(slot.trial == trial for slot in store.slots()):
        time.sleep(LOOK_S)
        recover(study, store)


def _stop_if_hopeless(failed: list[Outcome]) -> None:
    """Stop when failures in a row show that more trials would fail too."""
    last = failed[-1]
    of_one_cause = len(failed) >= FAILURES_IN_A_ROW and all(
        outcome.failure == last.failure for outcome in failed[-FAILURES_IN_A_ROW:]
    )
    if of_one_cause or len(failed) >= FAILURES_OF_ANY_CAUSE:
        count = FAILURES_IN_A_ROW if of_one_cause else len(failed)
        raise SearchError(f"{count} trials in a row failed, the last one thus: {last.reason}")
