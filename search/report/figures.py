"""The figures of a report, on plotly; each says in `alt` what it shows, for those who do not see it.

Colours are Okabe and Ito's, which those who are colour-blind tell apart; shapes differ too. Text and grid are left to
the page, which knows whether it is light or dark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from search.knobs import DRAFTS, SHORT, TOP_K, WINDOW
from search.objectives import DEFAULT, OBJECTIVES, listed
from search.report.hypervolume import progress
from search.store.slots import REFERENCE

if TYPE_CHECKING:
    from search.store.frames import Frames

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"),
    *("#56B4E9", "#808080"),
)
WRITTEN_OUT = {WINDOW: "sliding window", TOP_K: "centroid top-k", DRAFTS: "speculative tokens K"}
LEAST_FOR_IMPORTANCE = 20  # trials


@dataclass(frozen=True)
class Figure:
    """A figure with its title and what it shows in words."""

    name: str
    title: str
    alt: str
    plot: go.Figure


def written(knob: str) -> str:
    """A knob's name written out."""
    return WRITTEN_OUT.get(knob, knob)


def all_figures(study: Frames) -> list[Figure]:
    """Every figure that the study has something to show in."""
    makers: list[Callable[[Frames], Figure | None]] = [
        front,
        ppl_by_window,
        tps_by_knob,
        acceptance,
        importance,
        best_so_far,
        drift,
        held_out,
        time_spent,
    ]
    return [figure for maker in makers if (figure := maker(study)) is not None]


def front(study: Frames) -> Figure | None:
    """The front in its objectives: TPS against perplexity, unless the study names others."""
    if study.trials.empty:
        return None
    return _usual_front(study) if study.objectives == DEFAULT else _other_front(study)


def _usual_front(study: Frames) -> Figure:
    """TPS against perplexity: what passed, what is on the front, what was pruned, and the ceiling."""
    trials, timed = study.trials, _timed(study)
    plot = go.Figure()
    passed, best = timed[~timed.on_front], timed[timed.on_front].sort_values("ppl")
    plot.add_trace(_points(study, passed, "passed the gate", SKY, "circle"))
    if not best.empty:
        errors = {
            "array": best.tps_high - best.tps,
            "arrayminus": best.tps - best.tps_low,
            "color": BLUE,
            "thickness": 1,
        }
        plot.add_trace(
            go.Scatter(
                x=best.ppl,
                y=best.tps,
                error_y=errors,
                mode="markers+lines",
                name="front",
                **_hover(study, best),
                line={"color": BLUE, "shape": "hv"},
                marker={"size": 9, "symbol": "diamond"},
            )
        )
    pruned = trials[(trials.state == "PRUNED") & trials.ppl.notna()]
    pruned = pruned.assign(ppl=pruned.ppl_of_all)
    if not pruned.empty:
        floor = 0.97 * min([*timed.tps, study.reference.tps])
        plot.add_trace(_points(study, pruned.assign(tps=floor), _pruned_words(pruned), RED, "x", timed=False))
    plot.add_trace(
        go.Scatter(
            x=[study.reference.ppl],
            y=[study.reference.tps],
            mode="markers",
            name="reference",
            hoverinfo="text",
            text=[f"reference: {study.reference.tps:.1f} tok/s, perplexity {study.reference.ppl:.4f}"],
            marker={"size": 12, "symbol": "star", "color": ORANGE},
        )
    )
    plot.add_vline(x=study.ceiling, line={"color": RED, "dash": "dash"}, annotation={"text": "ceiling"})
    plot.update_layout(xaxis_title="perplexity (less is better)", yaxis_title="tokens a second")
    low, ceiling = min([study.reference.ppl, *timed.ppl]), study.ceiling
    high = min(max([ceiling, *pruned.ppl]), ceiling + (ceiling - low))  # what is far over it is seen when zoomed out
    plot.update_xaxes(range=[low - 0.05 * (high - low), high + 0.05 * (high - low)])
    fastest = f"the fastest makes {best.tps.max():.1f} tokens a second" if not best.empty else "there is no front"
    alt = f"Tokens a second against perplexity. Passed the gate: {len(timed)}; pruned: {len(pruned)}; {fastest}."
    return Figure("front", "What each setting costs and gives", alt, plot)


