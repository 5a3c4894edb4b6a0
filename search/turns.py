"""Whose turn it is: with which engine the next trial is measured, and what the sampler is told of that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from search import builds
from search.engine.protocol import Setting
from search.knobs import words
from search.samplers import Problem
from search.samplers.gated import worth_another
from search.samplers.problem import distribution
from search.spec import StudySpec

COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


class Turns:
    """The builds of one study, tried one after the other; a study without build knobs has one.

    Args:
        spec: the study.
        trials: how many should stand finished in the end.
        seed: of the order of builds.
        problem: what samplers are told of the reference's build.
        default: the setting tried first, live knobs alone.
        note: told when the next engine's turn begins.
    """

    def __init__(
        self,
        spec: StudySpec,
        trials: int,
        seed: int,
        problem: Problem,
        default: Setting,
        note: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._plan = builds.plan(spec.build_knobs, trials, bool(spec.knobs), seed)
        self._keys = [spec.build_key(build) for build in self._plan.builds]
        self._problem = problem
        self._default = default
        self._note = note

    def problem(
        self, study: optuna.Study, running: Setting, slower: Callable[[Setting], float], *, stop_early: bool
    ) -> Problem | None:
        """What the sampler is told for the next trial; None when no other trial is worth it.

        Args:
            study: with the trials so far.
            running: the build of this searcher's engine.
            slower: by how much an engine is slower than the reference's (see `stages.throughput`), by its build.
            stop_early: leave a build where another trial is not expected to gain anything.
        """
        if not self._spec.build_knobs:
            return None if stop_early and not worth_another(study.get_trials(deepcopy=False)) else self._problem
        trials = study.get_trials(deepcopy=False)
        by_key: dict[str, list[FrozenTrial]] = {key: [] for key in self._keys}
        for trial in trials:
            by_key.get(self._spec.build_key(trial.params), []).append(trial)
        by_build = list(by_key.values())
        closed = {n for n, of_it in enumerate(by_build) if any(map(_did_not_start, of_it))}
        if stop_early:
            closed |= {n for n, of_it in enumerate(by_build) if not worth_another(of_it)}
        counts = [sum(t.state in COUNTED for t in of_it) for of_it in by_build]
        key = self._spec.build_key(running)
        here = self._keys.index(key) if key in self._keys else None
        elsewhere = {n for n, of_it in enumerate(by_build) if any(t.state == TrialState.RUNNING for t in of_it)} - {
            here
        }
        number = self._plan.following(counts, closed, here, elsewhere)
        if number is None:
            if stop_early and len(closed) == len(self._keys):
                return None
            number = here if here is not None else 0
        build = self._plan.builds[number]
        if number != here:
            self._note(f"Next engine: {words(build)} ({number + 1} of {len(self._keys)} builds).")
        if not counts[number] and number:
            self._begin(study, trials, build)
        reference = self._problem.reference
        here_too = replace(reference, tps=reference.tps / slower(build))
        return replace(self._problem, knobs=self._spec.knobs_of(build), reference=here_too, build=build)

    def distributions(self, problem: Problem, enqueued: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        """What a trial's knobs are drawn from; one that was enqueued says itself which build it is for."""
        build = self._spec.build_of(enqueued) or problem.build
        of_build: dict[str, BaseDistribution] = {
            knob.name: CategoricalDistribution(knob.values) for knob in self._spec.build_knobs if knob.name in build
        }
        return of_build | {knob.name: distribution(knob) for knob in self._spec.knobs_of(build)}

    def _begin(self, study: optuna.Study, trials: Sequence[FrozenTrial], build: Setting) -> None:
        """Let a build begin with the live knobs that were fastest so far."""
        waiting = [t for t in trials if t.state == TrialState.WAITING]
        if any(self._spec.build_of(t.system_attrs.get("fixed_params", {})) == build for t in waiting):
            return
        passed = [t for t in trials if t.state == TrialState.COMPLETE]
        best = max(passed, key=lambda t: t.user_attrs["tps"]).params if passed else {}
        live = {k.name: best.get(k.name, self._default[k.name]) for k in self._spec.knobs_of(build)}
        why = "the first with this engine: what was fastest with the others"
        study.enqueue_trial({**build, **live}, user_attrs={"why": why})


def _did_not_start(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.FAIL and trial.user_attrs.get("failed_stage") == "build"
