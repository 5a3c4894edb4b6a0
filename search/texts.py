"""Prompts and records from elsewhere made into a study's: tokenised, sampled, split."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from search.data import GATE, HELD_OUT, TUNE, content_hash
from search.engine.process import Worker, WorkerError
from search.engine.protocol import EngineError, Load, Loaded, Sample, Sampled
from search.errors import SearchError, UsageError
from search.files import write_whole
from search.modelfiles import read_hub_config, text_config
from search.tokens import tokenised_prompts, tokenised_records

# The Fast Gemma Challenge's recipe for its records.
TEMPERATURE, TOP_K, TOP_P = 1.0, 64, 0.95
BUILD_S, SAMPLE_S, STALL_S = 1800.0, 600.0, 300.0


@dataclass(frozen=True)
class Recipe:
    """How records are sampled.

    model: the reference, which should be stronger than `served`, the model that will be gated, and share its tokens.
    prompts: the file whose texts are continued by at most `tokens` tokens.
    seed: of the sampling (with the text's number added) and of the split.
    args: of the reference's engine.
    """

    model: str
    served: str
    prompts: Path
    tokens: int
    seed: int
    args: Mapping[str, Any]


def sample_records(recipe: Recipe, out: Path, engine: str, logs: Path, say: Callable[[str], None]) -> str:
    """Sample a record for each text, split them into halves, write them with their recipe; what was written, in words.

    Raises:
        UsageError: a file cannot be read, or the two models do not share their tokens.
        SearchError: the reference model cannot be run.
    """
    _check_same_tokens(recipe)
    contexts = {p.id: list(p.token_ids) for p in tokenised_prompts(recipe.prompts, recipe.served)}
    say(f"Starting {recipe.model} …")
    rows = []
    try:
        with Worker(engine, logs / "records.log") as worker:
            load = Load(model=recipe.model, drafter=None, args=dict(recipe.args), limits={}, seed=recipe.seed)
            loaded = worker.ask(load, Loaded, STALL_S, _in(BUILD_S))
            for number, (name, context) in enumerate(contexts.items()):
                request = Sample(
                    prompt=context,
                    max_tokens=recipe.tokens,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    top_p=TOP_P,
                    seed=recipe.seed + number,
                )
                target = worker.ask(request, Sampled, STALL_S, _in(SAMPLE_S)).token_ids
                if target:  # a text that the model ends at once says nothing
                    rows.append({"id": name, "context_token_ids": context, "target_token_ids": target})
                say(f"[{number + 1}/{len(contexts)}] {name}: {len(target)} tokens")
    except WorkerError as error:
        raise SearchError(f"The reference model could not be run: {error} (log: {error.log})") from error
    if len(rows) < 2:
        raise SearchError(
            f"{recipe.model} continued fewer than two of the {len(contexts)} texts: nothing to gate with."
        )
    split_halves(rows, GATE, recipe.seed)
    _write_lines(out, rows)
    about = {
        **asdict(recipe),
        "prompts": content_hash(recipe.prompts),
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": TOP_P,
        "model_hash": loaded.model_hash,
        "environment": loaded.environment,
    }
    write_whole(Path(f"{out}.recipe.json"), json.dumps(about, indent=2) + "\n")
    return _counts(rows)


def import_texts(
    prompts: Path | None, records: Path | None, model: str | None, out: Path, seed: int
) -> Iterable[tuple[Path, str]]:
    """Write `out`/prompts.jsonl and `out`/records.jsonl, each split into halves unless it is split already.

    What is text becomes tokens of `model`.

    Yields:
        Each file that was written, and what is in it, in words.

    Raises:
        UsageError: a file cannot be read, or holds text and there is no model.
    """
    if prompts is not None:
        decoded = tokenised_prompts(prompts, model)
        rows: list[dict[str, Any]] = [
            {"id": p.id, "prompt_token_ids": list(p.token_ids), "split": p.split} for p in decoded
        ]
        if all(p.split == TUNE for p in decoded):
            split_halves(rows, TUNE, seed)
        _write_lines(out / "prompts.jsonl", rows)
        yield out / "prompts.jsonl", _counts(rows)
    if records is not None:
        scored = tokenised_records(records, model)
        rows = [
            {"id": r.id, "context_token_ids": list(r.context), "target_token_ids": list(r.target), "split": r.split}
            for r in scored
        ]
        if all(r.split == GATE for r in scored):
            split_halves(rows, GATE, seed)
        _write_lines(out / "records.jsonl", rows)
        yield out / "records.jsonl", _counts(rows)


def split_halves(rows: Sequence[dict[str, Any]], first: str, seed: int) -> None:
    """Give every row its `split`, by a seeded draw: one half `first`, with the odd one, the other held out."""
    chosen = set(random.Random(seed).sample(range(len(rows)), len(rows) // 2))
    for number, row in enumerate(rows):
        row["split"] = HELD_OUT if number in chosen else first


def _check_same_tokens(recipe: Recipe) -> None:
    """Records are token ids: they mean nothing to a model that numbers its tokens otherwise."""
    try:
        sizes = [text_config(read_hub_config(name)).get("vocab_size") for name in (recipe.model, recipe.served)]
        folders = [Path(name) for name in (recipe.model, recipe.served) if Path(name).is_dir()]
    except EngineError as error:
        raise UsageError(str(error)) from error
    files = {content_hash(f / "tokenizer.json") for f in folders if (f / "tokenizer.json").is_file()}
    if sizes[0] != sizes[1] or len(files) > 1:
        raise UsageError(
            f"{recipe.model} and {recipe.served} do not share their tokens: records of one mean nothing to the other."
        )


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{count} {split}" for split, count in sorted(Counter(row["split"] for row in rows).items()))


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _in(seconds: float) -> float:
    return time.monotonic() + seconds