def _other_front(study: Frames) -> Figure:
    """The first objective against the second: what passed, and what is on the front, coloured by a third one."""
    timed = _timed(study)
    (up, along), third = study.objectives[:2], study.objectives[2:]
    passed, best = timed[~timed.on_front], timed[timed.on_front]
    plot = go.Figure(
        [
            _figures_of(study, passed, along, up, "passed the gate", {"color": SKY, "size": 6, "opacity": 0.75}),
            _figures_of(study, best, along, up, "front", {"color": BLUE, "size": 9, "symbol": "diamond"}),
            _figures_of(
                study,
                study.reference.to_frame().T,
                along,
                up,
                "reference",
                {"color": ORANGE, "size": 12, "symbol": "star"},
            ),
        ]
    )
    for name in third:
        scale = {"title": OBJECTIVES[name].axis}
        colours = best[name].astype(float) * OBJECTIVES[name].scale
        plot.data[1].marker.update(color=colours, colorscale="Cividis", showscale=True, colorbar=scale)
    titles = [f"{OBJECTIVES[n].axis} ({'more' if OBJECTIVES[n].maximize else 'less'} is better)" for n in (along, up)]
    plot.update_layout(xaxis_title=titles[0], yaxis_title=titles[1], legend={"orientation": "h"})
    counts = f"{len(best)} settings of the {len(timed)} that passed the gate and were timed"
    alt = f"Front of {listed(study.objectives)}: {counts}."
    return Figure("front", "What each setting costs and gives", alt, plot)


def _figures_of(study: Frames, rows: pd.DataFrame, along: str, up: str, name: str, marker: dict[str, Any]) -> Any:
    """Trials by two of their figures."""
    x, y = (rows[figure].astype(float) * OBJECTIVES[figure].scale for figure in (along, up))
    told = [
        "<br>".join(
            [
                f"<b>{name if row['trial'] == REFERENCE else 'trial {:d}'.format(row['trial'])}</b>",
                *(f"{written(knob)} {row[knob]}" for knob in study.knobs if pd.notna(row[knob])),
                *(OBJECTIVES[figure].shown(row[figure]) for figure in study.objectives),
            ]
        )
        for row in rows.to_dict("records")
    ]
    return go.Scatter(x=x, y=y, mode="markers", name=name, marker=marker, hoverinfo="text", text=told)


def _pruned_words(pruned: pd.DataFrame) -> str:
    over = "over the ceiling" if (pruned.refused_by == "ppl").all() else "refused by a gate"
    return f"pruned: {over}, not timed"


def ppl_by_window(study: Frames) -> Figure | None:
    """Perplexity by window, with the ceiling."""
    if WINDOW not in study.trials or study.trials.ppl_of_all.isna().all():
        return None
    by_window = study.trials.dropna(subset=["ppl_of_all"]).groupby(WINDOW).ppl_of_all.first()
    plot = go.Figure(
        go.Scatter(x=by_window.index, y=by_window, mode="markers+lines", line={"color": BLUE}, name="perplexity")
    )
    plot.add_hline(y=study.ceiling, line={"color": RED, "dash": "dash"}, annotation={"text": "ceiling"})
    plot.update_layout(xaxis_title=written(WINDOW), yaxis_title="perplexity", showlegend=False)
    under = by_window[by_window <= study.ceiling]
    words = f"the smallest window under the ceiling is {under.index.min()}" if not under.empty else "none is under it"
    return Figure("ppl", "Perplexity by window", f"Perplexity of {len(by_window)} windows; {words}.", plot)


def tps_by_knob(study: Frames) -> Figure | None:
    """TPS against each knob, one panel each."""
    timed, knobs = _timed(study), _knobs(study)
    if timed.empty or not knobs:
        return None
    plot = make_subplots(1, len(knobs), shared_yaxes=True, horizontal_spacing=0.03)
    for column, knob in enumerate(knobs, start=1):
        marker = {"color": SKY, "size": 5}
        points = go.Scatter(x=timed[knob], y=timed.tps, mode="markers", marker=marker, name=written(knob))
        plot.add_trace(points, row=1, col=column)
        middle = timed.groupby(knob).tps.median()
        plot.add_trace(go.Scatter(x=middle.index, y=middle, line={"color": BLUE}, name="median"), row=1, col=column)
        plot.update_xaxes(title_text=SHORT.get(knob, knob), row=1, col=column)
    plot.update_yaxes(title_text="tokens a second", col=1)
    plot.update_layout(showlegend=False)
    return Figure("knobs", "Tokens a second by each knob", f"{len(timed)} timed trials by {len(knobs)} knobs.", plot)


def acceptance(study: Frames) -> Figure | None:
    """How often the draft at each position is accepted, for the points of the front."""
    best = study.trials[study.trials.on_front & study.trials.acceptance_rate.map(bool)]
    if best.empty:
        return None
    plot = go.Figure()
    for trial in best.itertuples():
        rates = list(trial.acceptance_rate)
        plot.add_trace(go.Scatter(x=list(range(1, len(rates) + 1)), y=rates, name=f"trial {trial.trial}"))
    plot.update_layout(xaxis_title="position of the draft", yaxis_title="accepted", yaxis_tickformat=".0%")
    first = best.acceptance_rate.map(lambda rates: rates[0])
    alt = f"Share of drafts accepted by position; of first drafts {first.min():.0%} to {first.max():.0%}."
    return Figure("acceptance", "Drafts accepted", alt, plot)


