"""What a study has measured so far, as samplers read it: from Optuna's trials, whoever measured them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from search.engine.protocol import Setting
from search.gates import GATES
from search.recovery import CONSTRAINT
from search.samplers.problem import Problem

Z = 1.96  # two-sided 95 % of a normal variable
STOPPED = 2.5  # times as wide as the narrowest interval of a study: the trial was stopped early
LEAST_SD, MOST_SD = 0.002, 0.2  # of ln TPS: what an interval is believed to say


@dataclass(frozen=True)
class Measured:
    """One finished trial. `ppl` is over all records (where it was rejected early, an estimate); `tps` None: not timed.

    `sd` is the standard deviation of ln TPS that its interval stands for. `constraints` are all gates' excesses, in
    the order of `search.gates.GATES`.
    """

    number: int
    setting: Setting
    ppl: float
    tps: float | None
    sd: float
    seconds: float | None
    reused: bool
    exact: bool  # all records were scored
    constraints: Mapping[str, float] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether a gate other than perplexity is over its limit."""
        return any(excess > 0 for name, excess in self.constraints.items() if name != CONSTRAINT)

    def under(self, ceiling: float) -> bool:
        """Whether it passed the gates."""
        return self.tps is not None and self.ppl <= ceiling

    def over(self, ceiling: float) -> bool:
        """Whether a gate is known to refuse it."""
        return self.ppl > ceiling or self.refused


@dataclass(frozen=True)
class History:
    """Finished trials by number, and the settings that are being measured now."""

    measured: tuple[Measured, ...]
    pending: tuple[Setting, ...]

    @property
    def timed(self) -> list[Measured]:
        """Those with a speed."""
        return [m for m in self.measured if m.tps is not None]


def history(study: optuna.Study, problem: Problem, asked: int) -> History:
    """What there is to learn from; `asked` is the number of the trial that is being asked for."""
    trials: Sequence[FrozenTrial] = study.get_trials(deepcopy=False)
    names = {knob.name for knob in problem.knobs}
    known = [
        t
        for t in trials
        if names <= t.params.keys() and t.number != asked and problem.build.items() <= t.params.items()
    ]
    pending = [problem.spelled(t.params) for t in known if t.state == TrialState.RUNNING]
    finished = [t for t in known if t.state in (TrialState.COMPLETE, TrialState.PRUNED) and CONSTRAINT in t.constraints]
    return History(tuple(_measured(t, problem) for t in finished), tuple(pending))


def _measured(trial: FrozenTrial, problem: Problem) -> Measured:
    said = trial.user_attrs
    tps, interval = said.get("tps"), said.get("tps_interval")
    sd = MOST_SD
    if interval:
        low, high = interval
        sd = min(MOST_SD, max(LEAST_SD, math.log(high / low) / (2 * Z)))
    constraints = trial.constraints
    ppl = constraints[CONSTRAINT] + problem.ceiling
    return Measured(
        number=trial.number,
        setting=problem.spelled(trial.params),
        ppl=ppl,
        tps=float(tps) if tps else None,
        sd=sd,
        seconds=said.get("wall_s"),
        reused="reused_from" in said,
        exact=trial.state == TrialState.COMPLETE or abs(said.get("ppl", 0.0) - ppl) < 1e-9,
        constraints={name: constraints[name] for name in GATES if name in constraints},
    )
