"""Faults at every stage of searches on the simulated engine; 200 of them: python -m tests.faults.campaign"""

import pytest

from tests.faults.campaign import SIMULATED, campaign, every_fault, table
from tests.faults.study import write_study

FAULTS = 40


@pytest.mark.timeout(900)
def test_whatever_happens_a_search_ends_with_its_trials_its_rows_and_no_process(tmp_path):
    searches = list(campaign(SIMULATED, write_study(tmp_path / "study"), tmp_path, every_fault(FAULTS)))
    print("\n".join(table(searches)))
    assert [search.wrong for search in searches if search.wrong] == []
    assert sum(len(search.fired) for search in searches) >= 0.8 * FAULTS
