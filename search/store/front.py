"""The Pareto front of throughput (up) and perplexity (down)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Point(Protocol):
    """Anything with a throughput and a perplexity."""

    @property
    def tps(self) -> float | None:
        """Tokens per second; None where none was measured."""

    @property
    def ppl(self) -> float | None:
        """Perplexity; None where none was measured."""


P = TypeVar("P", bound=Point)


def pareto_front(points: Iterable[P]) -> list[P]:
    """The points that no other point beats, slowest first.

    A point is beaten by one that is at least as good in both and better in one; of points equal in both the
    first is kept. Points without both figures never take part. O(n log n).
    """
    measured = [(p.tps, p.ppl, p) for p in points if p.tps is not None and p.ppl is not None]
    measured.sort(key=lambda entry: (-entry[0], entry[1]))
    front: list[P] = []
    best_ppl = float("inf")
    for _, ppl, point in measured:
        if ppl < best_ppl:
            front.append(point)
            best_ppl = ppl
    return front[::-1]
