"""Who proposes the next setting. torch is imported by a sampler only when that one has to propose."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler

from search.errors import UsageError
from search.objectives import DEFAULT, listed
from search.samplers.problem import PriorPoint, Problem, Reference

GATED = "gated"
STARTUP_TRIALS = 64  # of TPE: of 200 drawn at random, so that every window is seen, the forbidden ones too
NEEDS = {"gp": ("torch",), "gated": ("torch", "botorch")}  # packages that a sampler imports


def _tpe(_: Problem, seed: int, startup: int = STARTUP_TRIALS) -> BaseSampler:
    return TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=startup)


def _random(_: Problem, seed: int) -> BaseSampler:
    return RandomSampler(seed=seed)


def _gp(problem: Problem, seed: int) -> BaseSampler:
    from search.samplers.shadow import gp

    return gp(problem, seed)


def _nsga2(problem: Problem, seed: int) -> BaseSampler:
    from search.samplers.shadow import nsga2

    return nsga2(problem, seed)


def _gated(problem: Problem, seed: int) -> BaseSampler:
    from search.samplers.gated import GatedSampler

    return GatedSampler(problem, seed)


SAMPLERS: dict[str, Callable[[Problem, int], BaseSampler]] = {
    GATED: _gated,
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": _nsga2,
    "random": _random,
}


def check_sampler(objectives: Sequence[str], name: str, stop_early: bool) -> None:
    """Check that a sampler knows a study's objectives, and that it can say what another trial is worth if it must.

    Raises:
        UsageError: it does not, or cannot.
    """
    if name == GATED and tuple(objectives) != DEFAULT:
        raise UsageError(
            f"--sampler {GATED} models tokens a second and perplexity alone, and this study's objectives are "
            f"{listed(objectives)}: take --sampler tpe."
        )
    if stop_early and name != GATED:
        raise UsageError(f"--stop auto needs --sampler {GATED}, which says what another trial is worth; not {name}.")


def missing(name: str) -> list[str]:
    """The packages that a sampler needs and that are not installed."""
    return [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]


def make_sampler(name: str, problem: Problem, seed: int) -> BaseSampler:
    """A sampler by its name, for one trial: its seed is the trial's own.

    Raises:
        UsageError: it needs a package that is not installed.
    """
    if lacks := missing(name):
        raise UsageError(
            f"--sampler {name} needs {' and '.join(lacks)}: pip install {' '.join(lacks)}, or take --sampler tpe."
        )
    sampler = SAMPLERS[name](problem, seed) if problem.knobs else RandomSampler(seed=seed)
    if not problem.build:
        return sampler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return PartialFixedSampler(dict(problem.build), sampler)


def trial_seed(seed: int, ordinal: int, attempt: int) -> int:
    """The sampler's seed for one ask: a resumed study goes on, it does not draw the same again."""
    digest = hashlib.sha256(f"{seed} {ordinal} {attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


__all__ = ["SAMPLERS", "PriorPoint", "Problem", "Reference", "check_sampler", "make_sampler", "missing", "trial_seed"]
