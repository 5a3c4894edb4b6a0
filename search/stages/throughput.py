"""The speed stage: prompts timed one by one, with controls in between where the machine drifts.

Where the workload asks for several at once, a wave of them is what is timed and stands for a prompt in every figure.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search import broken, pace, speed
from search.data import Wave
from search.engine.process import WorkerError
from search.engine.protocol import Decode, Decoded, DecodeTogether, Loaded, Pace, Paced, Setting
from search.engine.session import EngineSession
from search.knobs import DRAFTS
from search.objectives import DEFAULT, MORE, lacking
from search.spec import StudySpec
from search.stages.base import Observer, Stage, apply
from search.stages.figures import Timed, drafting, more_figures
from search.store import REFERENCE, Measurement, PromptTimingRow, Store

MIN_PROMPTS = 6  # timed before an interval is believed
LEAST_CHANCE = 0.5  # of being faster than a setting that is no worse: below it a trial is not timed further
DRIFT_PROMPTS = 8  # timed at the reference setting when it is due again
CONTROL_AGE_S = 1.0  # a control older than this no longer says how fast the machine is now
REFERENCE_PASSES, CARD_PASSES = ("done", "repeat"), ("card", "card-repeat")  # on the first card, on another
BETWEEN_PROCESSES = math.sqrt(2) * 0.0016  # relative noise between two processes' passes: public A10G re-runs


@dataclass(frozen=True)
class SpeedResult:
    """What timing a setting found.

    `more` are the figures beside the speed (see `search.objectives`), `remark` says why it was stopped early where it
    was, `warning` what is broken where something is.
    """

    throughput: speed.Throughput
    more: dict[str, float | None]
    remark: str | None = None
    warning: str | None = None


class ThroughputStage(Stage):
    """Times the tune prompts on one card. `recall` must have run before a trial is measured.

    Latencies are compared within the card alone. What is returned is on the scale of the card that the study's
    reference was measured on: times its throughput at the reference setting, over this card's.
    """

    def __init__(self, spec: StudySpec, session: EngineSession, store: Store, observer: Observer) -> None:
        super().__init__(session, store, observer)
        self._waves = spec.waves()
        self._workload = spec.workload
        self._usual = min(spec.workload.prompts_per_trial or len(self._waves), len(self._waves))
        self._noise = 0.0
        self._reference: Setting = {}
        self._reference_s: dict[str, float] = {}
        self._reference_hashes: dict[str, str] = {}
        self._distinct_4grams = 0.0  # of the reference's outputs
        self._last_control: tuple[float, float] | None = None  # when, and the drift then
        self._drift = 1.0  # when the reference was last timed again
        self._since_drift = 0  # trials, since then
        self._environment: int | None = None  # the worker it was timed in
        self._spec = spec
        self._slower: dict[str, float] = {}  # than the reference's build another one is, at the reference setting
        self._paces: list[tuple[float, float]] = []  # seconds of the processor's own work, and the drift just then
        self._anchors: list[dict[str, float]] = []
        self._rival: tuple[int, list[speed.PromptTiming]] = REFERENCE, []  # the last one: a trial, its prompts
        self._scale, self._scale_error = 1.0, 0.0  # of the first card to this one (see `speed.rescaled`)
        self._more_scale: dict[str, float] = {}  # the same of the figures beside the speed

    def recall(self, card: str, passes: Sequence[Measurement]) -> None:
        """Take up what the store knows of the study on this card.

        Args:
            card: its name.
            passes: the two passes over the tune prompts at the reference setting on this card.
        """
        reference, again = passes
        first, first_again = reference_passes(self._store, None)
        self._reference = reference.setting
        self._noise = float(reference.figures["noise"])
        self._distinct_4grams = float(reference.figures["distinct_4grams"])
        self._reference_s = _of_both(reference, again)
        if reference.id != first.id:
            here, there = math.fsum(self._reference_s.values()), math.fsum(_of_both(first, first_again).values())
            timing = math.hypot(self._noise, float(first.figures["noise"])) / math.sqrt(2 * len(self._waves))
            self._scale, self._scale_error = here / there, math.hypot(timing, BETWEEN_PROCESSES)
            known = [name for name in MORE if first.figures.get(name) and reference.figures.get(name)]
            self._more_scale = {name: first.figures[name] / reference.figures[name] for name in known}
            self._observer.note(
                f"This card ({card}) runs the reference setting {there / here:.3f} × as fast as the one that the study "
                f"began on (± {1.96 * self._scale_error:.1%}); its figures are put on that one's scale."
            )
        self._reference_hashes = {t.prompt: t.output_hash for t in reference.timings}
        self._environment = reference.environment_id
        here_too = {e.id for e in self._store.environments() if e.card in (None, card)}
        for timed in self._store.measurements("speed", "drift"):
            if timed.environment_id in here_too:
                self._drift, self._environment = float(timed.figures["drift"]), timed.environment_id
                if "slower" in timed.figures:
                    self._slower[self._spec.build_key(timed.setting)] = float(timed.figures["slower"])
        self._paces = [(float(reference.figures["pace_s"]), 1.0)] if "pace_s" in reference.figures else []
        for control in self._store.measurements("speed", "control") if self._paces else []:
            if control.environment_id in here_too and "pace_s" in control.figures:
                self._note_pace(control.setting, float(control.figures["pace_s"]), float(control.figures["drift"]))
        self._anchors = [self._reference_s]
        for measured in self._store.fully_timed(len(self._waves), card):
            self._anchors.append({t.prompt: t.latency_s / t.drift for t in measured.timings})

    def measure_reference(
        self, setting: Setting, effective: Setting, statuses: tuple[str, str] = REFERENCE_PASSES
    ) -> tuple[SpeedResult, list[Measurement]]:
        """Time the reference setting on every tune prompt, twice: everything else is relative to it."""
        paces = [self._pace()]
        passes = []
        for _ in range(2):
            passes.append([Timed(d, 1.0) for d in self._decode_all(REFERENCE, setting, self._waves)])
            paces.append(self._pace())
        first, again = ([t.seconds for t in timed] for timed in passes)
        noise = speed.relative_noise(first, again)
        mean_s = _mean_seconds(*({t.decoded.prompt_id: t.seconds for t in timed} for timed in passes))
        timings = [
            speed.PromptTiming(t.decoded.prompt_id, t.decoded.tokens, mean_s[t.decoded.prompt_id], "")
            for t in passes[0]
        ]
        found = speed.estimate(timings, [mean_s], noise / math.sqrt(2))
        figures = {"noise": noise, **self._figures(found, passes[0])}
        if known := [p for p in paces if p is not None]:
            figures["pace_s"] = statistics.geometric_mean(known)
        return _result(found, figures), [
            self._speed_row(REFERENCE, statuses[0], setting, effective, figures, passes[0]),
            self._speed_row(REFERENCE, statuses[1], setting, effective, {}, passes[1]),
        ]

    def time_reference_again(self, trial: int) -> Measurement | None:
        """Where it is due, before `trial`: how fast is the machine now? Says so where that is beyond noise.

        In an engine that is built in another way it is timed first how much slower that is than the reference's. What
        the machine did meanwhile is told from it by work of the processor's that hangs on no engine, where the study
        asks for controls; a machine that does not drift is taken to be as it was.
        """
        self._since_drift += 1
        new_worker = self._session.environment_id != self._environment
        if self._since_drift <= self._workload.control_trials and not new_worker:
            return None
        reference = self._reference_here()
        effective = apply(self._session, reference, self._waves[0].prompts[0])
        paces = [self._pace() if self._is_new_build() else None]
        decoded = self._decode_all(trial, reference, self._waves[:DRIFT_PROMPTS], "control")
        paces += [self._pace() if self._is_new_build() else None]
        found = speed.compare(
            [_timing(d, d.latency_s) for d in decoded],
            [speed.PromptTiming(p, self._workload.wave_tokens, s, "") for p, s in self._reference_s.items()],
        )
        assert found is not None  # DRIFT_PROMPTS are enough
        low, high = (x * self._slower_here() for x in found.interval())
        self._since_drift, self._environment = 0, self._session.environment_id
        slower: dict[str, float] = {}
        if self._is_new_build():
            self._drift = self._drift_by_pace([p for p in paces if p is not None])
            slower["slower"] = self._slower[self._spec.build_key(self._session.build)] = (
                math.exp(-found.log_ratio) / self._drift
            )
        else:
            self._drift = math.exp(-found.log_ratio) / self._slower_here()
        self._last_control = None
        if not slower and not low <= 1 <= high:
            self._observer.note(
                f"Control: the reference setting is {1 / self._drift:.3f} × as fast as at the start ({low:.3f} to "
                f"{high:.3f}); trials are compared relative to that."
            )
        other = [d.prompt_id for d in decoded if d.output_hash != self._reference_hashes[d.prompt_id]]
        if other and self._session.build == self._spec.build_of(self._reference):
            self._observer.note(
                f"Control: {len(other)} of {len(decoded)} prompts gave other tokens than at the start: this worker "
                "took another token path."
            )
        figures = {"drift": self._drift, "low": 1 / high, "high": 1 / low, "other_outputs": len(other), **slower}
        timed = [Timed(d, self._drift) for d in decoded]
        return self._speed_row(trial, "drift", reference, effective, figures, timed)

    def _reference_here(self) -> Setting:
        """The reference setting as far as the running engine has its knobs, with the build that it has."""
        has = self._session.loaded().native
        build = self._spec.build_of(self._reference)
        live = {name: value for name, value in self._reference.items() if name not in build and name in has}
        return {**live, **self._session.build}

    def _pace(self) -> float | None:
        """Seconds of the processor's own work; None where it is not needed to tell engines from the machine's drift."""
        if not self._spec.build_knobs or self._workload.control_prompts is None:
            return None
        return self._session.ask(Pace(), Paced).seconds

    def _note_pace(self, setting: Setting, pace_s: float, drift: float) -> None:
        """Keep a pace and the drift just then; of the reference's build, whose drift was told from nothing else."""
        if self._spec.build_of(setting) == self._spec.build_of(self._reference):
            self._paces.append((pace_s, drift))

    def _drift_by_pace(self, paces: Sequence[float]) -> float:
        """How much slower the machine is than for the reference, told by the processor's own work."""
        if not paces or not self._paces:
            return self._drift
        share = pace.elasticity([self._paces]) if len(self._paces) > 1 else pace.PRIOR_SLOPE
        slower: float = (statistics.geometric_mean(paces) / self._paces[0][0]) ** share
        return slower

    def _is_new_build(self) -> bool:
        build = self._session.build
        return build != self._spec.build_of(self._reference) and self._spec.build_key(build) not in self._slower

    def slower(self, build: Setting) -> float:
        """How many times as long the reference setting takes on an engine built so as on the reference's.

        It is 1 where that is not known.
        """
        return self._slower.get(self._spec.build_key(build), 1.0)

    def _slower_here(self) -> float:
        return self.slower(self._session.build)

    def measure(
        self,
        trial: int,
        setting: Setting,
        effective: Setting,
        rival: int | None,
        rows: list[Measurement],
        *,
        on_all: bool = False,
    ) -> SpeedResult:
        """Time tune prompts until the interval is narrow, or the trial is beaten by `rival`.

        The rival is the fastest known trial with no higher perplexity; both are compared prompt by prompt. A trial
        with hardly a chance left is not worth more prompts; one that may reach the front gets them, so that no
        point of the front rests on a few lucky ones. The first setting with drafts is timed on all prompts: it
        shows which are easy to draft, which the reference cannot, and so narrows the interval of every later trial. So
        is any trial with `on_all`. Where the front is made of other figures, which are comparable on the same prompts
        alone, every trial is timed on as many as the study allows.

        A shared machine can drift by more than settings differ. Where the study asks for controls, the estimate is
        what the trial would have shown on the machine as it was for the reference; the uncorrected figure is kept
        as `tps_raw`.

        What was measured is added to `rows`, also before an error.
        """
        all_of_them = on_all or (len(self._anchors) == 1 and setting.get(DRAFTS, 0) != 0)
        to_the_end = all_of_them or self._spec.objectives != DEFAULT
        most = len(self._waves) if all_of_them else self._usual
        block_size = self._workload.control_prompts or 1
        # Nothing is read once prompts are timed: a database that went away meanwhile costs no measurement.
        rival_timings, rival_found = self._timings_of(rival), self._throughput_of(rival)
        timed: list[Timed] = []
        controls: list[Decoded] = []
        decoded: list[Decoded] = []  # of the block that is being timed
        before, remark = 1.0, None
        try:
            before = self._control(trial, self._waves[0], controls, fresh_is_enough=True)
            for start in range(0, most, block_size):
                block = self._waves[start : min(start + block_size, most)]
                if controls or not timed:
                    apply(self._session, setting)
                for wave in block:
                    self._observer.stage(trial, setting, "speed", len(timed) + len(decoded), most)
                    decoded.append(self._decode(wave, setting))
                after = self._control(trial, block[0], controls)
                timed += [Timed(d, math.sqrt(before * after)) for d in decoded]
                before, decoded = after, []
                if len(timed) < MIN_PROMPTS or to_the_end:
                    continue
                if self._estimate(timed).half_width <= self._workload.precision:
                    break
                if self._beaten(timed, rival_timings):
                    remark = f"stopped after {len(timed)} prompts: trial {rival} is faster and no worse"
                    break
        except (KeyboardInterrupt, WorkerError):
            timed += [Timed(d, before) for d in decoded]
            if timed:
                rows.append(self._speed_row(trial, "interrupted", setting, effective, {}, timed))
            raise
        if len(timed) == len(self._waves):
            self._anchors.append({t.decoded.prompt_id: t.seconds for t in timed})
        found = self._estimate(timed)
        if remark is not None and rival_found is not None:
            found = self._no_faster_than(rival_found, rival_timings, timed, found)
        raw = speed.throughput([_timing(t.decoded, t.decoded.latency_s) for t in timed])
        figures = {**self._figures(found, timed), "tps_raw": raw}
        if lacks := lacking(figures, self._spec.objectives):
            raise self._session.refuse("impossible-figure", f"there is no {' and no '.join(lacks)} of it")
        rows.append(self._speed_row(trial, "done", setting, effective, figures, timed))
        if controls:
            slower, here = self._slower_here(), self._reference_here()
            reference = [Timed(d, d.latency_s / self._reference_s[d.prompt_id] / slower) for d in controls]
            told: dict[str, Any] = {}
            if (pace_s := self._pace()) is not None:
                told = {"pace_s": pace_s, "drift": before}
                self._note_pace(here, pace_s, before)
            rows.append(self._speed_row(trial, "control", here, here, told, reference))
        warning = broken.useless_drafter(figures["acceptance_rate"]) or broken.looping_output(
            figures["distinct_4grams"], self._distinct_4grams
        )
        return _result(found, figures, remark, warning)

    def on_first_card(self, found: SpeedResult) -> SpeedResult:
        """What was found on this card, on the scale of the one that the study's reference was measured on."""
        if self._scale_error == 0:
            return found
        throughput = speed.rescaled(found.throughput, self._scale, self._scale_error)
        more = {name: x and x * self._more_scale.get(name, 1.0) for name, x in found.more.items()}
        return replace(found, throughput=throughput, more=more)

    def _timings_of(self, trial: int | None) -> list[speed.PromptTiming]:
        """A measured trial's prompts, drift undone."""
        if trial is None:
            return []
        if trial != self._rival[0]:
            (measured,) = self._store.measurements("speed", "done", trial)
            self._rival = (
                trial,
                [
                    speed.PromptTiming(t.prompt, t.tokens, t.latency_s / t.drift, t.output_hash)
                    for t in measured.timings
                ],
            )
        return self._rival[1]

    def _beaten(self, timed: list[Timed], rival: list[speed.PromptTiming]) -> bool:
        found = self._compared(timed, rival)
        return found is not None and found.chance_faster() < LEAST_CHANCE

    def _compared(self, timed: list[Timed], rival: list[speed.PromptTiming]) -> speed.Comparison | None:
        noise = math.hypot(self._control_noise(len(timed)), self._control_noise(len(rival)))
        return speed.compare([_timing(t.decoded, t.seconds) for t in timed], rival, noise)

    def _throughput_of(self, trial: int | None) -> speed.Throughput | None:
        """A measured trial's estimate, on this card's own scale."""
        known = self._store.outcome(trial) if trial is not None else None
        if known is None or not (known.tps and known.tps_low and known.tps_high):
            return None
        here = (known.card_tps or known.tps) / known.tps
        return speed.Throughput(known.tps * here, known.tps_low * here, known.tps_high * here, known.prompts or 0)

    def _no_faster_than(
        self,
        rival: speed.Throughput,
        rival_timings: list[speed.PromptTiming],
        timed: list[Timed],
        found: speed.Throughput,
    ) -> speed.Throughput:
        """A beaten trial's estimate: by its rival where that is the narrower one, or would otherwise be overtaken."""
        compared = self._compared(timed, rival_timings)
        if compared is None:
            return found
        beside = speed.beside(rival, compared)
        return beside if beside.half_width < found.half_width or found.tps >= rival.tps else found

    def _control(self, trial: int, wave: Wave, controls: list[Decoded], *, fresh_is_enough: bool = False) -> float:
        """How much slower the machine is now than for the reference (1.1: 10 % slower), by the nearest control."""
        if self._workload.control_prompts is None:
            return self._drift
        if fresh_is_enough and self._last_control and time.monotonic() - self._last_control[0] < CONTROL_AGE_S:
            return self._last_control[1]
        reference = self._reference_here()
        apply(self._session, reference)
        self._observer.stage(trial, reference, "control", 0, 1)
        controls.append(self._decode(wave, reference))
        drift = controls[-1].latency_s / self._reference_s[wave.id] / self._slower_here()
        self._last_control = (time.monotonic(), drift)
        return drift

    def _estimate(self, timed: list[Timed]) -> speed.Throughput:
        """Throughput on the machine as it was for the reference; the controls' noise widens the interval."""
        timings = [_timing(t.decoded, t.seconds) for t in timed]
        against_mean = math.sqrt(1.5) * self._control_noise(len(timed))  # a control is held against a mean of two
        return speed.estimate(timings, self._anchors, self._noise, against_mean)

    def _control_noise(self, prompts: int) -> float:
        """Relative standard deviation that the controls leave in the mean of so many prompts."""
        block = self._workload.control_prompts
        return self._noise / math.sqrt(math.ceil(prompts / block)) if block and prompts else 0.0

    def _figures(self, found: speed.Throughput, timed: Sequence[Timed]) -> dict[str, Any]:
        """What the store keeps of a timed setting; what stands beside its speed is of the prompts of every trial."""
        estimate = {"tps": found.tps, "tps_low": found.low, "tps_high": found.high, "prompts": found.prompts}
        return {**estimate, **drafting(timed), **more_figures(timed[: self._usual])}

    def _decode_all(self, trial: int, setting: Setting, waves: list[Wave], stage: str = "speed") -> list[Decoded]:
        decoded = []
        for number, wave in enumerate(waves):
            self._observer.stage(trial, setting, stage, number, len(waves))
            decoded.append(self._decode(wave, setting))
        return decoded

    def _decode(self, wave: Wave, setting: Setting) -> Decoded:
        """Decode and time one prompt or wave; figures that cannot be true are refused."""
        tokens, prompts = self._workload.output_tokens, {p.id: list(p.token_ids) for p in wave.prompts}
        request: Decode | DecodeTogether = DecodeTogether(wave=wave.id, prompts=prompts, max_tokens=tokens)
        if len(prompts) == 1:
            request = Decode(prompt_id=wave.id, prompt=prompts[wave.id], max_tokens=tokens)
        decoded = self._session.ask(request, Decoded)
        wrong = impossible(decoded, tokens, int(setting.get(DRAFTS, 0)), self._session.loaded(), len(prompts))
        if wrong:
            raise self._session.refuse("impossible-figure", f"prompt {wave.id}: {wrong}")
        return decoded

    def _speed_row(
        self, trial: int, status: str, setting: Setting, effective: Setting, figures: dict[str, Any], timed: list[Timed]
    ) -> Measurement:
        wall_s = sum(t.decoded.latency_s for t in timed)
        row = self._row(trial, "speed", status, setting, effective, figures, wall_s)
        row.timings = [
            PromptTimingRow(
                position=position,
                prompt=t.decoded.prompt_id,
                tokens=t.decoded.tokens,
                latency_s=t.decoded.latency_s,
                drift=t.drift,
                output_hash=t.decoded.output_hash,
                drafts=t.decoded.drafts,
                draft_tokens=t.decoded.draft_tokens,
                accepted_per_pos=t.decoded.accepted_per_pos,
            )
            for position, t in enumerate(timed)
        ]
        return row


