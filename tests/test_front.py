import random
from dataclasses import dataclass

from search.store.front import pareto_front


@dataclass(frozen=True)
class P:
    tps: float | None
    ppl: float | None


def beaten(point, points):
    return any(q.tps >= point.tps and q.ppl <= point.ppl and (q.tps > point.tps or q.ppl < point.ppl) for q in points)


def test_the_front_is_exactly_the_unbeaten_points():
    draw = random.Random(0)
    for _ in range(200):
        points = [P(draw.randrange(12), draw.randrange(12)) for _ in range(30)]
        front = pareto_front(points)
        assert {(p.tps, p.ppl) for p in front} == {(p.tps, p.ppl) for p in points if not beaten(p, points)}
        assert len({(p.tps, p.ppl) for p in front}) == len(front)
        assert [p.tps for p in front] == sorted(p.tps for p in front)


def test_of_equal_points_the_first_stays():
    first, second = P(1.0, 1.0), P(1.0, 1.0)
    assert pareto_front([first, second])[0] is first


def test_points_without_figures_take_no_part():
    assert pareto_front([P(None, 1.0), P(5.0, None)]) == []
