"""The three stages of a trial: apply the knobs, gate on perplexity, time prompts.

`Stages` decides when a stage has seen enough; what it returns are rows for the store, not yet written.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from search import gate, speed
from search.data import Prompt, Record
from search.engine.protocol import Applied, Apply, Decode, Decoded, Score, Scored, Setting
from search.engine.session import EngineSession
from search.knobs import DRAFTS, quality_part, words
from search.spec import StudySpec
from search.store import REFERENCE, Measurement, PromptTimingRow, Store

PROBE_TOKENS = 24  # decoded after every change: warms up, and lets K be counted
MIN_PROMPTS = 6  # timed before an interval is believed
REPEATED_PROMPTS = 8  # of the reference, timed twice for the noise
CONTROL_PROMPTS = 2  # decoded at the reference setting between trials, to see the machine drift
CONTROL_AGE_S = 3.0  # a control older than this no longer says how fast the machine is now
SAME_NLL = 1e-6  # nats a token: two scorings of one quality setting agree within this


class Observer(Protocol):
    """Who is told what goes on."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """A stage of a trial went on by one step."""


class Stages:
    """The stages of a study's trials, with what earlier ones taught: noise, anchors, whether memory holds."""

    def __init__(self, spec: StudySpec, session: EngineSession, store: Store, observer: Observer) -> None:
        self._session = session
        self._store = store
        self._observer = observer
        self._prompts = spec.prompts()
        self._records = spec.records()
        self._records_hash = spec.definition()["gate.records"]
        self._output_tokens = spec.workload.output_tokens
        self._precision = spec.workload.precision
        self._most_prompts = spec.workload.prompts_per_trial or len(self._prompts)
        self._noise = 0.0
        self._reference: Setting = {}
        self._reference_s: dict[str, float] = {}
        self._control: tuple[float, float] | None = None  # when, and the drift then
        self._anchors: list[dict[str, float]] = []
        self._memory_holds: bool | None = None

    def recall(self) -> None:
        """Take up what the store knows of the study; the reference must have been measured."""
        reference = self._store.measurements("speed", "done", REFERENCE)[0]
        self._noise = float(reference.figures["noise"])
        self._reference = reference.setting
        self._reference_s = {t.prompt: t.latency_s for t in reference.timings}
        for measured in self._store.measurements("speed", "done"):
            if len(measured.timings) == len(self._prompts):
                self._anchors.append({t.prompt: t.latency_s for t in measured.timings})
        for proof in self._store.measurements("gate", "proof"):
            self._memory_holds = float(proof.figures["shift"]) <= SAME_NLL

    # Apply ----------------------------------------------------------------------------------------------

    def apply(self, trial: int, setting: Setting) -> Setting:
        """Put the knobs to `setting`; returns what was read back.

        Raises:
            WorkerError: a knob does not act as it was asked to.
        """
        self._session.loaded()
        self._observer.stage(trial, setting, "apply", 0, 1)
        probe = list(self._prompts[0].token_ids)
        applied = self._session.ask(Apply(setting=setting, probe=probe, probe_tokens=PROBE_TOKENS), Applied)
        acting = {name: applied.effective.get(name, "nothing") for name in setting}
        if acting != setting:
            reason = f"asked for {words(setting)}, but the engine runs {words(acting)}"
            raise self._session.refuse("mismatch", reason)
        return applied.effective

    def _switch(self, setting: Setting) -> None:
        """Put the knobs to `setting` without a probe: K shows in every prompt that is timed then."""
        applied = self._session.ask(Apply(setting=setting, probe=[], probe_tokens=0), Applied)
        if any(applied.effective.get(name, value) != value for name, value in setting.items()):
            raise self._session.refuse("mismatch", f"asked for {words(setting)}, runs {words(applied.effective)}")

    # Gate -----------------------------------------------------------------------------------------------

    def measure_ppl(self, trial: int, setting: Setting, effective: Setting) -> Measurement:
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

    # Speed ----------------------------------------------------------------------------------------------

    def measure_reference_tps(self, setting: Setting, effective: Setting) -> tuple[speed.Throughput, list[Measurement]]:
        """Time the reference setting on every tune prompt, and on some again for the noise."""
        timed = self._time_all(REFERENCE, setting, self._prompts)
        again = self._time_all(REFERENCE, setting, self._prompts[:REPEATED_PROMPTS])
        noise = speed.relative_noise(_seconds(timed), _seconds(again))
        found = speed.estimate(_timings(timed), [_seconds(timed)], noise)
        figures = {"noise": noise, **_figures(found, timed)}
        return found, [
            self._speed_row(REFERENCE, "done", setting, effective, figures, timed),
            self._speed_row(REFERENCE, "repeat", setting, effective, {}, again),
        ]

    def measure_tps(
        self, trial: int, setting: Setting, effective: Setting, to_beat: float
    ) -> tuple[speed.Throughput, Measurement, str | None]:
        """Time tune prompts until the interval is narrow, or ends below `to_beat` (tokens per second).

        The first setting with drafts is timed on all of them: it shows which prompts are easy to draft, which
        the reference cannot, and so narrows the interval of every later trial.

        A machine drifts by more than settings differ. Control prompts at the reference setting, before and after,
        say by how much, and the estimate is what the trial would have shown on the machine as it was when the
        reference was measured; the uncorrected figure is kept as `tps_raw`.

        Returns:
            The estimate, its row, and a remark where the trial was stopped because it is beaten.
        """
        all_of_them = len(self._anchors) == 1 and setting.get(DRAFTS, 0) != 0
        timed: list[Decoded] = []
        remark = None
        before = self._drift(trial, fresh_is_enough=True)
        self._switch(setting)
        try:
            for number, prompt in enumerate(self._prompts):
                self._observer.stage(trial, setting, "speed", number, len(self._prompts))
                timed.append(self._time(prompt, setting))
                if len(timed) < MIN_PROMPTS or all_of_them:
                    continue
                found = self._estimate(timed, [before])
                if found.high < to_beat:
                    remark = f"stopped after {len(timed)} prompts: a known setting is faster and no worse"
                if remark or found.half_width <= self._precision or len(timed) >= self._most_prompts:
                    break
        except KeyboardInterrupt:
            self._store.add(self._speed_row(trial, "interrupted", setting, effective, {}, timed))
            raise
        if len(timed) == len(self._prompts):
            self._anchors.append(_seconds(timed))
        drifts = [before, self._drift(trial, fresh_is_enough=False)]
        found = self._estimate(timed, drifts)
        figures = {**_figures(found, timed), "drift": drifts, "tps_raw": speed.throughput(_timings(timed))}
        return found, self._speed_row(trial, "done", setting, effective, figures, timed), remark

    def _drift(self, trial: int, *, fresh_is_enough: bool) -> float:
        """How much slower the machine is now than when the reference was measured (1.1: 10 % slower)."""
        if fresh_is_enough and self._control and time.monotonic() - self._control[0] < CONTROL_AGE_S:
            return self._control[1]
        self._switch(self._reference)
        now = self._time_all(trial, self._reference, self._prompts[:CONTROL_PROMPTS], stage="control")
        drift = speed.drift(self._reference_s, _seconds(now))
        self._control = (time.monotonic(), drift)
        return drift

    def _estimate(self, timed: list[Decoded], drifts: list[float]) -> speed.Throughput:
        """Throughput on the machine as it was for the reference; the control's own noise widens the interval."""
        drift = math.fsum(drifts) / len(drifts)
        control_noise = self._noise / math.sqrt(CONTROL_PROMPTS * len(drifts))
        timings = [replace(timing, latency_s=timing.latency_s / drift) for timing in _timings(timed)]
        return speed.estimate(timings, self._anchors, self._noise, control_noise)

    def _time_all(self, trial: int, setting: Setting, prompts: list[Prompt], stage: str = "speed") -> list[Decoded]:
        timed = []
        for number, prompt in enumerate(prompts):
            self._observer.stage(trial, setting, stage, number, len(prompts))
            timed.append(self._time(prompt, setting))
        return timed

    def _time(self, prompt: Prompt, setting: Setting) -> Decoded:
        """Decode one prompt; figures that cannot be true are refused."""
        request = Decode(prompt_id=prompt.id, prompt=list(prompt.token_ids), max_tokens=self._output_tokens)
        decoded = self._session.ask(request, Decoded)
        wrong = impossible(decoded, self._output_tokens, int(setting.get(DRAFTS, 0)))
        if wrong:
            raise self._session.refuse("impossible-figure", f"prompt {prompt.id}: {wrong}")
        return decoded

    # Rows -----------------------------------------------------------------------------------------------

    def _speed_row(
        self,
        trial: int,
        status: str,
        setting: Setting,
        effective: Setting,
        figures: dict[str, Any],
        timed: list[Decoded],
    ) -> Measurement:
        wall_s = sum(t.latency_s for t in timed)
        row = self._row(trial, "speed", status, setting, effective, figures, wall_s)
        row.timings = [
            PromptTimingRow(
                position=position,
                prompt=t.prompt_id,
                tokens=t.tokens,
                latency_s=t.latency_s,
                output_hash=t.output_hash,
                drafts=t.drafts,
                draft_tokens=t.draft_tokens,
                accepted_per_pos=t.accepted_per_pos,
            )
            for position, t in enumerate(timed)
        ]
        return row

    def _row(
        self,
        trial: int,
        stage: str,
        status: str,
        setting: Setting,
        effective: Setting,
        figures: dict[str, Any],
        wall_s: float,
    ) -> Measurement:
        return Measurement(
            study=self._store.study,
            trial=trial,
            environment_id=self._session.environment_id,
            stage=stage,
            status=status,
            setting=dict(setting),
            effective=dict(effective),
            figures=figures,
            wall_s=wall_s,
        )


