"""What is measured beside throughput: when tokens arrive, and memory."""

from types import SimpleNamespace

import numpy as np
import pytest

from search.engine import memory
from search.engine.arrivals import Arrivals
from search.speed import gap_p95


class Manager:
    """Takes the statistics of a step, as vLLM's does."""

    def __init__(self):
        self.taken = []

    def record(self, *, scheduler_stats, iteration_stats):
        self.taken.append(iteration_stats)


def step(first=0, waits=()):
    return SimpleNamespace(time_to_first_tokens_iter=[9.0] * first, inter_token_latencies_iter=list(waits))


@pytest.fixture
def engine():
    return SimpleNamespace(logger_manager=Manager())


def test_first_tokens_are_timed_from_submission_and_waits_as_the_engine_has_them(engine):
    arrivals = Arrivals(engine)
    record = engine.logger_manager.record
    record(scheduler_stats=None, iteration_stats=step(first=1))  # of an earlier request
    arrivals.listen()
    for stats in (step(), None, step(first=1), step(first=1, waits=[0.25]), step(waits=[0.5, 0.125])):
        record(scheduler_stats=None, iteration_stats=stats)
    first, waits = arrivals.since(0.0, prompts=2, tokens=8)
    assert waits == [0.25, 0.5, 0.125] and len(first) == 2 and 0 < first[0] <= first[1]
    assert len(engine.logger_manager.taken) == 6  # vLLM's own records go on


@pytest.mark.parametrize(("prompts", "tokens"), [(2, 8), (1, 2)])
def test_an_engine_that_tells_of_other_prompts_or_too_many_steps_tells_nothing(engine, prompts, tokens):
    arrivals = Arrivals(engine)
    arrivals.listen()
    engine.logger_manager.record(scheduler_stats=None, iteration_stats=step(first=1, waits=[0.5, 0.5]))
    assert arrivals.since(0.0, prompts, tokens) == ([], [])


def test_tokens_that_arrive_together_are_no_gap_apart_in_the_percentile():
    assert gap_p95([0.1, 0.2, 0.3, 0.4], 4) == 0.4
    assert gap_p95([0.3, 0.1], 40) == 0.0  # 38 zeros, and 95 % of 40 are 38
    assert gap_p95([0.3, 0.1], 39) == 0.1
    assert gap_p95([], 0) is None
    draw = np.random.default_rng(0)
    for waits in (int(n) for n in draw.integers(1, 60, 20)):
        values, zeros = draw.exponential(size=waits), int(draw.integers(0, 60))
        pooled = np.quantile([*values, *[0.0] * zeros], 0.95, method="inverted_cdf")
        assert gap_p95(list(values), waits + zeros) == pooled


def test_the_peak_of_memory_is_forgotten_and_found_again():
    memory.forget_peak()
    before = memory.peak_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)
    assert memory.peak_bytes() - before > 0.9 * block.nbytes
    del block
    memory.forget_peak()
    assert memory.peak_bytes() - before < 32 << 20
