"""A new study's file, from what its model and drafter say of themselves and the machine it is made on."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from search.checkup import LOGIT_COPIES, cache_bytes
from search.data import read_prompts, read_records
from search.engine import gpu
from search.engine.protocol import EngineError
from search.errors import UsageError
from search.inputs import check_inputs
from search.knobs import DRAFTS, METHOD, MTP, NO_DRAFTS, TOP_K, WINDOW
from search.modelfiles import read_hub_config, text_config
from search.spec import read_study
from search.texts import import_texts

LOGITS_SHARE = 1 / 16  # of the device's memory, for the logits of one prefill chunk in the gate
CONTEXT_STEP = 256  # tokens that the context is rounded up to
NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
LEAST_CACHE = 256 << 20
HEADER = "# Written by search.init from the model's config; every key is explained in the README.\n"


@dataclass(frozen=True)
class Wanted:
    """What a new study is about: models (folders or hub ids), texts, and `ceiling` as the study file has it.

    With `ngram` drafts are looked up in what was written before, beside a drafter's or without one.
    """

    model: str
    drafter: str | None
    prompts: Path
    records: Path
    ceiling: Mapping[str, float]
    seed: int
    ngram: bool = False


def write_study(folder: Path, wanted: Wanted) -> Iterator[str]:
    """Write `folder` whole, with study.yaml, prompts and records; it is checked before it is there.

    Yields:
        What was written, a line each.

    Raises:
        UsageError: the folder is in use, a config or file cannot be read, or they do not fit together.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not empty: choose another folder.")
    model = text_config(_config(wanted.model))
    drafter = _config(wanted.drafter) if wanted.drafter else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / folder.name
        new.mkdir()
        counts = dict(import_texts(wanted.prompts, wanted.records, wanted.model, new, wanted.seed))
        study = _study(folder.name, wanted, model, drafter, _longest(new))
        file = new / "study.yaml"
        file.write_text(HEADER + yaml.safe_dump(study, sort_keys=False, width=120))
        check_inputs(read_study(file))
        if folder.exists():
            folder.rmdir()
        new.replace(folder)
    for name, values in study["knobs"].items():
        yield f"{name}: {', '.join(f'{k} {v}' for k, v in values.items())}"
    yield from (f"{path.name}: {count}" for path, count in counts.items())


def knob_ranges(
    model: Mapping[str, Any], drafter: Mapping[str, Any] | None, *, ngram: bool = False
) -> dict[str, dict[str, Any]]:
    """Ranges that suit a model: from an eighth of its window to all of it, centroids on a log scale, K up to 10.

    With a drafter and n-grams the method of speculation is a knob, too.

    Args:
        model: the language model's config.
        drafter: the drafter's config, or None.
        ngram: whether drafts may be looked up.

    Raises:
        UsageError: there is nothing to search.
    """
    knobs: dict[str, dict[str, Any]] = {}
    window = int(model.get("sliding_window") or 0)
    if window >= 32:
        step = window // 32
        low = window // 8 // step * step
        knobs[WINDOW] = {"low": low, "high": low + (window - low) // step * step, "step": step}
    if drafter is not None and ngram:
        knobs[METHOD] = {"choices": [MTP, "ngram", NO_DRAFTS]}
    if drafter is not None and drafter.get("use_ordered_embeddings"):
        centroids = int(drafter["num_centroids"])
        knobs[TOP_K] = {"low": max(1, centroids // 256), "high": min(128, centroids), "log": True}
    if drafter is not None or ngram:
        knobs[DRAFTS] = {"low": 0, "high": 10, "default": 4}
    if not knobs:
        raise UsageError(
            "There is nothing to search: the model has no sliding window, and no drafter is given. Try --ngram."
        )
    return knobs


def prefill_chunk(vocabulary: int, context: int, memory: int) -> int:
    """The largest power of two of tokens, within the context, whose logits take a small share of `memory` bytes."""
    most = min(context, LOGITS_SHARE * memory / (LOGIT_COPIES * 4 * vocabulary))
    return 1 << max(4, math.floor(math.log2(max(1, most))))


def _study(
    name: str, wanted: Wanted, model: Mapping[str, Any], drafter: Mapping[str, Any] | None, longest: int
) -> dict[str, Any]:
    device = gpu.first_gpu()
    output_tokens = 64 if device is None else 512
    context = math.ceil((longest + output_tokens) / CONTEXT_STEP) * CONTEXT_STEP
    context = min(context, int(model.get("max_position_embeddings") or context))
    memory = int(psutil.virtual_memory().total if device is None else device["total"])
    args: dict[str, Any] = {
        "max_model_len": context,
        "max_num_seqs": 1,
        "max_num_batched_tokens": prefill_chunk(int(model["vocab_size"]), context, memory),
    }
    workload: dict[str, Any] = {"prompts": "prompts.jsonl", "output_tokens": output_tokens}
    if device is None:  # processors are shared and drift
        args["kv_cache_memory_bytes"] = max(LEAST_CACHE, 4 * cache_bytes(model, context))
        workload |= {"precision": 0.02, "prompts_per_trial": 24, "control": {"prompts": 3}}
    else:
        args["gpu_memory_utilization"] = 0.90
        workload["prompts_per_trial"] = 32
    drafting: dict[str, Any] = {"drafter": _place(wanted.drafter)} if wanted.drafter else {}
    if wanted.ngram:
        drafting["speculation"] = {"ngram": dict(NGRAM)}
    engine = {"model": _place(wanted.model), **drafting, "args": args}
    return {
        "name": name,
        "engine": engine,
        "knobs": knob_ranges(model, drafter, ngram=wanted.ngram),
        "workload": workload,
        "gate": {"records": "records.jsonl", "ceiling": dict(wanted.ceiling)},
    }


def _place(name: str) -> str:
    """A folder by its whole path, as the study lies elsewhere; a hub id as it stands."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _longest(folder: Path) -> int:
    """Tokens of the longest prompt or record."""
    prompts = [len(p.token_ids) for p in read_prompts(folder / "prompts.jsonl")]
    records = [len(r.context) + len(r.target) for r in read_records(folder / "records.jsonl")]
    return max(prompts + records)


def _config(name: str) -> dict[str, Any]:
    try:
        return read_hub_config(name)
    except EngineError as error:
        raise UsageError(str(error)) from error
