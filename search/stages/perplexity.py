"""The gate stage: a setting's perplexity over the gate records, remembered by its quality knobs.

Where a study asks for it, agreement with the reference setting is measured in the same pass.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from search import agreement, builds, gate
from search.data import Record
from search.engine.protocol import Setting
from search.engine.session import EngineSession
from search.errors import SearchError
from search.gate import RecordScore
from search.gates import Finding
from search.knobs import quality_part
from search.spec import StudySpec
from search.stages.base import Observer, Stage, score
from search.store import REFERENCE, Measurement, Store

OTHER_BUILD = (
    "The model or the engine's build, vLLM's environment keys among it, is not the one that the study's reference was "
    "measured on, and their figures cannot be compared: start a new study (another --storage)."
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
        self._reference: dict[str, RecordScore] = {}
        self._shapes: dict[str, list[dict[int, float]]] = {}  # the reference's distributions, unpacked
        self._against = ""  # the setting that agreement is with
        self._limits = spec.gate.agreement.limits if spec.gate.agreement is not None else {}  # of agreement
        self._tokens = sum(len(record.target) for record in self._records.values())
        self._ceiling = float("nan")
        self._again: dict[str, float] = {}  # perplexity of the second scoring, by gate key
        self._spec = spec
        self._base = builds.base(spec.build_knobs)
        self._base_hash: str | None = None  # of the reference's model, where other models are searched too
        self._proofs: dict[str, list[bool]] = {}  # of the memory, by build: whether each held

    def recall(self, ceiling: float) -> None:
        """Take up what the store knows of the study; the reference must have been measured.

        Raises:
            SearchError: the reference was measured on another model or build than the one that runs now.
        """
        self._ceiling = ceiling
        (reference,) = self._store.measurements("gate", "done", REFERENCE)
        if "model" in self._base:
            began = next(e for e in self._store.environments() if e.id == reference.environment_id)
            self._base_hash = began.model_hash
        knobs = quality_part(reference.setting, self._spec.of_speed)
        self._against = repr(sorted(knobs.items()))
        self._reference = self._store.remembered_scores(self._key(knobs))
        if len(self._reference) < len(self._order):
            raise SearchError(OTHER_BUILD)
        self._shapes = {r: agreement.unpack(s.distributions) for r, s in self._reference.items() if s.distributions}
        self._recall_proof()
        self._recall_second_scorings()

    def _recall_proof(self) -> None:
        """Whether the memory was proved right, by this searcher or another."""
        self._proofs = {}
        for proof in self._store.measurements("gate", "proof"):
            self._proofs.setdefault(self._spec.build_key(proof.setting), []).append(proof.figures["shift"] <= SAME_NLL)

    def _recall_second_scorings(self) -> None:
        for measured in self._store.measurements("gate", "done"):
            if measured.figures.get("again"):
                self._again[self._setting_key(measured.setting)] = float(measured.figures["again"])

    def measure_reference(self, setting: Setting, effective: Setting, status: str = "done") -> Measurement:
        """The reference setting's perplexity over all records, as `figures["ppl"]` of a gate row."""
        started = time.perf_counter()
        self._against, self._shapes = repr(sorted(quality_part(setting, self._spec.of_speed).items())), {}
        key = self._setting_key(setting)
        scores = self._store.remembered_scores(key)
        missing = [record for record in self._order if record not in scores]
        scores |= self._score(REFERENCE, setting, missing, key)
        figures: dict[str, Any] = {"ppl": gate.perplexity(scores.values()), "records": len(scores)}
        figures["scored"] = len(missing)
        if self._limits:
            figures |= {"scores": key, **{f.gate: f.figure for f in self._agreement(scores)}}
        return self._row(REFERENCE, "gate", status, setting, effective, figures, time.perf_counter() - started)

    def measure(self, trial: int, setting: Setting, effective: Setting) -> tuple[list[Finding], Measurement]:
        """Score records until it is known what the gates over them say, and no further.

        Records remembered under the setting's quality knobs are not scored again, but for one setting of each build,
        in reverse order: that proves that perplexity hangs neither on the speed knobs nor on the order of records. If
        it does, that build's scores are kept apart, and if it still does then, all knobs count.

        Returns:
            What perplexity says, then what is found of agreement; and the stage's row.

        Raises:
            WorkerError: a record could not be scored.
        """
        started = time.perf_counter()
        key = self._setting_key(setting)
        scores = self._store.remembered_scores(key)
        status, scored = "remembered", 0
        figures: dict[str, Any] = {}
        if len(scores) == len(self._order) and self._memory(setting)[1] is None:
            self._recall_proof()
        if len(scores) == len(self._order) and self._memory(setting)[1] is None:
            status = "proof"
            again = self._score(trial, setting, self._order[::-1])
            scored, figures["shift"] = len(again), gate.largest_shift(scores, again)
            holds, apart = figures["shift"] <= SAME_NLL, self._memory(setting)[0]
            self._proofs.setdefault(self._spec.build_key(setting), []).append(holds)
            if not holds:
                self._forget(figures["shift"], own=not apart and self._memory(setting)[0])
                key, scores = self._setting_key(setting), again
                self._store.remember_scores(key, scores)
        if not scores or not self._decided(scores):
            status = "done"
            known = len(scores)
            missing = [record for record in self._order if record not in scores]
            scores = self._score(trial, setting, missing, key, scores)
            scored = len(scores) - known
        verdict, others = self._judge(scores), self._agreement(scores)
        refused = any(finding.outcome == "over" for finding in others)
        if verdict.used == verdict.of and gate.near(verdict.ppl, self._ceiling) and not refused:
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
            **{finding.gate: finding.figure for finding in others},
        }
        wall_s = time.perf_counter() - started
        found = [self._of_perplexity(verdict), *others]
        return found, self._row(trial, "gate", status, setting, effective, figures, wall_s)

    def of_reference(self, row: Measurement, ceiling: float) -> list[Finding]:
        """What the gates over the records say of the reference setting, whose `row` this is."""
        ppl = row.figures["ppl"]
        outcome: Literal["over", "under"] = "over" if ppl > ceiling else "under"
        itself = agreement.Agreement(self._tokens, 0.0)
        found = agreement.judge(itself, self._tokens, self._tokens, self._limits)
        return [Finding("ppl", outcome, ppl, ceiling, ppl - ceiling, ""), *found]

    def _of_perplexity(self, verdict: gate.Verdict) -> Finding:
        """A verdict as a finding: over too if two scorings of all records lie on different sides of the ceiling."""
        torn = verdict.outcome == "undecided" and verdict.used == verdict.of
        outcome: Literal["over", "under", "undecided"] = "over" if torn else verdict.outcome
        ceiling = self._ceiling
        return Finding("ppl", outcome, verdict.ppl, ceiling, verdict.excess, verdict.reason(ceiling))

    def _decided(self, scores: Mapping[str, RecordScore]) -> bool:
        """Whether the records scored so far refuse the setting, or are all."""
        verdict = self._judge(scores)
        if verdict.outcome == "over" or verdict.used == verdict.of:
            return True
        return any(finding.outcome == "over" for finding in self._agreement(scores))

    def _agreement(self, scores: Mapping[str, RecordScore]) -> list[Finding]:
        """What is found of agreement over the first records of the order, if the study asks for it."""
        used = [scores[r] for r in itertools.takewhile(scores.__contains__, self._order)]
        agrees = agreement.Agreement(sum(s.top1 or 0 for s in used), math.fsum(s.kl or 0.0 for s in used))
        return agreement.judge(agrees, sum(s.tokens for s in used), self._tokens, self._limits)

    def _judge(self, scores: Mapping[str, RecordScore]) -> gate.Verdict:
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
        known: Mapping[str, RecordScore] | None = None,
    ) -> dict[str, RecordScore]:
        """Score records one by one, after those `known`; returns both.

        With a `key` they are remembered every REMEMBER_S and at the end, also at an untimely one: what was scored need
        not be scored again. With `known` scores, even none, it ends as soon as a gate over the records refuses them.
        """
        scores = dict(known or {})
        new: dict[str, RecordScore] = {}
        remembered_at = time.monotonic()
        try:
            for number, record in enumerate(map(self._records.__getitem__, records)):
                self._observer.stage(trial, setting, "gate", number, len(records))
                scores[record.id] = new[record.id] = self._score_one(record)
                if key is not None and time.monotonic() - remembered_at > REMEMBER_S:
                    self._store.remember_scores(key, new)
                    new, remembered_at = {}, time.monotonic()
                if known is not None and self._decided(scores):
                    break
        finally:
            if key is not None and new:
                self._store.remember_scores(key, new)
        return scores

    def _score_one(self, record: Record) -> RecordScore:
        """A record's score; where the study asks for it, with how it agrees with the reference setting's."""
        if not self._limits:
            return score(self._session, record)
        found = score(self._session, record, agreement.TOP)
        assert found.distributions is not None
        if not self._shapes:  # this is the reference
            return replace(found, top1=found.tokens, kl=0.0)
        agrees = agreement.compare(self._shapes[record.id], agreement.unpack(found.distributions))
        return RecordScore(found.nll, found.tokens, agrees.top1, agrees.kl)

    def _forget(self, shift: float, *, own: bool) -> None:
        moved = f"it moved by {shift:.2e} nats a token between two scorings of one setting"
        if own:
            self._observer.note(
                f"An engine built so has perplexities of its own ({moved}): they are scored anew for it."
            )
            return
        self._observer.note(
            f"Perplexity is NOT decided by the quality knobs alone here, or hangs on the order of records ({moved}): "
            "every setting is scored from now on."
        )

    def _memory(self, setting: Setting) -> tuple[bool, bool | None]:
        """Whether a setting's build has scores of its own, and whether quality knobs decide them (None: not proved).

        The first proof of another build than the reference's is held against what that one scored.
        """
        key = self._spec.build_key(setting)
        proofs = self._proofs.get(key, [])
        own = key != self._spec.build_key(self._base) and proofs[:1] == [False]
        decided = proofs[1:] if own else proofs
        return own, decided[0] if decided else None

    def _setting_key(self, setting: Setting) -> str:
        own, holds = self._memory(setting)
        quality = quality_part(setting, self._spec.of_speed) | (self._spec.build_of(setting) if own else {})
        return self._key(setting if holds is False else quality)

    def _key(self, knobs: Setting) -> str:
        """What a remembered score hangs on: model, build, records and quality knobs (or all knobs).

        With agreement also on the setting that it is with.
        """
        loaded = self._session.loaded()
        of_base = self._base_hash is not None and knobs.get("model") == self._base["model"]
        model_hash = self._base_hash if of_base else loaded.model_hash
        text = repr((model_hash, loaded.build_hash, self._records_hash, sorted(knobs.items())))
        if self._limits:
            text += f" {agreement.TOP} {self._against}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
