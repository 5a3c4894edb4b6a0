"""Whole searches over a landscape, trial by trial, in simulated seconds: no worker, nobody waits.

What a trial measures, how it ends and what it costs follows the real stages: a gate that is remembered by its quality
knobs and stops early when a setting is far over; prompts timed until a rival is ahead; known settings reused.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.samplers import BaseSampler

from search.engine.protocol import Setting
from search.knobs import DRAFTS, canonical, quality_part, words
from search.landscapes import Landscape
from search.recovery import tell
from search.samplers import PriorPoint, Problem, Reference, trial_seed
from search.samplers.gated import asked_on_all, worth_another
from search.samplers.history import Z
from search.samplers.prior import WHY, enqueue
from search.store import Outcome, pareto_front, setting_key

LEAST_PROMPTS = 6  # timed before a trial may be given up (search.stages.throughput)
NEAR = 0.003  # of the ceiling: scored in full, twice (search.gate)
REJECTED_EARLY = 0.01  # this far over, a setting is rejected after a share of its records
EARLY_SHARE, EARLY_ERROR = 0.3, 0.003
FINALISTS = 3


@dataclass(frozen=True)
class Step:
    """After one trial: simulated seconds so far, how it ended, and the true TPS of what confirming would choose now.

    `finalist` is the true TPS of the best of those that would be confirmed: confirming has its own luck. Both are None
    while nothing has passed. `ask_s` is what the sampler took, in real seconds.
    """

    trial: int
    seconds: float
    state: str
    setting: Setting
    ppl: float
    tps: float | None
    confirmed: float | None
    finalist: float | None
    ask_s: float
    why: str


def gauss(*parts: object) -> float:
    """A standard normal number that hangs on `parts` alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    uniform = (int.from_bytes(digest[:7], "big") + 0.5) / 256**7
    return statistics.NormalDist().inv_cdf(uniform)


