"""What our samplers have in common: a trial's knobs are proposed together, from what the study has measured."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial

from search.samplers.problem import Problem


class JointSampler(BaseSampler):
    """Proposes whole settings, for one trial: its seed is the trial's own."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._random = RandomSampler(seed=seed)

    @abstractmethod
    def setting(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """The setting to measure as `trial`; whatever explains it is noted with the trial."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All knobs, from the first trial on; none for a trial that was enqueued."""
        return {} if trial.system_attrs.get("fixed_params") else self._problem.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The setting to measure next."""
        return self.setting(study, trial) if search_space else {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A knob that was not asked for above, at random."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)
