"""Where perplexity crosses the ceiling along a knob of which more is better: bracketed, then found by the secant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search.knobs import KNOWN, Knob
from search.samplers.history import History
from search.samplers.problem import Problem, coordinate, values

CLOSE = 0.03  # of the value: closer than that, what is left to win in speed is less than trials tell apart
INNER = 0.12  # of the bracket, at each end: a secant never lands closer, so that every trial narrows it


@dataclass(frozen=True)
class Bracket:
    """The smallest value known to be under the ceiling, and the largest below it that is known to be over.

    Each with ln(perplexity ÷ reference's) there; `over` is None where nothing below `under` was over. `over_rise` is
    NaN where another gate than perplexity refused that value: no secant goes through it.
    """

    under: int
    under_rise: float
    over: int | None
    over_rise: float


def edge_knob(problem: Problem) -> Knob | None:
    """The knob along which the ceiling is looked for: the one quality knob of which more is better."""
    ordered = [k for k in problem.quality if KNOWN[k.name].more_is_better and k.low < k.largest]
    return ordered[0] if len(ordered) == 1 else None


def bracket(knob: Knob, problem: Problem, past: History) -> Bracket | None:
    """What is known of the edge; None before anything was under the ceiling in the range."""
    rises = {int(m.setting[knob.name]): math.log(m.ppl / problem.reference.ppl) for m in past.measured}
    native = int(problem.reference.setting.get(knob.name, knob.largest))
    allowed = math.log(problem.ceiling / problem.reference.ppl)
    refused = {int(m.setting[knob.name]) for m in past.measured if m.refused and m.ppl <= problem.ceiling}
    under = {value: rise for value, rise in rises.items() if rise <= allowed and value not in refused}
    if native >= knob.largest and knob.largest not in rises:
        under[knob.largest] = 0.0  # no less than the reference has, as far as the knob's kind says
    if not under:
        return None
    lowest = min(under)
    over = max((value for value in rises if value not in under and value < lowest), default=None)
    over_rise = math.nan if over is None or over in refused else rises[over]
    return Bracket(lowest, under[lowest], over, over_rise)


def nothing_passes(knob: Knob, problem: Problem, past: History) -> bool:
    """Whether nothing was found under the ceiling, and the knob's largest value was measured."""
    largest = any(m.setting[knob.name] == knob.largest for m in past.measured)
    return largest and not any(m.under(problem.ceiling) for m in past.measured)


def next_value(knob: Knob, found: Bracket, allowed: float) -> int | None:
    """The value to try next, or None when the edge is known well enough; `allowed` is ln(ceiling ÷ reference's)."""
    low = knob.low if found.over is None else found.over
    between = [v for v in values(knob) if low < v < found.under or (found.over is None and v == knob.low < found.under)]
    if not between or (found.over is not None and (found.under - found.over) <= CLOSE * found.under):
        return None
    if found.over is not None and 0 < found.under_rise < found.over_rise:
        crossing = _secant(found, allowed)
        if crossing > found.under - knob.step / 2:
            return None  # as far as the two ends tell, `under` is the last value that passes
        safe = next((v for v in between if v >= crossing), between[-1])
        margin = INNER * (found.under - found.over)
        return _nearest(between, min(max(safe, found.over + margin), found.under - margin))
    middle = (coordinate(knob, low) + coordinate(knob, found.under)) / 2
    return min(between, key=lambda v: abs(coordinate(knob, v) - middle))


def _secant(found: Bracket, allowed: float) -> float:
    """Where a rise that falls exponentially with the value, as through both ends of the bracket, is just allowed."""
    assert found.over is not None
    slope = (math.log(found.over_rise) - math.log(found.under_rise)) / (found.under - found.over)
    return found.under - (math.log(allowed) - math.log(found.under_rise)) / slope if allowed > 0 else found.under


def _nearest(choices: Sequence[int], value: float) -> int:
    return min(choices, key=lambda v: abs(v - value))


def explain(knob: Knob, found: Bracket) -> str:
    """Why a value of the edge's bracket is tried."""
    over = "nothing below is known to be over" if found.over is None else f"{found.over} is over"
    return f"to find the ceiling's edge along {knob.name}: {found.under} is under, {over}"


def is_between(knob: Knob, found: Bracket, setting: Mapping[str, object]) -> bool:
    """Whether a setting lies inside the bracket."""
    return (found.over or knob.low - 1) < int(str(setting[knob.name])) < found.under
