"""FA_SLIDING: steps of few query rows attend through `kernels.window_attention`, which reads only the window.

vLLM's Triton backend gives a step with several query rows (a verification of K drafts has K+1) to its one-pass kernel,
which leaves most of the GPU idle when one sequence decodes. Whatever the kernel here was not written for (prompts,
quantised caches, biases, large batches) goes to vLLM's own, call by call.
"""

from __future__ import annotations

from typing import Any

from kernels.patches.base import Patch, activate, require_gpu_release, require_parameters

KEY = "FA_SLIDING"
MOST_ROWS = 16
MOST_SEQUENCES = 16
"""With more sequences in a step the GPU is busy without splitting the keys, and the kernel was not measured."""

PARAMETERS = (
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap "
    "q_descale k_descale v_descale seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max "
    "softmax_segm_expsum alibi_slopes output_scale qq_bias sinks mm_prefix_range rswa_prefix_lens rswa_window "
    "use_alibi_sqrt kv_quant_mode k_scale_cache v_scale_cache chunk_lookback use_td mm_prefix_clamp_sliding_window"
)
"""Of `unified_attention`; a new one could be a feature that the kernel here would ignore."""
UNSUPPORTED = (
    "alibi_slopes",
    "output_scale",
    "qq_bias",
    "sinks",
    "mm_prefix_range",
    "rswa_prefix_lens",
    "k_scale_cache",
    "v_scale_cache",
)
"""Arguments that must be None."""


def install() -> Patch:
    """Install the patch.

    Raises:
        PatchRefusedError: no CUDA GPU, an unknown vLLM, or an attention function that looks otherwise.
    """
    require_gpu_release(KEY)
    from vllm.v1.attention.backends import triton_attn

    stock = require_parameters(KEY, triton_attn, "unified_attention", PARAMETERS.split())
    from kernels.window_attention import HEAD_SIZES, window_attention

    patch = Patch(KEY)

    def unified_attention(**call: Any) -> None:
        if not fits(call, HEAD_SIZES):
            patch.left += 1
            stock(**call)
            return
        patch.taken += 1
        left_of_row = call["window_size"][0]
        window_attention(
            call["q"],
            call["k"],
            call["v"],
            call["out"],
            call["cu_seqlens_q"],
            call["seqused_k"],
            call["block_table"],
            scale=call["softmax_scale"],
            max_query_rows=call["max_seqlen_q"],
            window=left_of_row + 1 if left_of_row >= 0 else 0,
            softcap=call["softcap"],
            # The workspace is allocated call by call: in a captured graph it costs nothing when replayed, and the
            # allocator keeps streams apart.
            max_seq_len=call["max_seqlen_k"],
        )

    patch.replace(triton_attn, "unified_attention", unified_attention)
    return activate(patch, f"steps of up to {MOST_ROWS} query rows a sequence read only their window")


def fits(call: dict[str, Any], head_sizes: tuple[int, ...]) -> bool:
    """Whether the kernel here computes what this call of `unified_attention` asks for."""
    q = call["q"]
    return (
        call["max_seqlen_q"] <= MOST_ROWS
        and call["block_table"].shape[0] <= MOST_SEQUENCES
        and call["causal"] is True
        and call["window_size"][1] in (-1, 0)
        and q.shape[2] in head_sizes
        and q.dtype == call["k"].dtype == call["v"].dtype == call["out"].dtype
        and not call.get("kv_quant_mode", 0)  # KVQuantMode.NONE is 0
        and call.get("chunk_lookback", -1) < 0
        and all(call.get(name) is None for name in UNSUPPORTED)
    )
