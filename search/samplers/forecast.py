"""What is expected of settings not measured yet: speed, perplexity, the chance to pass, the gain and the seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from search.engine.protocol import Setting
from search.knobs import KNOWN
from search.samplers import models
from search.samplers.history import STOPPED, History, Measured
from search.samplers.models import Array, Prediction
from search.samplers.problem import Problem

MOST_POINTS = 160  # of the speed model: the latest, and the fastest
SCORING_SD = 2e-4  # of ln perplexity, where all records were scored: how rough it is from one window to the next
REJECTED_SD = 0.1  # of a rejected setting's excess in ln perplexity, which is estimated from the first records
REFERENCE_SD = 0.01  # of ln TPS
GATE_SHARE = 1.0  # of a trial with a remembered gate, what a gate costs before any was seen to be remembered
SHARED = 0.9  # of a variance that two trials share, where they decoded the same texts (see `errors`)
TEXTS_SD = 0.01  # of ln TPS between quality settings: public A10G runs of one manifest on other token paths
EDGE_WEIGHT = 8.0  # of the fastest setting under the ceiling, relative to the rest of the front
LEADERS = 6
MISTRUST = 0.01  # least chance that a setting is under the ceiling, or over it, whatever the order of windows says


@dataclass(frozen=True)
class Judged:
    """Of n settings: what is expected, the chance to pass, the expected gain (`models.hypervolume_gain`), the seconds.

    `ahead` is by how much (ln TPS) it is expected to be faster than the fastest of no higher perplexity.
    """

    expected: Prediction
    ahead: Array
    passes: Array
    gain: Array
    seconds: Array


class Forecast:
    """The fitted models of a study as it stands; what is being measured counts as it is expected to end."""

    def __init__(self, problem: Problem, past: History) -> None:
        self._problem, self._past = problem, past
        self._key = problem.quality_key
        self._passed = [m for m in past.measured if m.under(problem.ceiling)]
        self._speed = self._fit_speed()
        self._columns = [i for i, knob in enumerate(problem.knobs) if knob.affects_quality]
        self._log_ppl = self._fit_log_ppl() if self._columns else None
        self._gate_s, self._speed_s = _seconds(problem, past)

    def leaders(self) -> list[Setting]:
        """Where to look closely: the measured settings that are expected to be the fastest, and the front."""
        speed = self._speed.predict(self._points([m.setting for m in self._passed]))[0]
        order = np.argsort(-speed)
        return [self._passed[i].setting for i in order[:LEADERS]]

    def needs_all_prompts(self, setting: Setting, ahead: float, sd: float) -> bool:
        """Whether a trial that may be a new leader would tell nothing if it were stopped early.

        That is where a few prompts tell less than the `sd` to which the model knows it, or where every trial with the
        same texts was stopped early, by luck of its first prompts.
        """
        if ahead < -2 * sd:
            return False
        narrowest = min(m.sd for m in self._past.timed)
        same = [m.sd for m in self._past.timed if self._key(m.setting) == self._key(setting)]
        stopped = [math.sqrt(m.sd**2 - narrowest**2) for m in self._past.timed if m.sd > STOPPED * narrowest]
        return bool(same) and (min(same) > STOPPED * narrowest or (bool(stopped) and sd < statistics.median(stopped)))

    def judge(self, settings: Sequence[Setting]) -> Judged:
        """What to expect of `settings`."""
        points = self._points(settings)
        log_ppl, log_ppl_sd = self._quality(points)
        front, worst = self._front()
        rival = _rivals(front, log_ppl)
        beside = self._fastest_with_the_same_texts(settings, front[:, 0], rival)
        speed, speed_sd = np.empty(len(points)), np.empty(len(points))
        passed = self._points([m.setting for m in self._passed])
        for number in np.unique(beside):
            those = beside == number
            speed[those], speed_sd[those] = self._speed.predict(points[those], relative_to=passed[number])
        expected = Prediction(speed, speed_sd, log_ppl, log_ppl_sd)
        passes = self._passes(settings, log_ppl, log_ppl_sd)
        gain = models.hypervolume_gain(expected, front, worst, math.log(self._problem.reference.ppl)) * passes
        known = {self._key(m.setting) for m in self._past.measured} | {self._key(s) for s in self._past.pending}
        new = np.array([self._key(s) not in known for s in settings])
        ahead = speed - front[rival, 0]
        return Judged(expected, ahead, passes, gain, self._speed_s * np.maximum(passes, 0.1) + self._gate_s * new)

    def _fastest_with_the_same_texts(
        self, settings: Sequence[Setting], speeds: Array, otherwise: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """What a trial of each setting could be told apart from: the fastest that decoded the same texts.

        How hard these are nobody learns from yet another trial, so that it must not attract one. Of texts that nobody
        decoded yet, `otherwise`.
        """
        fastest: dict[tuple[object, ...], int] = {}
        for number in np.argsort(speeds):
            fastest[self._key(self._passed[number].setting)] = int(number)
        return np.array([fastest.get(self._key(s), other) for s, other in zip(settings, otherwise, strict=True)])

    def _points(self, settings: Sequence[Setting]) -> Array:
        return np.array([self._problem.point(s) for s in settings], dtype=np.float64).reshape(
            len(settings), len(self._problem.knobs)
        )

    def _fit_speed(self) -> models.Process:
        timed = _most_telling(self._past.timed)
        points = [self._problem.point(m.setting) for m in timed]
        outcomes = [math.log(m.tps or 1.0) for m in timed]
        noise = errors([self._key(m.setting) for m in timed], [m.sd for m in timed])
        reference = self._problem.reference
        if all(knob.name in reference.setting for knob in self._problem.knobs):
            points.append(self._problem.point(reference.setting))
            outcomes.append(math.log(reference.tps))
            noise = np.pad(noise, (0, 1))
            noise[-1, -1] = REFERENCE_SD**2
        at, found = np.array(points), np.array(outcomes)
        process = models.fit(at, found, noise)
        return models.with_beliefs(process, self._points(self._past.pending))

    def _fit_log_ppl(self) -> models.Process:
        """Of the quality knobs alone: one point for each of their settings."""
        reference = self._problem.reference
        ceiling = self._problem.ceiling
        known: dict[tuple[object, ...], tuple[list[float], float, float]] = {}
        if all(knob.name in reference.setting for knob in self._problem.quality):
            setting = {**{k.name: k.low for k in self._problem.knobs}, **reference.setting}
            known[self._key(setting)] = (self._problem.point(setting), math.log(reference.ppl), SCORING_SD)
        for m in self._past.measured:
            sd = SCORING_SD if m.exact else SCORING_SD + REJECTED_SD * abs(math.log(m.ppl / ceiling))
            known[self._key(m.setting)] = (self._problem.point(m.setting), math.log(m.ppl), sd)
        points, outcomes, sds = zip(*known.values(), strict=True)
        # Far over the ceiling only the side matters, and a steep rise there would teach rough ground everywhere.
        most = math.log(ceiling) + 2 * math.log(ceiling / reference.ppl) + SCORING_SD
        at = np.array(points)[:, self._columns]
        return models.fit(at, np.minimum(np.array(outcomes), most), np.diag(np.square(sds)))

    def _quality(self, points: Array) -> tuple[Array, Array]:
        if self._log_ppl is None:
            nothing = np.zeros(len(points))
            return nothing + math.log(self._problem.reference.ppl), nothing + SCORING_SD
        return self._log_ppl.predict(points[:, self._columns])

    def _passes(self, settings: Sequence[Setting], log_ppl: Array, sd: Array) -> Array:
        """The chance to be under the ceiling: the model's, and all but certain where an ordered knob says so.

        A quality setting that another gate refused is known to be over: of other gates nothing else is modelled.
        """
        allowed = math.log(self._problem.ceiling)
        chance = np.asarray(stats.norm.cdf((allowed - log_ppl) / np.hypot(sd, SCORING_SD)))
        over = {self._key(m.setting) for m in self._past.measured if m.over(self._problem.ceiling)}
        under = {self._key(m.setting) for m in self._passed}
        trusted = not any(self._no_worse(low, high) for low in over for high in under if low != high)
        for i, setting in enumerate(settings):
            key = self._key(setting)
            if key in under:
                chance[i] = 1.0
            elif key in over:
                chance[i] = 0.0
            elif trusted and any(self._no_worse(key, known) for known in under):
                chance[i] = max(chance[i], 1.0 - MISTRUST)
            elif trusted and any(self._no_worse(known, key) for known in over):
                chance[i] = min(chance[i], MISTRUST)
        return chance

    def _no_worse(self, first: tuple[object, ...], second: tuple[object, ...]) -> bool:
        """Whether the first quality setting has no more perplexity than the second, as far as knobs are ordered."""
        return all(
            a == b or (KNOWN[knob.name].more_is_better and float(str(a)) > float(str(b)))
            for knob, a, b in zip(self._problem.quality, first, second, strict=True)
        )

    def _front(self) -> tuple[Array, tuple[float, float]]:
        """What passed, speeds as the model sees them, and what the hypervolume is spanned from.

        That is the reference's speed, and a perplexity EDGE_WEIGHT times as far beyond the ceiling as the ceiling is
        from the reference: so much the fastest setting under the ceiling weighs, relative to the rest of the front.
        """
        settings = [m.setting for m in self._passed]
        points = self._points(settings)
        front = np.column_stack([self._speed.predict(points)[0], [math.log(m.ppl) for m in self._passed]])
        allowed, ideal = math.log(self._problem.ceiling), math.log(self._problem.reference.ppl)
        slowest = min(math.log(self._problem.reference.tps), float(front[:, 0].min())) - 1e-3
        return front, (slowest, allowed + EDGE_WEIGHT * max(allowed - ideal, 1e-3))


def _rivals(front: Array, log_ppl: Array) -> NDArray[np.int64]:
    """For each of n perplexities the number of the fastest point (of m) that has no higher one; else of the lowest."""
    no_higher = front[None, :, 1] <= log_ppl[:, None] + SCORING_SD
    speeds = np.where(no_higher, front[None, :, 0], -np.inf)
    return np.where(no_higher.any(axis=1), speeds.argmax(axis=1), front[:, 1].argmin())


def errors(texts: Sequence[object], sds: Sequence[float]) -> Array:
    """Covariance of the errors of ln TPS, of trials that decoded `texts` (equal ones decoded the same).

    A trial's interval covers prompts that it did not time. Trials of one quality setting decode the same texts in one
    order, so that of two of them the one with more prompts makes an error that the other one makes too: nested samples
    share the smaller variance. Texts that are easy or hard to draft by luck (TEXTS_SD) are shared in full.
    """
    variances = np.square(np.array(sds, dtype=np.float64))
    same = np.array([[a == b for b in texts] for a in texts], dtype=np.float64).reshape(len(sds), len(sds))
    shared = same * (SHARED * np.minimum.outer(variances, variances) + TEXTS_SD**2)
    own = variances - SHARED * variances
    return np.asarray(shared + np.diag(own))


def _most_telling(timed: list[Measured]) -> list[Measured]:
    if len(timed) <= MOST_POINTS:
        return timed
    half = MOST_POINTS // 2
    latest, rest = timed[-half:], timed[:-half]
    return sorted(rest, key=lambda m: -(m.tps or 0.0))[:half] + latest


def _seconds(problem: Problem, past: History) -> tuple[float, float]:
    """What scoring a new quality setting costs, and what the rest of a trial does: medians of what trials took."""
    seen: set[tuple[object, ...]] = set()
    fresh: list[float] = []
    remembered: list[float] = []
    for m in past.measured:
        key = problem.quality_key(m.setting)
        if m.seconds is not None and not m.reused and m.tps is not None:
            (remembered if key in seen else fresh).append(m.seconds)
        seen.add(key)
    speed = statistics.median(remembered) if remembered else statistics.median(fresh or [1.0]) / (1 + GATE_SHARE)
    gate = max(statistics.median(fresh) - speed, 0.0) if fresh else GATE_SHARE * speed
    return gate, max(speed, 1e-6)
