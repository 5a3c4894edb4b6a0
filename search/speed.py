"""Throughput statistics: pure functions over prompts that were timed one by one.

Every prompt is decoded to the same number of tokens, so throughput over the whole prompt set is decided by
the total time. A trial times some of the study's tune prompts; the rest is a finite population that the
interval has to cover. Settings that were timed on all of them (anchors) serve as the auxiliary variable of a
ratio estimator (Cochran, Sampling Techniques, 3rd ed., chapter 6): prompts that are slow, or easy to draft,
for the anchor too do not widen the interval.
"""

from __future__ import annotations

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
        The ratio estimate. Its variance is that of the residuals from the ratio line over the prompts not
        timed, plus timing noise over the prompts timed, plus the common noise; the interval is Student's t on
        the total time.

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
    variance = (1 - sampled) * spread / count + (noise * mean_s) ** 2 / count + (common_noise * mean_s) ** 2
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    return Throughput(
        tps=tokens_a_prompt / mean_s,
        low=tokens_a_prompt / (mean_s + half),
        high=tokens_a_prompt / max(mean_s - half, mean_s * 1e-3),
        prompts=count,
    )


def relative_noise(first: Mapping[str, float], again: Mapping[str, float]) -> float:
    """Relative standard deviation of one latency, from two or more prompts timed twice at the same setting.

    What shifted all prompts of a pass alike (the machine drifting) is left out: timing more prompts of the same
    pass would not make it smaller.
    """
    return statistics.stdev(math.log(again[p] / first[p]) for p in again) / math.sqrt(2)


def drift(reference_s: Mapping[str, float], now_s: Mapping[str, float]) -> float:
    """How much longer the prompts of `now_s` take now than they did in `reference_s`, at one setting."""
    return math.exp(statistics.fmean(math.log(now_s[p] / reference_s[p]) for p in now_s))


def acceptance_rate(accepted_per_pos: Sequence[int], drafts: int) -> list[float]:
    """Share of verify steps in which the draft at each position was accepted; empty without drafts."""
    return [accepted / drafts for accepted in accepted_per_pos] if drafts else []
