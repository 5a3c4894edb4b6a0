"""The gate stage: a setting's perplexity over the gate records, remembered by its quality knobs."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from search import gate
from search.engine.protocol import Setting
from search.engine.session import EngineSession
from search.errors import SearchError
from search.knobs import quality_part
from search.spec import StudySpec
from search.stages.base import Observer, Stage, score
from search.store import REFERENCE, Measurement, Store

OTHER_BUILD = (
    "The model or the engine's build is not the one that the study's reference was measured on, and their figures "
    "cannot be compared: start a new study (another --storage)."
)
REMEMBER_S = 0.5  # between two writes of scores: a GPU scores a record in a few milliseconds
SAME_NLL = 1e-6  # nats a token: two scorings of one quality setting agree within this


class PerplexityStage(Stage):
    """Scores the gate records. `recall` must have run before a trial is measured."""

    def __init__(self, spec: StudySpec, session: EngineSession, store: Store, observer: Observer) -> None:
        super().__init__(session, store, observer)
        self._records = {record.id: record for record in spec.records()}
        self._records_hash = spec.definition()["gate.records"]
        self._order = sorted(self._records)
        random.Random(self._records_hash).shuffle(self._order)  # once a study, before any record is seen
        self._reference: dict[str, gate.RecordScore] = {}
        self._ceiling = float("nan")
        self._again: dict[str, float] = {}  # perplexity of the second scoring, by gate key
        self._memory_holds: bool | None = None  # None: not proved yet

    def recall(self, ceiling: float) -> None:
        """Take up what the store knows of the study; the reference must have been measured.

        Raises:
            SearchError: the reference was measured on another model or build than the one that runs now.
        """
        self._ceiling = ceiling
        (reference,) = self._store.measurements("gate", "done", REFERENCE)
        self._reference = self._store.remembered_scores(self._key(quality_part(reference.setting)))
        if len(self._reference) < len(self._order):
            raise SearchError(OTHER_BUILD)
        self._recall_proof()
        self._recall_second_scorings()

    def _recall_proof(self) -> None:
        """Whether the memory was proved right, by this searcher or another."""
        for proof in self._store.measurements("gate", "proof"):
            self._memory_holds = float(proof.figures["shift"]) <= SAME_NLL

    def _recall_second_scorings(self) -> None:
        for measured in self._store.measurements("gate", "done"):
            if measured.figures.get("again"):
                self._again[self._setting_key(measured.setting)] = float(measured.figures["again"])

    def measure_reference(self, setting: Setting, effective: Setting, status: str = "done") -> Measurement:
        """The reference setting's perplexity over all records, as `figures["ppl"]` of a gate row."""
        started = time.perf_counter()
        key = self._setting_key(setting)
        scores = self._store.remembered_scores(key)
        missing = [record for record in self._order if record not in scores]
        scores |= self._score(REFERENCE, setting, missing, key)
        figures = {"ppl": gate.perplexity(scores.values()), "records": len(scores), "scored": len(missing)}
        return self._row(REFERENCE, "gate", status, setting, effective, figures, time.perf_counter() - started)

    def measure(self, trial: int, setting: Setting, effective: Setting) -> tuple[gate.Verdict, Measurement]:
        """Score records until the verdict stands, and no further.

        Records remembered under the setting's quality knobs are not scored again, but for one setting a study, in
        reverse order: that proves that perplexity hangs neither on the speed knobs nor on the order of records. If
        it does, all knobs count from then on.

        Raises:
            WorkerError: a record could not be scored.
        """
        started = time.perf_counter()
        key = self._setting_key(setting)
        scores = self._store.remembered_scores(key)
        status, scored = "remembered", 0
        figures: dict[str, Any] = {}
        if len(scores) == len(self._order) and self._memory_holds is None:
            self._recall_proof()
        if len(scores) == len(self._order) and self._memory_holds is None:
            status = "proof"
            again = self._score(trial, setting, self._order[::-1])
            scored, figures["shift"] = len(again), gate.largest_shift(scores, again)
            self._memory_holds = figures["shift"] <= SAME_NLL
            if not self._memory_holds:
                self._forget(figures["shift"])
                key, scores = self._setting_key(setting), again
                self._store.remember_scores(key, scores)
        verdict = self._judge(scores) if scores else None
        if verdict is None or (verdict.outcome == "undecided" and verdict.used < verdict.of):
            status = "done"
            known = len(scores)
            missing = [record for record in self._order if record not in scores]
            scores = self._score(trial, setting, missing, key, scores)
            scored, verdict = len(scores) - known, self._judge(scores)
        if verdict.used == verdict.of and gate.near(verdict.ppl, self._ceiling):
            if key not in self._again:
                self._recall_second_scorings()
            if key not in self._again:
                status = "done"
                twice = self._score(trial, setting, self._order[::-1])
                scored += len(twice)
                self._again[key] = gate.perplexity(twice.values())
            verdict = gate.confirmed(verdict, self._again[key], self._ceiling)
        figures |= {
            "verdict": verdict.outcome,
            "ppl": verdict.ppl,
            "ratio": verdict.ratio,
            "ratio_low": verdict.ratio_low,
            "records": verdict.used,
            "scored": scored,
            "again": verdict.again,
        }
        wall_s = time.perf_counter() - started
        return verdict, self._row(trial, "gate", status, setting, effective, figures, wall_s)

    def _judge(self, scores: Mapping[str, gate.RecordScore]) -> gate.Verdict:
        try:
            return gate.judge(self._reference, scores, self._order, self._ceiling)
        except ValueError as error:
            raise self._session.refuse("impossible-figure", f"record {error}") from error

    def _score(
        self,
        trial: int,
        setting: Setting,
        records: Sequence[str],
        key: str | None = None,
        known: Mapping[str, gate.RecordScore] | None = None,
    ) -> dict[str, gate.RecordScore]:
        """Score records one by one, after those `known`; returns both.

        With a `key` they are remembered every REMEMBER_S and at the end, also at an untimely one: what was scored need
        not be scored again. With `known` scores, even none, it ends as soon as the verdict is over.
        """
        scores = dict(known or {})
        new: dict[str, gate.RecordScore] = {}
        remembered_at = time.monotonic()
        try:
            for number, record in enumerate(map(self._records.__getitem__, records)):
                self._observer.stage(trial, setting, "gate", number, len(records))
                scores[record.id] = new[record.id] = score(self._session, record)
                if key is not None and time.monotonic() - remembered_at > REMEMBER_S:
                    self._store.remember_scores(key, new)
                    new, remembered_at = {}, time.monotonic()
                if known is not None and self._judge(scores).outcome == "over":
                    break
        finally:
            if key is not None and new:
                self._store.remember_scores(key, new)
        return scores

    def _forget(self, shift: float) -> None:
        self._observer.note(
            "Perplexity is NOT decided by the quality knobs alone here, or hangs on the order of records (it moved by "
            f"{shift:.2e} nats a token between two scorings of one setting): every setting is scored from now on."
        )

    def _setting_key(self, setting: Setting) -> str:
        return self._key(setting if self._memory_holds is False else quality_part(setting))

    def _key(self, knobs: Setting) -> str:
        """What a remembered score hangs on: model, build, records and quality knobs (or all knobs)."""
        loaded = self._session.loaded()
        text = repr((loaded.model_hash, loaded.build_hash, self._records_hash, sorted(knobs.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
