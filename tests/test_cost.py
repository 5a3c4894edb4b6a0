"""What a study's trials cost, by stage."""

import math

import pytest

from search.cost import stage_costs, table
from search.store import Store, open_engine


@pytest.fixture
def store(searched):
    return Store(open_engine(searched), "synthetic-simulated")


def test_every_stage_of_every_trial_is_counted_once(store):
    costs = {cost.what: cost for cost in stage_costs(store)}
    measured = [o for o in store.outcomes() if o.reused_from is None]
    under = [o for o in measured if o.state == "COMPLETE"]
    assert costs["engine start"].times == 1
    assert costs["apply"].times == len(measured)
    assert costs["gate, scored"].times + costs["gate, remembered"].times == len(measured)
    assert costs["speed"].times == costs["trial under the ceiling"].times == len(under)
    assert costs["trial under the ceiling"].total_s == pytest.approx(sum(o.wall_s for o in under))
    timings = [m for m in store.stages() if m.stage == "speed" and m.trial >= 0]
    assert math.fsum(m.wall_s for m in timings) == pytest.approx(costs["speed"].total_s + costs["controls"].total_s)
    assert costs["controls"].times == sum(m.status in ("control", "drift") for m in timings) > 0
    assert costs["gate, remembered"].median_s < costs["gate, scored"].median_s


def test_the_table_has_a_line_a_stage_in_columns(store):
    costs = stage_costs(store)
    lines = table(costs)
    assert len(lines) == 1 + len(costs) and len({len(line) for line in lines}) == 1
    assert table([]) == []
