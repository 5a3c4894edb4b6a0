"""The texts a study measures with, read from JSON Lines files and checked before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from search.errors import UsageError

TUNE, HELD_OUT, GATE = "tune", "held-out", "gate"
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt that is decoded for TPS; `split` is TUNE or HELD_OUT."""

    id: str
    split: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """A text the gate scores: `target` after `context` (token ids); `split` is GATE or HELD_OUT."""

    id: str
    split: str
    context: tuple[int, ...]
    target: tuple[int, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file of `{id, prompt_token_ids, split?}` lines; without a split they are tune prompts.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def prompt(row: dict[str, Any]) -> Prompt:
        return Prompt(str(row["id"]), _split(row, TUNE), _token_ids(row, "prompt_token_ids"))

    return _read(path, prompt, "prompts")


def read_conversations(path: Path) -> dict[str, str]:
    """First human turn by conversation id, of a ShareGPT-shaped JSON file: `[{id?, conversations: [{from, value}]}]`.

    Raises:
        UsageError: naming the file, the conversation and what is wrong there.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"The prompts file {path} cannot be read: {error}.") from error
    found: dict[str, str] = {}
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        turns = row.get("conversations") if isinstance(row, dict) else None
        text = next((t.get("value") for t in turns or [] if t.get("from") in ("human", "user")), None)
        if not isinstance(text, str) or not text:
            raise UsageError(f"{path}, conversation {number}: it has no turn of a human.")
        found[str(row.get("id", number))] = text
    if not found:
        raise UsageError(f"{path} holds no conversations.")
    return found


def read_records(path: Path) -> list[Record]:
    """Records of a file of `{id, context_token_ids, target_token_ids, split?}` lines.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def record(row: dict[str, Any]) -> Record:
        return Record(
            str(row["id"]),
            _split(row, GATE),
            _token_ids(row, "context_token_ids"),
            _token_ids(row, "target_token_ids"),
        )

    return _read(path, record, "records")


def json_hash(value: Any) -> str:
    """Hash of a value as JSON with sorted keys: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def content_hash(path: Path) -> str:
    """Hash of a file's bytes: 16 hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(path: Path, build: Callable[[dict[str, Any]], T], what: str) -> list[T]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"The {what} file {path} cannot be read: {error.strerror or error}.") from error
    items: list[T] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            item = build(row)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}, line {number}: {reason}.") from error
        if str(row["id"]) in seen:
            raise UsageError(f"{path}, line {number}: id {row['id']!r} occurs twice.")
        seen.add(str(row["id"]))
        items.append(item)
    if not items:
        raise UsageError(f"The {what} file {path} is empty.")
    return items


def _split(row: dict[str, Any], first: str) -> str:
    split = row.get("split", first)
    if split not in (first, HELD_OUT):
        raise ValueError(f"split is {split!r}; it must be {first!r} or {HELD_OUT!r}")
    return str(split)


def _token_ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    values = row[key]
    if not isinstance(values, list) or not values or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{key} must be a list of token ids (whole numbers)")
    return tuple(values)
