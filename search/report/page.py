"""A study's report as one HTML page that needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from plotly.offline import get_plotlyjs

from search.gates import words as gate_words
from search.knobs import words
from search.objectives import MORE, OBJECTIVES
from search.report.figures import all_figures, written

if TYPE_CHECKING:
    from search.store.frames import Frames

TEMPLATE = Path(__file__).parent / "page.html"
PLOT_OPTIONS = {"displayModeBar": False, "responsive": True}


@dataclass(frozen=True)
class Headline:
    """The four figures that a reader sees first; None for what is not known."""

    tps: float | None
    times_reference: float | None  # both as the search measured them, in one engine
    ppl: float | None
    p_pass: float | None
    who: str  # trial and setting
    basis: str  # what the figures rest on


def render(study: Frames, commands: list[str]) -> str:
    """The page.

    Args:
        study: what to show.
        commands: what to type to repeat the search, to export its winner and to verify it.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = _number
    return environment.from_string(TEMPLATE.read_text()).render(
        study=study,
        headline=headline(study),
        counts=study.trials.state.value_counts().to_dict() if len(study.trials) else {},
        known=int(study.trials.reused_from.notna().sum()) if len(study.trials) else 0,
        knobs={name: written(name) for name in study.knobs},
        front=_rows(study.trials[study.trials.on_front].sort_values("ppl")) if len(study.trials) else [],
        others={name: OBJECTIVES[name] for name in study.objectives if name in MORE},
        many_cards=len(study.trials) > 0 and study.trials.card.nunique() > 1,
        finalists=_rows(study.confirmations),
        failures=_failures(study),
        warnings=_rows(study.trials[study.trials.warning.notna()].head(20)) if len(study.trials) else [],
        facts=_facts(study),
        figures=[
            {
                "name": figure.name,
                "title": figure.title,
                "alt": figure.alt,
                "html": figure.plot.update_layout(margin={"t": 30, "r": 10}, template="none").to_html(
                    full_html=False, include_plotlyjs=False, div_id=f"plot-{figure.name}", config=PLOT_OPTIONS
                ),
            }
            for figure in all_figures(study)
        ],
        commands=commands,
        other_gates=gate_words(study.gates),
        plotly=get_plotlyjs(),
    )


def _setting(study: Frames, row: Any) -> str:
    """A row's knobs in words, those that it has."""
    return words({name: row[name] for name in study.knobs if name in row and pd.notna(row[name])})


def headline(study: Frames) -> Headline:
    """What is claimed of the winner or, where nothing is confirmed, what the search saw of the fastest."""
    reference = study.reference
    found = study.confirmations
    winners = found[found.eligible.astype(bool)]
    if len(winners):
        winner = winners.iloc[0]
        knobs = _setting(study, winner)
        return Headline(
            winner.claimed,
            study.trials.tps[winner.trial] / reference.tps,
            winner.ppl,
            winner.p_pass,
            f"trial {winner.trial} ({knobs})",
            "confirmed: served over HTTP, on prompts that the search never saw"
            if pd.notna(winner.held_out_tps)
            else "confirmed: served over HTTP, on the search's own prompts, as none are held out",
        )
    front = study.trials[study.trials.on_front] if len(study.trials) else study.trials
    if not len(front):
        return Headline(None, None, None, None, "no setting passed the gate", "there is nothing to claim")
    best = front.loc[front.tps.idxmax()]
    knobs = _setting(study, best)
    return Headline(
        best.tps,
        best.tps / reference.tps,
        best.ppl,
        None,
        f"trial {best.trial} ({knobs})",
        "not confirmed: the fastest of many is partly a lucky draw, and claims nothing",
    )


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """None for what pandas writes as missing."""
    return None if not isinstance(value, list) and pd.isna(value) else value


def _failures(study: Frames) -> list[dict[str, Any]]:
    """How many trials failed of each class and stage, with the first one's reason."""
    failed = study.trials[study.trials.state == "FAIL"] if len(study.trials) else study.trials
    groups = failed.groupby([failed.failure.fillna("unknown"), failed.failed_stage.fillna("–")]) if len(failed) else []
    return [
        {"kind": kind, "stage": stage, "count": len(rows), "reason": rows.reason.iloc[0]}
        for (kind, stage), rows in groups
    ]


def _facts(study: Frames) -> list[tuple[str, Any]]:
    """Where it was measured: the facts of the last engine, and how many engines there were."""
    if not len(study.environments):
        return []
    last = study.environments.iloc[-1].to_dict()
    facts = [(name.replace("_", " "), value) for name, value in last.items() if name != "simulated"]
    return [("engine starts", len(study.environments)), *facts]


def _number(value: Any, form: str) -> str:
    """A figure in its format, or a dash for one that is not known."""
    return "–" if value is None or pd.isna(value) else format(value, form)
