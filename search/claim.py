"""What may be claimed of a confirmed setting, and how likely a re-run is to bear it out: pure functions.

A re-run is another process, perhaps on another day. Its throughput differs from ours by what a process lands on (on the
A10G of the public record the same manifest had a relative standard deviation of 1.04 % over 18 fresh jobs, because
fresh compilations took different token paths) and by timing noise, of which the passes of one confirmation tell. The
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


def claim(passes: Sequence[Mapping[str, float]], tokens: int) -> Claim:
    """The claim that two or more passes over the same prompts support.

    Args:
        passes: for each pass, seconds by prompt id.
        tokens: generated a prompt.

    Raises:
        ValueError: fewer than two passes, or fewer than two prompts.
    """
    prompts = sorted(passes[0]) if passes else []
    if len(passes) < 2 or len(prompts) < 2:
        raise ValueError("a claim needs at least two passes over at least two prompts")
    logs = [math.log(len(prompts) * tokens / math.fsum(seconds[p] for p in prompts)) for seconds in passes]
    center = statistics.fmean(logs)
    of_mean = statistics.variance(logs) / len(logs)
    freedom = (of_mean + PROCESS_SD**2) ** 2 / (  # Welch-Satterthwaite, of the sum of two estimated variances
        of_mean**2 / (len(logs) - 1) + PROCESS_SD**4 / (PROCESS_JOBS - 1)
    )
    spread = math.sqrt(2 * (of_mean + PROCESS_SD**2))  # of the difference between a re-run like ours and ours
    mean_s = {p: statistics.fmean(seconds[p] for seconds in passes) for p in prompts}
    of_prompts = statistics.variance(mean_s.values()) / len(prompts) / statistics.fmean(mean_s.values()) ** 2
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(of_mean + PROCESS_SD**2)
    room = float(stats.t.ppf(CONFIDENCE, freedom)) * spread
    claimed = center + min(0.0, -room - math.log(1 - TOLERANCE))
    missed = claimed + math.log(1 - TOLERANCE)
    return Claim(
        claimed=math.exp(claimed),
        mean=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        p_pass=float(stats.t.sf((missed - center) / spread, freedom)),
        p_pass_new_prompts=float(
            stats.t.sf((missed - center) / math.hypot(spread, math.sqrt(2 * of_prompts)), freedom)
        ),
    )
