"""The comparison as a figure: median regret against simulated time, a panel a landscape."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from search.bench.compare import TRACE_UNITS, Run, numbers
from search.bench.variants import VARIANTS
from search.errors import UsageError
from search.landscapes import LANDSCAPES
from search.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY

COLOURS = dict(
    zip(
        ("gated", "gated+prior", "gp", "tpe", "tpe-10", "nsga2", "random"),
        (BLUE, SKY, PURPLE, RED, ORANGE, GREEN, GREY),
        strict=True,
    )
)
COLUMNS, PANEL = 2, (460, 260)  # pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAST = 1e-3  # regrets are drawn down to 0.1 %


def figure(runs: Sequence[Run], landscapes: Sequence[str] | None = None) -> go.Figure:
    """Median over the seeds; a line ends where most runs of it ended."""
    names = [n for n in (landscapes or LANDSCAPES) if any(r.landscape == n and r.regret is not None for r in runs)]
    rows = -(-len(names) // COLUMNS)
    plot = make_subplots(rows, COLUMNS, subplot_titles=names, vertical_spacing=0.28 / max(rows, 1))
    shown: set[str] = set()
    for place, name in enumerate(names):
        for variant in VARIANTS:
            own = [numbers(r.trace) for r in runs if r.landscape == name and r.variant == variant.label]
            if not own or variant.label not in COLOURS:
                continue
            xs, ys = [], []
            for i, unit in enumerate(TRACE_UNITS):
                there = [values[i] for values in own]
                known = [v for v in there if v is not None]
                if 2 * len(known) > len(there):
                    xs.append(unit)
                    ys.append(100 * max(statistics.median(known), LEAST))
            line = {"color": COLOURS[variant.label], "width": 3 if variant.label == "gated" else 1.5}
            plot.add_scatter(
                x=xs,
                y=ys,
                name=variant.label,
                mode="lines",
                line=line,
                legendgroup=variant.label,
                showlegend=variant.label not in shown,
                row=place // COLUMNS + 1,
                col=place % COLUMNS + 1,
            )
            shown.add(variant.label)
    plot.update_xaxes(type="log", title_text="simulated time, in whole trials")
    plot.update_yaxes(type="log", title_text="regret, %")
    width, height = PANEL
    return plot.update_layout(width=COLUMNS * width, height=rows * height + 60, template="plotly_white")


def write(plot: go.Figure, file: Path) -> None:
    """As HTML or, by a Chromium and Playwright, as SVG.

    Raises:
        UsageError: an SVG was asked for, and there is no browser.
    """
    if file.suffix == ".html":
        file.write_text(plot.to_html(include_plotlyjs=True))
        return
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise UsageError("An SVG figure needs Playwright and its Chromium; write figure.html instead.") from error
    try:
        with sync_playwright() as play:
            installed = next(filter(None, map(shutil.which, BROWSERS)), None)  # else Playwright's own
            browser = play.chromium.launch(executable_path=installed, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_content(plot.to_html(include_plotlyjs=True, div_id="plot"))
            size = {"format": "svg", "width": plot.layout.width, "height": plot.layout.height}
            data = page.evaluate(
                "size => Plotly.toImage(document.getElementById('plot'), size).then(decodeURIComponent)", size
            )
            browser.close()
    except Error as error:
        raise UsageError(f"The SVG figure could not be drawn ({error.message.splitlines()[0]}).") from error
    file.write_text(str(data).partition(",")[2])
