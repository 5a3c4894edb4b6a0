"""Texts made into token ids by a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from search.data import GATE, Prompt, Record
from search.errors import UsageError
from search.sources import Conversation, is_plain_text, read_given_prompts, read_given_records, read_text

# Of each record cut from a plain text. What a small window leaves out only tells behind a context that is longer.
CONTEXT_TOKENS, TARGET_TOKENS = 512, 256
Content = tuple[int, ...] | str | Conversation


def tokenised_prompts(path: Path, model: str | None) -> list[Prompt]:
    """The prompts of a file (`sources.read_given_prompts`), as `model` would be given them.

    Raises:
        UsageError: the file cannot be read, it holds text and there is no model, or the tokenizer does not take it.
    """
    tokens = _tokeniser(path, model)
    return [Prompt(p.id, p.split, tokens(p.content, f"prompt {p.id}", True)) for p in read_given_prompts(path)]


def tokenised_records(path: Path, model: str | None) -> list[Record]:
    """The records of a file: of `sources.read_given_records`, or cut from a plain text one after the other.

    Context and target of a record are tokenised apart, so that where one ends and the other begins is where the file
    says; what a tokenizer puts before every text stands before the context alone.

    Raises:
        UsageError: as in `tokenised_prompts`, and where a text is too short to be cut.
    """
    tokens = _tokeniser(path, model)
    if not is_plain_text(path):
        return [
            Record(
                r.id,
                r.split,
                tokens(r.context, f"record {r.id}'s context", True),
                tokens(r.target, f"record {r.id}'s target", False),
            )
            for r in read_given_records(path)
        ]
    text = read_text(path)
    whole = tokens(text, "its text", False)
    bare, full = tokens("a", "a letter", False), tokens("a", "a letter", True)
    start = full[: full.index(bare[0])]
    size = CONTEXT_TOKENS + TARGET_TOKENS
    cuts = [whole[at : at + size] for at in range(0, len(whole) - size + 1, size)]
    if len(cuts) < 2:
        raise UsageError(f"{path} is too short: {len(whole)} tokens, and two records need {2 * size}.")
    return [Record(str(n), GATE, start + cut[:CONTEXT_TOKENS], cut[CONTEXT_TOKENS:]) for n, cut in enumerate(cuts)]


def _tokeniser(path: Path, model: str | None) -> Callable[[Content, str, bool], tuple[int, ...]]:
    """What makes token ids of a content of `path`: the content, its name for an error, whether it begins a text.

    The tokenizer is loaded when the first text comes, so that token ids need no model.
    """

    @cache
    def tokenizer() -> Any:
        if model is None:
            raise UsageError(f"{path} holds text, which a model's tokenizer makes into tokens: say which with --model.")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(model)
        except Exception as error:  # the library raises its own kinds, and bare ones, for a file that is broken
            raise UsageError(f"The tokenizer of {model} cannot be loaded: {_first_line(error)}") from error

    def tokens(content: Content, name: str, begins: bool) -> tuple[int, ...]:
        if isinstance(content, tuple):
            return content
        try:
            found = _encode(tokenizer(), content, begins)
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise UsageError(f"{path}, {name}: {model} does not take it: {_first_line(error)}") from error
        if not found:
            raise UsageError(f"{path}, {name}: the tokenizer of {model} makes no tokens of it.")
        return tuple(found)

    return tokens


def _encode(tokenizer: Any, content: str | Conversation, begins: bool) -> list[int]:
    """Token ids of a text, or of a conversation through the chat template; without one, its turns by blank lines."""
    if isinstance(content, Conversation):
        if tokenizer.chat_template is not None:
            messages = [{"role": turn.role, "content": turn.content} for turn in content.turns]
            return list(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        content = "\n\n".join(turn.content for turn in content.turns)
    return list(tokenizer(content, add_special_tokens=begins, verbose=False)["input_ids"])


def _first_line(error: Exception) -> str:
    return f"{(str(error) or type(error).__name__).splitlines()[0]:.300}"
