"""How throughput follows the pace of the machine, recovered from passes that were made with it known."""

import math
import random

import pytest

from search.pace import PRIOR_SLOPE, elasticity
from search.served import Served


def drifting(slope, *, processes=4, passes=5, drift=0.02, noise=0.01, seed=0):
    """Passes of processes that each have a level of their own, on a machine that drifts."""
    draw = random.Random(seed)
    found = []
    for _ in range(processes):
        level = draw.gauss(3, 0.3)
        paces = [draw.gauss(0, drift) for _ in range(passes)]
        found.append([(0.1 * math.exp(p), math.exp(level + slope * p + draw.gauss(0, noise))) for p in paces])
    return found


@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0])
def test_the_slope_is_recovered_from_a_drifting_machine(slope):
    found = [elasticity(drifting(slope, processes=8, seed=seed)) for seed in range(40)]
    assert sum(found) / len(found) == pytest.approx(slope, abs=0.1)


def test_processes_of_different_settings_do_not_mix_their_levels():
    exact = drifting(2.0, noise=0.0)
    assert elasticity(exact) == pytest.approx(2.0, abs=0.03)


def test_a_steady_machine_tells_nothing_and_leaves_the_prior():
    assert elasticity(drifting(2.0, drift=1e-5, noise=0.003)) == pytest.approx(PRIOR_SLOPE, abs=0.05)
    assert elasticity([[(0.1, 3.0)]]) == PRIOR_SLOPE
    assert elasticity([]) == PRIOR_SLOPE


def test_passes_put_to_one_pace_differ_by_noise_alone():
    ((first, second),) = [[(0.1, 10.0), (0.11, 10.0 * 1.1**2)]]
    served = Served(passes=[{"a": first[1]}, {"a": second[1]}], machine_s=[first[0], second[0]])
    at_one_pace = served.at(0.1, 2.0)
    assert at_one_pace[0]["a"] == pytest.approx(10.0) == pytest.approx(at_one_pace[1]["a"])
    assert served.pace_s == pytest.approx(math.sqrt(0.1 * 0.11))
