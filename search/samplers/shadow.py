"""Optuna's GP and NSGA-II on a study of ours: they learn from completed trials alone; over the ceiling ours are pruned.

They are shown a shadow of the study in which a pruned trial is complete, with the perplexity that it had, its
constraints violated, and in place of figures that nobody measured those of the timed setting nearest to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.objectives import DEFAULT, values
from search.recovery import CONSTRAINT
from search.samplers.base import JointSampler
from search.samplers.history import Measured, history
from search.samplers.problem import Problem

POPULATION = 20  # of NSGA-II: Optuna's 50 would leave a budget of 40 trials at random


class ShadowSampler(JointSampler):
    """Asks another sampler on the shadow of the study."""

    def __init__(self, problem: Problem, seed: int, make: Callable[[int], BaseSampler]) -> None:
        super().__init__(problem, seed)
        self._make = make

    def setting(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """What the other sampler proposes; what it notes of a trial is kept with ours."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shadow = self._shadow(study, trial)
            shadow.sampler = self._make(self._seed)
            asked = shadow.ask(self._problem.distributions)
        for key, value in _noted(shadow.get_trials(deepcopy=False)[asked.number]).items():
            study._storage.set_trial_system_attr(trial._trial_id, key, value)
        return dict(asked.params)

    def _shadow(self, study: optuna.Study, trial: FrozenTrial) -> optuna.Study:
        past = history(study, self._problem, trial.number)
        originals = {t.number: t for t in study.get_trials(deepcopy=False)}
        shadow = optuna.create_study(directions=study.directions)
        objectives = study.metric_names or DEFAULT
        timed = past.timed
        for m in past.measured:
            like = m if m.tps is not None else _nearest(self._problem, m, timed)
            found = originals[like.number].values if like else values(self._problem.reference, objectives)
            assert found is not None
            shadow.add_trial(
                create_trial(
                    state=TrialState.COMPLETE,
                    values=[m.ppl if name == "ppl" else known for name, known in zip(objectives, found, strict=True)],
                    params=originals[m.number].params,
                    distributions=self._problem.distributions,
                    system_attrs=_noted(originals[m.number]),
                    constraints={**m.constraints, CONSTRAINT: m.ppl - self._problem.ceiling},
                )
            )
        for setting in past.pending:
            shadow.add_trial(
                create_trial(state=TrialState.RUNNING, params=dict(setting), distributions=self._problem.distributions)
            )
        return shadow


def _nearest(problem: Problem, over: Measured, timed: list[Measured]) -> Measured | None:
    at = np.array(problem.point(over.setting))
    return min(timed, key=lambda m: float(((np.array(problem.point(m.setting)) - at) ** 2).sum()), default=None)


def _noted(trial: FrozenTrial) -> dict[str, Any]:
    """What a sampler noted with a trial, NSGA-II its generation: Optuna's own notes of a study's are left out."""
    return {key: value for key, value in trial.system_attrs.items() if "NSGA" in key or "nsga" in key}


def gp(problem: Problem, seed: int) -> BaseSampler:
    """Optuna's Gaussian processes."""
    return ShadowSampler(problem, seed, lambda s: GPSampler(seed=s))


def nsga2(problem: Problem, seed: int) -> BaseSampler:
    """Optuna's genetic algorithm."""
    return ShadowSampler(problem, seed, lambda s: NSGAIISampler(seed=s, population_size=POPULATION))
