"""Everything that is written to and read from our tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import selectinload, sessionmaker

from search.errors import SpooledError, UsageError
from search.gate import RecordScore
from search.owner import on_this_host, owner_lives, owner_name
from search.store.database import cause_of
from search.store.front import pareto_front
from search.store.models import (
    Confirmation,
    Definition,
    Environment,
    Export,
    FrontPoint,
    Measurement,
    Outcome,
    Process,
    RecordScoreRow,
    Slot,
)
from search.store.spool import Spool, Waiting

REFERENCE = -1


def setting_key(setting: Mapping[str, Any]) -> str:
    """A setting as one comparable text."""
    return json.dumps(setting, sort_keys=True)


class Store:
    """One study's rows in a study database.

    With a `spool`, measurements that the database does not take wait there.
    """

    def __init__(self, engine: Engine, study: str, spool: Spool | None = None) -> None:
        self._session = sessionmaker(engine, expire_on_commit=False)  # rows outlive their session
        self.study = study
        self._spool = spool

    def take_in_spool(self) -> int:
        """Store what waits in the spool; how many trials, stages and scores that were.

        A trial whose outcome is stored already stays as it is.
        """
        taken = 0
        spool, self._spool = self._spool, None  # what cannot be taken in stays there, and need not wait twice
        try:
            for waiting in spool.take() if spool else ():
                if waiting.outcome is not None:
                    self.finish(waiting.outcome, waiting.measurements, waiting.slot)
                else:
                    self.add_all(waiting.measurements)
                if waiting.gate_key is not None:
                    self.remember_scores(waiting.gate_key, waiting.scores or {})
                taken += 1
        finally:
            self._spool = spool
        return taken

    def spool(self, measurements: Sequence[Measurement]) -> None:
        """Let measurements wait in the spool: at once, whatever the database is busy with."""
        if self._spool is not None and measurements:
            self._spool.keep(Waiting(measurements=measurements))

    @contextmanager
    def _or_spooled(self, waiting: Waiting) -> Iterator[None]:
        """What is written inside waits in the spool if that fails."""
        try:
            yield
        except SQLAlchemyError as error:
            if self._spool is None:
                raise
            raise SpooledError(
                f"The study database cannot be written ({cause_of(error)}). What was just measured is kept in "
                f"{self._spool.keep(waiting)} and taken in when the same command is run again."
            ) from error

    # The study ------------------------------------------------------------------------------------------

    def define(self, definition: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Record what the study is, or check that it still is (see `check_definition`)."""
        with self._session() as session, session.begin():
            if session.get(Definition, self.study) is None:
                session.add(Definition(study=self.study, definition=dict(definition), options=dict(options)))
        self.check_definition(definition)

    def check_definition(self, definition: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        """Check that `definition` is the one the study was started with.

        Raises:
            UsageError: a key, which is named, has another value now.
        """
        with self._session() as session:
            stored = session.get_one(Definition, self.study).definition
        for key in sorted((set(stored) | set(definition)) - set(ignore)):
            before, now = stored.get(key), definition.get(key)
            if before != now:
                raise UsageError(
                    f"Study {self.study!r} was started with {key} = {_shown(before)}, now it is {_shown(now)}. "
                    "Undo the change, or use another --storage or another name in the study file."
                )

    # Slots ----------------------------------------------------------------------------------------------

    def take_slot(self, total: int, owner: str) -> int | None:
        """The smallest free place below `total`, now `owner`'s; None when every place is taken."""
        with self._session() as session, session.begin():
            taken = set(session.scalars(select(Slot.ordinal).where(Slot.study == self.study)))
            free = next((n for n in range(total) if n not in taken), None)
            if free is not None and len(taken) < total:
                session.add(Slot(study=self.study, ordinal=free, owner=owner))
                return free
            return None

    def assign_slot(self, ordinal: int, trial: int) -> None:
        """Say which trial holds a place."""
        with self._session() as session, session.begin():
            session.get_one(Slot, (self.study, ordinal)).trial = trial

    def free_unfinished_slot(self, ordinal: int) -> None:
        """Give a place back, unless its trial finished."""
        with self._session() as session, session.begin():
            session.execute(
                delete(Slot).where(Slot.study == self.study, Slot.ordinal == ordinal, Slot.finished.is_(False))
            )

    def slots(self) -> list[Slot]:
        """Every place that is taken."""
        with self._session() as session:
            return list(session.scalars(select(Slot).where(Slot.study == self.study)))

    def finished(self) -> int:
        """How many places are finished."""
        query = select(func.count()).where(Slot.study == self.study, Slot.finished.is_(True))
        with self._session() as session:
            return session.scalar(query) or 0

    # Processes ------------------------------------------------------------------------------------------

    def process_started(self, mark: str, what: str) -> None:
        """A process group whose members carry `mark` is about to be started."""
        with self._session() as session, session.begin():
            session.add(Process(mark=mark, owner=owner_name(), what=what))

    def process_ended(self, mark: str) -> None:
        """All of a process group is gone; where that cannot be noted, the next start sees it."""
        with suppress(SQLAlchemyError), self._session() as session, session.begin():
            session.execute(delete(Process).where(Process.mark == mark))

    def orphan_marks(self) -> set[str]:
        """Marks of process groups on this host whose owner has died."""
        with self._session() as session:
            rows = session.scalars(select(Process)).all()
        return {row.mark for row in rows if on_this_host(row.owner) and not owner_lives(row.owner)}

    # Measurements ---------------------------------------------------------------------------------------

    def add_environment(self, environment: Environment) -> int:
        """Write one; returns its id."""
        with self._session() as session, session.begin():
            session.add(environment)
            session.flush()
            return environment.id

    def add_facts(self, environment: int, facts: Mapping[str, Any]) -> None:
        """Add to what is known of an environment; where that cannot be noted, nothing else is lost."""
        with suppress(SQLAlchemyError), self._session() as session, session.begin():
            row = session.get_one(Environment, environment)
            row.facts = {**row.facts, **facts}

    def add_all(self, measurements: Sequence[Measurement]) -> None:
        """Write measurements with their timings."""
        with self._or_spooled(Waiting(measurements=measurements)), self._session() as session, session.begin():
            session.add_all(measurements)

    def remembered_scores(self, gate_key: str) -> dict[str, RecordScore]:
        """Records already scored under `gate_key`, by record id."""
        with self._session() as session:
            rows = session.scalars(select(RecordScoreRow).where(RecordScoreRow.gate_key == gate_key))
            return {row.record: RecordScore(row.nll, row.tokens) for row in rows}

    def remember_scores(self, gate_key: str, scores: Mapping[str, RecordScore]) -> None:
        """Add record scores; those already there stay as they are."""
        waiting = Waiting(gate_key=gate_key, scores=scores)
        with self._or_spooled(waiting), self._session() as session, session.begin():
            among = RecordScoreRow.gate_key == gate_key, RecordScoreRow.record.in_(scores)
            there = set(session.scalars(select(RecordScoreRow.record).where(*among)))
            session.add_all(
                RecordScoreRow(gate_key=gate_key, record=record, nll=score.nll, tokens=score.tokens)
                for record, score in scores.items()
                if record not in there
            )

    def finish(self, outcome: Outcome, measurements: Sequence[Measurement] = (), slot: int | None = None) -> None:
        """Write a trial's rows, its slot and the study's new front in one transaction.

        Of two searchers that both measured the reference the first one's stands.
        """
        waiting = Waiting(outcome, measurements, slot)
        with self._or_spooled(waiting), self._session() as session, session.begin():
            if session.get(Outcome, (self.study, outcome.trial)) is not None:
                return
            session.add_all(measurements)
            session.add(outcome)
            if slot is not None and (place := session.get(Slot, (self.study, slot))) is not None:
                place.finished = True
            session.flush()
            complete = session.scalars(
                select(Outcome)
                .where(Outcome.study == self.study, Outcome.trial != REFERENCE, Outcome.state == "COMPLETE")
                .order_by(Outcome.trial)
            )
            session.execute(delete(FrontPoint).where(FrontPoint.study == self.study))
            session.add_all(_front_point(point) for point in pareto_front(_as_they_stand(complete)))

    # Reading --------------------------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        """Every trial's outcome but the reference's, by trial number."""
        query = select(Outcome).where(Outcome.study == self.study, Outcome.trial != REFERENCE)
        with self._session() as session:
            return list(session.scalars(query.order_by(Outcome.trial)))

    def outcome(self, trial: int) -> Outcome | None:
        """One trial's outcome; `REFERENCE` asks for the reference setting's."""
        with self._session() as session:
            return session.get(Outcome, (self.study, trial))

    def measured(self, setting: Mapping[str, Any]) -> Outcome | None:
        """The outcome of the last trial that measured `setting` (COMPLETE or PRUNED), if one did."""
        query = select(Outcome).where(
            Outcome.study == self.study,
            Outcome.trial != REFERENCE,
            Outcome.setting_key == setting_key(setting),
            Outcome.state.in_(("COMPLETE", "PRUNED")),
            Outcome.reused_from.is_(None),
        )
        with self._session() as session:
            return session.scalars(query.order_by(Outcome.trial.desc())).first()

    def failures(self, setting: Mapping[str, Any]) -> list[str]:
        """Failure kinds of the trials that tried `setting` and failed, oldest first."""
        query = select(Outcome.failure).where(
            Outcome.study == self.study, Outcome.setting_key == setting_key(setting), Outcome.state == "FAIL"
        )
        with self._session() as session:
            return [kind for kind in session.scalars(query.order_by(Outcome.trial)) if kind]

    def front(self) -> list[FrontPoint]:
        """The stored front, slowest first."""
        query = select(FrontPoint).where(FrontPoint.study == self.study).order_by(FrontPoint.tps)
        with self._session() as session:
            return list(session.scalars(query))

    def measurements(self, stage: str, status: str, trial: int | None = None) -> list[Measurement]:
        """Measurements of one stage and status with their timings, oldest first; of one trial or of all."""
        query = select(Measurement).where(
            Measurement.study == self.study, Measurement.stage == stage, Measurement.status == status
        )
        if trial is not None:
            query = query.where(Measurement.trial == trial)
        query = query.options(selectinload(Measurement.timings)).order_by(Measurement.id)
        with self._session() as session:
            return list(session.scalars(query))

    def stages(self) -> list[Measurement]:
        """Every measurement of the study without its timings, oldest first."""
        query = select(Measurement).where(Measurement.study == self.study).order_by(Measurement.id)
        with self._session() as session:
            return list(session.scalars(query))

    def options(self) -> dict[str, Any]:
        """What the study was first run with: engine, sampler, seed, trials."""
        with self._session() as session:
            return dict(session.get_one(Definition, self.study).options)

    def definition(self) -> dict[str, Any]:
        """What the study is (see `define`)."""
        with self._session() as session:
            return dict(session.get_one(Definition, self.study).definition)

    def best(self) -> Outcome | None:
        """The fastest trial that passed the gate."""
        front = self.front()
        return self.outcome(front[-1].trial) if front else None

    def fastest_within(self, ppl: float) -> int | None:
        """The fastest measured trial with perplexity at most `ppl`."""
        query = (
            select(Outcome.trial)
            .where(
                Outcome.study == self.study,
                Outcome.trial != REFERENCE,
                Outcome.state == "COMPLETE",
                Outcome.ppl <= ppl,
                Outcome.reused_from.is_(None),
            )
            .order_by(Outcome.tps.desc(), Outcome.trial)
        )
        with self._session() as session:
            return session.scalars(query.limit(1)).first()

    def add_confirmation(self, confirmation: Confirmation) -> None:
        """Write one; it replaces an earlier one of the same trial."""
        with self._session() as session, session.begin():
            session.merge(confirmation)

    def confirmation(self, trial: int) -> Confirmation | None:
        """What confirming a trial found, if it was confirmed."""
        with self._session() as session:
            return session.get(Confirmation, (self.study, trial))

    def confirmations(self) -> list[Confirmation]:
        """All of them: those that may win first, each by the lower end of its interval, best first."""
        query = select(Confirmation).where(Confirmation.study == self.study)
        with self._session() as session:
            found = list(session.scalars(query))
        return sorted(found, key=lambda c: (c.eligible, c.low or 0.0), reverse=True)

    def winner(self) -> Confirmation | None:
        """The confirmed trial with the best lower bound among those that may win."""
        return next((c for c in self.confirmations() if c.eligible), None)

    def add_export(self, trial: int, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Note that a trial was exported."""
        with self._session() as session, session.begin():
            session.add(Export(study=self.study, trial=trial, folder=str(folder)[-500:], manifest=dict(manifest)))

    def exports(self) -> list[Export]:
        """Every export of the study's trials, oldest first."""
        query = select(Export).where(Export.study == self.study).order_by(Export.id)
        with self._session() as session:
            return list(session.scalars(query))

    def environments(self) -> list[Environment]:
        """Every engine start of the study, oldest first."""
        query = select(Environment).where(Environment.study == self.study).order_by(Environment.id)
        with self._session() as session:
            return list(session.scalars(query))

    def gate_counts(self) -> dict[str, int]:
        """How many gate stages were scored and how many were remembered."""
        query = (
            select(Measurement.status, func.count().label("number"))
            .where(Measurement.study == self.study, Measurement.stage == "gate")
            .group_by(Measurement.status)
        )
        with self._session() as session:
            counts = {row.status: row.number for row in session.execute(query)}
        return {"scored": counts.get("done", 0), "remembered": counts.get("remembered", 0)}


def _as_they_stand(complete: Iterable[Outcome]) -> list[Outcome]:
    """Trials in their order, without those whose setting was measured again later: the later figure stands."""
    trials = list(complete)
    last = {outcome.setting_key: outcome.trial for outcome in trials if outcome.reused_from is None}
    return [outcome for outcome in trials if outcome.source == last.get(outcome.setting_key, outcome.source)]


def _front_point(outcome: Outcome) -> FrontPoint:
    assert outcome.tps is not None and outcome.ppl is not None  # pareto_front keeps none without
    return FrontPoint(
        study=outcome.study,
        trial=outcome.trial,
        tps=outcome.tps,
        tps_low=outcome.tps_low,
        tps_high=outcome.tps_high,
        ppl=outcome.ppl,
        setting=outcome.setting,
        simulated=outcome.simulated,
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
