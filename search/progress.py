"""What a person sees while a search runs: one live screen in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from search.knobs import words
from search.store import REFERENCE, Outcome

STAGE_WORDS = {
    "start": "starting the engine",
    "apply": "setting the knobs",
    "gate": "scoring perplexity",
    "speed": "timing prompts",
    "control": "timing the control",
}


def verdict(outcome: Outcome) -> str:
    """A finished trial in a few words."""
    text = words(outcome.setting)
    if outcome.state == "PRUNED":
        text += f": pruned, perplexity {outcome.ppl:.4f} > {outcome.ceiling:.4f}"
    elif outcome.state == "COMPLETE":
        text += f": {outcome.tps:.1f} tok/s, perplexity {outcome.ppl:.4f}"
    else:
        text += f": failed ({outcome.reason})"
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
            self.note(f"{STAGE_WORDS[stage].capitalize()}{what} …")

    def finished(self, outcome: Outcome, finished: int, best: Outcome | None) -> None:
        """One line."""
        self.note(f"[{finished}/{self._total}] trial {outcome.trial}: {verdict(outcome)}")

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
        self._now = Text(f"{who}: {words(setting) + ', ' if setting else ''}{STAGE_WORDS[stage]}{steps}")

    def finished(self, outcome: Outcome, finished: int, best: Outcome | None) -> None:
        """Move on by one trial."""
        self._finished, self._last, self._best = finished, outcome, best

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