@dataclass
class Bench:
    """One machine with one landscape: `seed` decides its luck."""

    landscape: Landscape
    seed: int
    _gated: set[str] = field(default_factory=set)
    _outcomes: list[Outcome] = field(default_factory=list)
    _anchored: bool = False

    def perplexity(self, setting: Mapping[str, Any]) -> float:
        """As all records give it: the law, and the window's own roughness."""
        rough = self.landscape.noise.perplexity * gauss(self.seed, "ppl", self._texts(setting))
        return self.landscape.perplexity(setting) * math.exp(rough)

    def estimate(self, setting: Setting, prompts: int) -> tuple[float, float]:
        """TPS as so many prompts give it, and the standard deviation of ln TPS that its interval states."""
        noise, texts, key = self.landscape.noise, self._texts(setting), words(setting)
        share = math.sqrt(max(0.0, 1 - prompts / self.landscape.costs.prompts) / prompts)
        luck = noise.path * gauss(self.seed, "path", texts)
        luck += noise.between * share * gauss(self.seed, "between", texts, prompts)
        luck += noise.within / math.sqrt(2) * share * gauss(self.seed, "within", key, prompts)
        timing = self._timing_sd(prompts)
        luck += timing * gauss(self.seed, "timing", key, prompts, len(self._outcomes))
        return self.landscape.tps(setting) * math.exp(luck), math.hypot(noise.between * share, timing)

    def confirm(self, setting: Setting) -> float:
        """TPS on held-out prompts in a fresh process: other texts, another token path."""
        noise, prompts = self.landscape.noise, self.landscape.costs.prompts
        luck = math.hypot(noise.path, noise.between / math.sqrt(prompts)) * gauss(
            self.seed, "held-out", self._texts(setting)
        )
        luck += noise.within / math.sqrt(2 * prompts) * gauss(self.seed, "held-out within", words(setting))
        return self.landscape.tps(setting) * math.exp(luck)

    def reference(self) -> Reference:
        """The reference setting, timed on all prompts."""
        setting = canonical(self.landscape.native, self.landscape.native)
        return Reference(setting, self.perplexity(setting), self.estimate(setting, self.landscape.costs.prompts)[0])

    def measure(self, number: int, asked: Mapping[str, Any], *, on_all: bool = False) -> Outcome:
        """One trial; `wall_s` are simulated seconds."""
        setting = canonical(dict(asked), self.landscape.native)
        known = next((o for o in reversed(self._outcomes) if o.setting_key == setting_key(setting)), None)
        if known is not None and not on_all:
            return self._outcome(number, setting, known.state, known.ppl, known.excess, 0.0, like=known)
        landscape, costs = self.landscape, self.landscape.costs
        seconds = costs.apply_s
        ppl = self.perplexity(setting)
        texts = self._texts(setting)
        if texts not in self._gated:
            self._gated.add(texts)
            over = math.log(ppl / landscape.ceiling)
            seconds += costs.gate_s * (EARLY_SHARE if over > REJECTED_EARLY else 2.0 if abs(over) < NEAR else 1.0)
        if ppl > landscape.ceiling:
            far = ppl > landscape.ceiling * math.exp(REJECTED_EARLY)
            told = ppl * math.exp(EARLY_ERROR * gauss(self.seed, "early", texts)) if far else ppl
            excess = max(told, landscape.ceiling * 1.0001) - landscape.ceiling
            return self._keep(self._outcome(number, setting, "PRUNED", ppl, excess, seconds))
        prompts = costs.prompts_a_trial
        rivals = [o for o in self._outcomes if o.tps is not None and o.ppl is not None and o.ppl <= ppl]
        rival = max(rivals, key=lambda o: o.tps or 0.0, default=None)
        if on_all or (not self._anchored and setting[DRAFTS]):
            prompts, self._anchored = costs.prompts, True
        elif rival is not None:
            least = min(LEAST_PROMPTS, prompts)
            mine, theirs = self.estimate(setting, least)[0], self.estimate(rival.setting, least)[0]
            if mine < theirs:
                prompts = least
        tps, sd = self.estimate(setting, prompts)
        if rival is not None and rival.tps and prompts < costs.prompts_a_trial:
            beside = math.hypot(_sd(rival), self._paired_sd(setting, rival.setting, prompts))
            if beside < sd or tps >= rival.tps:
                tps, sd = rival.tps * mine / theirs, beside
        a_prompt = costs.output_tokens / tps
        controls = costs.controls_a_prompt * costs.output_tokens / landscape.tps(landscape.native)
        seconds += prompts * (a_prompt + controls)
        excess = ppl - landscape.ceiling
        return self._keep(self._outcome(number, setting, "COMPLETE", ppl, excess, seconds, tps=tps, sd=sd))

    def finalists(self) -> list[Setting]:
        """What would be confirmed: the fastest of the front, then others, as `search.confirm` takes them."""
        latest = {o.setting_key: o for o in self._outcomes if o.state == "COMPLETE"}  # of trials with one setting
        passed = list(latest.values())
        fastest = [*pareto_front(passed)[::-1], *sorted(passed, key=lambda o: -(o.tps or 0.0))]
        finalists: dict[str, Setting] = {}
        for outcome in fastest:
            if len(finalists) < FINALISTS:
                finalists.setdefault(outcome.setting_key, outcome.setting)
        return list(finalists.values())

    def _paired_sd(self, setting: Setting, other: Setting, prompts: int) -> float:
        """Of ln of the ratio of two speeds on the same prompts."""
        noise, same = self.landscape.noise, self._texts(setting) == self._texts(other)
        of_prompts = (noise.within if same else noise.between) / math.sqrt(prompts)
        return math.hypot(of_prompts, math.sqrt(2) * self._timing_sd(prompts))

    def _timing_sd(self, prompts: int) -> float:
        return self.landscape.noise.timing * math.sqrt(self.landscape.costs.prompts_a_trial / prompts)

    def _texts(self, setting: Mapping[str, Any]) -> str:
        return words(quality_part(dict(setting)))

    def _keep(self, outcome: Outcome) -> Outcome:
        self._outcomes.append(outcome)
        return outcome

    def _outcome(
        self,
        number: int,
        setting: Setting,
        state: str,
        ppl: float | None,
        excess: float | None,
        seconds: float,
        *,
        tps: float | None = None,
        sd: float = 0.0,
        like: Outcome | None = None,
    ) -> Outcome:
        low, high = (tps * math.exp(-Z * sd), tps * math.exp(Z * sd)) if tps is not None else (None, None)
        if like is not None:
            tps, low, high = like.tps, like.tps_low, like.tps_high
        return Outcome(
            study="bench",
            trial=number,
            state=state,
            setting=dict(setting),
            setting_key=setting_key(setting),
            ppl=ppl,
            ceiling=self.landscape.ceiling,
            excess=excess,
            tps=tps,
            tps_low=low,
            tps_high=high,
            reused_from=like.trial if like is not None else None,
            wall_s=seconds,
            simulated=True,
        )


