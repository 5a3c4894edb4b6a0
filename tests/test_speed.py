import math
import random

import pytest

from search.speed import PromptTiming, acceptance_rate, beside, compare, estimate, relative_noise, throughput


def timing(prompt, latency_s, tokens=100):
    return PromptTiming(prompt, tokens, latency_s, "")


def test_throughput_is_all_tokens_over_all_seconds():
    # Not the mean of 100 and 25 tokens a second.
    assert throughput([timing("a", 1.0), timing("b", 4.0)]) == 40.0


@pytest.mark.parametrize("latency_s", [0.0, -1.0, math.inf, math.nan])
def test_throughput_refuses_an_impossible_latency(latency_s):
    with pytest.raises(ValueError, match="positive, finite"):
        throughput([timing("a", 1.0), timing("b", latency_s)])


def test_an_estimate_from_all_prompts_is_the_throughput_itself():
    anchor = {f"p{i}": 1.0 + i for i in range(5)}
    timings = [timing(p, 0.5 * s) for p, s in anchor.items()]
    found = estimate(timings, [anchor], noise=0.0)
    assert found.tps == pytest.approx(throughput(timings), rel=1e-12)
    assert found.low == pytest.approx(found.high)


def test_an_estimate_from_some_prompts_allows_for_the_others_being_slower():
    anchor = {"easy1": 1.0, "easy2": 1.0, "hard1": 3.0, "hard2": 3.0}
    found = estimate([timing("easy1", 0.5), timing("easy2", 0.5)], [anchor], noise=0.0)
    assert found.tps == pytest.approx(400 / 4.0)  # half the anchor's 8 seconds for 400 tokens


def test_the_anchor_that_predicts_best_is_used():
    good = {f"p{i}": 1.0 + i % 3 for i in range(12)}
    flat = dict.fromkeys(good, 1.0)
    timings = [timing(p, 2 * good[p]) for p in list(good)[:6]]
    both = estimate(timings, [flat, good], noise=0.0)
    assert both.high - both.low < 1e-9
    assert both == estimate(timings, [good], noise=0.0)


def test_the_interval_covers_the_true_throughput_at_its_rate():
    draw = random.Random(1)
    covered = 0
    rounds = 400
    for _ in range(rounds):
        anchor = {f"p{i}": math.exp(draw.gauss(0, 0.4)) for i in range(48)}
        truth = {p: 0.6 * s * math.exp(draw.gauss(0, 0.08)) for p, s in anchor.items()}
        sample = draw.sample(sorted(anchor), 16)
        timings = [timing(p, truth[p] * math.exp(draw.gauss(0, 0.01))) for p in sample]
        found = estimate(timings, [anchor], noise=0.01)
        covered += found.low <= 4800 / sum(truth.values()) <= found.high
    assert 0.92 <= covered / rounds <= 0.99  # 95 %, within what 400 rounds and a nonlinear estimator allow


def test_an_estimate_needs_two_known_prompts():
    with pytest.raises(ValueError, match="at least two"):
        estimate([timing("a", 1.0)], [{"a": 1.0, "b": 1.0}], 0.0)
    with pytest.raises(ValueError, match="not one of"):
        estimate([timing("a", 1.0), timing("x", 1.0)], [{"a": 1.0, "b": 1.0}], 0.0)


def test_noise_recovers_the_spread_of_a_repeated_timing_on_a_drifting_machine():
    draw = random.Random(2)
    first = [math.exp(draw.gauss(0, 0.02)) for _ in range(4000)]
    drifts = [1.1 + 0.1 * math.sin(i / 100) for i in range(4000)]  # the second pass 10 % slower, swinging by 10 %
    again = [drift * math.exp(draw.gauss(0, 0.02)) for drift in drifts]
    assert relative_noise(first, again) == pytest.approx(0.02, rel=0.05)


def test_the_noise_of_a_correction_does_not_shrink_with_the_prompts():
    anchor = {f"p{i}": 1.0 for i in range(100)}
    found = estimate([timing(p, 1.0) for p in anchor], [anchor], noise=0.0, common_noise=0.02)
    seconds = 0.02 * 1.959964  # a prompt; the noise is known, so a normal's 95 %
    assert found.high == pytest.approx(100 * math.exp(seconds), rel=1e-6)
    assert found.low == pytest.approx(100 * math.exp(-seconds), rel=1e-6)


def test_acceptance_is_by_position_and_empty_without_drafts():
    assert acceptance_rate([9, 6, 3], 12) == [0.75, 0.5, 0.25]
    assert acceptance_rate([], 0) == []


def test_an_estimate_beside_another_setting_covers_the_truth_and_keeps_their_order():
    draw, covered, studies = random.Random(0), 0, 400
    for _ in range(studies):
        other_s = [math.exp(draw.gauss(0, 0.25)) for _ in range(64)]
        mine_s = [1.1 * s * math.exp(draw.gauss(0, 0.03)) for s in other_s]
        many = estimate([timing(f"p{i}", other_s[i]) for i in range(32)], [{f"p{i}": 1.0 for i in range(64)}], 0.0)
        few = compare(
            [timing(f"p{i}", s) for i, s in enumerate(mine_s[:6])], [timing(f"p{i}", other_s[i]) for i in range(32)]
        )
        found = beside(many, few)
        assert (found.tps < many.tps) == (few.log_ratio < 0)
        covered += found.low <= 100 * 64 / sum(mine_s) <= found.high
    assert covered / studies >= 0.93  # 0.95 less twice what 400 studies leave open
