"""A search as a few lines of a terminal that stay in place: how far, how long still, what now, what is best."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from search.closing import found, verdict
from search.knobs import words
from search.objectives import DEFAULT
from search.store import REFERENCE, FrontPoint, Outcome

if TYPE_CHECKING:
    from search.summary import Summary

STAGE_WORDS = {
    "start": "starting the engine",
    "apply": "setting the knobs",
    "gate": "scoring perplexity",
    "tasks": "answering tasks",
    "speed": "timing prompts",
    "control": "timing the control",
    "plain": "decoding without drafts",
    "held-out": "scoring held-out records",
}
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
SPARK_WIDTH = 24
RECENT = 30  # trials that the estimate rests on: known settings and remembered gates grow more frequent
LEAST = 3  # trials before anything is estimated


def stage_words(stage: str) -> str:
    """What goes on in a stage, for people."""
    return STAGE_WORDS.get(stage, stage)


class StageTimes:
    """How long each stage of the recent trials took.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trials: deque[Counter[str]] = deque(maxlen=RECENT)
        self._now: Counter[str] = Counter()
        self._stage, self._since = "ask", clock()

    def enter(self, stage: str) -> None:
        """The time from now on is `stage`'s; of the stage that goes on already, nothing changes."""
        now = self._clock()
        self._now[self._stage] += now - self._since  # type: ignore[assignment]  # counts seconds
        self._stage, self._since = stage, now

    def end_trial(self) -> None:
        """A trial ended; what follows belongs to the next one."""
        self.enter("ask")
        self._trials.append(self._now)
        self._now = Counter()

    def restart(self) -> None:
        """What passed until now belongs to no trial."""
        self._now = Counter()
        self._stage, self._since = "ask", self._clock()

    def per_trial(self) -> dict[str, float]:
        """Mean seconds that a trial spends in each stage; empty while there are too few trials."""
        if len(self._trials) < LEAST:
            return {}
        total: Counter[str] = sum(self._trials, Counter())
        return {stage: total[stage] / len(self._trials) for stage in total}


def sparkline(points: Sequence[tuple[float, float]], ceiling: float, width: int, blocks: str = BLOCKS) -> str:
    """The most TPS to be had at each perplexity, from the front's best one up to the ceiling.

    Args:
        points: perplexity and TPS of each point of a front.
        ceiling: the perplexity at the right end.
        width: characters.
        blocks: characters from low to high.
    """
    least = min(ppl for ppl, _ in points)
    edges = [least + (ceiling - least) * (n + 1) / width for n in range(width - 1)] + [max(ceiling, least)]
    best = [max((tps for ppl, tps in points if ppl <= edge), default=0.0) for edge in edges]
    low, high = min(best), max(best)
    step = (high - low) / (len(blocks) - 1) or 1.0
    return "".join(blocks[round((tps - low) / step)] for tps in best)


class Screen:
    """Follows a search on a terminal; lines that stay are printed above it. `objectives` are the study's."""

    def __init__(self, console: Console, objectives: Sequence[str] = DEFAULT) -> None:
        self._console, self._objectives = console, objectives
        self._blocks = BLOCKS if "utf" in console.encoding.lower() else PLAIN_BLOCKS
        self._total = self._finished = 0
        self._times = StageTimes()
        self._counts: Counter[str] = Counter()
        self._ceiling = float("nan")
        self._now = Text("…")
        self._front: Sequence[FrontPoint] = ()
        self._last: Outcome | None = None
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        """Print a line above the screen."""
        self._console.print(Text(text))

    def opened(self, finished: int, total: int) -> None:
        """The first trial begins."""
        self._finished, self._total = finished, total
        self._times.restart()

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """Show what goes on."""
        self._times.enter(stage)
        who = "reference" if trial == REFERENCE else f"trial {trial}"
        steps = f" {done + 1}/{total}" if total > 1 else ""
        self._now = Text(f"{who}: {words(setting) + ', ' if setting else ''}{stage_words(stage)}{steps}")

    def finished(self, outcome: Outcome, finished: int, front: Sequence[FrontPoint]) -> None:
        """Move on by one trial."""
        self._times.end_trial()
        self._counts["known" if outcome.reused_from is not None else outcome.state] += 1
        self._finished, self._last, self._front = finished, outcome, front
        self._ceiling = outcome.ceiling or self._ceiling

    def searched(self, summary: Summary) -> None:
        """Print what was found; finalists are still to be confirmed."""
        self._total = 0
        for line in found(summary):
            self.note(line)

    def close(self) -> None:
        """Remove the screen."""
        self._live.stop()

    def _screen(self) -> Group:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("now", self._now)
        if not self._total:
            return Group(rows)
        if self._last is not None:
            rows.add_row("last", Text(f"trial {self._last.trial}: {verdict(self._last, self._objectives)}"))
            ended = (("COMPLETE", "passed"), ("PRUNED", "pruned"), ("known", "known"))
            rows.add_row("so far", Text(", ".join(f"{self._counts[state]} {word}" for state, word in ended)))
        if self._front:
            best, slowest = self._front[-1], self._front[0]
            line = f"trial {best.trial}: {words(best.setting)}: {best.tps:.1f} tok/s, perplexity {best.ppl:.4f}"
            usual = self._objectives == DEFAULT
            rows.add_row("best" if usual else "fastest", Text(line, style="bold green"))
        if self._front and usual:
            spark = sparkline([(p.ppl, p.tps) for p in self._front], self._ceiling, SPARK_WIDTH, self._blocks)
            rows.add_row("front", Text(f"{slowest.tps:.0f} {spark} {best.tps:.0f} tok/s up to the ceiling"))
        per_trial = self._times.per_trial()
        if per_trial:
            rows.add_row("takes", Text(_times_words(per_trial)))
        head = Table.grid(padding=(0, 1))
        left = _eta(per_trial, self._total - self._finished)
        bar = ProgressBar(total=self._total, completed=self._finished, width=20)
        head.add_row(bar, Text(f"{self._finished}/{self._total} trials{left}", style="bold"))
        return Group(head, rows)


def _times_words(per_trial: Mapping[str, float]) -> str:
    most = sorted(per_trial, key=lambda stage: -per_trial[stage])[:3]
    parts = ", ".join(f"{'between trials' if stage == 'ask' else stage} {per_trial[stage]:.1f}" for stage in most)
    return f"{sum(per_trial.values()):.1f} s a trial ({parts})"


def _eta(per_trial: Mapping[str, float], left: int) -> str:
    if not per_trial:
        return ""
    minutes, seconds = divmod(round(sum(per_trial.values()) * left), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f", about {hours} h {minutes} min left"
    return f", about {minutes} min left" if minutes else f", about {seconds} s left"
