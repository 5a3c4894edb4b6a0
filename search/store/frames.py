"""A study as pandas DataFrames: what reports and notebooks read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search.errors import SearchError
from search.gates import refusers
from search.knobs import KNOWN
from search.objectives import MORE, value
from search.store.database import open_engine, study_names
from search.store.models import Measurement, Outcome
from search.store.slots import REFERENCE
from search.store.store import Store

if TYPE_CHECKING:
    from pandas import DataFrame, Series


DRIFT_COLUMNS = ("drift", "low", "high")
STAGE_COLUMNS = ("trial", "stage", "status", "wall_s", "made_at", *DRIFT_COLUMNS)
CLAIM_COLUMNS = ("trial", "eligible", "reason", "claimed", "mean", "low", "high", "p_pass")
SERVED_COLUMNS = ("tune_tps", "held_out_tps", "gap", "ppl", "held_out_ratio")
CONFIRMATION_COLUMNS = (*CLAIM_COLUMNS, *SERVED_COLUMNS, "identity_rate")


@dataclass(frozen=True)
class Frames:
    """One study.

    knobs: their names: live ones, then those that engines are built with.
    trials: a row a trial, by number: state, a column for each knob, tps with tps_low and tps_high (tokens a second),
        ppl (over the records that the gate used), ppl_of_all (over all of them; an estimate where it was rejected
        early), refused_by (gates over their limits, by name), a column for the figure of each gate beside perplexity
        (see `search.gates`), on_front, acceptance_rate (a list by position), ttft_s (median seconds to the first
        token), itl_p95_s (between tokens), peak_bytes, energy_j (a token), reused_from, reason, failure, failed_stage,
        warning, wall_s, finished_at, card, and card_tps, what tps was on that card.
    reference: the same of the reference setting.
    stages: a row a stage of a trial: trial, stage, status, wall_s, made_at, and drift, low, high where the reference
        was timed again.
    confirmations: a row a finalist: trial, eligible, reason, claimed, mean, low, high, p_pass, tune_tps, held_out_tps,
        gap, ppl, held_out_ratio, identity_rate, and a column for each knob.
    environments: a row an engine start: facts as columns, card, start_s, started_at.
    objectives: what the front is made of (see `search.objectives`).
    gates: limit and the reference setting's figure by gate; None for studies of before there were several.
    """

    study: str
    simulated: bool
    ceiling: float
    knobs: tuple[str, ...]
    trials: DataFrame
    reference: Series[Any]
    stages: DataFrame
    confirmations: DataFrame
    environments: DataFrame
    objectives: tuple[str, ...]
    gates: dict[str, Any] | None


def load(url: str, study: str | None = None) -> Frames:
    """Read a study from its database; `study` may be left out where there is but one.

    Raises:
        SearchError: there is no such database or study, or nothing has been measured in it yet.
    """
    engine = open_engine(url, must_exist=True)
    if study is None:
        names = study_names(engine)
        if len(names) != 1:
            raise SearchError(f"Which study? The database holds {', '.join(names) or 'none'}.")
        (study,) = names
    return frames(Store(engine, study))


def frames(store: Store) -> Frames:
    """The same from an open store."""
    import pandas as pd

    reference = store.outcome(REFERENCE)
    if reference is None:
        raise SearchError(f"Nothing has been measured in study {store.study!r} yet.")
    stages = store.stages()
    accepted = {m.trial: m.figures.get("acceptance_rate") for m in stages if (m.stage, m.status) == ("speed", "done")}
    front = {point.trial for point in store.front()}
    outcomes = [reference, *store.outcomes()]
    found = {name for outcome in outcomes for name in outcome.setting}
    knobs = tuple(name for name in (*KNOWN, *sorted(found - KNOWN.keys())) if name in found)
    rows = [_trial(outcome, accepted, front, knobs) for outcome in outcomes]
    table = pd.DataFrame(rows).set_index("trial", drop=False)
    assert reference.ceiling is not None
    return Frames(
        study=store.study,
        simulated=reference.simulated,
        ceiling=reference.ceiling,
        knobs=knobs,
        trials=table.drop(index=REFERENCE),
        reference=table.loc[REFERENCE],
        stages=_table([_stage(m) for m in stages], STAGE_COLUMNS),
        confirmations=_table([_confirmation(c) for c in store.confirmations()], CONFIRMATION_COLUMNS),
        environments=pd.DataFrame(
            [
                {**e.facts, "card": e.card, "start_s": e.start_s, "started_at": e.created_at}
                for e in store.environments()
            ]
        ),
        objectives=store.objectives(),
        gates=reference.gates,
    )


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> DataFrame:
    """A frame that has its columns even where it has no rows."""
    import pandas as pd

    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns))


def _trial(outcome: Outcome, accepted: dict[int, Any], front: set[int], knobs: tuple[str, ...]) -> dict[str, Any]:
    names = ("trial", "state", "tps", "tps_low", "tps_high", "ppl", "prompts", "reused_from", "reason")
    more = ("failure", "failed_stage", "warning", "wall_s", "card", "card_tps")
    return {
        **{name: getattr(outcome, name) for name in (*names, *more)},
        **{name: found["figure"] for name, found in (outcome.gates or {}).items() if found and name != "ppl"},
        "refused_by": ", ".join(refusers(outcome.gates)) or ("ppl" if outcome.state == "PRUNED" else None),
        "ppl_of_all": outcome.ppl if outcome.excess is None else outcome.excess + (outcome.ceiling or 0.0),
        **{name: outcome.setting.get(name) for name in knobs},
        "on_front": outcome.trial in front,
        "acceptance_rate": accepted.get(outcome.source),
        **{name: value(outcome, name) for name in MORE},
        "finished_at": outcome.created_at,
    }


def _stage(measurement: Measurement) -> dict[str, Any]:
    drift = {name: measurement.figures.get(name) for name in DRIFT_COLUMNS}
    return {
        "trial": measurement.trial,
        "stage": measurement.stage,
        "status": measurement.status,
        "wall_s": measurement.wall_s,
        "made_at": measurement.created_at,
        **(drift if measurement.status == "drift" else dict.fromkeys(drift)),
    }


def _confirmation(found: Any) -> dict[str, Any]:
    return {
        **{name: getattr(found, name) for name in CLAIM_COLUMNS},
        **{name: found.figures.get(name) for name in SERVED_COLUMNS},
        "identity_rate": (found.figures.get("identity") or {}).get("rate"),
        **found.setting,
    }
