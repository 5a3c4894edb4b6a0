"""The result folder of a `vllm bench sweep serve`, as points measured elsewhere.

Such a folder holds `SERVE-…-BENCH-…/run=N.json` for every run: what `vllm bench serve` measured, with the parameters of
the combination beside it, and `summary.json` and `summary.csv`, which repeat them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search.errors import UsageError

TPS = "output_throughput"  # generated tokens ÷ wall seconds, of all streams together


def read_sweep(folder: Path) -> list[dict[str, Any]]:
    """Every complete run of one stream: its parameters by their last name, and `tps`.

    A study times one stream: a run counts if its requests came one at a time (`--max-concurrency 1`), or its server
    took no more (`max_num_seqs` 1 among the parameters). What all combinations take from the sweep's own command is not
    in the folder.

    Raises:
        UsageError: a result cannot be read, or none is of one stream.
    """
    files = sorted(folder.rglob("run=*.json"))
    if not files:
        raise UsageError(f"--prior {folder} holds no run=N.json: it is no result folder of vllm bench sweep serve.")
    runs = [_run(path) for path in files]
    found = [run for run in runs if "1" in (str(run.get("max_concurrency")), str(run.get("max_num_seqs")))]
    if not found:
        raise UsageError(
            f"--prior {folder} holds {len(runs)} runs, none of one stream, which is what a study times: sweep with "
            "--max-concurrency 1."
        )
    return [{**run, "tps": run[TPS]} for run in found if not run.get("failed")]


def _run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_bytes())
        if not isinstance(run, dict) or TPS not in run:
            raise ValueError(f"it has no {TPS}")
        return _by_last_name(run)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--prior {path} is no result of vllm bench serve: {error}.") from error


def _by_last_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parameters by their last name: `hf_overrides.text_config.sliding_window`, however it is written.

    A sweep names them with dots, in dictionaries or as JSON text, with dashes or underscores.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = _object(value)
        if nested is not None:
            found |= _by_last_name(nested)
        else:
            found[key.rpartition(".")[2].lstrip("-").replace("-", "_")] = value
    return found


def _object(value: Any) -> dict[str, Any] | None:
    """A dictionary, also one that is written as JSON text; None for everything else."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None
