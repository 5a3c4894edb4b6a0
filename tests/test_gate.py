import math

import pytest

from search.gate import RecordScore, largest_shift, perplexity, violation


def test_perplexity_weighs_tokens_not_records():
    # One record of 1 token at ln 8 and one of 3 tokens at ln 2 each: exp((ln 8 + 3 ln 2) / 4) = 2^1.5.
    scores = [RecordScore(math.log(8), 1), RecordScore(3 * math.log(2), 3)]
    assert perplexity(scores) == pytest.approx(2**1.5, rel=1e-15)


def test_perplexity_does_not_depend_on_the_order_of_records():
    scores = [RecordScore(0.1 * n + 1e-9 * n * n, n) for n in range(1, 200)]
    assert perplexity(scores) == perplexity(reversed(scores))


@pytest.mark.parametrize("scores", [[], [RecordScore(1.0, 0)], [RecordScore(math.nan, 4)], [RecordScore(math.inf, 4)]])
def test_perplexity_of_nothing_or_of_no_number_is_an_error(scores):
    with pytest.raises(ValueError, match="perplexity|finite"):
        perplexity(scores)


def test_a_setting_at_the_ceiling_is_feasible_and_one_above_is_not():
    assert violation(2.42, 2.42) <= 0 < violation(2.4200001, 2.42)


def test_the_largest_shift_is_per_token():
    first = {"a": RecordScore(10.0, 10), "b": RecordScore(4.0, 2)}
    again = {"a": RecordScore(10.5, 10), "b": RecordScore(4.4, 2)}
    assert largest_shift(first, again) == pytest.approx(0.2)
