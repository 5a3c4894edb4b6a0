"""How fast the machine was, and what that did to throughput: pure functions.

A shared machine drifts between one process and the next, and within each. Every pass over the prompts therefore carries
a probe, which is the same work each time (the first token of the first prompt). Throughput follows it, but not one to
one: decoding is many short steps and suffers more from a slow moment than reading a prompt does. By how much is
estimated from passes of the same process, between which nothing but the machine changes (the regression estimator:
Cochran, Sampling Techniques, 3rd ed., section 7.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PRIOR_SLOPE, PRIOR_SD = 1.0, 1.0  # before anything is known, decoding follows the probe one to one, more or less
LEAST_NOISE = 0.005  # relative: what two passes differ by on a quiet machine


def elasticity(processes: Sequence[Sequence[tuple[float, float]]]) -> float:
    """By what power of the probe's time the decoding time changes: 2 means that 1 % slower reads as 2 % slower.

    The slope of ln(decoding time) on ln(probe time) within processes, drawn towards PRIOR_SLOPE as far as the machine
    was too steady to tell.

    Args:
        processes: for each process its passes as (seconds of the probe, seconds of all prompts).
    """
    probes, decodes = [], []
    for passes in processes:
        logs = [(math.log(probe_s), math.log(decode_s)) for probe_s, decode_s in passes]
        center = [statistics.fmean(values) for values in zip(*logs, strict=True)]
        probes += [probe - center[0] for probe, _ in logs]
        decodes += [decode - center[1] for _, decode in logs]
    spread = math.fsum(x * x for x in probes)
    together = math.fsum(x * y for x, y in zip(probes, decodes, strict=True))
    noise = LEAST_NOISE
    freedom = len(probes) - len(processes) - 1
    if freedom > 0 and spread > 0:
        slope = together / spread
        residual = math.fsum((y - slope * x) ** 2 for x, y in zip(probes, decodes, strict=True))
        noise = max(noise, math.sqrt(residual / freedom))
    weight = (noise / PRIOR_SD) ** 2
    return (together + weight * PRIOR_SLOPE) / (spread + weight)
