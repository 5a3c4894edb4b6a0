"""Everything that is written to and read from our tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, and_, delete, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, selectinload

from search.answers import Answer
from search.errors import LostClaimError, SpooledError, UsageError
from search.gate import RecordScore
from search.objectives import DEFAULT, KEY
from search.owner import on_this_host, owner_lives, owner_name
from search.store.database import cause_of, take_turn
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
    TaskAnswerRow,
)
from search.store.patience import patient, patiently
from search.store.slots import REFERENCE, Slots
from search.store.spool import Spool, Waiting


def setting_key(setting: Mapping[str, Any]) -> str:
    """A setting as one comparable text."""
    return json.dumps(setting, sort_keys=True)


class Store(Slots):
    """One study's rows in a study database.

    With a `spool`, measurements that the database does not take wait there. `note` is told when the database server
    does not answer and is waited for.
    """

    def __init__(
        self,
        engine: Engine,
        study: str,
        spool: Spool | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(engine, study, note)
        self._spool = spool
        self._made_of: tuple[str, ...] | None = None

    def take_in_spool(self) -> int:
        """Store what waits in the spool; how many trials, stages and scores that were.

        A trial whose outcome is stored already stays as it is.
        """
        taken = 0
        spool, self._spool = self._spool, None  # what cannot be taken in stays there, and need not wait twice
        try:
            for waiting in spool.take() if spool else ():
                if waiting.outcome is not None:
                    with suppress(LostClaimError):  # it was measured again meanwhile
                        self.finish(waiting.outcome, waiting.measurements, waiting.slot)
                else:
                    self.add_all(waiting.measurements)
                if waiting.gate_key is not None:
                    self.remember_scores(waiting.gate_key, waiting.scores or {})
                    self.remember_answers(waiting.gate_key, waiting.answers or {})
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

    @patient
    def define(self, definition: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Record what the study is, or check that it still is (see `check_definition`)."""
        with self._session() as session, session.begin():
            if session.get(Definition, self.study) is None:
                session.add(Definition(study=self.study, definition=dict(definition), options=dict(options)))
        self.check_definition(definition)

    @patient
    def check_definition(self, definition: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        """Check that `definition` is the one the study was started with.

        Raises:
            UsageError: a key, which is named, has another value now.
        """
        with self._reading() as session:
            stored = session.get_one(Definition, self.study).definition
        for key in sorted((set(stored) | set(definition)) - set(ignore)):
            before, now = stored.get(key), definition.get(key)
            if before != now:
                raise UsageError(
                    f"Study {self.study!r} was started with {key} = {_shown(before)}, now it is {_shown(now)}. "
                    "Undo the change, or use another --storage or another name in the study file."
                )

    # Processes ------------------------------------------------------------------------------------------

    @patient
    def process_started(self, mark: str, what: str) -> None:
        """A process group whose members carry `mark` is about to be started."""
        with self._alone() as session, session.begin():
            session.merge(Process(mark=mark, owner=owner_name(), what=what))

    def process_ended(self, mark: str) -> None:
        """All of a process group is gone; where that cannot be noted, the next start sees it."""
        with suppress(SQLAlchemyError), self._alone() as session, session.begin():
            session.execute(delete(Process).where(Process.mark == mark))

    @patient
    def orphan_marks(self) -> set[str]:
        """Marks of process groups on this host whose owner has died."""
        with self._reading() as session:
            rows = session.scalars(select(Process)).all()
        return {row.mark for row in rows if on_this_host(row.owner) and not owner_lives(row.owner)}

    # Measurements ---------------------------------------------------------------------------------------

    @patient
    def add_environment(self, environment: Environment) -> int:
        """Write one; returns its id."""
        with self._alone() as session, session.begin():
            session.add(environment)
            session.flush()
            return environment.id

    def add_facts(self, environment: int, facts: Mapping[str, Any]) -> None:
        """Add to what is known of an environment; where that cannot be noted, nothing else is lost."""
        with suppress(SQLAlchemyError), self._alone() as session, session.begin():
            row = session.get_one(Environment, environment)
            row.facts = {**row.facts, **facts}

    def add_all(self, measurements: Sequence[Measurement]) -> None:
        """Write measurements with their timings."""

        def write() -> None:
            with self._alone() as session, session.begin():
                session.add_all(m for m in measurements if not self._is_there(session, m))

        for measurement in measurements:
            measurement.created_at = measurement.created_at or datetime.now(UTC)
        with self._or_spooled(Waiting(measurements=measurements)):
            patiently(write, self.note)

    def _is_there(self, session: Session, row: Measurement) -> bool:
        """Whether a row was written already, and only the answer was lost on the way."""
        same = (getattr(Measurement, name) for name in ("trial", "stage", "status", "created_at"))
        query = select(Measurement.id).where(
            Measurement.study == self.study, *(column == getattr(row, column.key) for column in same)
        )
        return session.scalars(query).first() is not None

    @patient
    def remembered_scores(self, gate_key: str) -> dict[str, RecordScore]:
        """Records already scored under `gate_key`, by record id."""
        with self._reading() as session:
            rows = session.scalars(select(RecordScoreRow).where(RecordScoreRow.gate_key == gate_key))
            return {r.record: RecordScore(r.nll, r.tokens, r.top1, r.kl, r.distributions) for r in rows}

    def reference_distributions(self) -> dict[str, bytes]:
        """The reference setting's distributions over each gate record, packed (see `search.agreement`).

        Nothing where the study does not ask for agreement, or its reference is not measured.
        """
        for row in self.measurements("gate", "done", REFERENCE):
            if key := row.figures.get("scores"):
                scores = self.remembered_scores(str(key))
                return {r: s.distributions for r, s in scores.items() if s.distributions is not None}
        return {}

    def remember_scores(self, gate_key: str, scores: Mapping[str, RecordScore]) -> None:
        """Add record scores; those already there stay as they are."""

        def write() -> None:
            with self._alone() as session, session.begin():
                take_turn(session, gate_key)
                among = RecordScoreRow.gate_key == gate_key, RecordScoreRow.record.in_(scores)
                there = set(session.scalars(select(RecordScoreRow.record).where(*among)))
                session.add_all(
                    RecordScoreRow(gate_key=gate_key, record=record, **asdict(score))
                    for record, score in scores.items()
                    if record not in there
                )

        with self._or_spooled(Waiting(gate_key=gate_key, scores=scores)):
            patiently(write, self.note)

    @patient
    def remembered_answers(self, gate_key: str) -> dict[str, Answer]:
        """Tasks already answered under `gate_key`, by task id."""
        with self._reading() as session:
            rows = session.scalars(select(TaskAnswerRow).where(TaskAnswerRow.gate_key == gate_key))
            return {row.task: Answer(row.answer, row.matched) for row in rows}

    def remember_answers(self, gate_key: str, answers: Mapping[str, Answer]) -> None:
        """Add answers to tasks; those already there stay as they are."""

        def write() -> None:
            with self._alone() as session, session.begin():
                take_turn(session, gate_key)
                among = TaskAnswerRow.gate_key == gate_key, TaskAnswerRow.task.in_(answers)
                there = set(session.scalars(select(TaskAnswerRow.task).where(*among)))
                session.add_all(
                    TaskAnswerRow(gate_key=gate_key, task=task, matched=answer.matched, answer=_kept(answer.text))
                    for task, answer in answers.items()
                    if task not in there
                )

        with self._or_spooled(Waiting(gate_key=gate_key, answers=answers)):
            patiently(write, self.note)

    def finish(self, outcome: Outcome, measurements: Sequence[Measurement] = (), slot: int | None = None) -> None:
        """Write a trial's rows, its slot and the study's new front in one transaction.

        A trial that has an outcome keeps it.

        Raises:
            LostClaimError: the trial's slot was given to another, because its searcher seemed to be dead.
        """
        with self._or_spooled(Waiting(outcome, measurements, slot)):
            patiently(lambda: self._finish(outcome, measurements, slot), self.note)

    def _finish(self, outcome: Outcome, measurements: Sequence[Measurement], slot: int | None) -> None:
        with self._alone() as session, session.begin():
            place = session.get(Slot, (self.study, slot), with_for_update=True) if slot is not None else None
            if session.get(Outcome, (self.study, outcome.trial)) is not None:
                return
            if slot is not None:
                if place is None or place.trial != outcome.trial:
                    raise LostClaimError(outcome.trial)
                place.finished = True
            session.add_all(measurements)
            session.add(outcome)
            if outcome.state == "COMPLETE" and outcome.trial != REFERENCE:
                session.flush()
                if outcome.reused_from is None and self._measured_before(session, outcome):
                    take_turn(session, f"front of {self.study}")
                    self._rewrite_front(session)
                elif self._moves_front(session, outcome):
                    take_turn(session, f"front of {self.study}")
                    self._move_front(session, outcome)

    def _measured_before(self, session: Session, outcome: Outcome) -> bool:
        """Whether another trial has timed the setting: what the front was made from then stands no more."""
        query = select(Outcome.trial).where(
            Outcome.study == self.study,
            Outcome.trial.not_in((REFERENCE, outcome.trial)),
            Outcome.setting_key == outcome.setting_key,
            Outcome.state == "COMPLETE",
        )
        return session.scalars(query.limit(1)).first() is not None

    def _rewrite_front(self, session: Session) -> None:
        complete = session.scalars(
            select(Outcome)
            .where(Outcome.study == self.study, Outcome.trial != REFERENCE, Outcome.state == "COMPLETE")
            .order_by(Outcome.trial)
        )
        session.execute(delete(FrontPoint).where(FrontPoint.study == self.study))
        front = pareto_front(_as_they_stand(complete), self._objectives(session))
        session.add_all(map(_front_point, front))

    def _moves_front(self, session: Session, outcome: Outcome) -> bool:
        """Whether a trial may reach the front; one that stands behind it now stands behind any later one."""
        point = _front_point(outcome)
        points = sorted([*self._front(session), point], key=lambda p: p.trial)
        return point in pareto_front(points, self._objectives(session))

    def _move_front(self, session: Session, outcome: Outcome) -> None:
        stored = self._front(session)
        points = sorted([*stored, _front_point(outcome)], key=lambda point: point.trial)
        front = pareto_front(points, self._objectives(session))
        for point in points:
            if point in front and point not in stored:
                session.add(point)
            elif point in stored and point not in front:
                session.delete(point)

    def _objectives(self, session: Session) -> tuple[str, ...]:
        if self._made_of is None and (defined := session.get(Definition, self.study)) is not None:
            self._made_of = tuple(defined.definition.get(KEY, DEFAULT))  # for as long as the study goes on
        return self._made_of or DEFAULT

    def _front(self, session: Session) -> list[FrontPoint]:
        return list(session.scalars(select(FrontPoint).where(FrontPoint.study == self.study)))

    # Reading --------------------------------------------------------------------------------------------

    @patient
    def outcomes(self, without: Collection[int] = ()) -> list[Outcome]:
        """Every trial's outcome but the reference's and those `without`, by trial number."""
        query = select(Outcome).where(Outcome.study == self.study, Outcome.trial != REFERENCE)
        with self._reading() as session:
            if without:
                numbers = select(Outcome.trial).where(Outcome.study == self.study, Outcome.trial != REFERENCE)
                query = query.where(Outcome.trial.in_(set(session.scalars(numbers)) - set(without)))
            return list(session.scalars(query.order_by(Outcome.trial)))

    @patient
    def outcome(self, trial: int) -> Outcome | None:
        """One trial's outcome; `REFERENCE` asks for the reference setting's."""
        with self._reading() as session:
            return session.get(Outcome, (self.study, trial))

    @patient
    def measured(self, setting: Mapping[str, Any]) -> Outcome | None:
        """The outcome of the last trial that measured `setting` (COMPLETE or PRUNED), if one did."""
        query = select(Outcome).where(
            Outcome.study == self.study,
            Outcome.trial != REFERENCE,
            Outcome.setting_key == setting_key(setting),
            Outcome.state.in_(("COMPLETE", "PRUNED")),
            Outcome.reused_from.is_(None),
        )
        with self._reading() as session:
            return session.scalars(query.order_by(Outcome.trial.desc())).first()

    @patient
    def failures(self, setting: Mapping[str, Any]) -> list[str]:
        """Failure kinds of the trials that tried `setting` and failed, oldest first."""
        query = select(Outcome.failure).where(
            Outcome.study == self.study, Outcome.setting_key == setting_key(setting), Outcome.state == "FAIL"
        )
        with self._reading() as session:
            return [kind for kind in session.scalars(query.order_by(Outcome.trial)) if kind]

    @patient
    def front(self) -> list[FrontPoint]:
        """The stored front, slowest first."""
        query = select(FrontPoint).where(FrontPoint.study == self.study).order_by(FrontPoint.tps)
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def measurements(self, stage: str, status: str, trial: int | None = None) -> list[Measurement]:
        """Measurements of one stage and status with their timings, oldest first; of one trial or of all."""
        query = select(Measurement).where(
            Measurement.study == self.study, Measurement.stage == stage, Measurement.status == status
        )
        if trial is not None:
            query = query.where(Measurement.trial == trial)
        query = query.options(selectinload(Measurement.timings)).order_by(Measurement.id)
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def fully_timed(self, prompts: int, card: str | None) -> list[Measurement]:
        """The speed measurements of trials that were timed on `prompts` prompts on `card`, with their timings."""
        query = (
            select(Measurement)
            .join(Outcome, and_(Outcome.study == Measurement.study, Outcome.trial == Measurement.trial))
            .where(
                Measurement.study == self.study,
                Measurement.stage == "speed",
                Measurement.status == "done",
                Outcome.trial != REFERENCE,
                Outcome.prompts == prompts,
                or_(Outcome.card.is_(None), Outcome.card == card),
            )
            .options(selectinload(Measurement.timings))
            .order_by(Measurement.id)
        )
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def stages(self) -> list[Measurement]:
        """Every measurement of the study without its timings, oldest first."""
        query = select(Measurement).where(Measurement.study == self.study).order_by(Measurement.id)
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def options(self) -> dict[str, Any]:
        """What the study was first run with: engine, sampler, seed, trials."""
        with self._reading() as session:
            return dict(session.get_one(Definition, self.study).options)

    @patient
    def definition(self) -> dict[str, Any]:
        """What the study is (see `define`)."""
        with self._reading() as session:
            return dict(session.get_one(Definition, self.study).definition)

    @patient
    def objectives(self) -> tuple[str, ...]:
        """What the study's front is made of (see `search.objectives`)."""
        with self._reading() as session:
            return self._objectives(session)

    def best(self) -> Outcome | None:
        """The fastest trial that passed the gate."""
        front = self.front()
        return self.outcome(front[-1].trial) if front else None

    @patient
    def fastest_within(self, ppl: float, card: str | None = None) -> int | None:
        """The fastest trial with perplexity at most `ppl` that was measured on `card` (or on any, before 0004)."""
        query = (
            select(Outcome.trial)
            .where(
                Outcome.study == self.study,
                Outcome.trial != REFERENCE,
                Outcome.state == "COMPLETE",
                Outcome.ppl <= ppl,
                Outcome.reused_from.is_(None),
                or_(Outcome.card.is_(None), Outcome.card == card),
            )
            .order_by(Outcome.tps.desc(), Outcome.trial)
        )
        with self._reading() as session:
            return session.scalars(query.limit(1)).first()

    @patient
    def add_confirmation(self, confirmation: Confirmation) -> None:
        """Write one; it replaces an earlier one of the same trial."""
        with self._session() as session, session.begin():
            session.merge(confirmation)

    @patient
    def confirmation(self, trial: int) -> Confirmation | None:
        """What confirming a trial found, if it was confirmed."""
        with self._reading() as session:
            return session.get(Confirmation, (self.study, trial))

    @patient
    def confirmations(self) -> list[Confirmation]:
        """All of them: those that may win first, each by the lower end of its interval, best first."""
        query = select(Confirmation).where(Confirmation.study == self.study)
        with self._reading() as session:
            found = list(session.scalars(query))
        return sorted(found, key=lambda c: (c.eligible, c.low or 0.0), reverse=True)

    def winner(self) -> Confirmation | None:
        """The confirmed trial with the best lower bound among those that may win."""
        return next((c for c in self.confirmations() if c.eligible), None)

    @patient
    def add_export(self, trial: int, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Note that a trial was exported."""
        with self._session() as session, session.begin():
            session.add(Export(study=self.study, trial=trial, folder=str(folder)[-500:], manifest=dict(manifest)))

    @patient
    def exports(self) -> list[Export]:
        """Every export of the study's trials, oldest first."""
        query = select(Export).where(Export.study == self.study).order_by(Export.id)
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def environments(self) -> list[Environment]:
        """Every engine start of the study, oldest first."""
        query = select(Environment).where(Environment.study == self.study).order_by(Environment.id)
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def gate_counts(self) -> dict[str, int]:
        """How many gate stages were scored and how many were remembered."""
        query = (
            select(Measurement.status, func.count().label("number"))
            .where(Measurement.study == self.study, Measurement.stage == "gate")
            .group_by(Measurement.status)
        )
        with self._reading() as session:
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
        figures=outcome.figures,
        setting=outcome.setting,
        card=outcome.card,
        simulated=outcome.simulated,
    )


def _kept(text: str) -> str:
    """As much of a text as the store takes; PostgreSQL takes no NUL."""
    return text.replace("\0", "")[:500]


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
