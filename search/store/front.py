"""The Pareto front of a study's objectives: throughput (up) and perplexity (down), unless it names others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from search.objectives import DEFAULT, Point, losses

P = TypeVar("P", bound=Point)


def pareto_front(points: Iterable[P], objectives: Sequence[str] = DEFAULT) -> list[P]:
    """The points that no other point beats, the worst in the first objective first.

    A point is beaten by one that is at least as good in all objectives and better in one; of points equal in all the
    first is kept. Points without all figures never take part. O(n log n) for two objectives, O(n × front) for three.
    """
    measured = [(lost, point) for point in points if (lost := losses(point, objectives)) is not None]
    measured.sort(key=lambda entry: entry[0])  # none is beaten by one that comes later
    front: list[tuple[tuple[float, ...], P]] = []
    for lost, point in measured:
        rivals = front[-1:] if len(objectives) == 2 else front  # of two objectives the last has the least of the second
        if not any(all(a <= b for a, b in zip(rival, lost, strict=True)) for rival, _ in rivals):
            front.append((lost, point))
    return [point for _, point in reversed(front)]
