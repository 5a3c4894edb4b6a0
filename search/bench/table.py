"""The comparison as Markdown tables: medians over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from search.bench.compare import AT_TRIALS, AT_UNITS, NEAR, Run, numbers
from search.bench.variants import VARIANTS
from search.landscapes import LANDSCAPES


def tables(runs: Sequence[Run]) -> str:
    """One table a landscape."""
    parts = [_table(name, [r for r in runs if r.landscape == name]) for name in LANDSCAPES]
    return "\n\n".join(part for part in parts if part)


def _table(landscape: str, runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    head = ["sampler", "seeds", *(f"{n} trials" for n in AT_TRIALS), *(f"{u} units" for u in AT_UNITS)]
    head += ["best finalist, 40 trials"]
    head += [f"units to {near:.1%}" for near in NEAR] + ["over, of 40", "ask s"]
    lines = [f"### {landscape}", "", _row(head), _row(["---"] * len(head))]
    for variant in VARIANTS:
        own = [r for r in runs if r.variant == variant.label]
        if not own:
            continue
        cells = [variant.label, str(len(own))]
        cells += [_percent(numbers(r.at_trials)[i] for r in own) for i in range(len(AT_TRIALS))]
        cells += [_percent(numbers(r.at_units)[i] for r in own) for i in range(len(AT_UNITS))]
        cells += [_percent(numbers(r.best_finalist)[AT_TRIALS.index(40)] for r in own)]
        cells += [_first(numbers(r.until)[i] for r in own) for i in range(len(NEAR))]
        cells += [f"{statistics.fmean(r.over_of_40 for r in own):.1%}", f"{_mean_ask(own):.2f}"]
        if variant.stop:
            cells[0] += f" ({statistics.median(r.trials for r in own):.0f} trials)"
        lines.append(_row(cells))
    return "\n".join(lines)


def _mean_ask(runs: Sequence[Run]) -> float:
    return statistics.fmean(r.mean_ask_s for r in runs)


def _percent(values: Iterable[float | None]) -> str:
    """The median regret; blank unless most runs got there."""
    every = list(values)
    there = [v for v in every if v is not None]
    return f"{statistics.median(there):.2%}" if 2 * len(there) > len(every) else ""


def _first(values: Iterable[float | None]) -> str:
    """The median time; a run that never got there counts as later than all others."""
    median = statistics.median(float("inf") if v is None else v for v in values)
    return "never" if median == float("inf") else f"{median:.1f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
