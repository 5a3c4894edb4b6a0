"""vLLM general plugin: vLLM calls `register` in every one of its processes, before any model is built.

On a CPU it lets a Gemma 4 MTP drafter with ordered embeddings run. On a GPU it installs the patches whose environment
keys are "1" (see `PATCHES`). A patch that does not fit what it replaces ends vLLM's start with a sentence. What acts,
and how often it was taken, `report` says; `missing` names keys that are set where nothing honours them.

Nothing here imports torch or vllm before `register` is called: vLLM only logs a plugin that cannot be imported.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from kernels.patches import cpu_centroid_head
from kernels.patches.base import Patch, PatchRefusedError, active

PATCHES: Mapping[str, str] = {
    "FA_SLIDING": "kernels.patches.window_attention",
    "FUSED_CENTROID_HEAD": "kernels.patches.centroid_head",
    "DRAFT_GRAPH": "kernels.patches.draft_graph",
}
"""The module of each patch, by the environment key that switches it: "1" is on; "0", "" and an unset key are off."""
LEAST_DRAFTS: Mapping[str, int] = {"FA_SLIDING": 0, "FUSED_CENTROID_HEAD": 1, "DRAFT_GRAPH": 2}
"""Tokens drafted a step from which on each of them has something to do."""
NOT_LOADED = (
    "{keys} cannot act: vLLM did not load the plugin vllm_pareto here. Install vllm-pareto in this environment, and "
    "name it in VLLM_PLUGINS if that is set."
)


def register() -> None:
    """Install what this platform needs and the environment asks for. Safe to call more than once in a process.

    Raises:
        PatchRefusedError: a key has another value, or its patch does not fit this vLLM, model or machine.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        cpu_centroid_head.install()
    for key in switched_on(os.environ):
        install(key)


def install(key: str) -> Patch:
    """Install the patch of one key, whatever the environment says; the one that acts already, if there is one.

    Raises:
        PatchRefusedError: it does not fit this vLLM or machine.
    """
    if key in active:
        return active[key]
    patch: Patch = importlib.import_module(PATCHES[key]).install()
    return patch


def remove(key: str) -> None:
    """Take the patch of one key out again, if it acts. CUDA graphs that were captured with it keep it."""
    if key in active:
        active[key].remove()


def switched_on(environ: Mapping[str, str]) -> list[str]:
    """The keys that are on.

    Raises:
        PatchRefusedError: a key has a value that is neither on nor off.
    """
    for key in PATCHES:
        if environ.get(key, "") not in ("", "0", "1"):
            raise PatchRefusedError(f"{key} is {environ[key]!r}: it must be 1 (on) or 0 (off).")
    return [key for key in PATCHES if environ.get(key) == "1"]


def report() -> dict[str, dict[str, int]]:
    """What acts in this process: calls that were taken and that were left to vLLM's own code, by patch."""
    return {name: {"taken": patch.taken, "left": patch.left} for name, patch in sorted(active.items())}


def acting() -> dict[str, int]:
    """The keys whose patches act in this process, each with 1: what a knob's effective value is."""
    return {key: 1 for key in PATCHES if key in active}


def missing(environ: Mapping[str, str]) -> list[str]:
    """Keys that are on in the environment and have no patch that acts in this process."""
    return [key for key in switched_on(environ) if key not in active]
