"""Perplexity statistics: pure functions over summed negative log-likelihoods (nats) and token counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RecordScore:
    """Summed negative log-likelihood (nats) of one record's `tokens` target tokens."""

    nll: float
    tokens: int


def perplexity(scores: Iterable[RecordScore]) -> float:
    """exp(Σ NLL ÷ Σ tokens): the perplexity of the records taken as one text.

    Never the mean of the records' own perplexities, which weighs short records up.

    Raises:
        ValueError: no tokens, or a score that is not finite.
    """
    scores = list(scores)
    tokens = sum(score.tokens for score in scores)
    if tokens <= 0:
        raise ValueError("perplexity needs at least one token")
    nll = math.fsum(score.nll for score in scores)
    if not math.isfinite(nll):
        raise ValueError("a record's negative log-likelihood is not finite")
    return math.exp(nll / tokens)


def violation(ppl: float, ceiling: float) -> float:
    """How far `ppl` lies over the ceiling; feasible where it is ≤ 0."""
    return ppl - ceiling


def largest_shift(scores: Mapping[str, RecordScore], again: Mapping[str, RecordScore]) -> float:
    """Largest difference, in nats a token, between two scorings of the same records."""
    return max(abs(scores[r].nll - again[r].nll) / scores[r].tokens for r in again)
