"""The gated sampler: the ceiling's edge first, then the most expected hypervolume a second.

It knows what a study knows before its first trial: perplexity hangs on the quality knobs alone, and more of a window
does not raise it; a remembered gate costs nothing; every speed comes with its interval. Nothing is kept between two
asks: all that it knows it reads from the study's trials, so that a search can be resumed, and several may share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial
from scipy import stats

from search.engine.protocol import Setting
from search.knobs import quality_part, words
from search.samplers import edge
from search.samplers.base import JointSampler
from search.samplers.candidates import candidates, far_from, random_setting
from search.samplers.history import STOPPED, History, Measured, history
from search.samplers.prior import WHY
from search.samplers.problem import Problem

GAIN, ON_ALL = "expected_gain", "on_all_prompts"  # user attributes of a trial
EDGE_TRIALS = 10  # at most, before the models take over
DESIGN = 2  # timed trials a knob before the models are believed
ELSEWHERE = 12  # one trial in so many is drawn at random, whatever the models say
ON_ALL_PROMPTS = 1.5  # times as wide as the narrowest interval: the trial was timed on all prompts
MOST_THOROUGH = 0.4  # of the timed trials, those on all prompts
NEW_QUALITY = 0.3  # of these, how many may have quality knobs that nothing is known of
STOP_BELOW = 0.002  # expected gain of a further trial: how much faster the front gets
TOLD_APART = 0.8  # probability that one of two leaders is the faster


@dataclass(frozen=True)
class Proposal:
    """A setting to measure, and why; `gain` is what the models expect of it, `on_all` that all prompts are timed."""

    setting: Setting
    why: str
    gain: float | None = None
    on_all: bool = False


class GatedSampler(JointSampler):
    """`propose` behind Optuna's interface. A trial's user attributes `why` and `expected_gain` explain it."""

    def setting(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """The setting to measure next."""
        past = history(study, self._problem, trial.number)
        chosen = propose(self._problem, past, np.random.default_rng(self._seed))
        said = {WHY: chosen.why, GAIN: chosen.gain, ON_ALL: chosen.on_all or None}
        for name, value in said.items():
            if value is not None:
                study._storage.set_trial_user_attr(trial._trial_id, name, value)
        return dict(chosen.setting)


def propose(problem: Problem, past: History, draw: np.random.Generator) -> Proposal:
    """The setting to measure next, from what is known.

    The ceiling's edge is found first, with speed knobs spread wide; then the models choose.
    """
    if (found := _at_the_edge(problem, past, draw)) is not None:
        return found
    if (knob := edge.edge_knob(problem)) is not None and edge.nothing_passes(knob, problem, past):
        why = f"at random: even the largest {knob.name} is over the ceiling"
        return Proposal(random_setting(problem, past, draw), why, gain=0.0)
    passed = [m for m in past.measured if m.under(problem.ceiling)]
    edge_of_range = _quality_at_edge(problem, passed)
    if (found := _anchor(problem, past, edge_of_range)) is not None:
        return found
    wanted = DESIGN * len(problem.knobs)
    if len(passed) < wanted:
        setting = far_from(problem, past, edge_of_range, draw)
        return Proposal(setting, f"to know the knobs apart: trial {len(passed) + 1} of {wanted} before models are used")
    thorough = _may_be_thorough(past)
    if thorough and (again := _leader_again(problem, past)) is not None:
        return again
    if draw.random() < 1 / ELSEWHERE:
        return Proposal(_elsewhere(problem, past, draw), "far from all trials, whatever the models expect")
    return _by_models(problem, past, draw, thorough)


def _may_be_thorough(past: History) -> bool:
    """Whether another trial may be timed on all prompts: where all is flat, such trials would take all the time."""
    sds = [m.sd for m in past.timed]
    return sum(sd <= ON_ALL_PROMPTS * min(sds) for sd in sds) <= MOST_THOROUGH * len(sds)


def _at_the_edge(problem: Problem, past: History, draw: np.random.Generator) -> Proposal | None:
    knob = edge.edge_knob(problem)
    if knob is None or len(past.measured) >= EDGE_TRIALS:
        return None
    found = edge.bracket(knob, problem, past)
    if found is None:
        return None
    allowed = math.log(problem.ceiling / problem.reference.ppl)
    if any(edge.is_between(knob, found, setting) for setting in past.pending):
        return None  # another searcher is on it
    value = edge.next_value(knob, found, allowed)
    if value is None and all(m.setting[knob.name] != found.under for m in past.measured):
        value = found.under  # it was only assumed to pass
    if value is None:
        return None
    return Proposal(far_from(problem, past, {knob.name: value}, draw), edge.explain(knob, found))


def _quality_at_edge(problem: Problem, passed: Sequence[Measured]) -> Setting:
    """The quality knobs of the highest perplexity that passed: the fastest ones, and their gate is remembered."""
    if not passed or not problem.quality:
        return {}
    last = max(passed, key=lambda m: m.ppl)
    return quality_part(last.setting)


def _anchor(problem: Problem, past: History, quality: Setting) -> Proposal | None:
    """A trial on all prompts at the ceiling's edge, with the speed knobs that did best: what others there are held to.

    A trial with other texts than those measured before is easily stopped early, by luck of its first prompts.
    """
    there = [m for m in past.timed if all(m.setting[name] == value for name, value in quality.items())]
    narrowest = min((m.sd for m in past.timed), default=0.0)
    if not quality or not there or any(m.sd <= STOPPED * narrowest for m in there):
        return None
    if any(all(s[name] == value for name, value in quality.items()) for s in past.pending):
        return None
    fastest = max(past.timed, key=lambda m: m.tps or 0.0)
    setting = problem.spelled({**fastest.setting, **quality})
    return Proposal(setting, "on all prompts: what other trials at the ceiling's edge are compared with", on_all=True)


def _by_models(problem: Problem, past: History, draw: np.random.Generator, thorough: bool) -> Proposal:
    from search.samplers.forecast import Forecast  # torch

    forecast = Forecast(problem, past)
    pool = candidates(problem, past, forecast.leaders(), draw)
    judged = forecast.judge(pool)
    best = int(np.argmax(judged.gain / judged.seconds))
    gain = float(judged.gain.max())
    if gain < STOP_BELOW:
        return Proposal(_elsewhere(problem, past, draw), f"far from all trials: the models expect {gain:.2%}", gain)
    sd = float(judged.expected.speed_sd[best])
    why = (
        f"most expected hypervolume a second: the front {judged.gain[best]:.2%} faster for "
        f"{judged.seconds[best]:.3g} s; expected {math.exp(judged.expected.speed[best]):.1f} tok/s ± {sd:.1%}, under "
        f"the ceiling with a chance of {judged.passes[best]:.0%}"
    )
    if thorough and forecast.needs_all_prompts(pool[best], float(judged.ahead[best]), sd):
        return Proposal(pool[best], f"{why}; on all prompts, as a few would tell nothing", gain, True)
    return Proposal(pool[best], why, gain)


def _elsewhere(problem: Problem, past: History, draw: np.random.Generator) -> Setting:
    """A setting far from all others, mostly with quality knobs that have passed: their gate costs nothing."""
    passed = [m for m in past.measured if m.under(problem.ceiling)]
    if draw.random() < NEW_QUALITY or not passed:
        return random_setting(problem, past, draw)
    there = passed[int(draw.integers(len(passed)))].setting
    return far_from(problem, past, quality_part(there), draw)


def _leader_again(problem: Problem, past: History) -> Proposal | None:
    """The fastest trial again, on all prompts, unless it was timed so or is surely faster than the next.

    The fastest of many is partly a lucky draw; without this the search would go on from its luck, and hand it over.
    """
    passed = [m for m in past.measured if m.under(problem.ceiling) and not m.reused]
    latest = {words(m.setting): m for m in passed}
    leaders = sorted(latest.values(), key=lambda m: -(m.tps or 0.0))[:2]
    if len(leaders) < 2:
        return None
    first, second = leaders
    assert first.tps and second.tps
    surely = float(stats.norm.cdf(math.log(first.tps / second.tps) / math.hypot(first.sd, second.sd)))
    narrowest = min(m.sd for m in passed)
    if surely >= TOLD_APART or first.sd <= ON_ALL_PROMPTS * narrowest or first.setting in past.pending:
        return None
    why = f"again, on all prompts: it leads, but may be no faster than trial {second.number} ({surely:.0%})"
    return Proposal(first.setting, why, on_all=True)


def asked_on_all(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> bool:
    """Whether a trial was asked for on all prompts, be its setting known or not."""
    return bool(study._storage.get_trial(trial._trial_id).user_attrs.get(ON_ALL))


def worth_another(measured: Sequence[FrozenTrial], trials: int = 3) -> bool:
    """Whether a further trial can be expected to gain anything: not after so many in a row were not worth it.

    Each trial that the models chose keeps what they expected of it (`expected_gain`); others break no row.
    """
    gains = [t.user_attrs[GAIN] for t in measured if GAIN in t.user_attrs]
    return len(gains) < trials or any(gain >= STOP_BELOW for gain in gains[-trials:])
