"""Every variant on every landscape with every seed; what is done is kept, so that a comparison can be gone on with."""

from __future__ import annotations

import csv
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from search.bench.replay import first_setting, optimum, replay
from search.bench.variants import BY_LABEL, Variant
from search.landscapes import LANDSCAPES, Landscape
from search.samplers.prior import read_prior

AT_TRIALS = (10, 20, 40, 80)
AT_UNITS = (5, 10, 20, 40, 80)  # of the seconds of one whole trial: a new gate, and prompts timed to the last
NEAR = (0.005, 0.01, 0.02)  # regrets whose first time is noted
TRACE_UNITS = tuple(round(0.5 * 1.15**n, 2) for n in range(38))  # to 88, for the figure


@dataclass(frozen=True)
class Run:
    """One search in figures. A regret is by how much the confirmed setting is slower than the fastest that passes."""

    landscape: str
    variant: str
    seed: int
    trials: int
    seconds: float
    over_of_40: float  # share of the first 40 trials that were over the ceiling
    seconds_of_40: float | None
    mean_ask_s: float
    longest_ask_s: float
    regret: float | None  # at the end; None where nothing can pass
    best_finalist: str  # regrets of the best of those that are confirmed, after AT_TRIALS trials
    at_trials: str  # regrets after AT_TRIALS trials, blank where it ended before
    at_units: str  # regrets after AT_UNITS units of simulated time
    until: str  # units of simulated time until a regret of NEAR was reached for good
    trace: str  # regrets at TRACE_UNITS


def unit_s(landscape: Landscape) -> float:
    """Simulated seconds of one whole trial of the first setting: the unit in which landscapes are comparable."""
    costs = landscape.costs
    a_prompt = costs.output_tokens / landscape.tps(first_setting(landscape))
    a_control = costs.controls_a_prompt * costs.output_tokens / landscape.tps(landscape.native)
    return costs.apply_s + costs.gate_s + costs.prompts_a_trial * (a_prompt + a_control)


def run(landscape: Landscape, variant: Variant, seed: int) -> Run:
    """Replay one search."""
    prior = read_prior(str(variant.prior), landscape.knobs) if variant.prior else ()
    steps = replay(landscape, variant.make, seed, variant.trials, prior=prior, stop=variant.stop)
    best, unit = optimum(landscape, seed), unit_s(landscape)
    regrets = [_regret(best, step.confirmed) for step in steps]
    units = [s.seconds / unit for s in steps]
    asks = [s.ask_s for s in steps[1:]] or [0.0]
    first = steps[:40]
    return Run(
        landscape=landscape.name,
        variant=variant.label,
        seed=seed,
        trials=len(steps),
        seconds=round(steps[-1].seconds, 1),
        over_of_40=sum(s.state == "PRUNED" for s in first) / len(first),
        seconds_of_40=round(steps[39].seconds, 1) if len(steps) >= 40 else None,
        mean_ask_s=round(sum(asks) / len(asks), 4),
        longest_ask_s=round(max(asks), 3),
        regret=regrets[-1],
        best_finalist=_written([_regret(best, steps[n - 1].finalist) if len(steps) >= n else None for n in AT_TRIALS]),
        at_trials=_written([regrets[n - 1] if len(steps) >= n else None for n in AT_TRIALS]),
        at_units=_written([_at(units, regrets, u, variant.stop) for u in AT_UNITS]),
        until=_written([_until(units, regrets, near) for near in NEAR], 2),
        trace=_written([_at(units, regrets, u, variant.stop) for u in TRACE_UNITS]),
    )


def _regret(best: float | None, tps: float | None) -> float | None:
    return None if best is None else 1 - (tps or 0.0) / best


def _at(units: Sequence[float], regrets: Sequence[float | None], when: float, ended: bool) -> float | None:
    """The regret that stood at some time; None once the trials had ended before, unless the search ended by itself."""
    if when > units[-1] and not ended:
        return None
    done = [regret for u, regret in zip(units, regrets, strict=True) if u <= when]
    return done[-1] if done else 1.0


def _until(units: Sequence[float], regrets: Sequence[float | None], near: float) -> float | None:
    late = None
    for u, regret in zip(reversed(units), reversed(regrets), strict=True):
        if regret is None or regret > near:
            break
        late = u
    return late


def _written(values: Sequence[float | None], digits: int = 5) -> str:
    return " ".join("-" if v is None else f"{v:.{digits}f}" for v in values)


def numbers(text: str) -> list[float | None]:
    """The numbers of a column that holds several."""
    return [None if word == "-" else float(word) for word in text.split()]


def compare(cells: Sequence[tuple[str, str, int]], file: Path, jobs: int, limit_s: float | None) -> Iterator[Run]:
    """Run what `file` does not hold yet, `jobs` at a time, and add it; yields each run as it is done.

    Args:
        cells: (landscape, variant, seed).
        file: CSV of runs, added to.
        jobs: processes.
        limit_s: seconds after which no further run is started or waited for.
    """
    started = time.monotonic()
    done = {(r.landscape, r.variant, r.seed) for r in read_runs(file)}
    missing = [cell for cell in cells if cell not in done]
    new = not file.exists()
    context = multiprocessing.get_context("spawn")
    with file.open("a", newline="") as out, context.Pool(jobs) as pool:  # leaving it ends what still runs
        writer = csv.DictWriter(out, [f.name for f in fields(Run)])
        if new:
            writer.writeheader()
        results = pool.imap_unordered(_run_cell, missing)
        for _ in missing:
            left = None if limit_s is None else max(0.0, limit_s - (time.monotonic() - started))
            try:
                found = results.next(left)
            except multiprocessing.TimeoutError:
                return
            writer.writerow(asdict(found))
            out.flush()
            yield found


def _run_cell(cell: tuple[str, str, int]) -> Run:
    landscape, variant, seed = cell
    return run(LANDSCAPES[landscape], BY_LABEL[variant], seed)


def read_runs(file: Path) -> list[Run]:
    """The runs that a file holds; none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [_read(row) for row in csv.DictReader(lines) if row.get("trace")]


def _read(row: dict[str, str]) -> Run:
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    read = {f.name: kinds.get(str(f.type), _float_or_none)(row[f.name]) for f in fields(Run)}
    return Run(**read)


def _float_or_none(text: str) -> float | None:
    return float(text) if text else None
