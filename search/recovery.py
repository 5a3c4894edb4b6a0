"""Optuna's side of a study: opened, told, and put right after searchers that were stopped.

What is stored is the truth; Optuna is told nothing that is not. Whatever a search was doing when it was killed, the
next one puts it right here: processes that still run, trials stored but not told, trials asked but not measured.
"""

from __future__ import annotations

import time
import warnings

import optuna
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from search.engine.group import end_marked
from search.errors import SearchError
from search.owner import owner_lives, owner_name
from search.stages import Observer
from search.store import Outcome, Store, cause_of, engine_options, full_url, safe_url

OPEN_WAIT_S = 60.0  # for another searcher that is making Optuna's tables
CONSTRAINT = "ppl"


def open_study(url: str, name: str) -> optuna.Study:
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
        "wall_s": outcome.wall_s,
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


def end_orphans(store: Store, observer: Observer) -> None:
    """End what searchers that died have left running on this machine; nothing that does not carry their mark."""
    for mark in store.orphan_marks():
        if end_marked({mark}):
            store.process_ended(mark)
        else:
            observer.note(f"A process of an earlier search does not end (mark {mark}); it may hold the device.")


def recover(study: optuna.Study, store: Store) -> None:
    """Put right what earlier searchers left open: stored but not told, or asked but not measured."""
    asked = {trial.number for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING])}
    slots = store.slots()  # read after the trials: a slot is taken before its trial is asked
    owners = {slot.trial: slot.owner for slot in slots if slot.trial is not None}
    asking = any(slot.trial is None and _at_work(slot.owner) for slot in slots)
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        owner = owners.get(trial.number)
        abandoned = not _at_work(owner) if owner else not asking
        if trial.number in asked and abandoned:
            settle(study, store, trial.number)
    for slot in slots:
        if not _at_work(slot.owner):
            store.free_unfinished_slot(slot.ordinal)


def _at_work(owner: str) -> bool:
    """Whether a searcher is another one that still runs; what this process left open is an earlier search's."""
    return owner != owner_name() and owner_lives(owner)


def settle(study: optuna.Study, store: Store, number: int) -> None:
    """Close a trial whose searcher stopped: told if its outcome is stored, otherwise asked again later."""
    outcome = store.outcome(number)
    if outcome is not None:
        tell(study, outcome)
        return
    params = study.get_trials(deepcopy=False)[number].params
    study.tell(number, state=TrialState.FAIL)
    if params:
        study.enqueue_trial(params, user_attrs={"asked_before_as": number})
