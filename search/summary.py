"""What a search did, read back from the store: the document of `search.run --json`, as an object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search.errors import SearchError
from search.gates import refusers
from search.knobs import METHOD
from search.objectives import MORE, value
from search.store import REFERENCE, Confirmation, FrontPoint, Outcome, Store


@dataclass(frozen=True)
class Summary:
    """A study as it stands; `wall_s` and `engine_starts` are of the search that has just ended.

    `objectives` are what the front is made of, `best` is its fastest point.

    `methods` has the fastest trial that passed with each method of speculation, where that is searched (tokens a
    second). `cards` says how many trials were measured on each, `gates` of each gate its limit, the reference setting's
    figure, and how many trials it refused.
    """

    study: str
    simulated: bool
    counts: dict[str, int]
    reused: int
    reference: Outcome
    ceiling: float | None
    objectives: tuple[str, ...]
    front: list[dict[str, Any]]
    cards: dict[str, int]
    methods: dict[str, float]
    best: dict[str, Any] | None
    wall_s: float
    engine_starts: int
    gate: dict[str, int]
    gates: dict[str, dict[str, Any]]
    drift: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    confirmed: list[Confirmation]
    winner: Confirmation | None

    def as_json(self) -> dict[str, Any]:
        """The document `--json` prints."""
        return {
            "study": self.study,
            "simulated": self.simulated,
            "trials": {**self.counts, "reused": self.reused},
            "reference": {"tps": self.reference.tps, "ppl": self.reference.ppl, **_figures(self.reference)},
            "ceiling": self.ceiling,
            "objectives": list(self.objectives),
            "front": self.front,
            "cards": self.cards,
            "methods": self.methods,
            "best": self.best,
            "confirmed": _confirmed(self.winner),
            "drift": self.drift,
            "warnings": self.warnings,
            "wall_s": round(self.wall_s, 1),
            "engine_starts": self.engine_starts,
            "gate": self.gate,
            "gates": self.gates,
        }


def summarize(store: Store, engine_starts: int, wall_s: float) -> Summary:
    """The study's summary.

    Raises:
        SearchError: nothing has been measured yet.
    """
    outcomes = store.outcomes()
    states = [outcome.state for outcome in outcomes]
    reference = store.outcome(REFERENCE)
    if reference is None:
        raise SearchError("Nothing has been measured yet: --trials must be at least 1.")
    found = {outcome.trial: outcome.gates or {} for outcome in outcomes}
    front = [{**_point(point), **_figures(point), "gates": _others(found[point.trial])} for point in store.front()]
    refused = Counter(name for gates in found.values() for name in refusers(gates))
    return Summary(
        study=store.study,
        simulated=reference.simulated,
        counts={
            "complete": states.count("COMPLETE"),
            "pruned": states.count("PRUNED"),
            "failed": states.count("FAIL"),
        },
        reused=sum(outcome.reused_from is not None for outcome in outcomes),
        reference=reference,
        ceiling=reference.ceiling,
        objectives=store.objectives(),
        front=front,
        cards=dict(Counter(outcome.card for outcome in outcomes if outcome.card and outcome.state != "FAIL")),
        methods=_by_method(outcomes),
        best=front[-1] if front else None,
        wall_s=wall_s,
        engine_starts=engine_starts,
        gate=store.gate_counts(),
        gates={
            name: {"limit": one["limit"], "reference": one["figure"], "refused": refused[name]}
            for name, one in (reference.gates or {}).items()
        },
        drift=[
            {"trial": m.trial, **{name: m.figures[name] for name in ("drift", "low", "high", "other_outputs")}}
            for m in store.measurements("speed", "drift")
        ],
        warnings=[{"trial": o.trial, "warning": o.warning} for o in outcomes if o.warning and o.reused_from is None],
        confirmed=store.confirmations(),
        winner=store.winner(),
    )


def _figures(point: Outcome | FrontPoint) -> dict[str, float | None]:
    """A measured trial's latency, memory and energy; None where it was not measured."""
    return {name: value(point, name) for name in MORE}


def _others(gates: Mapping[str, Any]) -> dict[str, float]:
    """Figures of the gates beside perplexity."""
    return {name: found["figure"] for name, found in gates.items() if found and name != "ppl"}


def _by_method(outcomes: Sequence[Outcome]) -> dict[str, float]:
    found: dict[str, float] = {}
    for outcome in outcomes:
        if METHOD in outcome.setting and outcome.tps is not None and outcome.state == "COMPLETE":
            method = str(outcome.setting[METHOD])
            found[method] = max(outcome.tps, found.get(method, 0.0))
    return found


def _confirmed(found: Confirmation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    names = ("trial", "claimed", "mean", "low", "high", "p_pass")
    kept = ("ppl", "held_out_ratio", "held_out_tps", "tune_tps", "gap", "identity")
    return {
        **{n: getattr(found, n) for n in names},
        **{n: found.figures[n] for n in kept},
        "gates": found.figures.get("gates", {}),
        "knobs": found.setting,
    }


def _point(point: FrontPoint) -> dict[str, Any]:
    return {
        "trial": point.trial,
        "tps": point.tps,
        "tps_low": point.tps_low,
        "tps_high": point.tps_high,
        "ppl": point.ppl,
        "card": point.card,
        "knobs": point.setting,
    }