def importance(study: Frames) -> Figure | None:
    """How much each knob matters for TPS and for perplexity (PED-ANOVA)."""
    found = {what: _importances(study, what) for what in ("tps", "ppl_of_all")}
    if not all(found.values()):
        return None
    plot = go.Figure()
    for what, colour, label in (("tps", BLUE, "tokens a second"), ("ppl_of_all", ORANGE, "perplexity")):
        plot.add_trace(
            go.Bar(
                y=[written(k) for k in found[what]],
                x=list(found[what].values()),
                orientation="h",
                name=label,
                marker_color=colour,
            )
        )
    plot.update_layout(xaxis_title="importance", xaxis_tickformat=".0%")
    tops = {what: written(max(values, key=lambda k: values[k])) for what, values in found.items()}
    alt = f"What matters most: for tokens a second the {tops['tps']}, for perplexity the {tops['ppl_of_all']}."
    return Figure("importance", "What matters", alt, plot)


def best_so_far(study: Frames) -> Figure | None:
    """Best TPS under the ceiling and, of a front of TPS and perplexity, hypervolume; by trial and by wall time."""
    trials = study.trials[study.trials.state != "FAIL"]
    if trials.empty:
        return None
    timed = trials.tps.where(trials.state == "COMPLETE")
    best = timed.cummax().ffill()
    points = [None if pd.isna(t) else (t, p) for t, p in zip(timed, trials.ppl, strict=True)]
    volume = pd.Series(progress(points, study.ceiling), index=trials.index)
    minutes = (trials.finished_at - trials.finished_at.iloc[0]).dt.total_seconds() / 60
    steps = (volume.diff() != 0) | (best.diff() != 0) & best.notna()
    steps.iloc[-1] = True  # between steps nothing changes
    rows = 2 if study.objectives == DEFAULT else 1
    plot = make_subplots(
        rows, 2, shared_yaxes="rows", shared_xaxes="columns", horizontal_spacing=0.04, vertical_spacing=0.08
    )
    for column, (x, name) in enumerate(((trials.trial, "trial"), (minutes, "minutes")), start=1):
        plot.add_trace(go.Scatter(x=x[steps], y=best[steps], line={"color": BLUE, "shape": "hv"}), row=1, col=column)
        if rows == 2:
            area = go.Scatter(x=x[steps], y=volume[steps], line={"color": GREEN, "shape": "hv"})
            plot.add_trace(area, row=2, col=column)
        plot.update_xaxes(title_text=name, row=rows, col=column)
    plot.update_yaxes(title_text="most tok/s", row=1, col=1)
    if rows == 2:
        plot.update_yaxes(title_text="hypervolume", row=2, col=1)
    plot.update_layout(showlegend=False)
    if best.notna().any():
        last = trials.trial[best == best.iloc[-1]].iloc[0]
        alt = f"The fastest of {len(trials)} trials was found in trial {last}."
    else:
        alt = "No trial passed the gate."
    return Figure("progress", "How the search got there", alt, plot)


def drift(study: Frames) -> Figure | None:
    """How fast the reference setting was when it was timed again."""
    again = study.stages[study.stages.status == "drift"]
    if again.empty:
        return None
    speed, low, high = 1 / again.drift.astype(float), 1 / again.high.astype(float), 1 / again.low.astype(float)
    errors = {"array": high - speed, "arrayminus": speed - low, "color": ORANGE, "thickness": 1}
    plot = go.Figure(
        go.Scatter(x=again.trial, y=speed, error_y=errors, mode="markers", marker={"color": ORANGE, "size": 8})
    )
    plot.add_hline(y=1, line={"color": GREY, "dash": "dash"})
    plot.update_layout(xaxis_title="before trial", yaxis_title="reference, × its first speed")
    alt = f"The reference setting was timed again {len(again)} times: {speed.min():.2f} to {speed.max():.2f} × as fast."
    return Figure("drift", "Drift of the machine", alt, plot)


