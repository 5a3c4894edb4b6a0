"""What is compared: samplers with their settings, on which landscapes, for how many trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.samplers import BaseSampler, TPESampler

from search.landscapes import A10G, LANDSCAPES, MINIATURE, OTHER_CARD
from search.samplers import Problem, make_sampler

EASY_TRIALS, MODEL_TRIALS, LONG_TRIALS = 200, 80, 200
GP_TRIALS = 40  # its ask takes longest
PUBLIC_POINTS = Path(__file__).resolve().parents[2] / "studies" / "gemma-4-e4b-a10g" / "points.csv"


@dataclass(frozen=True)
class Variant:
    """A sampler as it is compared; `landscapes` by name, `prior` a file, `stop` whether it may end by itself."""

    label: str
    make: Callable[[Problem, int], BaseSampler]
    trials: int
    landscapes: tuple[str, ...] = tuple(LANDSCAPES)
    prior: Path | None = None
    stop: bool = False


def _named(name: str) -> Callable[[Problem, int], BaseSampler]:
    return lambda problem, seed: make_sampler(name, problem, seed)


def _eager_tpe(_: Problem, seed: int) -> BaseSampler:
    """TPE that believes its model after ten trials, Optuna's own default, instead of search.run's 64."""
    return TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=10)


VARIANTS = (
    Variant("gated", _named("gated"), MODEL_TRIALS),
    Variant("random", _named("random"), EASY_TRIALS),
    Variant("tpe", _named("tpe"), EASY_TRIALS),
    Variant("tpe-10", _eager_tpe, EASY_TRIALS),
    Variant("nsga2", _named("nsga2"), EASY_TRIALS),
    Variant("gated+prior", _named("gated"), GP_TRIALS, (A10G.name, OTHER_CARD.name), prior=PUBLIC_POINTS),
    Variant("gp", _named("gp"), GP_TRIALS),
    Variant("gated, stop auto", _named("gated"), LONG_TRIALS, (A10G.name, MINIATURE.name), stop=True),
    Variant("gated, 200", _named("gated"), LONG_TRIALS, (MINIATURE.name,)),
)
BY_LABEL = {variant.label: variant for variant in VARIANTS}
