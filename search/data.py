"""The texts a study measures with, read from JSON Lines files and checked before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from search.errors import UsageError

TUNE, HELD_OUT, GATE = "tune", "held-out", "gate"
MAX_ID = 200  # characters; what the store's columns take


class Named(Protocol):
    """What is read from a file has an id, which no other of the file has."""

    @property
    def id(self) -> str: ...  # noqa: D102


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Prompt:
    """A prompt that is decoded for TPS; `split` is TUNE or HELD_OUT."""

    id: str
    split: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Wave:
    """Prompts that are decoded at the same time, and timed as one: a prompt alone goes by its own id."""

    id: str
    prompts: tuple[Prompt, ...]


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
        return Prompt(text_id(row["id"]), split_of(row, TUNE), token_ids(row, "prompt_token_ids"))

    return read_items(path, lines(read_bytes(path)), prompt, "prompts")


def waves(prompts: Sequence[Prompt], concurrency: int) -> list[Wave]:
    """Prompts in waves of `concurrency`, in their order; a last one that is not full is left out."""
    whole = len(prompts) // concurrency * concurrency
    found = [tuple(prompts[start : start + concurrency]) for start in range(0, whole, concurrency)]
    return [Wave(_wave_id([p.id for p in wave]), wave) for wave in found]


def _wave_id(ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"wave-{json_hash(list(ids))}"


def read_records(path: Path) -> list[Record]:
    """Records of a file of `{id, context_token_ids, target_token_ids, split?}` lines.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def record(row: dict[str, Any]) -> Record:
        return Record(
            text_id(row["id"]),
            split_of(row, GATE),
            token_ids(row, "context_token_ids"),
            token_ids(row, "target_token_ids"),
        )

    return read_items(path, lines(read_bytes(path)), record, "records")


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a file of `{id, prompt | prompt_token_ids, expected}` lines.

    Raises:
        UsageError: naming the file, the line and what is wrong there.
    """

    def task(row: dict[str, Any]) -> Task:
        if ("prompt" in row) == ("prompt_token_ids" in row):
            raise ValueError("exactly one of prompt and prompt_token_ids is needed")
        prompt = _text(row, "prompt") if "prompt" in row else token_ids(row, "prompt_token_ids")
        return Task(text_id(row["id"]), prompt, _text(row, "expected"))

    return read_items(path, lines(read_bytes(path)), task, "tasks")


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
    return bytes_hash(read_bytes(path))


def bytes_hash(content: bytes) -> str:
    """Hash of some bytes: 16 hex digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def lines(content: bytes) -> list[tuple[str, Any]]:
    """The lines of a JSON Lines file that are not blank, not parsed yet, each with its place in words."""
    return [(f"line {n}", line) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]


def read_items(path: Path, rows: Iterable[tuple[str, Any]], build: Callable[[dict[str, Any]], T], what: str) -> list[T]:
    """What `build` makes of every row of `path`; rows come with their place in words, and as JSON if they are bytes.

    Raises:
        UsageError: naming the file, the place and what is wrong there; `build` says it by a ValueError or KeyError.
    """
    items: list[T] = []
    seen: set[str] = set()
    for place, row in rows:
        try:
            row = json.loads(row) if isinstance(row, bytes) else row
            if not isinstance(row, dict):
                raise ValueError("not an object in braces")
            item = build(row)
            if item.id in seen:
                raise ValueError(f"id {item.id!r} occurs twice")
        except (ValueError, KeyError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}, {place}: {reason}.") from error
        seen.add(item.id)
        items.append(item)
    if not items:
        raise UsageError(f"The {what} file {path} is empty.")
    return items


def read_bytes(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def text_id(value: Any) -> str:
    """An id as text; ValueError where the store could not take it."""
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


def split_of(row: Mapping[str, Any], first: str) -> str:
    """A row's split, `first` or HELD_OUT; ValueError where it is another."""
    split = row.get("split", first)
    if split not in (first, HELD_OUT):
        raise ValueError(f"split is {split!r:.40}; it must be {first!r} or {HELD_OUT!r}")
    return str(split)


def token_ids(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token ids under `key`, which must be there; ValueError where they are none."""
    values = row[key]
    if not isinstance(values, list) or not values or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{key} must be a list of token ids (whole numbers)")
    return tuple(values)
