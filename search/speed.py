"""Throughput statistics: pure functions over prompts that were timed one by one.

Every prompt is decoded to the same number of tokens, so throughput over the whole prompt set is decided by
the total time. A trial times some of the study's tune prompts; the rest is a finite population that the
interval has to cover. Settings that were timed on all of them (anchors) serve as the auxiliary variable of a
ratio estimator (Cochran, Sampling Techniques, 3rd ed., chapter 6): prompts that are slow, or easy to draft,
for the anchor too do not widen the interval.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PromptTiming:
    """Wall time, from submission to the last token, of one prompt decoded to `tokens` tokens."""

    prompt_id: str
    tokens: int
    latency_s: float
    output_hash: str


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over the study's tune prompts, with a two-sided interval at CONFIDENCE."""

    tps: float
    low: float
    high: float
    prompts: int

    @property
    def half_width(self) -> float:
        """The longer arm of the interval, relative to the estimate (0.01 is 1 %)."""
        return max(self.high / self.tps, self.tps / self.low) - 1


def throughput(timings: Sequence[PromptTiming]) -> float:
    """Generated tokens ÷ wall seconds over `timings`.

    Raises:
        ValueError: no timings, no tokens, or a latency that is not a positive number.
    """
    tokens = sum(timing.tokens for timing in timings)
    seconds = math.fsum(timing.latency_s for timing in timings)
    if tokens <= 0 or not math.isfinite(seconds) or any(t.latency_s <= 0 for t in timings):
        raise ValueError("throughput needs tokens that took a positive, finite time")
    return tokens / seconds


def estimate(
    timings: Sequence[PromptTiming], anchors: Sequence[Mapping[str, float]], noise: float, common_noise: float = 0.0
) -> Throughput:
    """Throughput over all tune prompts from the timed ones.

    Args:
        timings: at least two timed prompts.
        anchors: one or more settings' seconds by prompt id, each on every tune prompt. The one that predicts
            the timed prompts best is used.
        noise: relative standard deviation of one prompt's latency when it is timed again (0.01 is 1 %).
        common_noise: relative standard deviation of what all latencies were divided by (a drift correction).

    Returns:
        The ratio estimate. The residuals from the ratio line hold both how prompts differ and timing noise; their
        variance counts in full over the prompts not timed, and the noise alone over those that were. The common
        noise is added. The interval is Student's t on the logarithm of the total time (so that it stays positive
        however wide it is), with the degrees of freedom that Welch and Satterthwaite give the sum: few where it rests
        on the residuals, many where on the noise, which is known.

    Raises:
        ValueError: fewer than two timings, no anchor, or a prompt that an anchor was not timed on.
    """
    if len(timings) < 2 or not anchors:
        raise ValueError("an estimate needs at least two timed prompts and an anchor")
    if any(timing.prompt_id not in anchor for anchor in anchors for timing in timings):
        raise ValueError("a timed prompt is not one of the study's tune prompts")
    throughput(timings)
    found = (_ratio_estimate(timings, anchor, noise, common_noise) for anchor in anchors)
    return min(found, key=lambda t: t.high - t.low)


def _ratio_estimate(
    timings: Sequence[PromptTiming], anchor: Mapping[str, float], noise: float, common_noise: float
) -> Throughput:
    count, population = len(timings), len(anchor)
    tokens_a_prompt = sum(timing.tokens for timing in timings) / count
    ratio = math.fsum(t.latency_s for t in timings) / math.fsum(anchor[t.prompt_id] for t in timings)
    mean_s = ratio * math.fsum(anchor.values()) / population
    residuals = [t.latency_s - ratio * anchor[t.prompt_id] for t in timings]
    spread = math.fsum(r * r for r in residuals) / (count - 1)
    sampled = count / population
    of_prompts = (1 - sampled) * spread / count
    of_timing = (sampled * noise**2 / count + common_noise**2) * mean_s**2
    variance = of_prompts + of_timing
    freedom = (count - 1) * (variance / of_prompts) ** 2 if of_prompts > 0 else math.inf
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(variance) / mean_s
    tps = tokens_a_prompt / mean_s
    return Throughput(tps, low=tps * math.exp(-half), high=tps * math.exp(half), prompts=count)


def rescaled(found: Throughput, scale: float, error: float) -> Throughput:
    """Throughput as another card would show it, that runs the reference setting `scale` times as fast as this one.

    Args:
        found: throughput here.
        scale: the other card's throughput at the reference setting ÷ this one's.
        error: the scale's relative standard error; it widens the interval.
    """
    more = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    tps = scale * found.tps
    low = tps * math.exp(-math.hypot(math.log(found.tps / found.low), more))
    high = tps * math.exp(math.hypot(math.log(found.high / found.tps), more))
    return Throughput(tps, low, high, found.prompts)