def held_out(study: Frames) -> Figure | None:
    """Finalists served: tune against held-out prompts, and what is claimed."""
    found = study.confirmations.dropna(subset=["mean"])
    if found.empty:
        return None
    labels = [f"trial {trial}" for trial in found.trial]
    errors = {"array": found.high - found["mean"], "arrayminus": found["mean"] - found.low, "thickness": 1}
    plot = go.Figure(
        [
            go.Bar(x=labels, y=found.tune_tps, name="tune prompts", marker_color=SKY),
            go.Bar(x=labels, y=found["mean"], name="held-out prompts", marker_color=BLUE, error_y=errors),
            go.Scatter(
                x=labels,
                y=found.claimed,
                name="claimed",
                mode="markers",
                marker={"symbol": "line-ew-open", "size": 26, "color": RED},
            ),
        ]
    )
    plot.update_layout(yaxis_title="tokens a second, served")
    alt = f"{len(found)} finalists on prompts the search saw and on prompts that it did not."
    return Figure("held-out", "Finalists, served", alt, plot)


def time_spent(study: Frames) -> Figure | None:
    """Seconds by stage, over the whole search."""
    if study.stages.empty:
        return None
    of_stages = study.stages.groupby(["stage", "status"]).wall_s.sum()
    spent = {"starting engines": float(study.environments.start_s.sum())}
    names = {
        ("gate", "done"): "scoring records",
        ("gate", "proof"): "proving the memory",
        ("gate", "remembered"): "remembered gates",
        ("speed", "done"): "timing prompts",
        ("speed", "control"): "controls",
        ("speed", "repeat"): "timing the reference twice",
        ("speed", "drift"): "drift",
        ("speed", "interrupted"): "interrupted",
    }
    for key, label in names.items():
        if key in of_stages.index:
            spent[label] = float(of_stages[key])
    ordered = dict(sorted(spent.items(), key=lambda item: item[1]))
    plot = go.Figure(go.Bar(y=list(ordered), x=list(ordered.values()), orientation="h", marker_color=PURPLE))
    plot.update_layout(xaxis_title="seconds", showlegend=False)
    most = max(spent, key=lambda name: spent[name])
    alt = f"{sum(spent.values()):.0f} seconds in all, most of them on {most} ({spent[most]:.0f})."
    return Figure("time", "Where the time went", alt, plot)


def _timed(study: Frames) -> pd.DataFrame:
    return study.trials[(study.trials.state == "COMPLETE") & study.trials.reused_from.isna()]


def _knobs(study: Frames) -> list[str]:
    return [name for name in study.knobs if study.trials[name].nunique() > 1]


def _hover(study: Frames, rows: pd.DataFrame, *, timed: bool = True) -> dict[str, Any]:
    """What is shown of a point under the pointer: one template, and numbers, which take little room in the page."""
    knobs = list(study.knobs)
    lines = [
        "<b>trial %{customdata[0]}</b>",
        *(f"{written(name)} %{{customdata[{place}]}}" for place, name in enumerate(knobs, start=1)),
        "perplexity %{x:.4f}",
        *(["%{y:.1f} tok/s"] if timed else []),
    ]
    told = rows[["trial", *knobs]]
    whole = all(pd.api.types.is_integer_dtype(told[name]) for name in told)
    data = told.to_numpy(dtype="int32") if whole else told.astype(object).where(told.notna(), "–").to_numpy()
    return {"customdata": data, "hovertemplate": "<br>".join(lines) + "<extra></extra>"}


def _points(study: Frames, rows: pd.DataFrame, name: str, colour: str, symbol: str, *, timed: bool = True) -> Any:
    marker = {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.75}
    return go.Scatter(
        x=rows.ppl, y=rows.tps, mode="markers", name=name, marker=marker, **_hover(study, rows, timed=timed)
    )


def _importances(study: Frames, what: str) -> dict[str, float]:
    """Share of what a knob explains of `what`, by knob; empty where there are too few trials to tell."""
    import optuna

    rows = study.trials.dropna(subset=[what])
    knobs = [k for k in _knobs(study) if rows[k].notna().all()]  # not those that some engines do not have
    if len(rows) < LEAST_FOR_IMPORTANCE or len(knobs) < 2 or rows[what].nunique() < 2:
        return {}
    rows = rows.astype({k: object for k in knobs if not pd.api.types.is_numeric_dtype(rows[k])})
    ranges = {k: _range(rows[k]) for k in knobs}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    mirror = optuna.create_study(direction="maximize" if what == "tps" else "minimize")
    mirror.add_trials(
        [
            optuna.trial.create_trial(params={k: row[k] for k in knobs}, distributions=ranges, value=float(row[what]))
            for row in rows[[*knobs, what]].to_dict("records")
        ]
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(mirror, evaluator=evaluator, params=knobs))


def _range(values: pd.Series[Any]) -> Any:
    """What the values of a knob are drawn from, as Optuna writes it."""
    import optuna

    if pd.api.types.is_integer_dtype(values):
        return optuna.distributions.IntDistribution(int(values.min()), int(values.max()))
    return optuna.distributions.CategoricalDistribution(sorted(values.unique(), key=str))