def impossible(decoded: Decoded, tokens: int, drafts: int) -> str | None:
    """Why a timed prompt cannot be what it says, or None: `tokens` were asked for, at K = `drafts`."""
    accepted = sum(decoded.accepted_per_pos)
    if decoded.tokens != tokens:
        return f"{decoded.tokens} tokens instead of {tokens}"
    if decoded.latency_s <= 0:
        return f"a latency of {decoded.latency_s} s"
    if decoded.draft_tokens != drafts * decoded.drafts or (drafts > 0 and decoded.drafts == 0):
        return f"{decoded.draft_tokens} tokens drafted in {decoded.drafts} steps at K {drafts}"
    if accepted > decoded.draft_tokens:
        return f"{accepted} drafts accepted of {decoded.draft_tokens}"
    return None


def _timings(timed: list[Decoded]) -> list[speed.PromptTiming]:
    return [speed.PromptTiming(t.prompt_id, t.tokens, t.latency_s, t.output_hash) for t in timed]


def _seconds(timed: list[Decoded]) -> dict[str, float]:
    return {t.prompt_id: t.latency_s for t in timed}


def _figures(found: speed.Throughput, timed: list[Decoded]) -> dict[str, Any]:
    drafts = sum(t.drafts for t in timed)
    positions = sum(t.draft_tokens for t in timed) // drafts if drafts else 0  # an engine counts up to its largest K
    accepted = [sum(t.accepted_per_pos[i] for t in timed) for i in range(positions)]
    return {
        "tps": found.tps,
        "tps_low": found.low,
        "tps_high": found.high,
        "prompts": found.prompts,
        "acceptance_rate": speed.acceptance_rate(accepted, drafts),
        "accepted_a_step": sum(accepted) / drafts if drafts else 0.0,
        "output_hash": hashlib.sha256("".join(t.output_hash for t in timed).encode()).hexdigest()[:16],
    }
