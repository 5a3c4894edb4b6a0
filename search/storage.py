"""Optuna's storage for a study that many searchers share: a trial's rows written together, reading that costs less.

Optuna's own commits every parameter and attribute by itself, and reads each trial that is new or runs, with everything
that belongs to it, two or three times an ask. Both grow with the number of searchers. Its tables stay as they are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Select, delete, insert, or_, select
from sqlalchemy.orm import Session, scoped_session, sessionmaker

MANY = 500  # trials whose numbers are not written into a query one by one
distribution_of = lru_cache(maxsize=1000)(json_to_distribution)  # a study has a few, read with every trial


class Together(Session):
    """A session whose commits wait for the end of `SharedStorage.together`, where one is open."""

    open = False

    def commit(self) -> None:
        """Write to the database; for good, unless the block is still open."""
        if self.open:
            self.flush()
        else:
            super().commit()

    def close(self) -> None:
        """Forget what was read, but not the transaction of an open block."""
        if self.open:
            self.expunge_all()
        else:
            super().close()


class SharedStorage(RDBStorage):
    """Optuna's tables, read and written in fewer and smaller statements.

    Trials are read without intermediate values, which no search here reports.
    """

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        super().__init__(url, engine_kwargs=engine_kwargs)
        self.scoped_session = scoped_session(sessionmaker(bind=self.engine, class_=Together))
        self._once = self._read = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread writes inside is one transaction."""
        session: Any = self.scoped_session()  # a Together
        session.open = True
        try:
            yield
            session.open = False
            session.commit()
        finally:
            session.open = False
            session.close()  # rolls back what is not committed

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        """Inside, other searchers' trials are read once and are not looked at again."""
        self._once, self._read = True, False
        try:
            yield
        finally:
            self._once = False

    def end_trial(
        self,
        trial_id: int,
        state: TrialState,
        values: Sequence[float] | None,
        user_attrs: Mapping[str, Any],
        system_attrs: Mapping[str, Any],
    ) -> None:
        """Write how a trial ended and what is known of it.

        Raises:
            UpdateFinishedTrialError: it has ended already, and stays as it is.
        """
        kinds: Any = (models.TrialUserAttributeModel, user_attrs), (models.TrialSystemAttributeModel, system_attrs)
        with self.together():
            session = self.scoped_session()
            for kind, attributes in kinds:
                if attributes:
                    session.execute(delete(kind).where(kind.trial_id == trial_id, kind.key.in_(attributes)))
                    rows = [
                        {"trial_id": trial_id, "key": k, "value_json": json.dumps(v)} for k, v in attributes.items()
                    ]
                    session.execute(insert(kind), rows)
            self.set_trial_state_values(trial_id, state, values)

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """The trials after one number and those of some numbers, in order: what the cache above does not know."""
        if self._once and self._read:
            return []
        trial: Any = models.TrialModel
        wanted = [trial.trial_id > trial_id_greater_than]
        if included := [number for number in included_trial_ids if number <= trial_id_greater_than]:
            wanted.append(trial.trial_id.in_(included))
        these = select(trial.trial_id).where(trial.study_id == study_id, or_(*wanted))
        session = self.scoped_session()
        try:
            found = self._read_trials(session, these)
        except Exception:
            session.rollback()
            raise
        finally:
            session.close()
        self._read = True
        return [one for one in found if states is None or one.state in states]

    def _read_trials(self, session: Session, these: Select[tuple[int]]) -> list[FrozenTrial]:
        trial: Any = models.TrialModel  # Optuna's models have no types
        rows = session.scalars(select(trial).where(trial.trial_id.in_(these)).order_by(trial.trial_id)).all()
        if not rows:
            return []
        ids = [row.trial_id for row in rows]  # a trial that begins meanwhile is read next time
        wanted = ids if len(ids) <= MANY else these
        values: dict[int, dict[int, float]] = defaultdict(dict)
        value: Any = models.TrialValueModel
        columns: Any = value.trial_id, value.objective, value.value, value.value_type
        for number, objective, stored, kind in session.execute(select(*columns).where(value.trial_id.in_(wanted))):
            values[number][objective] = value.stored_repr_to_value(stored, kind)
        params: dict[int, dict[str, Any]] = defaultdict(dict)
        distributions: dict[int, dict[str, BaseDistribution]] = defaultdict(dict)
        param: Any = models.TrialParamModel
        columns = param.trial_id, param.param_name, param.param_value, param.distribution_json
        in_order = select(*columns).where(param.trial_id.in_(wanted)).order_by(param.param_id)
        for number, name, stored, text in session.execute(in_order):
            distributions[number][name] = distribution_of(text)
            params[number][name] = distribution_of(text).to_external_repr(stored)
        user_attrs, system_attrs = (
            self._read_attributes(session, kind, wanted)
            for kind in (models.TrialUserAttributeModel, models.TrialSystemAttributeModel)
        )
        return [
            FrozenTrial(
                number=row.number,
                state=row.state,
                value=None,
                values=[v for _, v in sorted(values[row.trial_id].items())] or None,
                datetime_start=row.datetime_start,
                datetime_complete=row.datetime_complete,
                params=params[row.trial_id],
                distributions=distributions[row.trial_id],
                user_attrs=user_attrs[row.trial_id],
                system_attrs=system_attrs[row.trial_id],
                intermediate_values={},
                trial_id=row.trial_id,
            )
            for row in rows
        ]

    def _read_attributes(self, session: Session, kind: Any, wanted: Any) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        columns = kind.trial_id, kind.key, kind.value_json
        for number, key, text in session.execute(select(*columns).where(kind.trial_id.in_(wanted))):
            found[number][key] = json.loads(text)
        return found


def ask(
    study: optuna.Study, distributions: Callable[[Mapping[str, Any]], Mapping[str, BaseDistribution]]
) -> optuna.Trial:
    """A trial that Optuna proposes: `study.ask`, with one reading of the others and one transaction for what it draws.

    What its knobs are drawn from is told by the values that it was enqueued with, if it was.
    The trial is made in a transaction of its own, for which others wait; drawing keeps nobody waiting.
    """
    storage = shared_storage(study)
    with storage.reading_once() if storage is not None else nullcontext():
        trial = study.ask()
        with storage.together() if storage is not None else nullcontext():
            enqueued = trial._cached_frozen_trial.system_attrs.get("fixed_params", {})
            for name, distribution in distributions(enqueued).items():
                trial._suggest(name, distribution)
    return trial


def end_trial(
    study: optuna.Study,
    trial_id: int,
    state: TrialState,
    values: Sequence[float] | None,
    user_attrs: Mapping[str, Any],
    system_attrs: Mapping[str, Any],
) -> None:
    """Write how a trial ended and what is known of it; in one transaction where the study's storage is a shared one.

    Raises:
        UpdateFinishedTrialError: it has ended already, and stays as it is.
    """
    storage = shared_storage(study)
    if storage is not None:
        storage.end_trial(trial_id, state, values, user_attrs, system_attrs)
        return
    for key, value in user_attrs.items():
        study._storage.set_trial_user_attr(trial_id, key, value)
    for key, value in system_attrs.items():
        study._storage.set_trial_system_attr(trial_id, key, value)
    study._storage.set_trial_state_values(trial_id, state, values)


def shared_storage(study: optuna.Study) -> SharedStorage | None:
    """The storage that `recovery.open_study` has given a study; None for a study that was made elsewhere."""
    storage = getattr(study._storage, "_backend", None)
    return storage if isinstance(storage, SharedStorage) else None
