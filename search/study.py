"""The search: Optuna asks, the laboratory measures, the store keeps, Optuna is told."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from search.confirm import confirm
from search.engine.group import end_marked
from search.engine.protocol import Setting
from search.errors import SearchError, SpooledError
from search.inputs import check_inputs
from search.knobs import TOP_K, WINDOW, Knob
from search.owner import owner_lives, owner_name
from search.spec import StudySpec
from search.stages import Observer
from search.store import (
    REFERENCE,
    Confirmation,
    FrontPoint,
    Outcome,
    Spool,
    Store,
    cause_of,
    engine_options,
    full_url,
    open_engine,
    safe_url,
)
from search.trial import Laboratory

STARTUP_TRIALS = 64  # of 200: drawn at random, so that every window is seen, the forbidden ones too
FAILURES_IN_A_ROW = 10  # of one cause
FAILURES_OF_ANY_CAUSE = 40  # in a row
OPEN_WAIT_S = 60.0  # for another searcher that is making Optuna's tables
CONSTRAINT = "ppl"

SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
}


@dataclass(frozen=True)
class Options:
    """How to search: `trials` in all should stand finished, `confirm` finalists are measured again."""

    trials: int
    confirm: int
    storage: str
    engine: str
    sampler: str
    seed: int
    timeout_s: float | None
    logs: Path


class StudyObserver(Observer, Protocol):
    """An observer that also follows whole trials."""

    def opened(self, finished: int, total: int) -> None:
        """The search begins; `finished` trials already stand."""

    def finished(self, outcome: Outcome, finished: int, best: Outcome | None) -> None:
        """A trial ended; `best` is the fastest feasible one so far."""

    def searched(self, summary: Summary) -> None:
        """The last trial ended; finalists are still to be confirmed."""


@dataclass(frozen=True)
class Summary:
    """What `search` did: the JSON document of `search.run --json`, as an object."""

    study: str
    simulated: bool
    counts: dict[str, int]
    reused: int
    reference: Outcome
    ceiling: float | None
    front: list[dict[str, Any]]
    best: dict[str, Any] | None
    wall_s: float
    engine_starts: int
    gate: dict[str, int]
    drift: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    confirmed: list[Confirmation]
    winner: Confirmation | None

    def as_json(self) -> dict[str, Any]:
        """The document `--json` prints."""
        return {
            "study": self.study,
            "simulated": self.simulated,
            "trials": {**self.counts, "reused": self.reused},
            "reference": {"tps": self.reference.tps, "ppl": self.reference.ppl},
            "ceiling": self.ceiling,
            "front": self.front,
            "best": self.best,
            "confirmed": _confirmed(self.winner),
            "drift": self.drift,
            "warnings": self.warnings,
            "wall_s": round(self.wall_s, 1),
            "engine_starts": self.engine_starts,
            "gate": self.gate,
        }


def study_name(spec: StudySpec, engine: str) -> str:
    """The study's name in the database; simulated studies never share one with measured ones."""
    return spec.name if engine == "vllm" else f"{spec.name}-simulated"


def search(spec: StudySpec, options: Options, observer: StudyObserver) -> Summary:
    """Run the study until `options.trials` trials stand finished (COMPLETE or PRUNED), or time is up.

    Raises:
        UsageError: the study in the database was started with other settings.
        SearchError: the database cannot be used, the engine does not start, the reference is over the ceiling,
            or ten trials in a row failed.
    """
    started = time.perf_counter()
    if options.engine == "vllm":
        check_inputs(spec)
    name = study_name(spec, options.engine)
    database = open_engine(options.storage)
    spool = Spool(options.storage, name)
    store = Store(database, name, spool)
    with _database_errors(options.storage):
        _end_orphans(store, observer)
        store.define(
            spec.definition(),
            {"engine": options.engine, "sampler": options.sampler, "seed": options.seed, "trials": options.trials},
        )
        if waiting := store.take_in_spool():
            observer.note(f"Taken in from the spool: {waiting} measurements that the database could not take before.")
        study = _open_study(options.storage, store.study)
        _recover(study, store)
        spool.reserve()
        try:
            with Laboratory(spec, options.engine, store, options.logs, observer, options.seed) as laboratory:
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
        laboratory.measure_reference()
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(default_setting(spec, laboratory.native))
        observer.opened(store.finished(), options.trials)
        _loop(spec, options, study, store, laboratory, observer, started)
    if options.confirm and options.engine == "vllm" and store.front():
        observer.searched(_summary(store, laboratory.engine_starts, time.perf_counter() - started))
        confirm(spec, store, laboratory, observer, options.confirm, options.logs)
    return _summary(store, laboratory.engine_starts, time.perf_counter() - started)


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


