"""What may be claimed of a confirmed setting, and how likely a re-run is to bear it out: pure functions.

A re-run is another process, perhaps on another day. Its throughput differs from ours by what a process lands on (on the
A10G of the public record the same manifest had a relative standard deviation of 1.04 % over 18 fresh jobs, because
fresh compilations took different token paths) and by timing noise, of which the passes of a confirmation tell. The
claim is the mean where that leaves a re-run enough room, and less where it does not; the best draw is never claimed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95
TOLERANCE = 0.05  # a re-run bears a claim out if it is no more than this below it
PROCESS_SD = 0.0104  # of ln TPS between processes; see above
PROCESS_JOBS = 18  # that it was estimated from


@dataclass(frozen=True)
class Claim:
    """Tokens per second: what is claimed, the mean it rests on and its interval.

    `p_pass` is the chance that a re-run on the same prompts reaches the claim within TOLERANCE, `p_pass_new_prompts`
    that one on as many other prompts of the same kind does.
    """

    claimed: float
    mean: float
    low: float
    high: float
    p_pass: float
    p_pass_new_prompts: float


def claim(processes: Sequence[Sequence[Mapping[str, float]]], tokens: int) -> Claim:
    """The claim that passes over the same prompts, in one or more processes, support.

    The spread between processes is what ours show, but never less than PROCESS_SD: two say little about it.

    Args:
        processes: for each process two or more passes, each seconds by prompt id.
        tokens: generated a prompt.

    Raises:
        ValueError: no process, fewer than two passes in one, or fewer than two prompts.
    """
    prompts = sorted(processes[0][0]) if processes and processes[0] else []
    if any(len(passes) < 2 for passes in processes) or len(prompts) < 2:
        raise ValueError("a claim needs at least two passes over at least two prompts")
    logs = [[_log_tps(seconds, prompts, tokens) for seconds in passes] for passes in processes]
    count, means = len(logs), [statistics.fmean(values) for values in logs]
    center = statistics.fmean(means)
    within = statistics.fmean(statistics.variance(values) / len(values) for values in logs)
    between = max(PROCESS_SD, statistics.stdev(means) if count > 1 else 0.0) ** 2
    freedom = (within + between) ** 2 / (  # Welch-Satterthwaite, of the sum of two estimated variances
        within**2 / sum(len(values) - 1 for values in logs) + between**2 / (PROCESS_JOBS - 1)
    )
    spread = math.sqrt((within + between) * (1 + 1 / count))  # of the difference between one re-run and our mean
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt((within + between) / count)
    room = float(stats.t.ppf(CONFIDENCE, freedom)) * spread
    claimed = center + min(0.0, -room - math.log(1 - TOLERANCE))
    missed = claimed + math.log(1 - TOLERANCE)
    passes = [seconds for process in processes for seconds in process]
    mean_s = [statistics.fmean(seconds[p] for seconds in passes) for p in prompts]
    of_prompts = statistics.variance(mean_s) / len(prompts) / statistics.fmean(mean_s) ** 2
    of_new_prompts = math.hypot(spread, math.sqrt(2 * of_prompts))
    return Claim(
        claimed=math.exp(claimed),
        mean=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        p_pass=float(stats.t.sf((missed - center) / spread, freedom)),
        p_pass_new_prompts=float(stats.t.sf((missed - center) / of_new_prompts, freedom)),
    )


def _log_tps(seconds: Mapping[str, float], prompts: Sequence[str], tokens: int) -> float:
    return math.log(len(prompts) * tokens / math.fsum(seconds[p] for p in prompts))
