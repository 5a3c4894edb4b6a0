"""What a sampler is told of a study before its first trial, and how settings become points of a unit cube."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution, IntDistribution

from search.engine.protocol import Setting
from search.knobs import DRAFTS, KNOWN, Knob, canonical


@dataclass(frozen=True)
class Reference:
    """The reference setting as it was measured; `figures` as in `search.objectives`."""

    setting: Setting
    ppl: float
    tps: float
    figures: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The live knobs, the ceiling (perplexity) and the reference of a study; `prior` are points from elsewhere.

    Of a study with several engine builds it is one build's: `build` are the values that its trials have in common.
    """

    knobs: tuple[Knob, ...]
    ceiling: float
    reference: Reference
    prior: tuple[PriorPoint, ...] = ()
    build: Setting = field(default_factory=dict)

    @property
    def quality(self) -> tuple[Knob, ...]:
        """The knobs that perplexity hangs on."""
        return tuple(knob for knob in self.knobs if knob.affects_quality)

    def quality_key(self, setting: Setting) -> tuple[object, ...]:
        """The values of a setting that perplexity hangs on, comparable."""
        return tuple(setting[knob.name] for knob in self.quality)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The knobs' ranges as Optuna writes them."""
        return {knob.name: distribution(knob) for knob in self.knobs}

    def spelled(self, setting: Mapping[str, Any]) -> Setting:
        """A setting in its one spelling, with the knobs of the study alone."""
        full = canonical({knob.name: int(setting[knob.name]) for knob in self.knobs}, self._native)
        return {knob.name: full[knob.name] for knob in self.knobs}

    def point(self, setting: Mapping[str, Any]) -> list[float]:
        """A setting as a point of the unit cube, one coordinate a knob; what acts by ratios on a logarithmic axis."""
        spelled = self.spelled(setting)
        return [coordinate(knob, float(spelled[knob.name])) for knob in self.knobs]

    @property
    def _native(self) -> Setting:
        return {name: value for name, value in self.reference.setting.items() if name != DRAFTS}


@dataclass(frozen=True)
class PriorPoint:
    """A setting as it did elsewhere: its TPS there, and its perplexity where that is known."""

    setting: Setting
    tps: float
    ppl: float | None
    count: int  # how many reports it is the median of


def distribution(knob: Knob) -> BaseDistribution:
    """A knob's range as Optuna writes it."""
    return IntDistribution(knob.low, knob.largest, step=knob.step, log=knob.log)


def values(knob: Knob) -> Sequence[int]:
    """Every value of a knob's range, ascending."""
    return range(knob.low, knob.largest + 1, knob.step)


def coordinate(knob: Knob, value: float) -> float:
    """Where a value lies in its range: 0 at `low`, 1 at `largest`; it may lie outside."""
    low, high = float(knob.low), float(knob.largest)
    if low == high:
        return 0.5
    if (knob.log or KNOWN[knob.name].by_ratio) and low > 0:
        return math.log(max(value, 0.5) / low) / math.log(high / low)
    return (value - low) / (high - low)
