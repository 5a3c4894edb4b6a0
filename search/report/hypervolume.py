"""How much of the plane a front has conquered, trial after trial: pure functions."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence


def progress(points: Sequence[tuple[float, float] | None], ceiling: float) -> list[float]:
    """Area that the points so far dominate, after each: TPS × perplexity under the ceiling.

    The reference point is (0 tokens a second, the ceiling), so that the area grows with faster settings and with better
    ones, and no point over the ceiling adds to it.

    Args:
        points: TPS and perplexity of each trial in order; None for one that was not timed.
        ceiling: of perplexity.
    """
    front: list[tuple[float, float]] = []  # by perplexity; TPS grows with it
    found, area = [], 0.0
    for point in points:
        if point is not None and point[1] < ceiling and _add(front, point):
            area = _area(front, ceiling)
        found.append(area)
    return found


def _add(front: list[tuple[float, float]], point: tuple[float, float]) -> bool:
    """Put a point into a front unless one of it is as good, and take out what it beats; whether it went in."""
    tps, ppl = point
    place = bisect.bisect_right(front, (ppl, math.inf))
    if place and front[place - 1][1] >= tps:
        return False
    while place < len(front) and front[place][1] <= tps:
        del front[place]
    if place and front[place - 1][0] == ppl:
        del front[place - 1]
        place -= 1
    front.insert(place, (ppl, tps))
    return True


def _area(front: Sequence[tuple[float, float]], ceiling: float) -> float:
    edges = [ppl for ppl, _ in front[1:]] + [ceiling]
    return math.fsum(tps * (edge - ppl) for (ppl, tps), edge in zip(front, edges, strict=True))