def reference_passes(store: Store, card: str | None) -> list[Measurement]:
    """The two passes at the reference setting on `card`, or (None) on the card that the study began on.

    Empty where the reference has not been measured there.
    """
    of_card = {e.id: e.card for e in store.environments()}
    firsts = [store.measurements("speed", status, REFERENCE)[0] for status in REFERENCE_PASSES]
    if card is None or of_card[firsts[0].environment_id] in (None, card):
        return firsts
    passes = [store.measurements("speed", status, REFERENCE) for status in CARD_PASSES]
    return next(([a, b] for a, b in zip(*passes, strict=True) if of_card[a.environment_id] == card), [])


def impossible(decoded: Decoded, tokens: int, drafts: int, engine: Loaded, prompts: int = 1) -> str | None:
    """Why a timed prompt cannot be what it says, or None: `tokens` were asked for after each, at K = `drafts`."""
    accepted = sum(decoded.accepted_per_pos)
    if decoded.tokens != prompts * tokens:
        return f"{decoded.tokens} tokens instead of {prompts * tokens}"
    if not 0 < decoded.latency_s < math.inf:
        return f"a latency of {decoded.latency_s} s"
    as_many = decoded.draft_tokens == drafts * decoded.drafts and (drafts == 0 or decoded.drafts > 0)
    if not (decoded.draft_tokens <= drafts * decoded.drafts if engine.variable_drafts else as_many):
        return f"{decoded.draft_tokens} tokens drafted in {decoded.drafts} steps at K {drafts}"
    if accepted > decoded.draft_tokens:
        return f"{accepted} drafts accepted of {decoded.draft_tokens}"
    # At the least: a step gives each of the prompts one token and what was accepted in it.
    steps = -(-(decoded.tokens - accepted) // prompts)
    return broken.over_bandwidth(steps, decoded.latency_s, engine.step_bytes, engine.bandwidth)


def _result(
    found: speed.Throughput, figures: Mapping[str, Any], remark: str | None = None, warning: str | None = None
) -> SpeedResult:
    return SpeedResult(found, {name: figures[name] for name in MORE}, remark, warning)


def _timing(decoded: Decoded, seconds: float) -> speed.PromptTiming:
    return speed.PromptTiming(decoded.prompt_id, decoded.tokens, seconds, decoded.output_hash)


def _of_both(first: Measurement, again: Measurement) -> dict[str, float]:
    """Seconds by prompt over two passes that are stored."""
    return _mean_seconds(*({t.prompt: t.latency_s for t in measured.timings} for measured in (first, again)))


def _mean_seconds(first: dict[str, float], again: dict[str, float]) -> dict[str, float]:
    """Seconds by prompt over two passes."""
    return {prompt: (first[prompt] + again[prompt]) / 2 for prompt in first}
