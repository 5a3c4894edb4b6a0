"""The gate stage: a setting's perplexity over the gate records, remembered by its quality knobs."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from search import gate
from search.data import Record
from search.engine.protocol import Score, Scored, Setting
from search.engine.session import EngineSession
from search.knobs import quality_part
from search.spec import StudySpec
from search.stages.base import Observer, Stage
from search.store import REFERENCE, Measurement, Store

SAME_NLL = 1e-6  # nats a token: two scorings of one quality setting agree within this


class PerplexityStage(Stage):
    """Scores the gate records. `recall` must have run before a trial is measured."""

    def __init__(self, spec: StudySpec, session: EngineSession, store: Store, observer: Observer) -> None:
        super().__init__(session, store, observer)
        self._records = spec.records()
        self._records_hash = spec.definition()["gate.records"]
        self._memory_holds: bool | None = None  # None: not proved yet

    def recall(self) -> None:
        """Take up what the store knows of the study."""
        for proof in self._store.measurements("gate", "proof"):
            self._memory_holds = float(proof.figures["shift"]) <= SAME_NLL

    def measure(self, trial: int, setting: Setting, effective: Setting) -> Measurement:
        """Perplexity of `setting` over all gate records, as `figures["ppl"]` of a gate row.

        Records remembered under its quality knobs are not scored again, but for one setting a study: that
        proves that perplexity hangs on the quality knobs alone. If it does not, all knobs count from then on.
        """
        started = time.perf_counter()
        key = self._gate_key(setting)
        scores = self._store.remembered_scores(key)
        missing = [record for record in self._records if record.id not in scores]
        figures: dict[str, Any] = {"records": len(self._records), "scored": len(missing)}
        if missing:
            status = "done"
            scores |= self._score(trial, setting, missing, key)
        elif self._memory_holds is None and trial != REFERENCE:
            status = "proof"
            again = self._score(trial, setting, self._records, key=None)
            figures |= {"scored": len(again), "shift": gate.largest_shift(scores, again)}
            self._memory_holds = figures["shift"] <= SAME_NLL
            if not self._memory_holds:
                self._forget(figures["shift"])
                self._store.remember_scores(self._gate_key(setting), again)
                scores = again
        else:
            status = "remembered"
        figures["ppl"] = gate.perplexity(scores[record.id] for record in self._records)
        wall_s = time.perf_counter() - started
        return self._row(trial, "gate", status, setting, effective, figures, wall_s)

    def _score(
        self, trial: int, setting: Setting, records: list[Record], key: str | None
    ) -> dict[str, gate.RecordScore]:
        """Score records one by one; with a `key` they are remembered, also those before an interruption."""
        scores: dict[str, gate.RecordScore] = {}
        try:
            for number, record in enumerate(records):
                self._observer.stage(trial, setting, "gate", number, len(records))
                request = Score(record=record.id, context=list(record.context), target=list(record.target))
                scored = self._session.ask(request, Scored)
                if scored.tokens != len(record.target):
                    reason = f"record {record.id}: {scored.tokens} tokens scored of {len(record.target)}"
                    raise self._session.refuse("impossible-figure", reason)
                scores[record.id] = gate.RecordScore(scored.nll, scored.tokens)
        finally:
            if key is not None:
                self._store.remember_scores(key, scores)
        return scores

    def _forget(self, shift: float) -> None:
        self._observer.note(
            f"Perplexity is NOT decided by the quality knobs alone here (it moved by {shift:.2e} nats a token "
            "between two settings that share them): every setting is scored from now on."
        )

    def _gate_key(self, setting: Setting) -> str:
        """What a remembered score hangs on: model, build, records and quality knobs (or all knobs)."""
        loaded = self._session.loaded()
        knobs = setting if self._memory_holds is False else quality_part(setting)
        text = repr((loaded.model_hash, loaded.build_hash, self._records_hash, sorted(knobs.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
