"""The life of one trial: apply, gate, speed, outcome.

A `Laboratory` holds the worker and what the study has learned so far (native values, reference, memory); it
turns a setting into an `Outcome` and writes every stage to the store. It knows nothing of Optuna.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from search import gate, speed
from search.data import Prompt, Record
from search.engine.process import R, Worker, WorkerError
from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Loaded, Request, Score, Scored, Setting
from search.errors import SearchError
from search.knobs import DRAFTS, canonical, quality_part, words
from search.spec import StudySpec
from search.store import REFERENCE, Environment, Measurement, Outcome, PromptTimingRow, Store
from search.store.store import setting_key

LOAD_TIMEOUT_S = 1800.0
ANSWER_TIMEOUT_S = 300.0
PROBE_TOKENS = 24  # decoded after every change: warms up, and lets K be counted
MIN_PROMPTS = 6  # timed before an interval is believed
REPEATED_PROMPTS = 8  # of the reference, timed twice for the noise
SAME_NLL = 1e-6  # nats a token: two scorings of one quality setting agree within this


class Observer(Protocol):
    """Who is told what goes on."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """A stage of a trial went on by one step."""


@dataclass(frozen=True)
class GateResult:
    """Perplexity of a setting over all gate records, and whether it was scored for this trial."""

    ppl: float
    measurement: Measurement


class Laboratory:
    """One worker and one study's measurements. A context manager: leaving it ends the worker."""

    def __init__(
        self, spec: StudySpec, engine: str, store: Store, logs: Path, observer: Observer, seed: int = 0
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._store = store
        self._logs = logs
        self._observer = observer
        self._seed = seed
        self._prompts = spec.prompts()
        self._records = spec.records()
        self._worker: Worker | None = None
        self._loaded: Loaded | None = None
        self._environment_id = 0
        self._reference: Outcome | None = None
        self._noise = 0.0
        self._anchors: list[dict[str, float]] = []
        self._memory_holds: bool | None = None
        self.engine_starts = 0

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_worker()

    @property
    def native(self) -> Setting:
        """What the model declares for each knob; starts the worker if there is none."""
        return self._start().native

    @property
    def ceiling(self) -> gate.Ceiling:
        """The perplexity ceiling; a ratio needs the reference measured."""
        if self._spec.gate.ppl is not None:
            return gate.Ceiling(self._spec.gate.ppl, f"ppl {self._spec.gate.ppl:g}")
        assert self._reference is not None and self._reference.ppl is not None
        assert self._spec.gate.ratio is not None
        ratio = self._spec.gate.ratio
        return gate.Ceiling(ratio * self._reference.ppl, f"{ratio:g} × the reference's {self._reference.ppl:.4f}")

    # The reference --------------------------------------------------------------------------------------

    def measure_reference(self) -> Outcome:
        """Measure the reference setting (native window and top-k, no drafts), or take it from the store.

        Raises:
            SearchError: it cannot be measured, or is itself over the ceiling.
        """
        if self._store.outcome(REFERENCE) is None:
            self._measure_reference()
        self._reference = self._store.outcome(REFERENCE)
        assert self._reference is not None
        self._recall()
        ppl = self._reference.ppl
        assert ppl is not None
        if gate.violation(ppl, self.ceiling) > 0:
            raise SearchError(
                f"The reference setting itself has perplexity {ppl:.4f}, over the ceiling of "
                f"{self.ceiling.ppl:.4f}: no setting can be expected to pass. Raise gate.ceiling (or --ppl-ceiling)."
            )
        return self._reference

    def _measure_reference(self) -> None:
        started = time.perf_counter()
        setting = canonical({DRAFTS: 0}, self.native)
        try:
            effective = self._apply(REFERENCE, setting)
            gated = self._gate(REFERENCE, setting, effective)
            timed = self._time_prompts(REFERENCE, setting, self._prompts)
            again = self._time_prompts(REFERENCE, setting, self._prompts[:REPEATED_PROMPTS])
        except WorkerError as error:
            raise SearchError(f"The reference setting could not be measured: {error}") from error
        seconds = {t.prompt_id: t.latency_s for t in timed}
        noise = speed.relative_noise(seconds, {t.prompt_id: t.latency_s for t in again})
        found = speed.estimate(_timings(timed), [seconds], noise)
        figures = {"noise": noise, **_speed_figures(found, timed)}
        outcome = self._outcome(REFERENCE, setting, started, "COMPLETE", ppl=gated.ppl, found=found)
        rows = [
            gated.measurement,
            self._speed_row(REFERENCE, setting, effective, timed, figures, "done"),
            self._speed_row(REFERENCE, setting, effective, again, {}, "repeat"),
        ]
        self._store.finish(outcome, rows)

    def _recall(self) -> None:
        """Take up what the store knows of the study: noise, anchors, whether the gate's memory holds."""
        row = self._store.measurements("speed", "done", REFERENCE)[0]
        self._noise = float(row.figures["noise"])
        for measured in self._store.measurements("speed", "done"):
            if len(measured.timings) == len(self._prompts):
                self._anchors.append({t.prompt: t.latency_s for t in measured.timings})
        for proof in self._store.measurements("gate", "proof"):
            self._memory_holds = float(proof.figures["shift"]) <= SAME_NLL

    # A trial --------------------------------------------------------------------------------------------

    def run(self, trial: int, setting: Mapping[str, Any], slot: int) -> Outcome:
        """Measure one setting; the outcome and every stage's row are in the store when this returns.

        Raises:
            SearchError: no engine can be started any more.
        """
        started = time.perf_counter()
        asked = canonical(setting, self.native)
        known = self._store.measured(asked)
        if known is not None:
            outcome = self._reused(trial, known, started)
            self._store.finish(outcome, slot=slot)
            return outcome
        rows: list[Measurement] = []
        try:
            outcome = self._measure(trial, asked, rows, started)
        except WorkerError as error:
            if error.fatal:
                self._end_worker()
            outcome = self._outcome(trial, asked, started, "FAIL", reason=f"{error.kind}: {error}")
        self._store.finish(outcome, rows, slot if outcome.state != "FAIL" else None)
        return outcome

    def _measure(self, trial: int, setting: Setting, rows: list[Measurement], started: float) -> Outcome:
        effective = self._apply(trial, setting)
        gated = self._gate(trial, setting, effective)
        rows.append(gated.measurement)
        over = gate.violation(gated.ppl, self.ceiling)
        if over > 0:
            reason = f"perplexity {gated.ppl:.4f} is over the ceiling of {self.ceiling.ppl:.4f}"
            return self._outcome(trial, setting, started, "PRUNED", ppl=gated.ppl, reason=reason)
        timed, found, remark = self._speed(trial, setting, effective, gated.ppl)
        rows.append(self._speed_row(trial, setting, effective, timed, _speed_figures(found, timed), "done"))
        return self._outcome(trial, setting, started, "COMPLETE", ppl=gated.ppl, found=found, reason=remark)

    # Stages ---------------------------------------------------------------------------------------------

    def _apply(self, trial: int, setting: Setting) -> Setting:
        """Put the knobs to `setting`; returns what was read back, which must be what was asked."""
        self._observer.stage(trial, setting, "apply", 0, 1)
        self._start()
        probe = list(self._prompts[0].token_ids)
        applied = self._ask(Apply(setting=setting, probe=probe, probe_tokens=PROBE_TOKENS), Applied)
        acting = {name: applied.effective.get(name, "nothing") for name in setting}
        if acting != setting:
            assert self._worker is not None
            reason = f"asked for {words(setting)}, but the engine runs {words(acting)}"
            raise WorkerError("mismatch", reason, self._worker.log, fatal=False)
        return applied.effective

    def _gate(self, trial: int, setting: Setting, effective: Setting) -> GateResult:
        """Score the records that are not remembered; prove the memory once a study."""
        started = time.perf_counter()
        key = self._gate_key(setting)
        scores = self._store.remembered_scores(key)
        missing = [record for record in self._records if record.id not in scores]
        status = "done" if missing else "remembered"
        figures: dict[str, Any] = {}
        if not missing and self._memory_holds is None and trial != REFERENCE:
            status = "proof"
            again = self._score(trial, setting, self._records, key=None)
            figures["shift"] = gate.largest_shift(scores, again)
            self._memory_holds = figures["shift"] <= SAME_NLL
            if not self._memory_holds:
                self._observer.note(
                    "Perplexity is NOT decided by the quality knobs alone here (it moved by "
                    f"{figures['shift']:.2e} nats a token between two settings that share them): every setting is "
                    "scored from now on."
                )
                self._store.remember_scores(self._gate_key(setting), again)
                scores = again
        elif missing:
            scores |= self._score(trial, setting, missing, key)
        ppl = gate.perplexity(scores[record.id] for record in self._records)
        row = Measurement(
            study=self._store.study,
            trial=trial,
            environment_id=self._environment_id,
            stage="gate",
            status=status,
            setting=dict(setting),
            effective=dict(effective),
            figures={"ppl": ppl, "records": len(self._records), "scored": len(missing), **figures},
            wall_s=time.perf_counter() - started,
        )
        return GateResult(ppl, row)

    def _score(
        self, trial: int, setting: Setting, records: list[Record], key: str | None
    ) -> dict[str, gate.RecordScore]:
        """Score records one by one; with a `key` they are remembered, also those before an interruption."""
        scores: dict[str, gate.RecordScore] = {}
        try:
            for number, record in enumerate(records):
                self._observer.stage(trial, setting, "gate", number, len(records))
                request = Score(record=record.id, context=list(record.context), target=list(record.target))
                scored = self._ask(request, Scored)
                scores[record.id] = gate.RecordScore(scored.nll, scored.tokens)
        finally:
            if key is not None:
                self._store.remember_scores(key, scores)
        return scores

    def _speed(
        self, trial: int, setting: Setting, effective: Setting, ppl: float
    ) -> tuple[list[Decoded], speed.Throughput, str | None]:
        """Time tune prompts until the interval is narrow, or the trial can no longer reach the front."""
        first = self._first_with_drafts(setting)
        rivals = [o for o in self._store.outcomes() if o.state == "COMPLETE" and o.ppl is not None and o.ppl <= ppl]
        to_beat = max((o.tps_low for o in rivals if o.tps_low is not None), default=0.0)
        timed: list[Decoded] = []
        try:
            for number, prompt in enumerate(self._prompts):
                self._observer.stage(trial, setting, "speed", number, len(self._prompts))
                timed.append(self._time(prompt, setting))
                if len(timed) < MIN_PROMPTS or first:
                    continue
                found = self._estimate(timed)
                if found.high < to_beat:
                    return (
                        timed,
                        found,
                        f"stopped after {len(timed)} prompts: a known setting is faster and no worse",
                    )
                if max(found.high / found.tps, found.tps / found.low) - 1 <= self._spec.workload.precision:
                    return timed, found, None
        except KeyboardInterrupt:
            self._store.add(self._speed_row(trial, setting, effective, timed, {}, "interrupted"))
            raise
        self._anchors.append({t.prompt_id: t.latency_s for t in timed})
        return timed, self._estimate(timed), None

    def _first_with_drafts(self, setting: Setting) -> bool:
        """Whether only the reference has been timed on all prompts, and this setting drafts.

        Such a setting is timed on all of them: it shows which prompts are easy to draft, which the reference
        cannot, and so narrows the interval of every later trial.
        """
        return len(self._anchors) == 1 and setting.get(DRAFTS, 0) != 0

    def _time_prompts(self, trial: int, setting: Setting, prompts: list[Prompt]) -> list[Decoded]:
        timed = []
        for number, prompt in enumerate(prompts):
            self._observer.stage(trial, setting, "speed", number, len(prompts))
            timed.append(self._time(prompt, setting))
        return timed

    def _time(self, prompt: Prompt, setting: Setting) -> Decoded:
        """Decode one prompt; figures that cannot be true are refused."""
        request = Decode(
            prompt_id=prompt.id, prompt=list(prompt.token_ids), max_tokens=self._spec.workload.output_tokens
        )
        decoded = self._ask(request, Decoded)
        drafts = int(setting.get(DRAFTS, 0))
        wrong = None
        if decoded.tokens != self._spec.workload.output_tokens:
            wrong = f"{decoded.tokens} tokens instead of {self._spec.workload.output_tokens}"
        elif decoded.latency_s <= 0:
            wrong = f"a latency of {decoded.latency_s} s"
        elif decoded.draft_tokens != drafts * decoded.drafts or (drafts > 0 and decoded.drafts == 0):
            wrong = f"{decoded.draft_tokens} tokens drafted in {decoded.drafts} steps at K {drafts}"
        elif sum(decoded.accepted_per_pos) > min(decoded.draft_tokens, decoded.tokens):
            wrong = f"{sum(decoded.accepted_per_pos)} drafts accepted of {decoded.draft_tokens}"
        if wrong:
            assert self._worker is not None
            raise WorkerError("impossible-figure", f"prompt {prompt.id}: {wrong}", self._worker.log, fatal=False)
        return decoded

    # Rows -----------------------------------------------------------------------------------------------

    def _estimate(self, timed: list[Decoded]) -> speed.Throughput:
        return speed.estimate(_timings(timed), self._anchors, self._noise)

    def _speed_row(
        self,
        trial: int,
        setting: Setting,
        effective: Setting,
        timed: list[Decoded],
        figures: dict[str, Any],
        status: str,
    ) -> Measurement:
        return Measurement(
            study=self._store.study,
            trial=trial,
            environment_id=self._environment_id,
            stage="speed",
            status=status,
            setting=dict(setting),
            effective=dict(effective),
            figures=figures,
            wall_s=sum(t.latency_s for t in timed),
            timings=[
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
            ],
        )

    def _outcome(
        self,
        trial: int,
        setting: Setting,
        started: float,
        state: str,
        *,
        ppl: float | None = None,
        found: speed.Throughput | None = None,
        reason: str | None = None,
    ) -> Outcome:
        return Outcome(
            study=self._store.study,
            trial=trial,
            state=state,
            setting=dict(setting),
            setting_key=setting_key(setting),
            ppl=ppl,
            ceiling=self.ceiling.ppl if self._reference is not None else None,
            tps=found.tps if found else None,
            tps_low=found.low if found else None,
            tps_high=found.high if found else None,
            prompts=found.prompts if found else None,
            reused_from=None,
            reason=reason[:1000] if reason else None,
            wall_s=time.perf_counter() - started,
            simulated=self._engine == "simulated",
        )

    def _reused(self, trial: int, known: Outcome, started: float) -> Outcome:
        """The outcome of a setting that trial `known` has already measured."""
        found = None
        if known.tps is not None and known.tps_low is not None and known.tps_high is not None:
            found = speed.Throughput(known.tps, known.tps_low, known.tps_high, known.prompts or 0)
        reason = f"measured before, as trial {known.trial}"
        outcome = self._outcome(trial, known.setting, started, known.state, ppl=known.ppl, found=found, reason=reason)
        outcome.reused_from = known.trial
        return outcome

    # The worker -----------------------------------------------------------------------------------------

    def _gate_key(self, setting: Setting) -> str:
        """What a remembered score hangs on. Without a memory that holds, all knobs."""
        loaded = self._start()
        knobs = quality_part(setting) if self._memory_holds is not False else setting
        records = self._spec.definition()["gate.records"]
        text = repr((loaded.model_hash, loaded.build_hash, records, sorted(knobs.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _start(self) -> Loaded:
        """The running worker's `Loaded`; starts one if there is none.

        Raises:
            SearchError: the engine does not start.
        """
        if self._worker is not None and self._loaded is not None:
            return self._loaded
        self.engine_starts += 1
        self._observer.stage(REFERENCE, {}, "start", 0, 1)
        self._worker = Worker(self._engine, self._logs / f"worker-{time.strftime('%Y%m%d-%H%M%S')}.log")
        engine = self._spec.engine
        request = Load(
            model=engine.model,
            drafter=engine.drafter,
            args=engine.args,
            limits={knob.name: knob.largest for knob in self._spec.knobs},
            seed=self._seed,
        )
        try:
            self._loaded = self._worker.ask(request, Loaded, LOAD_TIMEOUT_S)
        except WorkerError as error:
            self._end_worker()
            raise SearchError(f"The engine did not start: {error} (log: {error.log})") from error
        self._environment_id = self._store.add(
            Environment(
                study=self._store.study,
                simulated=self._engine == "simulated",
                model_hash=self._loaded.model_hash,
                drafter_hash=self._loaded.drafter_hash,
                build_hash=self._loaded.build_hash,
                native=self._loaded.native,
                facts=self._loaded.environment,
                start_s=self._loaded.start_s,
            )
        )
        return self._loaded

    def _ask(self, request: Request, expect: type[R]) -> R:
        assert self._worker is not None
        return self._worker.ask(request, expect, ANSWER_TIMEOUT_S)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = self._loaded = None


def _timings(timed: list[Decoded]) -> list[speed.PromptTiming]:
    return [speed.PromptTiming(t.prompt_id, t.tokens, t.latency_s, t.output_hash) for t in timed]


def _speed_figures(found: speed.Throughput, timed: list[Decoded]) -> dict[str, Any]:
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
