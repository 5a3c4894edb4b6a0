"""What a person sees while a search runs: one live screen in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from search.knobs import words
from search.store import REFERENCE, Outcome

if TYPE_CHECKING:
    from search.summary import Summary

STAGE_WORDS = {
    "start": "starting the engine",
    "apply": "setting the knobs",
    "gate": "scoring perplexity",
    "speed": "timing prompts",
    "control": "timing the control",
    "plain": "decoding without drafts",
    "held-out": "scoring held-out records",
}


def search_words(summary: Summary) -> list[str]:
    """What a search found, in four lines at most."""
    counts, best, reference = summary.counts, summary.best, summary.reference
    marked = "SIMULATED " if summary.simulated else ""
    lines = [
        f"{counts['complete'] + counts['pruned']} trials finished in {summary.wall_s:.0f} s: "
        f"{counts['complete']} passed the gate, {counts['pruned']} were pruned over the ceiling of "
        f"{summary.ceiling:.4f}; {summary.reused} were known settings, {counts['failed']} more failed."
    ]
    if summary.warnings:
        first, more = summary.warnings[0], len(summary.warnings) - 1
        others = f" ({more} more trials have warnings)" if more else ""
        lines.append(f"WARNING, trial {first['trial']}: {first['warning']}{others}.")
    if best is None:
        return [*lines, "No setting passed the gate: there is no best trial. Raise the ceiling, or widen the ranges."]
    assert reference.tps is not None
    return [
        *lines,
        f"{marked}Best: trial {best['trial']} ({words(best['knobs'])}): {best['tps']:.1f} tok/s "
        f"[{best['tps_low']:.1f}, {best['tps_high']:.1f}], {best['tps'] / reference.tps:.2f} × the reference's "
        f"{reference.tps:.1f}; perplexity {best['ppl']:.4f} (reference {reference.ppl:.4f}).",
        f"Front: {len(summary.front)} points.",
    ]


def _stage_words(stage: str) -> str:
    return STAGE_WORDS.get(stage, stage)


def verdict(outcome: Outcome) -> str:
    """A finished trial in a few words."""
    text = words(outcome.setting)
    if outcome.state == "PRUNED":
        text += f": pruned, {outcome.reason}"
    elif outcome.state == "COMPLETE":
        text += f": {outcome.tps:.1f} tok/s, perplexity {outcome.ppl:.4f}"
    else:
        text += f": failed ({outcome.reason})"
    if outcome.warning:
        text += f"; WARNING: {outcome.warning}"
    return text + (f" (as in trial {outcome.reused_from})" if outcome.reused_from is not None else "")


class PlainProgress:
    """One line a finished trial, and one a long stage; nothing that a log file could not hold."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = 0
        self._announced: tuple[int, str] | None = None

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def opened(self, finished: int, total: int) -> None:
        """Say where the study stands."""
        self._total = total
        if finished:
            self.note(f"Going on after {finished} finished trials.")

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """Announce the stages before the first trial; later ones are told by their trial."""
        if trial == REFERENCE and self._announced != (trial, stage):
            self._announced = (trial, stage)
            what = f" at the reference setting ({words(setting)})" if setting else ""
            self.note(f"{_stage_words(stage).capitalize()}{what} …")

    def finished(self, outcome: Outcome, finished: int, best: Outcome | None) -> None:
        """One line."""
        self.note(f"[{finished}/{self._total}] trial {outcome.trial}: {verdict(outcome)}")

    def searched(self, summary: Summary) -> None:
        """What was found, before finalists are confirmed."""
        for line in search_words(summary):
            self.note(line)

    def close(self) -> None:
        """Nothing is left open."""


class LiveProgress:
    """A few lines that stay in place: how far, what now, what is best, how long still."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = self._finished = self._started_with = 0
        self._opened_at = time.monotonic()
        self._now = Text("…")
        self._best: Outcome | None = None
        self._last: Outcome | None = None
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        """Print a line above the screen."""
        self._console.print(Text(text))

    def opened(self, finished: int, total: int) -> None:
        """Start the clock of the estimate."""
        self._finished = self._started_with = finished
        self._total = total
        self._opened_at = time.monotonic()

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """Show what goes on."""
        who = "reference" if trial == REFERENCE else f"trial {trial}"
        steps = f" {done + 1}/{total}" if total > 1 else ""
        self._now = Text(f"{who}: {words(setting) + ', ' if setting else ''}{_stage_words(stage)}{steps}")

    def finished(self, outcome: Outcome, finished: int, best: Outcome | None) -> None:
        """Move on by one trial."""
        self._finished, self._last, self._best = finished, outcome, best

    def searched(self, summary: Summary) -> None:
        """Print what was found; finalists are still to be confirmed."""
        self._total = 0
        for line in search_words(summary):
            self.note(line)

    def close(self) -> None:
        """Remove the screen."""
        self._live.stop()

    def _screen(self) -> Group:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("now", self._now)
        if self._last is not None:
            rows.add_row("last", Text(verdict(self._last)))
        if self._best is not None:
            rows.add_row("best", Text(verdict(self._best), style="bold green"))
        if not self._total:
            return Group(rows)
        head = Table.grid(padding=(0, 1))
        count = Text(f"{self._finished}/{self._total} trials{self._eta()}", style="bold")
        head.add_row(ProgressBar(total=self._total, completed=self._finished, width=24), count)
        return Group(head, rows)

    def _eta(self) -> str:
        done = self._finished - self._started_with
        if done < 3:
            return ""
        left_s = (time.monotonic() - self._opened_at) / done * (self._total - self._finished)
        minutes, seconds = divmod(round(left_s), 60)
        return f", about {minutes} min left" if minutes else f", about {seconds} s left"


def make_progress(*, to_stderr: bool) -> PlainProgress | LiveProgress:
    """The live screen if the stream is a terminal, otherwise plain lines."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream)
    return LiveProgress(console) if console.is_terminal else PlainProgress(stream)
