"""FUSED_CENTROID_HEAD: the drafter's greedy token comes from `kernels.centroid_head`, without a full row of logits.

vLLM's V2 runner scatters the candidates' logits into a row as long as the vocabulary and searches that; its V1 runner
takes the best of the gathered candidates. Ties are broken as each of the two breaks them.
"""

from __future__ import annotations

from typing import Any

from kernels.patches.base import (
    Patch,
    activate,
    refusal,
    require_attributes,
    require_gpu_release,
    require_parameters,
)

KEY = "FUSED_CENTROID_HEAD"
MOST_ROWS = 16
"""With more hidden states in a call the GPU is busy anyway, and the kernel was not measured."""
HEAD_ATTRIBUTES = ("centroids", "token_ordering", "centroid_intermediate_top_k", "num_centroids")


def install() -> Patch:
    """Install the patch; whether the drafter has such a head is checked when it is loaded.

    Raises:
        PatchRefusedError: no CUDA GPU, an unknown vLLM, or drafting code that looks otherwise.
    """
    require_gpu_release(KEY)
    from vllm.model_executor.models.gemma4_mtp import Gemma4MTP, Gemma4MTPMaskedEmbedder
    from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    require_parameters(KEY, Gemma4MTP, "_get_full_lm_head_weight", ("self",))
    stock_top = require_parameters(
        KEY, Gemma4MTPMaskedEmbedder, "get_top_tokens", ("self", "hidden_states", "lm_head_weight")
    )
    stock_greedy = require_parameters(KEY, DraftModelSpeculator, "_greedy_sample_draft", ("self", "hidden_states"))
    stock_load_v2 = require_parameters(KEY, DraftModelSpeculator, "load_model", ("self", "target_model"))
    stock_load_v1 = require_parameters(KEY, Gemma4Proposer, "load_model", ("self", "target_model"))
    from kernels.centroid_head import Ties, centroid_top_token, make_workspace, without_tokens

    patch = Patch(KEY)

    def top_tokens(head: Any, hidden: Any, lm_head: Any, ordering: Any, ties: Ties) -> Any:
        patch.taken += 1
        workspace = vars(head).get("_pareto_workspace")
        if workspace is None:  # vLLM runs the head once before it captures a graph of it
            workspace = head._pareto_workspace = make_workspace(MOST_ROWS, head.centroids.weight)
        return centroid_top_token(
            hidden,
            head.centroids.weight,
            ordering,
            lm_head,
            head.centroid_intermediate_top_k,
            ties=ties,
            workspace=workspace,
        )

    def get_top_tokens(self: Any, hidden_states: Any, lm_head_weight: Any) -> Any:
        if hidden_states.shape[0] > MOST_ROWS:
            patch.left += 1
            return stock_top(self, hidden_states, lm_head_weight)
        return top_tokens(self, hidden_states, lm_head_weight, self.token_ordering, "candidate")

    def greedy_sample_draft(self: Any, hidden_states: Any) -> Any:
        if self.use_local_argmax_reduction:  # by way of get_top_tokens
            return stock_greedy(self, hidden_states)
        if hidden_states.shape[0] > MOST_ROWS:
            patch.left += 1
            return stock_greedy(self, hidden_states)
        if "_pareto_ordering" not in vars(self):
            prepare(self)
        model = self.model
        lm_head = model._get_full_lm_head_weight()
        return top_tokens(model.masked_embedding, hidden_states, lm_head, self._pareto_ordering, "token")

    def prepare(speculator: Any) -> None:
        head = require_head(speculator.model)
        if speculator.speculative_config.draft_sample_method != "greedy":
            raise refusal(KEY, "drafts are sampled, for which all logits are needed (draft_sample_method)")
        ordering = head.token_ordering
        suppressed = getattr(speculator.model, "_suppress_token_ids", None)
        if suppressed:
            ordering = without_tokens(ordering, head.num_centroids, suppressed)
        speculator._pareto_ordering = ordering

    def load_v2(self: Any, target_model: Any) -> None:
        stock_load_v2(self, target_model)
        prepare(self)

    def load_v1(self: Any, target_model: Any) -> None:
        stock_load_v1(self, target_model)
        require_head(self.model)

    patch.replace(Gemma4MTPMaskedEmbedder, "get_top_tokens", get_top_tokens)
    patch.replace(DraftModelSpeculator, "_greedy_sample_draft", greedy_sample_draft)
    patch.replace(DraftModelSpeculator, "load_model", load_v2)
    patch.replace(Gemma4Proposer, "load_model", load_v1)
    return activate(patch, "the drafter's greedy token is found among the candidates alone")


def require_head(model: Any) -> Any:
    """The centroid head of a drafter.

    Raises:
        PatchRefusedError: it has none, or one that looks otherwise.
    """
    head = getattr(model, "masked_embedding", None)
    if head is None:
        raise refusal(KEY, f"the drafter ({type(model).__name__}) has no centroid head (use_ordered_embeddings)")
    require_attributes(KEY, head, HEAD_ATTRIBUTES)
    return head
