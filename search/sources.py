"""Texts from elsewhere, as their files give them: token ids, text or conversations, not tokenised yet.

What a file holds is told from its content; plain text alone is told by its name, which ends in .txt.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search.data import GATE, TUNE, lines, read_bytes, read_items, split_of, text_id, token_ids
from search.errors import UsageError

USER, ASSISTANT = "user", "assistant"
PROMPT_KEYS = "prompt_token_ids, prompt, messages, conversations, or a body with one of them"


@dataclass(frozen=True)
class Turn:
    """One message of a conversation; `role` is what the model's chat template knows it by."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages that an assistant answers next."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt as its file gives it: token ids, plain text or a conversation."""

    id: str
    split: str
    content: tuple[int, ...] | str | Conversation


@dataclass(frozen=True)
class GivenRecord:
    """A text for the gate as its file gives it: `target` after `context`, each token ids or text."""

    id: str
    split: str
    context: tuple[int, ...] | str
    target: tuple[int, ...] | str


def is_plain_text(path: Path) -> bool:
    """Whether a file is read as plain text."""
    return path.suffix.lower() == ".txt"


def read_given_prompts(path: Path) -> list[GivenPrompt]:
    """Prompts of a file in any of these forms.

    JSON Lines, or one JSON list, of `{prompt_token_ids}`, `{prompt: text}`, `{messages: [{role, content}]}`,
    `{conversations: [{from, value}]}` (ShareGPT: its first human turn) or `{custom_id, body: {messages or prompt}}`
    (a request in an OpenAI-style log or batch), each with `id?` (otherwise its number, from 0) and `split?`; plain
    text, a prompt a paragraph. An assistant's turns at the end of a conversation are answers, and left out.

    Raises:
        UsageError: naming the file, the line or item, and what is wrong there.
    """
    if is_plain_text(path):
        paragraphs = [part.strip() for part in re.split(r"\n[^\S\n]*\n", read_text(path)) if part.strip()]
        return [GivenPrompt(str(n), TUNE, part) for n, part in enumerate(paragraphs)]
    number = itertools.count()

    def prompt(row: dict[str, Any]) -> GivenPrompt:
        name = text_id(row.get("id", row.get("custom_id", next(number))))
        body = row.get("body", row)
        if not isinstance(body, dict):
            raise ValueError("body is not an object in braces")
        return GivenPrompt(name, split_of(row, TUNE), _content(body))

    return read_items(path, _rows(path), prompt, "prompts")


def read_given_records(path: Path) -> list[GivenRecord]:
    """Records of JSON Lines, or one JSON list.

    Each is `{context_token_ids, target_token_ids}`, or as text `{context or prompt, target or completion}`; with
    `id?` and `split?`.

    Raises:
        UsageError: naming the file, the line or item, and what is wrong there.
    """
    number = itertools.count()

    def record(row: dict[str, Any]) -> GivenRecord:
        return GivenRecord(
            text_id(row.get("id", next(number))),
            split_of(row, GATE),
            _part(row, "context_token_ids", "context", "prompt"),
            _part(row, "target_token_ids", "target", "completion"),
        )

    return read_items(path, _rows(path), record, "records")


def read_text(path: Path) -> str:
    """A plain text file, its line ends as single newlines.

    Raises:
        UsageError: it cannot be read, is not UTF-8 or is empty.
    """
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8.") from error
    if not text.strip():
        raise UsageError(f"The text file {path} is empty.")
    return text.replace("\r\n", "\n")


def _rows(path: Path) -> list[tuple[str, Any]]:
    """What stands in a file of JSON Lines or of one JSON list, each with its place in words."""
    content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    first = content.lstrip()[:1]
    if first == b"[":
        try:
            rows = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}.") from error
        return [(f"item {number}", row) for number, row in enumerate(rows)]
    if first not in (b"{", b""):
        raise UsageError(
            f"{path}, line 1: neither JSON Lines nor a JSON list. Plain text must be in a file whose name ends in .txt."
        )
    return lines(content)


def _content(body: Mapping[str, Any]) -> tuple[int, ...] | str | Conversation:
    if "prompt_token_ids" in body:
        return token_ids(body, "prompt_token_ids")
    if "messages" in body:
        return _messages(body["messages"])
    if "conversations" in body:
        return Conversation((Turn(USER, _first_human_turn(body["conversations"])),))
    if "prompt" in body:
        return token_ids(body, "prompt") if isinstance(body["prompt"], list) else _words(body["prompt"], "prompt")
    raise ValueError(f"it holds no prompt: {PROMPT_KEYS} is needed")


def _part(row: Mapping[str, Any], ids: str, *names: str) -> tuple[int, ...] | str:
    """Half of a record: token ids, or text under one of its names."""
    if ids in row:
        return token_ids(row, ids)
    for name in names:
        if name in row:
            return _words(row[name], name)
    raise ValueError(f"{ids} is missing, or {' or '.join(names)} as text")


def _messages(messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ValueError("messages must be a list")
    turns = [_turn(message, f"message {number}") for number, message in enumerate(messages)]
    while turns and turns[-1].role == ASSISTANT:
        turns.pop()
    if not turns:
        raise ValueError("messages ask nothing: none is a user's")
    return Conversation(tuple(turns))


def _turn(message: Any, place: str) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{place} has no role")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which only text can be decoded
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if any(kind not in ("text", "input_text") for kind in kinds):
            raise ValueError(f"{place} holds more than text ({', '.join(map(str, kinds)):.60})")
        content = "".join(_words(part.get("text"), f"{place}'s text") for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return Turn(role, _words(content, f"{place}'s content"))


def _first_human_turn(turns: Any) -> str:
    said = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
    text = next((t.get("value") for t in said if t.get("from") in ("human", USER)), None)
    if not isinstance(text, str) or not text:
        raise ValueError("it has no turn of a human")
    return _words(text, "its human's turn")


def _words(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text, and not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a character (a lone surrogate)") from error
    return value
