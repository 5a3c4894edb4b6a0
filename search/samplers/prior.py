"""What was measured elsewhere: read, made one point a setting, and tried first. It is never a measurement here.

The models do not learn from it: how speed hangs on the knobs elsewhere was no help on the same card and misled on
another (studies/samplers/RESULTS.md).
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna

from search.errors import UsageError
from search.knobs import KNOWN, Knob, words
from search.samplers.problem import PriorPoint, Problem
from search.store.front import pareto_front
from search.sweep import read_sweep

WHY = "why"  # user attribute of a trial: why it was asked for
PROPOSALS = 4  # settings of the prior's front that are tried after the study's own default
SAME_MODEL = (0.99, 1.5)  # of the reference's perplexity: what lies outside is of other weights, or broken
UPPER = 0.75  # of the speeds reported of a setting this quantile counts: most reports are of slower software
TRUSTED = 3  # reports, from which on a setting's speed counts in full
ONE_REPORT = 0.03  # what a setting loses, in order of proposal, for resting on a single report


def read_prior(source: str, knobs: Sequence[Knob], study: str | None = None) -> tuple[PriorPoint, ...]:
    """Points from elsewhere.

    A CSV file (a column for each knob, `tps`, `ppl`), the result folder of a `vllm bench sweep serve`, or another
    study's database.

    Raises:
        UsageError: it cannot be read, or holds no point with all knobs of this study.
    """
    if Path(source).is_dir():
        rows = read_sweep(Path(source))
    else:
        rows = _of_database(source, study) if "://" in source or source.endswith(".db") else _of_csv(Path(source))
    names = [knob.name for knob in knobs]
    groups: dict[tuple[int, ...], list[tuple[float, float | None]]] = {}
    for row in rows:
        try:
            setting = tuple(int(float(row[name])) for name in names)
            tps, ppl = float(row["tps"]), float(row["ppl"]) if row.get("ppl") else None
        except (KeyError, ValueError, TypeError):
            continue
        if tps > 0 and math.isfinite(tps):
            groups.setdefault(setting, []).append((tps, ppl))
    if not groups:
        raise UsageError(f"--prior {source} holds no row with numbers for {', '.join(names)} and tps.")
    return tuple(
        PriorPoint(dict(zip(names, setting, strict=True)), tps, ppl, count=1)
        for setting, reports in sorted(groups.items())
        for tps, ppl in reports
    )


def _of_csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--prior {path} cannot be read: {error}.") from error


def _of_database(source: str, study: str | None) -> list[dict[str, Any]]:
    from search.store import Store, open_engine, study_names

    url = source if "://" in source else f"sqlite:///{source}"
    engine = open_engine(url, must_exist=True)
    names = study_names(engine)
    chosen = [name for name in names if study in (None, name)] or names
    return [
        {**o.setting, "tps": o.tps, "ppl": o.ppl}
        for name in chosen
        for o in Store(engine, name).outcomes()
        if o.state == "COMPLETE" and o.reused_from is None
    ]


def settled(problem: Problem) -> list[PriorPoint]:
    """One point a setting: those that can be of the same model, and lie in the knobs' ranges.

    Perplexity that a report does not give is taken from reports of the same quality knobs, or, at those of the
    reference, from the reference.
    """
    low, high = (factor * problem.reference.ppl for factor in SAME_MODEL)
    kept = [p for p in problem.prior if (p.ppl is None or low <= p.ppl <= high) and _in_range(problem, p)]
    by_quality: dict[tuple[object, ...], list[float]] = {}
    groups: dict[tuple[object, ...], list[PriorPoint]] = {}
    for p in kept:
        groups.setdefault(tuple(problem.spelled(p.setting).values()), []).append(p)
        if p.ppl is not None:
            by_quality.setdefault(problem.quality_key(p.setting), []).append(p.ppl)
    by_quality.setdefault(problem.quality_key(problem.reference.setting), [problem.reference.ppl])
    found = []
    for reports in groups.values():
        tps = _quantile(sorted(p.tps for p in reports), UPPER)
        ppls = by_quality.get(problem.quality_key(reports[0].setting))
        ppl = statistics.median(ppls) if ppls else None
        found.append(PriorPoint(problem.spelled(reports[0].setting), tps, ppl, len(reports)))
    return found


def proposals(problem: Problem) -> list[PriorPoint]:
    """The settings to try first: the front of what passed elsewhere, the fastest and best attested first."""
    passed = [p for p in settled(problem) if p.ppl is not None and p.ppl <= problem.ceiling]
    attested = [
        PriorPoint(p.setting, p.tps * math.exp(-ONE_REPORT * max(0.0, 1 - (p.count - 1) / TRUSTED)), p.ppl, p.count)
        for p in passed
    ]
    return pareto_front(attested)[::-1][:PROPOSALS]


def enqueue(study: optuna.Study, problem: Problem, note: Callable[[str], None]) -> None:
    """Let a study begin with the prior's proposals, whatever its sampler."""
    found = proposals(problem)
    for p in found:
        why = f"as it did best elsewhere (--prior): {p.tps:.1f} tok/s there"
        nearest = {knob.name: knob.nearest(int(p.setting[knob.name])) for knob in problem.knobs}
        study.enqueue_trial(nearest, user_attrs={WHY: why})
    if problem.prior:
        tried = "; ".join(words(p.setting) for p in found) or "none: nothing of it is known to pass here"
        count = f"{len(problem.prior)} points from elsewhere, {len(settled(problem))} settings"
        note(f"Prior: {count}. Tried first: {tried}.")


def safe_source(source: str) -> str:
    """A prior's file or database as it may be shown."""
    from search.store import safe_url

    return safe_url(source) if "://" in source else source


def _in_range(problem: Problem, p: PriorPoint) -> bool:
    return all(
        knob.low <= int(p.setting[knob.name]) <= knob.largest and KNOWN[knob.name].minimum <= int(p.setting[knob.name])
        for knob in problem.knobs
    )


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
