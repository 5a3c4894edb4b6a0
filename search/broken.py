"""Signs that a model, a drafter or a figure is broken although everything ran: pure functions, a sentence or None.

All of these were seen in public: a zero-padded head with a perplexity of 899,234 at full speed, a drafter whose drafts
were accepted 0.2 % of the time on a healthy server, outputs that loop, throughput that no memory can deliver.
"""

from __future__ import annotations

LEAST_ACCEPTANCE = 0.02  # of the first draft; a drafter that knows nothing of its target stays below
LEAST_SHARE = 0.8  # of the reference's variety; an output with less is degenerate
BANDWIDTH_SLACK = 1.02  # timers and clocks


def senseless_perplexity(ppl: float, vocabulary: int) -> str | None:
    """A model that is worse than one that guesses among its `vocabulary` alike is no model of the text."""
    if ppl < vocabulary:
        return None
    return f"a perplexity of {ppl:,.0f} is worse than guessing among the vocabulary's {vocabulary:,} tokens"


def useless_drafter(acceptance_rate: list[float]) -> str | None:
    """A drafter whose first drafts (`acceptance_rate[0]`) are all but never accepted costs time and gives nothing."""
    if not acceptance_rate or acceptance_rate[0] >= LEAST_ACCEPTANCE:
        return None
    return f"{acceptance_rate[0]:.1%} of the first drafts are accepted: the drafter does not fit the model"


def looping_output(distinct_4grams: float, reference: float) -> str | None:
    """Outputs whose share of distinct 4-grams is far under the reference setting's repeat themselves."""
    if distinct_4grams >= LEAST_SHARE * reference:
        return None
    return (
        f"its outputs loop: {distinct_4grams:.0%} of their 4-grams are distinct, where the reference setting's are "
        f"{reference:.0%}"
    )


def over_bandwidth(steps: int, seconds: float, step_bytes: int | None, bandwidth: float | None) -> str | None:
    """More decoding steps a second than the memory can read the weights for.

    Args:
        steps: decoding steps, each of which reads all of `step_bytes`.
        seconds: in which they were made.
        step_bytes: bytes of weights that every step needs, at the least; None if unknown.
        bandwidth: peak bytes a second of the device's memory; None if unknown.
    """
    if not step_bytes or not bandwidth or steps * step_bytes <= BANDWIDTH_SLACK * bandwidth * seconds:
        return None
    return (
        f"{steps / seconds:,.0f} steps a second over {step_bytes / 1e9:.2f} GB of weights, which memory of "
        f"{bandwidth / 1e9:,.0f} GB/s cannot read"
    )
