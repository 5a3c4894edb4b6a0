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
MAX_ID = 200  # characters; what the store's columns take
T = TypeVar("T", "Prompt", "Record", "Task")


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


@dataclass(frozen=True)
class Task:
    """A prompt with the answer that is expected: a text, or token ids as they stand."""

    id: str
    prompt: str | tuple[int, ...]
    expected: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file of `{id, prompt_token_ids, split?}` lines; without a split they are tune prompts.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def prompt(row: dict[str, Any]) -> Prompt:
        return Prompt(_id(row["id"]), _split(row, TUNE), _token_ids(row, "prompt_token_ids"))

    return _read(path, prompt, "prompts")


def read_conversations(path: Path) -> dict[str, str]:
    """First human turn by conversation id, of a ShareGPT-shaped JSON file: `[{id?, conversations: [{from, value}]}]`.

    Raises:
        UsageError: naming the file, the conversation and what is wrong there.
    """
    try:
        rows = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The prompts file {path} is not JSON: {error}.") from error
    found: dict[str, str] = {}
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        turns = row.get("conversations") if isinstance(row, dict) else None
        said = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
        text = next((t.get("value") for t in said if t.get("from") in ("human", "user")), None)
        if not isinstance(text, str) or not text:
            raise UsageError(f"{path}, conversation {number}: it has no turn of a human.")
        try:
            name = _id(row.get("id", number))
        except ValueError as error:
            raise UsageError(f"{path}, conversation {number}: {error}.") from error
        if name in found:
            raise UsageError(f"{path}, conversation {number}: id {name!r} occurs twice.")
        found[name] = text
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
            _id(row["id"]),
            _split(row, GATE),
            _token_ids(row, "context_token_ids"),
            _token_ids(row, "target_token_ids"),
        )

    return _read(path, record, "records")


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a file of `{id, prompt | prompt_token_ids, expected}` lines.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def task(row: dict[str, Any]) -> Task:
        if ("prompt" in row) == ("prompt_token_ids" in row):
            raise ValueError("exactly one of prompt and prompt_token_ids is needed")
        prompt = _text(row, "prompt") if "prompt" in row else _token_ids(row, "prompt_token_ids")
        return Task(_id(row["id"]), prompt, _text(row, "expected"))

    return _read(path, task, "tasks")


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: not if it has halves of surrogate pairs, as JSON and YAML may write them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def json_hash(value: Any) -> str:
    """Hash of a value as JSON with sorted keys: 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def content_hash(path: Path) -> str:
    """Hash of a file's bytes: 16 hex digits.

    Raises:
        UsageError: it cannot be read.
    """
    return bytes_hash(_read_bytes(path))


def bytes_hash(content: bytes) -> str:
    """Hash of some bytes: 16 hex digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def _read(path: Path, build: Callable[[dict[str, Any]], T], what: str) -> list[T]:
    items: list[T] = []
    seen: set[str] = set()
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object in braces")
            item = build(row)
            if item.id in seen:
                raise ValueError(f"id {item.id!r} occurs twice")
        except (ValueError, KeyError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}, line {number}: {reason}.") from error
        seen.add(item.id)
        items.append(item)
    if not items:
        raise UsageError(f"The {what} file {path} is empty.")
    return items


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def _id(value: Any) -> str:
    text = str(value) if type(value) in (str, int) else ""
    if not text or len(text) > MAX_ID or not text.isprintable():
        raise ValueError(f"id must be a number or a text of at most {MAX_ID} characters, not {value!r:.40}")
    return text


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not blank, not {value!r:.40}")
    if not is_utf8(value):
        raise ValueError(f"{key} is no text that UTF-8 can hold")
    return value


def _split(row: dict[str, Any], first: str) -> str:
    split = row.get("split", first)
    if split not in (first, HELD_OUT):
        raise ValueError(f"split is {split!r:.40}; it must be {first!r} or {HELD_OUT!r}")
    return str(split)


def _token_ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    values = row[key]
    if not isinstance(values, list) or not values or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{key} must be a list of token ids (whole numbers)")
    return tuple(values)