def _end_orphans(store: Store, observer: StudyObserver) -> None:
    """End what searchers that died have left running on this machine; nothing that does not carry their mark."""
    for mark in store.orphan_marks():
        if end_marked({mark}):
            store.process_ended(mark)
        else:
            observer.note(f"A process of an earlier search does not end (mark {mark}); it may hold the device.")


def default_setting(spec: StudySpec, native: Mapping[str, Any]) -> Setting:
    """The setting tried first: each knob's `default`, else the model's own value, else the middle."""
    return {k.name: k.default if k.default is not None else _own_value(k, native) for k in spec.knobs}


def _own_value(knob: Knob, native: Mapping[str, Any]) -> int:
    if knob.name in (WINDOW, TOP_K) and knob.name in native:
        return knob.nearest(int(native[knob.name]))
    return knob.nearest((knob.low + knob.high) // 2)


def distribution(knob: Knob) -> BaseDistribution:
    """A knob's range as Optuna writes it."""
    return IntDistribution(knob.low, knob.largest, step=knob.step, log=knob.log)


def _loop(
    spec: StudySpec,
    options: Options,
    study: optuna.Study,
    store: Store,
    laboratory: Laboratory,
    observer: StudyObserver,
    started: float,
) -> None:
    distributions = {knob.name: distribution(knob) for knob in spec.knobs}
    failed: list[Outcome] = []  # in a row
    while options.timeout_s is None or time.perf_counter() - started < options.timeout_s:
        slot = store.take_slot(options.trials, owner_name())
        if slot is None:
            return
        trial: optuna.Trial | None = None
        try:
            study.sampler = SAMPLERS[options.sampler](_seed(options.seed, slot, len(failed)))
            trial = study.ask(distributions)
            store.assign_slot(slot, trial.number)
            outcome = laboratory.run(trial.number, trial.params, slot)
            tell(study, outcome)
        except SpooledError:
            raise  # the trial stays open until its outcome is taken in
        except BaseException:
            with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError):  # then the next start settles it
                if trial is not None:
                    _settle(study, store, trial.number)
                store.free_unfinished_slot(slot)
            raise
        if outcome.state == "FAIL":
            store.free_unfinished_slot(slot)
            observer.note(f"Trial {outcome.trial} failed: {outcome.reason}")
            failed.append(outcome)
            _stop_if_hopeless(failed)
            continue
        failed.clear()
        observer.finished(outcome, store.finished(), store.best())


def _stop_if_hopeless(failed: list[Outcome]) -> None:
    """Stop when failures in a row show that more trials would fail too."""
    last = failed[-1]
    of_one_cause = len(failed) >= FAILURES_IN_A_ROW and all(
        outcome.failure == last.failure for outcome in failed[-FAILURES_IN_A_ROW:]
    )
    if of_one_cause or len(failed) >= FAILURES_OF_ANY_CAUSE:
        count = FAILURES_IN_A_ROW if of_one_cause else len(failed)
        raise SearchError(f"{count} trials in a row failed, the last one thus: {last.reason}")


def tell(study: optuna.Study, outcome: Outcome) -> None:
    """Tell Optuna how a trial ended; its constraint and figures stay readable when it was pruned."""
    frozen = study.get_trials(deepcopy=False)[outcome.trial]
    trial = optuna.trial.Trial(study, frozen._trial_id)
    attributes = {
        "setting": outcome.setting,
        "ppl": outcome.ppl,
        "tps": outcome.tps,
        "tps_low": outcome.tps_low,
        "tps_high": outcome.tps_high,
        "reused_from": outcome.reused_from,
        "reason": outcome.reason,
        "failure": outcome.failure,
        "warning": outcome.warning,
        "simulated": outcome.simulated or None,
    }
    for name, value in attributes.items():
        if value is not None:
            trial.set_user_attr(name, value)
    told_before = CONSTRAINT in frozen.constraints  # by a searcher that was killed before it could finish
    if outcome.excess is not None and not told_before:
        trial.set_constraint(CONSTRAINT, outcome.excess)
    if outcome.state == "COMPLETE":
        assert outcome.tps is not None and outcome.ppl is not None
        study.tell(outcome.trial, [outcome.tps, outcome.ppl])
    else:
        study.tell(outcome.trial, state=TrialState[outcome.state])


