"""The life of one trial: a setting in, an outcome out, every stage in the store. It knows nothing of Optuna."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from search import broken, builds
from search.card import card_of
from search.engine import gpu
from search.engine.process import WorkerError
from search.engine.protocol import KnobValue, Loaded, Setting
from search.engine.session import EngineSession, insist
from search.errors import SearchError
from search.gates import Finding
from search.knobs import DRAFTS, canonical
from search.objectives import DEFAULT, lacking
from search.spec import StudySpec
from search.stages import (
    CARD_PASSES,
    OTHER_BUILD,
    Observer,
    PerplexityStage,
    PlainStage,
    SpeedResult,
    TaskStage,
    ThroughputStage,
    apply,
    reference_passes,
)
from search.store import REFERENCE, Environment, Measurement, Outcome, Store, setting_key

T = TypeVar("T")
FAILURES_A_SETTING = 2  # for one cause, after which it is not tried any more


class Laboratory:
    """Measures the settings of one study. A context manager: leaving it ends the worker."""

    def __init__(
        self, spec: StudySpec, engine: str, store: Store, logs: Path, observer: Observer, seed: int = 0
    ) -> None:
        self._spec = spec
        self._store = store
        self._simulated = engine != "vllm"
        self._base = builds.base(spec.build_knobs)
        self._natives: dict[str, Setting] = {}  # what engines declared, by their build
        measured = [o for o in store.outcomes() if o.state != "FAIL"] if spec.build_knobs else []
        latest = max(measured, key=lambda o: o.trial, default=None)  # a search goes on with the build that it was at

        def announce() -> None:
            observer.stage(REFERENCE, {}, "start", 0, 1)

        self._session = EngineSession(
            engine,
            lambda setting: spec.load(setting, seed),
            self._base if latest is None else latest.setting,
            spec.limits,
            logs,
            store,
            announce,
            on_loaded=self._store_environment,
            on_end=self._store_end,
            note=observer.note,
        )
        self._perplexity = PerplexityStage(spec, self._session, store, observer)
        tasks = spec.gate.tasks
        self._tasks = TaskStage(spec, tasks, self._session, store, observer) if tasks is not None else None
        self._throughput = ThroughputStage(spec, self._session, store, observer)
        self.plain = PlainStage(self._session, store, observer)
        self._observer = observer
        self._probe = spec.prompts()[0]
        self._ceiling = float("nan")
        self._apply_s = 0.0  # of the last change
        self._card: str | None = None
        self._gated: int | None = None  # the trial whose gate was stored last

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.end()

    @property
    def native(self) -> Setting:
        """What the model declares for each live knob; starts the engine if there is none."""
        self._session.loaded()
        native = self._native_of(self._base)
        assert native is not None  # the first engine of a study is the reference's
        return native

    def _native_of(self, setting: Mapping[str, KnobValue]) -> Setting | None:
        """What the engine of a setting declares; None where there has been none of that build."""
        key = self._spec.build_key(setting)
        if key not in self._natives:
            self._natives |= {
                self._spec.build_key(e.facts.get("build", {})): e.native for e in self._store.environments()
            }
        return self._natives.get(key)

    def spelled(self, setting: Mapping[str, KnobValue]) -> Setting:
        """A setting in its one spelling, as far as that can be told without starting an engine."""
        return canonical(setting, self._native_of(setting) or {})

    @property
    def engine_starts(self) -> int:
        """How many engines were started."""
        return self._session.starts

    @property
    def card(self) -> str | None:
        """The card that is measured on; starts the engine if there is none."""
        self._session.loaded()
        return self._environment().card

    @property
    def build(self) -> Setting:
        """The build of the engine that runs, or will."""
        return self._session.build

    def slower(self, build: Setting) -> float:
        """How many times as long the reference setting takes on an engine built so; 1 where it is not known."""
        return self._throughput.slower(build)

    def end_worker(self) -> None:
        """End the worker; a later measurement starts another."""
        self._session.end()

    def measure_reference(self) -> None:
        """Measure the reference setting (native window and top-k, no drafts), unless the store has it.

        Raises:
            SearchError: it cannot be measured, or does not pass its own gates.
        """
        if self._store.outcome(REFERENCE) is None:
            self._measure_reference()
        reference = self._store.outcome(REFERENCE)
        assert reference is not None and reference.ppl is not None and reference.ceiling is not None
        self._ceiling = reference.ceiling  # one for the study, whatever other cards say
        if reference.ppl > self._ceiling:
            raise SearchError(
                f"The reference setting itself has perplexity {reference.ppl:.4f}, over the ceiling of "
                f"{self._ceiling:.4f}: no setting can be expected to pass. Raise gate.ceiling (or --ppl-ceiling)."
            )
        exact = (reference.gates or {}).get("exact")
        if exact and exact["excess"] > 0:
            raise SearchError(
                f"The reference setting itself answers {exact['figure']:.4f} of the tasks as expected, and "
                f"{exact['limit']:.4f} are asked for: no setting can be expected to pass. Lower gate.tasks.exact, or "
                "ask for a drop instead."
            )

    def recall(self) -> None:
        """Take up what is known of the study; a card that is new to it measures the reference setting first.

        Raises:
            SearchError: the model or the engine's build is not the one that the reference was measured on, or the
                reference cannot be measured on this card.
        """
        self._session.loaded()
        self._card = self._environment().card
        passes = reference_passes(self._store, self._card)
        if not passes:
            self._measure_card()
            passes = reference_passes(self._store, self._card)
        self._perplexity.recall(self._ceiling)
        if self._tasks is not None:
            self._tasks.recall()
        assert self._card is not None
        self._throughput.recall(self._card, passes)

    def _measure_card(self) -> None:
        """Measure the reference setting on this card, to put its figures on one scale with the first card's."""
        first = reference_passes(self._store, None)[0]
        began = next(e for e in self._store.environments() if e.id == first.environment_id)
        self._session.use(first.setting)
        self._session.loaded()
        check_same_build(began, self._environment())

        def measure() -> list[Measurement]:
            effective = self._apply(REFERENCE, first.setting)
            with self._session.within("gate"):
                gated = self._perplexity.measure_reference(first.setting, effective, "card")
            with self._session.within("speed"):
                found, passes = self._throughput.measure_reference(first.setting, effective, CARD_PASSES)
            _require_objectives(found, self._spec.objectives)
            return [gated, *passes]

        try:
            self._store.add_all(self.insist("The reference setting", measure))
        except WorkerError as error:
            raise SearchError(f"The reference setting could not be measured on {self._card}: {error}") from error

    def _environment(self) -> Environment:
        return next(e for e in self._store.environments() if e.id == self._session.environment_id)

    def run(self, trial: int, setting: Mapping[str, Any], slot: int, *, on_all: bool = False) -> Outcome:
        """Measure one setting; the outcome and every stage's row are in the store when this returns.

        Where the machine is at fault and not the setting (a worker that was killed from outside, say), it is measured
        again. A setting that failed twice for one cause is not measured any more.

        With `on_all` it is timed on all tune prompts, also if it was measured before.

        Raises:
            SearchError: no engine can be started any more, or the store cannot be written: rows then wait in the spool.
        """
        started = time.perf_counter()
        rows: list[Measurement] = []
        try:
            if self._native_of(setting) is None:
                self._start_for(setting)
        except WorkerError as error:
            outcome = self._failed(trial, canonical(setting, {}), started, error)
            self._store.finish(outcome, rows, None)
            return outcome
        asked = self.spelled(setting)
        known = None if on_all else self._store.measured(asked)
        if known is not None:
            outcome = self._reused(trial, known, started)
        elif (cause := self._hopeless(asked)) is not None:
            outcome = self._outcome(
                trial, asked, started, "FAIL", reason=f"not tried: it failed twice before ({cause})"
            )
            outcome.failure = cause
        else:
            try:
                outcome = self.insist(f"Trial {trial}", lambda: self._measure(trial, asked, rows, started, on_all))
            except WorkerError as error:
                outcome = self._failed(trial, asked, started, error)
            except (KeyboardInterrupt, SQLAlchemyError):
                self._store.spool(rows)
                raise
        self._store.finish(outcome, rows, slot if outcome.state != "FAIL" else None)
        return outcome

    def _hopeless(self, setting: Setting) -> str | None:
        """The cause for which a setting has failed often enough, if there is one."""
        failures = self._store.failures(setting)
        return next((cause for cause in failures if failures.count(cause) >= FAILURES_A_SETTING), None)

    def insist(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which is made again where the machine is at fault and not what is asked of it.

        Raises:
            WorkerError: it failed for another cause, or too often.
        """
        return insist(attempt, lambda error: self._observer.note(f"{what} is measured again: {error}"))

    def _start_for(self, setting: Mapping[str, KnobValue]) -> None:
        """Have the engine of a setting run.

        Raises:
            WorkerError: it does not start, which is the fault of its build.
            SearchError: it does not start, and is the reference's.
        """
        self._session.use(setting)
        if self._session.build == self._base:
            self._session.loaded()
        else:
            self._session.require()

    def _apply(self, trial: int, setting: Setting) -> Setting:
        self._start_for(setting)
        with self._session.within("apply"):
            self._observer.stage(trial, setting, "apply", 0, 1)
            started = time.perf_counter()
            effective = apply(self._session, setting, self._probe)
            self._apply_s = time.perf_counter() - started
        return effective

    def _measure(self, trial: int, setting: Setting, rows: list[Measurement], started: float, on_all: bool) -> Outcome:
        effective = self._apply(trial, setting)
        with self._session.within("gate"):
            findings, row = self._perplexity.measure(trial, setting, effective)
        row.figures["apply_s"] = self._apply_s
        if self._gated != trial:  # a trial that is measured again has its row
            self._store.add_all([row])
            self._gated = trial
        moved = False
        if self._tasks is not None and not _refused(findings):
            with self._session.within("gate"):
                finding, row, moved = self._tasks.measure(trial, setting, effective)
            findings.append(finding)
            rows.append(row)
        ppl = findings[0].figure
        warning = broken.senseless_perplexity(ppl, self._session.loaded().vocabulary)
        if refused := _refused(findings):
            reason = "; ".join(finding.reason for finding in refused)
            return self._outcome(
                trial, setting, started, "PRUNED", ppl=ppl, findings=findings, reason=reason, warning=warning
            )
        with self._session.within("speed"):
            drift = self._throughput.time_reference_again(trial)
        if drift is not None:
            rows.append(drift)
        if drift is not None or moved:
            self._apply(trial, setting)
        with self._session.within("speed"):
            found = self._throughput.measure(
                trial, setting, effective, self._store.fastest_within(ppl, self._card), rows, on_all=on_all
            )
        outcome = self._outcome(
            trial,
            setting,
            started,
            "COMPLETE",
            ppl=ppl,
            findings=findings,
            found=self._throughput.on_first_card(found),
            reason=found.remark,
            warning=found.warning,
        )
        outcome.card_tps = found.throughput.tps
        return outcome

    def _failed(self, trial: int, setting: Setting, started: float, error: WorkerError) -> Outcome:
        outcome = self._outcome(trial, setting, started, "FAIL", reason=f"{error.kind} in {error.stage}: {error}")
        outcome.failure, outcome.failed_stage, outcome.log = error.kind, error.stage, str(error.log)[-500:]
        return outcome

    def _measure_reference(self) -> None:
        started = time.perf_counter()
        answered: list[tuple[Finding, Measurement]] = []

        def measure() -> tuple[Setting, Measurement, SpeedResult, list[Measurement]]:
            self._session.use(self._base)
            setting = canonical({DRAFTS: 0, **self._base}, self._session.loaded().native)
            effective = self._apply(REFERENCE, setting)
            with self._session.within("gate"):
                gated = self._perplexity.measure_reference(setting, effective)
                answered[:] = [self._tasks.measure_reference(setting, effective)] if self._tasks is not None else []
            with self._session.within("speed"):
                return setting, gated, *self._throughput.measure_reference(setting, effective)

        try:
            setting, gated, found, rows = self.insist("The reference setting", measure)
        except WorkerError as error:
            raise SearchError(f"The reference setting could not be measured: {error}") from error
        ppl = gated.figures["ppl"]
        senseless = broken.senseless_perplexity(ppl, self._session.loaded().vocabulary)
        if senseless:
            raise SearchError(
                f"The model is broken at its reference setting: {senseless}. Check its weights and tokenizer."
            )
        self._ceiling = self._spec.gate.ppl or (self._spec.gate.ratio or 1.0) * ppl
        self._card = self._environment().card
        outcome = self._outcome(REFERENCE, setting, started, "COMPLETE", ppl=ppl, found=found)
        _require_objectives(found, self._spec.objectives)
        findings = [*self._perplexity.of_reference(gated, self._ceiling), *(finding for finding, _ in answered)]
        outcome.gates = self._gates(findings)
        self._store.finish(outcome, [gated, *(row for _, row in answered), *rows])

    def _gates(self, findings: Sequence[Finding]) -> dict[str, Any]:
        """What the store keeps of a setting's gates: None of those that were not asked."""
        found = {finding.gate: finding.as_json() for finding in findings}
        return {name: found.get(name) for name in self._spec.gate.names}

    def _outcome(
        self,
        trial: int,
        setting: Setting,
        started: float,
        state: str,
        *,
        ppl: float | None = None,
        findings: Sequence[Finding] = (),
        found: SpeedResult | None = None,
        reason: str | None = None,
        warning: str | None = None,
    ) -> Outcome:
        throughput = found.throughput if found else None
        return Outcome(
            study=self._store.study,
            trial=trial,
            state=state,
            setting=dict(setting),
            setting_key=setting_key(setting),
            ppl=ppl,
            ceiling=self._ceiling,
            excess=findings[0].excess if findings else None,
            gates=self._gates(findings) if findings else None,
            tps=throughput.tps if throughput else None,
            tps_low=throughput.low if throughput else None,
            tps_high=throughput.high if throughput else None,
            figures=found.more if found else None,
            prompts=throughput.prompts if throughput else None,
            card=self._card,
            card_tps=throughput.tps if throughput else None,
            reused_from=None,
            reason=reason[:1000] if reason else None,
            warning=warning,
            wall_s=time.perf_counter() - started,
            simulated=self._simulated,
        )

    def _reused(self, trial: int, known: Outcome, started: float) -> Outcome:
        """The outcome of a setting that trial `known` has already measured."""
        reason = f"measured before, as trial {known.trial}"
        outcome = self._outcome(trial, known.setting, started, known.state, ppl=known.ppl, reason=reason)
        outcome.excess, outcome.gates = known.excess, known.gates
        outcome.tps, outcome.tps_low, outcome.tps_high = known.tps, known.tps_low, known.tps_high
        outcome.figures = known.figures
        outcome.prompts, outcome.reused_from, outcome.warning = known.prompts, known.trial, known.warning
        outcome.card, outcome.card_tps = known.card, known.card_tps
        return outcome

    def _store_end(self, environment: int) -> None:
        """How the GPU does at the end of an engine: heat and clocks explain a drift."""
        now = None if self._simulated else gpu.first_gpu()
        if now is not None:
            kept = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c")
            self._store.add_facts(environment, {f"gpu_{name}_at_end": now[name] for name in kept})

    def _store_environment(self, loaded: Loaded, log: Path) -> int:
        build = self._session.build
        self._natives[self._spec.build_key(build)] = loaded.native
        return self._store.add_environment(
            Environment(
                study=self._store.study,
                simulated=self._simulated,
                model_hash=loaded.model_hash,
                drafter_hash=loaded.drafter_hash,
                build_hash=loaded.build_hash,
                native=loaded.native,
                facts=loaded.environment | ({"build": build} if build else {}),
                card=card_of(loaded.environment),
                log=str(log.resolve())[-500:],
                start_s=loaded.start_s,
            )
        )


def _require_objectives(found: SpeedResult, objectives: Sequence[str]) -> None:
    """Check that the reference setting has every figure that the front is made of.

    Raises:
        SearchError: it lacks one.
    """
    if lacks := lacking(found.more, objectives):
        told = ", ".join([*DEFAULT, *(name for name, figure in found.more.items() if figure is not None)])
        raise SearchError(
            f"The study's objectives name {' and '.join(lacks)}, which cannot be measured here: this engine tells "
            f"of {told}."
        )


def _refused(findings: Sequence[Finding]) -> list[Finding]:
    """Those by which a setting does not pass."""
    return [finding for finding in findings if finding.outcome == "over"]


def check_same_build(first: Environment, here: Environment) -> None:
    """Check that two cards run the same model on the same software; the card itself may differ.

    Raises:
        SearchError: they do not.
    """
    same = ("model_hash", "drafter_hash")
    facts = ("engine", "vllm", "torch", "patches", "shell")
    if any(getattr(first, name) != getattr(here, name) for name in same) or any(
        first.facts.get(name) != here.facts.get(name) for name in facts
    ):
        raise SearchError(OTHER_BUILD)
