"""What timed prompts say beside their speed: drafts, latency, memory, energy."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from search import speed
from search.engine.protocol import Decoded


@dataclass(frozen=True)
class Timed:
    """One timed prompt or wave, and how much slower the machine was just then than for the reference."""

    decoded: Decoded
    drift: float

    @property
    def seconds(self) -> float:
        """What the prompt would have taken on the machine as it was for the reference."""
        return self.decoded.latency_s / self.drift


def drafting(timed: Sequence[Timed]) -> dict[str, Any]:
    """How drafts fared, and what the outputs were: acceptance_rate is by position, distinct_4grams a share."""
    drafts = sum(t.decoded.drafts for t in timed)
    # An engine counts up to its largest K, whatever K is; a method may draft fewer tokens a step.
    positions = math.ceil(sum(t.decoded.draft_tokens for t in timed) / drafts) if drafts else 0
    positions = max([positions, *(n for t in timed for n, hits in enumerate(t.decoded.accepted_per_pos, 1) if hits)])
    accepted = [sum(t.decoded.accepted_per_pos[i] for t in timed) for i in range(positions)]
    return {
        "acceptance_rate": speed.acceptance_rate(accepted, drafts),
        "distinct_4grams": statistics.fmean(t.decoded.distinct_4grams for t in timed),
        "accepted_a_step": sum(accepted) / drafts if drafts else 0.0,
        "output_hash": hashlib.sha256("".join(t.decoded.output_hash for t in timed).encode()).hexdigest()[:16],
    }


def more_figures(timed: Sequence[Timed]) -> dict[str, float | None]:
    """Seconds to the first token (median over prompts) and between tokens, on the machine as it was for the reference.

    With the most memory that the worker held, and the energy that a token took. None where one of `timed` lacks it.
    """
    of_time = all(t.decoded.first_token_s for t in timed)
    first = [second / t.drift for t in timed for second in t.decoded.first_token_s]
    waits = [second / t.drift for t in timed for second in t.decoded.waits_s]
    tokens = sum(t.decoded.tokens for t in timed)
    peaks, energies = [t.decoded.peak_bytes for t in timed], [t.decoded.energy_j for t in timed]
    held, taken = [p for p in peaks if p is not None], [e for e in energies if e is not None]
    return {
        "ttft_s": statistics.median(first) if of_time else None,
        "itl_p95_s": speed.gap_p95(waits, tokens - len(first)) if of_time else None,
        "peak_bytes": max(held) if len(held) == len(timed) else None,
        "energy_j": sum(taken) / tokens if len(taken) == len(timed) else None,
    }