def _sd(outcome: Outcome) -> float:
    assert outcome.tps_low and outcome.tps_high
    return math.log(outcome.tps_high / outcome.tps_low) / (2 * Z)


def optimum(landscape: Landscape, seed: int) -> float | None:
    """The true TPS of the fastest setting that passes on the machine of that seed; None if none does."""
    bench = Bench(landscape, seed)
    passes: dict[tuple[object, ...], bool] = {}
    best = None
    for setting in landscape.settings():
        key = tuple(quality_part(setting).values())
        if key not in passes:
            passes[key] = bench.perplexity(setting) <= landscape.ceiling
        if passes[key]:
            tps = landscape.tps(setting)
            best = tps if best is None or tps > best else best
    return best


def replay(
    landscape: Landscape,
    make: Callable[[Problem, int], BaseSampler],
    seed: int,
    trials: int,
    *,
    prior: Sequence[PriorPoint] = (),
    stop: bool = False,
) -> list[Step]:
    """One search: what stood after each of its trials. The study's default setting is the first trial.

    `make` gives the sampler for each of them; with `stop` the search ends when a further trial is not worth it.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    bench = Bench(landscape, seed)
    problem = Problem(landscape.knobs, landscape.ceiling, bench.reference(), tuple(prior))
    study = optuna.create_study(directions=["maximize", "minimize"])
    study.enqueue_trial(first_setting(landscape))
    enqueue(study, problem, lambda _: None)
    steps: list[Step] = []
    seconds = 0.0
    while len(steps) < trials and not (stop and not worth_another(study.get_trials(deepcopy=False))):
        started = time.perf_counter()
        study.sampler = make(problem, trial_seed(seed, len(steps), 0))
        trial = study.ask(problem.distributions)
        ask_s = time.perf_counter() - started
        said = study.get_trials(deepcopy=False)[trial.number].user_attrs
        outcome = bench.measure(trial.number, trial.params, on_all=asked_on_all(study, trial))
        tell(study, outcome)
        seconds += outcome.wall_s
        finalists = bench.finalists()
        chosen = max(finalists, key=bench.confirm, default=None)
        assert outcome.ppl is not None
        steps.append(
            Step(
                trial=trial.number,
                seconds=seconds,
                state=outcome.state,
                setting=outcome.setting,
                ppl=outcome.ppl,
                tps=outcome.tps,
                confirmed=landscape.tps(chosen) if chosen is not None else None,
                finalist=max(map(landscape.tps, finalists), default=None),
                ask_s=ask_s,
                why=str(said.get(WHY, "")),
            )
        )
    return steps


def first_setting(landscape: Landscape) -> dict[str, int]:
    """The setting that a study begins with: each knob's default, else the model's own value."""
    middle = {k.name: k.nearest((k.low + k.largest) // 2) for k in landscape.knobs}
    own = {k.name: k.nearest(int(landscape.native[k.name])) for k in landscape.knobs if k.name != DRAFTS}
    given = {k.name: k.default for k in landscape.knobs if k.default is not None}
    return {**middle, **own, **given}
