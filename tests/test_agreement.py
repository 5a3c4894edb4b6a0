"""Top-1 agreement and divergence, against closed forms and full distributions."""

import math
import random

import pytest

from search.agreement import LEAST_REST, Agreement, compare, divergence, judge, likeliest, pack, unpack


def logs(*shares):
    """Log-probabilities of tokens 0, 1, …; a share of 0 is not shown."""
    return {token: math.log(share) for token, share in enumerate(shares) if share}


def softmax(draw, size):
    weights = [math.exp(2 * draw.gauss(0, 1)) for _ in range(size)]
    return [w / sum(weights) for w in weights]


def shown(shares, count):
    """The `count` likeliest of a full distribution."""
    best = sorted(range(len(shares)), key=lambda token: -shares[token])[:count]
    return {token: math.log(shares[token]) for token in best}


def test_the_divergence_of_two_full_distributions_is_the_textbooks():
    # Cover and Thomas, example 2.3.1: p = (1 − r, r), q = (1 − s, s) with r = 1/2, s = 1/4; in bits 1 − log2(3) / 2.
    p, q = logs(1 / 2, 1 / 2), logs(3 / 4, 1 / 4)
    assert divergence(p, q) == pytest.approx((1 - math.log2(3) / 2) * math.log(2), rel=1e-9)
    assert divergence(q, p) == pytest.approx((3 / 4 * math.log2(3) - 1) * math.log(2), rel=1e-9)


def test_from_few_tokens_it_is_a_lower_bound_that_more_tokens_close():
    draw = random.Random(0)
    for _ in range(300):
        p, q = softmax(draw, 60), softmax(draw, 60)
        true = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        bounds = [divergence(shown(p, count), shown(q, count)) for count in (5, 20, 60)]
        assert all(0 <= bound <= true + 1e-4 for bound in bounds)
        assert bounds[-1] == pytest.approx(true, abs=1e-4)  # what the least rest adds


def test_a_setting_is_at_no_distance_from_itself_and_top_1_agrees_with_itself():
    draw = random.Random(1)
    record = [shown(softmax(draw, 50), 20) for _ in range(64)]
    record = unpack(pack(record))
    assert compare(record, record) == Agreement(64, 0.0)


def test_tokens_that_only_one_side_shows_count_as_the_rest():
    p, q = logs(0.5, 0.25), {0: math.log(0.5), 2: math.log(0.25)}  # token 1 of one, token 2 of the other
    assert divergence(p, q) == 0.0
    far = divergence(logs(0.9), {1: math.log(0.9)})  # nothing in common: one bucket each, which tells nothing
    assert far == 0.0


def test_a_rest_that_rounding_made_negative_is_no_infinite_divergence():
    p, q = {0: math.log(0.6), 1: math.log(0.4)}, {0: 0.0, 1: -40.0}
    assert math.isfinite(divergence(p, q)) and divergence(p, q) > 10
    assert 0 <= divergence(logs(0.5, 0.5), logs(0.5, 0.5 - 2 * LEAST_REST)) < 1e-5


def test_of_equally_likely_tokens_the_lowest_id_counts_on_both_sides():
    p, q = {7: -0.7, 3: -0.7, 9: -3.0}, {3: -0.7, 7: -0.7}
    assert likeliest(p) == likeliest(q) == 3
    assert compare([p, p], [q, {7: -0.6, 3: -0.7}]).top1 == 1


def test_packed_distributions_come_back_as_float32_and_other_bytes_are_refused():
    record = [{1: -0.1, 262_143: -2.5}, {5: -1e-9}, {}]
    back = unpack(pack(record))
    assert [list(d) for d in back] == [[1, 262_143], [5], []]
    assert back[0][1] == pytest.approx(-0.1, abs=1e-8)
    assert unpack(pack(back)) == back
    for broken in (b"", b"nothing", pack(record)[:-3]):
        with pytest.raises(ValueError, match="no packed distributions"):
            unpack(broken)


def test_agreement_is_refused_as_soon_as_the_rest_cannot_bring_it_back_and_no_sooner():
    limits = {"top1": 0.9, "kl": 0.02}
    # Of 100 tokens at most 10 may differ, and they may have 2 nats together.
    top1, kl = judge(Agreement(40, 1.9), 50, 100, limits)
    assert (top1.outcome, kl.outcome) == ("undecided", "undecided")
    top1, kl = judge(Agreement(39, 2.1), 50, 100, limits)
    assert (top1.outcome, kl.outcome) == ("over", "over")
    assert top1.excess == pytest.approx(0.9 - 0.78) and kl.excess == pytest.approx(0.042 - 0.02)
    assert "gate top1: 0.7800" in top1.reason and "after 50 of 100, and the rest cannot bring it back" in top1.reason
    top1, kl = judge(Agreement(90, 2.0), 100, 100, limits)
    assert (top1.outcome, kl.outcome) == ("under", "under") and top1.excess <= 0 and kl.excess <= 0
    assert [f.gate for f in judge(Agreement(90, 2.0), 100, 100, {"kl": 0.02, "ppl": 4.0, "exact": 0.5})] == ["kl"]