def _open_study(url: str, name: str) -> optuna.Study:
    """The Optuna study of that name, made if it is new.

    Two searchers that start together both try to make Optuna's tables; the one that loses tries again.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    deadline = time.monotonic() + OPEN_WAIT_S
    while True:
        try:
            storage = optuna.storages.RDBStorage(full_url(url), engine_kwargs=engine_options(url))
            study = optuna.create_study(
                storage=storage, study_name=name, directions=["maximize", "minimize"], load_if_exists=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names(["tps", "ppl"])
            return study
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise SearchError(
                    f"Optuna cannot use the study database {safe_url(url)}: {cause_of(error)}."
                ) from error
            time.sleep(0.5)


def _recover(study: optuna.Study, store: Store) -> None:
    """Put right what earlier searchers left open: stored but not told, or asked but not measured."""
    asked = {trial.number for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING])}
    slots = store.slots()  # read after the trials: a slot is taken before its trial is asked
    owners = {slot.trial: slot.owner for slot in slots if slot.trial is not None}
    asking = any(slot.trial is None and _at_work(slot.owner) for slot in slots)
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        owner = owners.get(trial.number)
        abandoned = not _at_work(owner) if owner else not asking
        if trial.number in asked and abandoned:
            _settle(study, store, trial.number)
    for slot in slots:
        if not _at_work(slot.owner):
            store.free_unfinished_slot(slot.ordinal)


def _at_work(owner: str) -> bool:
    """Whether a searcher is another one that still runs; what this process left open is an earlier search's."""
    return owner != owner_name() and owner_lives(owner)


def _settle(study: optuna.Study, store: Store, number: int) -> None:
    """Close a trial whose searcher stopped: told if its outcome is stored, otherwise asked again later."""
    outcome = store.outcome(number)
    if outcome is not None:
        tell(study, outcome)
        return
    params = study.get_trials(deepcopy=False)[number].params
    study.tell(number, state=TrialState.FAIL)
    if params:
        study.enqueue_trial(params, user_attrs={"asked_before_as": number})


def _seed(seed: int, ordinal: int, attempt: int) -> int:
    """The sampler's seed for one ask: a resumed study goes on, it does not draw the same again."""
    digest = hashlib.sha256(f"{seed} {ordinal} {attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _summary(store: Store, engine_starts: int, wall_s: float) -> Summary:
    outcomes = store.outcomes()
    states = [outcome.state for outcome in outcomes]
    reference = store.outcome(REFERENCE)
    if reference is None:
        raise SearchError("Nothing has been measured yet: --trials must be at least 1.")
    front = [_point(point) for point in store.front()]
    return Summary(
        study=store.study,
        simulated=reference.simulated,
        counts={
            "complete": states.count("COMPLETE"),
            "pruned": states.count("PRUNED"),
            "failed": states.count("FAIL"),
        },
        reused=sum(outcome.reused_from is not None for outcome in outcomes),
        reference=reference,
        ceiling=reference.ceiling,
        front=front,
        best=front[-1] if front else None,
        wall_s=wall_s,
        engine_starts=engine_starts,
        gate=store.gate_counts(),
        drift=[
            {"trial": m.trial, **{name: m.figures[name] for name in ("drift", "low", "high", "other_outputs")}}
            for m in store.measurements("speed", "drift")
        ],
        warnings=[{"trial": o.trial, "warning": o.warning} for o in outcomes if o.warning and o.reused_from is None],
        confirmed=store.confirmations(),
        winner=store.winner(),
    )


def _confirmed(found: Confirmation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    names = ("trial", "claimed", "mean", "low", "high", "p_pass")
    kept = ("ppl", "held_out_ratio", "held_out_tps", "tune_tps", "gap", "identity")
    return {**{n: getattr(found, n) for n in names}, **{n: found.figures[n] for n in kept}, "knobs": found.setting}


def _point(point: FrontPoint) -> dict[str, Any]:
    return {
        "trial": point.trial,
        "tps": point.tps,
        "tps_low": point.tps_low,
        "tps_high": point.tps_high,
        "ppl": point.ppl,
        "knobs": point.setting,
    }
