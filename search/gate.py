"""Perplexity statistics: pure functions over summed negative log-likelihoods (nats) and token counts.

The gate asks one question of a setting: is its perplexity over *all* gate records at most the ceiling? The records
are a finite set, so an answer from all of them is exact, and acceptance needs all of them. Rejection may come
earlier. Records are scored in one order, drawn at random once, and each is compared with the reference setting on
the same tokens, which takes out how much harder one text is than another. What is left is tested after every record
by betting against "the ceiling holds" while drawing without replacement (Waudby-Smith and Ramdas, Confidence
sequences for sampling without replacement, NeurIPS 2020; Estimating means of bounded random variables by betting,
JRSS B 86, 2024). A capital that would grow twentyfold with a chance of at most 1 in 20 (Ville's inequality) if the
ceiling held is evidence that it does not, whenever one stops to look.

One bound is assumed: no setting makes any record more likely than the reference setting does by more than GAIN_BOUND
nats a token. A record that is seen to break it sends the setting through all records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ALPHA = 0.05  # chance, at most, that a setting under the ceiling is rejected before all records are scored
GAIN_BOUND = 0.1  # nats a token; see above
STAKES = (0.25, 0.5, 0.75, 0.95)  # shares of the capital that are bet, one player each
HAIR = 0.001  # a perplexity this close to the ceiling, relative to it, is scored twice


@dataclass(frozen=True)
class RecordScore:
    """Summed negative log-likelihood (nats) of one record's `tokens` target tokens.

    Where a study asks for agreement (see `search.agreement`): for how many of them the likeliest token is the reference
    setting's (`top1`), the divergence from it (`kl`, nats, summed), or the `distributions` themselves, packed: those of
    the reference are kept.
    """

    nll: float
    tokens: int
    top1: int | None = None
    kl: float | None = None
    distributions: bytes | None = None


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a setting, and what it rests on.

    `ppl` and `ratio` (to the reference on the same records) are over the `used` records of `of`. The ratio over all
    records is at least `ratio_low`, at confidence 1 − ALPHA; where all were used it is `ratio` itself. `excess` is
    the estimated perplexity over all records minus the ceiling. `again` is the perplexity of a second scoring.
    """

    outcome: Literal["over", "under", "undecided"]
    ppl: float
    ratio: float
    ratio_low: float
    excess: float
    used: int
    of: int
    again: float | None = None

    def reason(self, ceiling: float) -> str:
        """Why, in words."""
        if self.used < self.of:
            return (
                f"over the ceiling of {ceiling:.4f}: after {self.used} of {self.of} records at least "
                f"{self.ratio_low:.3f} × the reference's perplexity, most likely {self.ratio:.3f} ×"
            )
        if self.again is None:
            return f"perplexity {self.ppl:.4f} is {self.outcome} the ceiling of {ceiling:.4f}"
        return (
            f"perplexity {self.ppl:.4f} and, scored again, {self.again:.4f}: within a hair of the ceiling of "
            f"{ceiling:.4f}, {self.outcome}"
        )


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


def judge(
    reference: Mapping[str, RecordScore], scores: Mapping[str, RecordScore], order: Sequence[str], ceiling: float
) -> Verdict:
    """The verdict after the records scored so far, which are the first of `order`.

    Args:
        reference: the reference setting's score of every record.
        scores: the setting's scores; records that do not follow one another from the start of `order` on are not used.
        order: all records' ids, in the order in which they are scored: drawn at random, before any was seen.
        ceiling: perplexity over all records that is not to be exceeded.

    Returns:
        `over` as soon as that is certain enough, `undecided` while records are missing, `under` after the last.

    Raises:
        ValueError: no record was scored, a score is not finite, or its tokens are not the reference's. The message
            starts with the record's id.
    """
    used = []
    for record in order:
        if record not in scores:
            break
        _check(record, scores[record], reference[record])
        used.append(record)
    ppl = perplexity(scores[record] for record in used)
    ratio = ppl / perplexity(reference[record] for record in used)
    whole = perplexity(reference.values())
    allowed = math.log(ceiling / whole)  # nats a token, over all records
    gains = [scores[r].nll - reference[r].nll for r in used]
    tokens = [reference[r].tokens for r in used]
    excess = ratio * whole - ceiling
    if len(used) == len(order):
        outcome: Literal["over", "under", "undecided"] = "over" if ppl > ceiling else "under"
        return Verdict(outcome, ppl, ratio, ratio, ppl - ceiling, len(used), len(order))
    largest = max(score.tokens for score in reference.values())
    if not _refuted(gains, tokens, allowed, len(order), largest) or excess <= 0:
        return Verdict("undecided", ppl, ratio, 0.0, excess, len(used), len(order))
    low, high = allowed, math.log(ratio) + GAIN_BOUND
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if _refuted(gains, tokens, middle, len(order), largest) else (low, middle)
    return Verdict("over", ppl, ratio, math.exp(low), excess, len(used), len(order))


def _refuted(
    gains: Sequence[float], tokens: Sequence[int], allowed: float, population: int, largest_tokens: int
) -> bool:
    """Whether the bets have at any record refuted "over all records, the loss is at most `allowed` nats a token".

    Args:
        gains: negative log-likelihood minus the reference's, one a record (nats).
        tokens: those records' token counts.
        allowed: the hypothesis.
        population: how many records there are in all.
        largest_tokens: token count of the longest record.
    """
    least = -(GAIN_BOUND + allowed) * largest_tokens  # no record lies under this, by assumption
    capital = [1 / len(STAKES)] * len(STAKES)
    total = 0.0
    for number, (gain, count) in enumerate(zip(gains, tokens, strict=True)):
        expected = -total / (population - number)  # of the next record, if the hypothesis just holds
        room = expected - least
        if gain < -GAIN_BOUND * count:
            return False
        if room <= 0:
            return True  # what has been seen outweighs anything the remaining records could bring
        excess = gain - allowed * count
        capital = [c * (1 + stake * (excess - expected) / room) for c, stake in zip(capital, STAKES, strict=True)]
        total += excess
        if math.fsum(capital) >= 1 / ALPHA:
            return True
    return False


def near(ppl: float, ceiling: float) -> bool:
    """Whether `ppl` is within a hair of the ceiling, so that it should be scored again."""
    return abs(ppl / ceiling - 1) <= HAIR


def confirmed(verdict: Verdict, again: float, ceiling: float) -> Verdict:
    """The verdict after all records were scored a second time: `undecided` if the two lie on different sides."""
    sides = {verdict.ppl > ceiling, again > ceiling}
    outcome = verdict.outcome if len(sides) == 1 else "undecided"
    excess = max(verdict.ppl, again) - ceiling
    return Verdict(outcome, verdict.ppl, verdict.ratio, verdict.ratio_low, excess, verdict.used, verdict.of, again)


def largest_shift(scores: Mapping[str, RecordScore], again: Mapping[str, RecordScore]) -> float:
    """Largest difference, in nats a token, between two scorings of the same records."""
    return max(abs(scores[r].nll - again[r].nll) / scores[r].tokens for r in again)


def _check(record: str, score: RecordScore, reference: RecordScore) -> None:
    if not math.isfinite(score.nll) or score.nll < 0:
        raise ValueError(f"{record}: a negative log-likelihood of {score.nll}")
    if score.tokens != reference.tokens or score.tokens <= 0:
        raise ValueError(f"{record}: {score.tokens} tokens scored, {reference.tokens} at the reference setting")
