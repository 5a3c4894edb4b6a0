"""Our tables, beside Optuna's in the same database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Double, ForeignKey, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


def _now() -> datetime:
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """Base of our tables; all their names start with `pareto_`, so that none meets one of Optuna's."""

    metadata = MetaData()
    type_annotation_map = {dict[str, Any]: JSON, list[int]: JSON, float: Double(), datetime: DateTime(timezone=True)}  # noqa: RUF012


class Definition(Base):
    """What a study was started with; it must not change while the study goes on."""

    __tablename__ = "pareto_definition"

    study: Mapped[str] = mapped_column(String(200), primary_key=True)
    definition: Mapped[dict[str, Any]]
    options: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=_now)


class Slot(Base):
    """One of the study's N places: `ordinal` seeds the sampler, `trial` is who took it.

    `owner` (host, pid, start time of the process) tells whether an unfinished slot's searcher still lives; its
    `setting_key` is claimed until it is finished or given back. The place -1 is the reference setting's.
    """

    __tablename__ = "pareto_slot"

    study: Mapped[str] = mapped_column(String(200), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(String(200))
    trial: Mapped[int | None]
    finished: Mapped[bool] = mapped_column(default=False)
    setting_key: Mapped[str | None] = mapped_column(String(200))


class Searcher(Base):
    """A searcher at work: it renews its lease while it lives. `name` tells those of one command apart."""

    __tablename__ = "pareto_searcher"

    owner: Mapped[str] = mapped_column(String(200), primary_key=True)
    study: Mapped[str] = mapped_column(String(200), index=True)
    name: Mapped[str] = mapped_column(String(200))
    renewed_at: Mapped[datetime]
    started_at: Mapped[datetime]


class Environment(Base):
    """Where measurements were made: one row an engine start.

    `card` is the device (see `search.card`), `log` the file of the worker's output.
    """

    __tablename__ = "pareto_environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    study: Mapped[str] = mapped_column(String(200), index=True)
    simulated: Mapped[bool]
    model_hash: Mapped[str] = mapped_column(String(16))
    drafter_hash: Mapped[str | None] = mapped_column(String(16))
    build_hash: Mapped[str] = mapped_column(String(16))
    native: Mapped[dict[str, Any]]
    facts: Mapped[dict[str, Any]]
    card: Mapped[str | None] = mapped_column(String(200))
    log: Mapped[str | None] = mapped_column(String(500))
    start_s: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(default=_now)


class Measurement(Base):
    """One stage of one trial; the reference setting's stand under trial -1.

    `stage` is gate, tasks or speed. `status` is done; remembered (a gate taken from memory); proof (a gate scored
    although it was remembered, to prove the memory right); repeat (the reference timed again, for the noise);
    control (prompts at the reference setting in between a trial's, for the drift); drift (the same between trials,
    or in a new worker); card and card-repeat (the reference on another card than the first, for the scale between
    them); or interrupted.
    """

    __tablename__ = "pareto_measurement"

    id: Mapped[int] = mapped_column(primary_key=True)
    study: Mapped[str] = mapped_column(String(200), index=True)
    trial: Mapped[int] = mapped_column(index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("pareto_environment.id"))
    stage: Mapped[str] = mapped_column(String(10))
    status: Mapped[str] = mapped_column(String(12))
    setting: Mapped[dict[str, Any]]
    effective: Mapped[dict[str, Any]]
    figures: Mapped[dict[str, Any]]
    wall_s: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(default=_now)
    timings: Mapped[list[PromptTimingRow]] = relationship(cascade="all, delete-orphan")


class RecordScoreRow(Base):
    """The gate's memory: one record scored under one gate key (model, quality knobs, records, build).

    `top1`, `kl` and `distributions` as in `gate.RecordScore`: of studies that ask for agreement with the reference.
    """

    __tablename__ = "pareto_record_score"
    __table_args__ = (UniqueConstraint("gate_key", "record"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gate_key: Mapped[str] = mapped_column(String(16), index=True)
    record: Mapped[str] = mapped_column(String(200))
    nll: Mapped[float]
    tokens: Mapped[int]
    top1: Mapped[int | None]
    kl: Mapped[float | None]
    distributions: Mapped[bytes | None]


class TaskAnswerRow(Base):
    """The same of a task: how it was answered under one key (model, quality knobs, tasks, build).

    `answer` is its beginning, with its white space made one.
    """

    __tablename__ = "pareto_task_answer"
    __table_args__ = (UniqueConstraint("gate_key", "task"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gate_key: Mapped[str] = mapped_column(String(16), index=True)
    task: Mapped[str] = mapped_column(String(200))
    matched: Mapped[bool]
    answer: Mapped[str] = mapped_column(String(500))


class PromptTimingRow(Base):
    """One timed prompt of a speed measurement, in the order in which it was decoded.

    `drift` is how much slower the machine was just then than when the reference was measured: what is compared
    is latency_s ÷ drift.
    """

    __tablename__ = "pareto_prompt_timing"

    id: Mapped[int] = mapped_column(primary_key=True)
    measurement_id: Mapped[int] = mapped_column(ForeignKey("pareto_measurement.id"), index=True)
    position: Mapped[int]
    prompt: Mapped[str] = mapped_column(String(200))
    tokens: Mapped[int]
    latency_s: Mapped[float]
    drift: Mapped[float]
    output_hash: Mapped[str] = mapped_column(String(16))
    drafts: Mapped[int]
    draft_tokens: Mapped[int]
    accepted_per_pos: Mapped[list[int]]


class Outcome(Base):
    """How a trial ended: what Optuna is told, and what a later trial with the same setting reuses.

    `ppl` is over the records that the verdict used; `excess`, the constraint, is how far the perplexity over all of
    them is (or, from fewer, is estimated to be) over the ceiling. `gates` holds outcome, figure, limit and excess of
    every gate of the study, perplexity's too, by its name (see `search.gates`): None of one that was not asked because
    another had refused the setting. It is None in rows from before 0005. The reference setting's stands under trial -1.
    `tps` and its interval are on the scale of the card that the reference was measured on; `card` is the one that the
    trial was measured on, and `card_tps` what it showed there. `figures` are what was measured beside its speed (see
    `search.objectives`), on the same scale; None in rows from before 0006. `reason` says why it ended as it did.
    Of a failed trial `failure` is the protocol's failure kind, beside the stage that failed and the worker's log.
    `warning` says what is wrong with the model that was measured.
    """

    __tablename__ = "pareto_outcome"

    study: Mapped[str] = mapped_column(String(200), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(10))
    setting: Mapped[dict[str, Any]]
    setting_key: Mapped[str] = mapped_column(String(200), index=True)
    ppl: Mapped[float | None]
    ceiling: Mapped[float | None]
    excess: Mapped[float | None]
    gates: Mapped[dict[str, Any] | None]
    tps: Mapped[float | None]
    tps_low: Mapped[float | None]
    tps_high: Mapped[float | None]
    figures: Mapped[dict[str, Any] | None]
    card: Mapped[str | None] = mapped_column(String(200))
    card_tps: Mapped[float | None]
    prompts: Mapped[int | None]
    reused_from: Mapped[int | None]
    reason: Mapped[str | None] = mapped_column(String(1000))
    failure: Mapped[str | None] = mapped_column(String(20))
    failed_stage: Mapped[str | None] = mapped_column(String(10))
    log: Mapped[str | None] = mapped_column(String(500))
    warning: Mapped[str | None] = mapped_column(String(500))
    wall_s: Mapped[float]
    simulated: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(default=_now)

    @property
    def source(self) -> int:
        """The trial whose measurements this outcome rests on: its own, or the one it reuses."""
        return self.trial if self.reused_from is None else self.reused_from


class Confirmation(Base):
    """A finalist measured again, served in a process of its own (see `search.confirm`).

    `claimed`, `mean`, `low`, `high` are tokens per second on held-out prompts; `reason` is why it must not win.
    """

    __tablename__ = "pareto_confirmation"

    study: Mapped[str] = mapped_column(String(200), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    setting: Mapped[dict[str, Any]]
    eligible: Mapped[bool]
    reason: Mapped[str | None] = mapped_column(String(1000))
    claimed: Mapped[float | None]
    mean: Mapped[float | None]
    low: Mapped[float | None]
    high: Mapped[float | None]
    p_pass: Mapped[float | None]
    figures: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=_now)


class Export(Base):
    """A trial that was exported: the folder that was written, and its manifest."""

    __tablename__ = "pareto_export"

    id: Mapped[int] = mapped_column(primary_key=True)
    study: Mapped[str] = mapped_column(String(200), index=True)
    trial: Mapped[int]
    folder: Mapped[str] = mapped_column(String(500))
    manifest: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=_now)


class Process(Base):
    """A process group that may be running: `owner` started it, and its members carry `mark` in their environment."""

    __tablename__ = "pareto_process"

    mark: Mapped[str] = mapped_column(String(16), primary_key=True)
    owner: Mapped[str] = mapped_column(String(200))
    what: Mapped[str] = mapped_column(String(20))
    created_at: Mapped[datetime] = mapped_column(default=_now)


class FrontPoint(Base):
    """The feasible trials that no other feasible trial beats in the study's objectives, kept with every outcome."""

    __tablename__ = "pareto_front"

    study: Mapped[str] = mapped_column(String(200), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    tps: Mapped[float]
    tps_low: Mapped[float]
    tps_high: Mapped[float]
    ppl: Mapped[float]
    figures: Mapped[dict[str, Any] | None]
    setting: Mapped[dict[str, Any]]
    card: Mapped[str | None] = mapped_column(String(200))
    simulated: Mapped[bool]
