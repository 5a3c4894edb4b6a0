"""An exported folder: where its files stand, and its manifest read, checked and hashed."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from search.agreement import unpack
from search.data import json_hash
from search.errors import UsageError

MANIFEST, PROMPTS, RECORDS = "manifest.json", "evidence/prompts.jsonl", "evidence/records.jsonl"
TASKS, REFERENCE = "evidence/tasks.jsonl", "evidence/reference.jsonl"  # where gates ask tasks, and for agreement
JSON_KEYS = ("ENGINE_ARGS", "HF_OVERRIDES", "SPECULATIVE_CONFIG")  # of `env`, whose values are JSON objects as text
NUMBER_KEYS = ("WARMUP_NUM_PROMPTS", "WARMUP_MAX_TOKENS", "WARMUP_SEED", "SLIDING_WINDOW", "CENTROID_TOP_K")


class _Tps(msgspec.Struct):
    claimed: float | None


class _Gate(msgspec.Struct):
    figure: float
    limit: float
    max_tokens: int | None = None
    stop: list[str] = []


class _Evidence(msgspec.Struct):
    tps: _Tps
    ppl: float
    ceiling: float
    output_tokens: int
    effective: dict[str, int]
    hashes: dict[str, str | None]
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1
    machine_s: float | None = None
    pace_elasticity: float | None = None
    gates: dict[str, _Gate] = {}


class _Manifest(msgspec.Struct):
    """What serving and verifying read of a manifest; there may be more."""

    model_id: str
    served_model_name: str
    port: int
    env: dict[str, str]
    confirmed: bool | None
    evidence: _Evidence


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an exported folder.

    Raises:
        UsageError: there is none, it is not what an export writes (with the key), or a file of the folder leads out
            of it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        checked = msgspec.json.decode(content, type=_Manifest)
        manifest: dict[str, Any] = json.loads(content)
        for key in JSON_KEYS:
            if key in checked.env and not isinstance(json.loads(checked.env[key]), dict):
                raise ValueError(f"env.{key} is no JSON object")
        for key in NUMBER_KEYS:
            int(checked.env.get(key, "0"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors that name the key
        raise UsageError(f"{path} is no manifest that search.export wrote: {error}.") from error
    evidence = checked.evidence
    if checked.confirmed and (evidence.tps.claimed is None or not evidence.machine_s or not evidence.pace_elasticity):
        raise UsageError(f"{path} says that it is confirmed, but not what it claims.")
    if "exact" in evidence.gates and not evidence.gates["exact"].max_tokens:
        raise UsageError(f"{path} claims answers to tasks, but not how long they may be (evidence.gates.exact).")
    for name in (MANIFEST, PROMPTS, RECORDS, TASKS, REFERENCE, "serve.py"):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{folder / name} leads out of the folder: this is no folder that search.export wrote.")
    return manifest


def reference_lines(distributions: Mapping[str, bytes]) -> bytes:
    """The file REFERENCE: by record the reference setting's distributions, as `search.agreement` packs them, base64."""
    rows = [
        {"id": record, "distributions": base64.b64encode(distributions[record]).decode()}
        for record in sorted(distributions)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_reference(folder: Path) -> dict[str, bytes]:
    """What `reference_lines` has written into a folder, by record.

    Raises:
        UsageError: it cannot be read.
    """
    path = folder / REFERENCE
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found = {str(row["id"]): base64.b64decode(row["distributions"], validate=True) for row in rows}
        for packed in found.values():
            unpack(packed)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is no file of distributions that search.export wrote: {error}.") from error
    return found


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Hash of everything a manifest says but this hash itself: 16 hex digits. A claim that was edited shows in it."""
    bare = json.loads(json.dumps(finite(manifest)))
    bare["evidence"]["hashes"].pop("manifest", None)
    return json_hash(bare)


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity as None, which is what they mean in a manifest."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
