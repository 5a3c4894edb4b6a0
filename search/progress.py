"""What a person sees while a search runs: one live screen in a terminal (`search.screen`), plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from search.closing import found, verdict
from search.knobs import words
from search.objectives import DEFAULT
from search.screen import Screen, stage_words
from search.store import REFERENCE, FrontPoint, Outcome

if TYPE_CHECKING:
    from search.summary import Summary


class PlainProgress:
    """One line a finished trial, and one a long stage; nothing that a log file could not hold."""

    def __init__(self, stream: TextIO, objectives: Sequence[str] = DEFAULT) -> None:
        self._stream, self._objectives = stream, objectives
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
            self.note(f"{stage_words(stage).capitalize()}{what} …")

    def finished(self, outcome: Outcome, finished: int, front: Sequence[FrontPoint]) -> None:
        """One line."""
        self.note(f"[{finished}/{self._total}] trial {outcome.trial}: {verdict(outcome, self._objectives)}")

    def searched(self, summary: Summary) -> None:
        """What was found, before finalists are confirmed."""
        for line in found(summary):
            self.note(line)

    def close(self) -> None:
        """Nothing is left open."""


def make_progress(objectives: Sequence[str], *, to_stderr: bool) -> PlainProgress | Screen:
    """The live screen if the stream is a terminal that can move its cursor, otherwise plain lines."""
    stream = sys.stderr if to_stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # a stream that knows no × shows ? for it
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return Screen(console, objectives)
    return PlainProgress(stream, objectives)