@dataclass(frozen=True)
class Comparison:
    """How many times as fast one setting is as another on the prompts that both were timed on.

    `log_ratio` is ln(TPS ÷ other's TPS), `error` its standard error, `prompts` how many were compared.
    """

    log_ratio: float
    error: float
    prompts: int

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Two-sided interval of the speed ratio (1.02: 2 % faster)."""
        half = float(stats.t.ppf((1 + confidence) / 2, self.prompts - 1)) * self.error
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)

    def chance_faster(self) -> float:
        """Probability that the setting is the faster one, from these prompts alone (Student's t)."""
        if self.error == 0:
            return float(self.log_ratio > 0) if self.log_ratio else 0.5
        return float(stats.t.cdf(self.log_ratio / self.error, self.prompts - 1))


def compare(
    timings: Sequence[PromptTiming],
    others: Sequence[PromptTiming],
    common_noise: float = 0.0,
    *,
    same_output: bool = False,
) -> Comparison | None:
    """Compare two settings prompt by prompt; None if fewer than three prompts can be compared.

    Prompts differ by a factor of three, but mostly alike for both settings, so that the residuals from the ratio
    of the totals are what is left (the ratio estimator's linearisation: Cochran, 3rd ed., section 6.4).

    Args:
        timings: prompts timed at the setting, each decoded to as many tokens as in `others`.
        others: prompts timed at the other setting.
        common_noise: relative standard deviation that all of `timings` share against all of `others`; across
            processes at least √2 · 0.16 %, which is what public A10G re-runs of one token path show.
        same_output: compare only prompts on which both gave the same tokens. Different tokens are easier or harder
            to draft, which is luck of the text and no speed; without them the comparison is at its sharpest.
    """
    mine, theirs = {t.prompt_id: t for t in timings}, {t.prompt_id: t for t in others}
    common = sorted(mine.keys() & theirs.keys())
    if same_output:
        common = [p for p in common if mine[p].output_hash == theirs[p].output_hash]
    count = len(common)
    if count < 3:
        return None
    mean_other = math.fsum(theirs[p].latency_s for p in common) / count
    ratio = math.fsum(mine[p].latency_s for p in common) / (count * mean_other)
    spread = math.fsum((mine[p].latency_s - ratio * theirs[p].latency_s) ** 2 for p in common) / (count - 1)
    error = math.sqrt(spread / count / (ratio * mean_other) ** 2 + common_noise**2)
    return Comparison(log_ratio=-math.log(ratio), error=error, prompts=count)


def beside(other: Throughput, found: Comparison, confidence: float = CONFIDENCE) -> Throughput:
    """Throughput of a setting that was compared with another one on a few prompts, the other having more.

    Double sampling (Cochran, 3rd ed., chapter 12): the ratio on the few, times what the other did on the many. A
    setting that is behind on the prompts that both decoded stays behind.
    """
    paired = float(stats.t.ppf((1 + confidence) / 2, found.prompts - 1)) * found.error
    half = math.hypot(paired, math.log(other.high / other.low) / 2)
    tps = other.tps * math.exp(found.log_ratio)
    return Throughput(tps, low=tps * math.exp(-half), high=tps * math.exp(half), prompts=found.prompts)


def gap_p95(waits: Sequence[float], gaps: int) -> float | None:
    """The 95th percentile (nearest rank) of the time between one token of a prompt and its next; None without gaps.

    Tokens that arrive together are 0 apart after the first of them, so that a step with accepted drafts is one wait and
    some zeros: what somebody who reads along sees.

    Args:
        waits: seconds between arrivals, over all prompts.
        gaps: tokens over all prompts, less the first of each; those that are no wait are 0.
    """
    if gaps < 1:
        return None
    rank = math.ceil(0.95 * gaps) - (gaps - len(waits))
    return sorted(waits)[rank - 1] if rank > 0 else 0.0


def relative_noise(first: Sequence[float], again: Sequence[float]) -> float:
    """Relative standard deviation of one latency, from two passes over the same three or more prompts in one order.

    A machine that drifts slowly moves neighbours alike, and that is left out: it is the mean square successive
    difference (von Neumann et al., The Mean Square Successive Difference, Annals of Mathematical Statistics 12,
    1941) of the log ratios, halved once for the difference and once for the two passes.
    """
    ratios = [math.log(b / a) for a, b in zip(first, again, strict=True)]
    differences = [b - a for a, b in itertools.pairwise(ratios)]
    return math.sqrt(statistics.fmean(d * d for d in differences)) / 2


def acceptance_rate(accepted_per_pos: Sequence[int], drafts: int) -> list[float]:
    """Share of verify steps in which the draft at each position was accepted; empty without drafts."""
    return [accepted / drafts for accepted in accepted_per_pos] if drafts else []
