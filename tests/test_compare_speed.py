"""The speed comparison that the live-equals-cold proof rests on, with clocks that are made up."""

import random
from types import SimpleNamespace

import pytest

from tests.live_and_cold import LEAST_ROUNDS, MOST_ROUNDS, SAME_SPEED, compare_speed

PROMPTS = [SimpleNamespace(id=f"p{i}", token_ids=(i,)) for i in range(12)]


class Machine:
    """A machine that other work disturbs for seconds at a time, and engines on it."""

    def __init__(self, seed, disturbed):
        self.draw, self.disturbed = random.Random(seed), disturbed
        self.calls, self.factor, self.until = 0, 1.0, 0

    def engine(self, slowness):
        def ask(request, *_):
            self.calls += 1
            if self.calls >= self.until:
                self.factor = self.draw.uniform(1.2, 2) if self.draw.random() < self.disturbed else 1.0
                self.until = self.calls + self.draw.randrange(3, 30)
            base = 0.2 + 0.02 * request.prompt[0]
            latency = slowness * base * self.factor * self.draw.uniform(1, 1.03)
            return SimpleNamespace(latency_s=latency, output_hash="h", drafts=9, draft_tokens=36, accepted_per_pos=[5])

        return SimpleNamespace(ask=ask)


def apart(seed, slowness, disturbed=0.5):
    machine = Machine(seed, disturbed)
    ratio, error = compare_speed(machine.engine(slowness), machine.engine(1.0), PROMPTS, 48)
    return abs(ratio - 1) >= SAME_SPEED + 3 * error, machine.calls / (2 * len(PROMPTS))


def test_two_equal_engines_are_equal_on_a_disturbed_machine():
    assert [seed for seed in range(200) if apart(seed, 1.0)[0]] == []


@pytest.mark.parametrize("slowness", [1.15, 0.87])
def test_an_engine_that_is_slower_or_faster_is_found_out(slowness):
    assert sum(apart(seed, slowness)[0] for seed in range(200)) >= 190
    assert all(apart(seed, slowness, disturbed=0)[0] for seed in range(200))


def test_on_a_quiet_machine_the_least_rounds_are_enough():
    assert {apart(seed, 1.0, disturbed=0)[1] for seed in range(50)} == {LEAST_ROUNDS}
    assert apart(0, 1.3, disturbed=0)[1] == MOST_ROUNDS
