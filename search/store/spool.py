"""Where measurements wait while the study database cannot be written: a file of JSON lines beside it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import DateTime

from search.answers import Answer
from search.gate import RecordScore
from search.store.models import Measurement, Outcome, PromptTimingRow

RESERVE_BYTES = 1 << 20  # kept free on the disk, so that a full one still takes the spool


@dataclass(frozen=True)
class Waiting:
    """One line of a spool: a trial's outcome with its measurements and slot, or scores or answers under a gate key."""

    outcome: Outcome | None = None
    measurements: Sequence[Measurement] = ()
    slot: int | None = None
    gate_key: str | None = None
    scores: Mapping[str, RecordScore] | None = None
    answers: Mapping[str, Answer] | None = None


class Spool:
    """The spool of one study. `reserve` keeps some of the disk free for it, `release` gives that back.

    Args:
        url: the study database's.
        study: the study's name in it.
    """

    def __init__(self, url: str, study: str) -> None:
        parsed = sqlalchemy.make_url(url)
        sqlite = parsed.get_backend_name() == "sqlite" and parsed.database
        self.path = Path(f"{parsed.database}.{study}.spool" if sqlite else f"{study}.spool").absolute()
        name = f"vllm-pareto-{hashlib.sha256(str(self.path).encode()).hexdigest()[:16]}.spool"
        self._elsewhere = Path(tempfile.gettempdir()) / name  # where `path` cannot be written at all
        self._reserve = self.path.with_name(f"{self.path.name}-reserve")

    def reserve(self) -> None:
        """Set disk space aside; where that cannot be done there is none."""
        with contextlib.suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def release(self) -> None:
        """Give back what was set aside."""
        self._reserve.unlink(missing_ok=True)

    def keep(self, waiting: Waiting) -> Path:
        """Add a line; returns the file it stands in.

        Raises:
            OSError: there is room neither beside the database nor in the folder for temporary files.
        """
        line = json.dumps(
            {
                "outcome": _values(waiting.outcome) if waiting.outcome is not None else None,
                "measurements": [
                    {**_values(m), "timings": [_values(t) for t in m.timings]} for m in waiting.measurements
                ],
                "slot": waiting.slot,
                "gate_key": waiting.gate_key,
                "scores": {record: _score_values(s) for record, s in (waiting.scores or {}).items()},
                "answers": {task: [a.text, a.matched] for task, a in (waiting.answers or {}).items()},
            }
        )
        self.release()
        try:
            return _append(self.path, line)
        except OSError:
            return _append(self._elsewhere, line)

    def take(self) -> Iterator[Waiting]:
        """Everything that waits; each line is gone once the caller comes for the next.

        A line that was cut off while it was written is left out: whoever wrote it said that this failed.
        """
        for path in (self.path, self._elsewhere):
            taking = path.with_name(f"{path.name}-taking")  # another searcher may add to `path` meanwhile
            for file in (taking, path):
                if file.exists():
                    file.rename(taking)
                    yield from _one_by_one(taking)


def _one_by_one(file: Path) -> Iterator[Waiting]:
    lines = file.read_text().splitlines()
    for place, line in enumerate(lines, start=1):
        if (waiting := _waiting(line)) is not None:
            yield waiting
        left = file.with_name(f"{file.name}-left")
        left.write_text("".join(f"{later}\n" for later in lines[place:]))
        left.replace(file)
    file.unlink()


def _append(path: Path, line: str) -> Path:
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return path


def _waiting(line: str) -> Waiting | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return Waiting(
        outcome=_row(Outcome, row["outcome"]) if row["outcome"] is not None else None,
        measurements=[_measurement(m) for m in row["measurements"]],
        slot=row["slot"],
        gate_key=row["gate_key"],
        scores={record: _score(values) for record, values in row["scores"].items()},
        answers={task: Answer(*answer) for task, answer in row.get("answers", {}).items()},
    )


def _score_values(score: RecordScore) -> list[Any]:
    """As JSON can hold it: bytes in base64."""
    packed = score.distributions
    return [score.nll, score.tokens, score.top1, score.kl, packed and base64.b64encode(packed).decode()]


def _score(values: Sequence[Any]) -> RecordScore:
    """The same back; earlier releases wrote the first two alone."""
    nll, tokens, top1, kl, packed = [*values, None, None, None][:5]
    return RecordScore(nll, tokens, top1, kl, packed and base64.b64decode(packed))


def _values(row: Any) -> dict[str, Any]:
    """A row's values as JSON can hold them, without what the database numbers."""
    values = {column.key: getattr(row, column.key) for column in row.__table__.columns if column.key != "id"}
    return {name: v.isoformat() if isinstance(v, datetime) else v for name, v in values.items() if v is not None}


def _row(kind: type[Any], values: Mapping[str, Any]) -> Any:
    dates = {column.key for column in kind.__table__.columns if isinstance(column.type, DateTime)}
    return kind(**{name: datetime.fromisoformat(v) if name in dates else v for name, v in values.items()})


def _measurement(values: dict[str, Any]) -> Measurement:
    timings = values.pop("timings")
    row: Measurement = _row(Measurement, values)
    row.timings = [_row(PromptTimingRow, timing) for timing in timings]
    return row
