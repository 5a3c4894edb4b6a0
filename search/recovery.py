"""Optuna's side of a study: opened, told, and put right after searchers that were stopped.

What is stored is the truth; Optuna is told nothing that is not. Whatever a search was doing when it was killed, the
next one puts it right here: processes that still run, trials stored but not told, trials asked but not measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from search.engine.group import end_marked
from search.errors import SearchError
from search.gates import constraints
from search.objectives import DEFAULT, OBJECTIVES, values
from search.owner import on_this_host, owner_lives, owner_name
from search.stages import Observer
from search.storage import SharedStorage, end_trial
from search.store import REFERENCE, Outcome, Store, cause_of, full_url, optuna_options, safe_url

OPEN_WAIT_S = 60.0  # for another searcher that is making Optuna's tables
LEASE_S = 180.0  # of a searcher on another host: more than the two minutes for which a network may be cut
CONSTRAINT = "ppl"


def open_study(url: str, name: str, engine: Engine, objectives: Sequence[str]) -> optuna.Study:
    """The Optuna study of that name, made if it is new; `engine` is ours on the same database.

    Its values are the `objectives`, in their order.

    Two searchers that start together both try to make Optuna's tables; the one that loses tries again.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    deadline = time.monotonic() + OPEN_WAIT_S
    while True:
        try:
            storage = SharedStorage(full_url(url), optuna_options(url, engine))
            ways = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE
            directions = [ways[OBJECTIVES[name].maximize] for name in objectives]
            study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names(list(objectives))
            return study
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise SearchError(
                    f"Optuna cannot use the study database {safe_url(url)}: {cause_of(error)}."
                ) from error
            time.sleep(0.5)


def tell(
    study: optuna.Study,
    outcome: Outcome,
    objectives: Sequence[str] = DEFAULT,
    asked: optuna.Trial | None = None,
) -> None:
    """Tell Optuna how a trial ended; its constraints, one a gate, and figures stay readable when it was pruned.

    A trial that has been told stays as it is. `asked`, the trial as it was asked for, saves reading it again.
    """
    if asked is not None:
        trial_id = asked._trial_id
    else:
        trial = _trial(study, outcome.trial)
        if trial.state.is_finished():
            return
        trial_id = trial._trial_id
    attributes = {
        "setting": outcome.setting,
        "ppl": outcome.ppl,
        "tps": outcome.tps,
        "tps_interval": [outcome.tps_low, outcome.tps_high] if outcome.tps is not None else None,
        "card": outcome.card,
        "reused_from": outcome.reused_from,
        "reason": outcome.reason,
        "failure": outcome.failure,
        "failed_stage": outcome.failed_stage,
        "warning": outcome.warning,
        "simulated": outcome.simulated or None,
        "wall_s": outcome.wall_s,
        **(outcome.figures or {}),
    }
    told = None
    if outcome.state == "COMPLETE":
        told = values(outcome, objectives)
        assert told is not None  # or it would have failed
    end_trial(
        study,
        trial_id,
        TrialState[outcome.state],
        told,
        {name: value for name, value in attributes.items() if value is not None},
        {f"constraints:{name}": excess for name, excess in _constraints(outcome).items()},
    )


def _constraints(outcome: Outcome) -> dict[str, float]:
    """Each gate's excess by its name; nothing of a trial that failed before there was one."""
    if outcome.excess is None:
        return {}
    return {CONSTRAINT: outcome.excess} | constraints(outcome.gates or {})


def end_orphans(store: Store, observer: Observer) -> None:
    """End what searchers that died have left running on this machine; nothing that does not carry their mark."""
    for mark in store.orphan_marks():
        if end_marked({mark}):
            store.process_ended(mark)
        else:
            observer.note(f"A process of an earlier search does not end (mark {mark}); it may hold the device.")


def recover(study: optuna.Study, store: Store) -> int:
    """Put right what other searchers left open: stored but not told, or asked but not measured.

    Several may do this at once: each place is put right by the one that takes it over.

    Returns:
        How many places were given back.
    """
    running = {trial.number: trial for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING])}
    slots = store.slots(running)  # read after the trials: a slot is taken before its trial is asked
    leases = store.leases()
    given_back = 0
    for slot in slots:
        if at_work(slot.owner, leases):
            continue
        if slot.finished:
            if slot.trial in running:
                settle(study, store, slot.trial)
        elif store.take_over(slot.ordinal, slot.owner, owner_name()):
            if slot.trial is not None and slot.trial != REFERENCE:
                settle(study, store, slot.trial)
            store.free_unfinished_slot(slot.ordinal)
            given_back += 1
    held = {slot.trial for slot in slots}
    if not any(slot.trial is None and at_work(slot.owner, leases) for slot in slots):  # or it may be theirs
        for number in running.keys() - held:
            settle(study, store, number)
    return given_back


def at_work(owner: str, leases: Mapping[str, float]) -> bool:
    """Whether a searcher is another one that still runs; what this process left open is an earlier search's.

    On this host its process is looked at; elsewhere its lease has to be fresh.
    """
    if owner == owner_name():
        return False
    if on_this_host(owner):
        return owner_lives(owner)
    return leases.get(owner, float("inf")) < LEASE_S


def settle(study: optuna.Study, store: Store, number: int) -> None:
    """Close a trial whose searcher stopped: told if its outcome is stored, otherwise asked again later."""
    outcome = store.outcome(number)
    if outcome is not None:
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another was quicker
            tell(study, outcome, store.objectives())
    elif close(study, number):
        trial = _trial(study, number)
        params = trial.params or trial.system_attrs.get("fixed_params")
        if params:
            study.enqueue_trial(params, user_attrs={"asked_before_as": number})


def close(study: optuna.Study, number: int) -> bool:
    """End a trial that is not measured, in Optuna's eyes; False where it has ended already."""
    try:
        study.tell(number, state=TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return False
    return True


def _trial(study: optuna.Study, number: int) -> FrozenTrial:
    storage = study._storage
    return storage.get_trial(storage.get_trial_id_from_study_id_trial_number(study._study_id, number))
