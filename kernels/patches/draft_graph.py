"""DRAFT_GRAPH: the draft passes of a step are launched as one CUDA graph (`kernels.draft_loop`), on vLLM's V2 runner.

The V1 runner replays its drafter in pieces with attention launched between them, from a loop inside a long method; it
has no place where one graph could stand, so a drafter built there refuses the key.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kernels.patches.base import (
    Patch,
    activate,
    refusal,
    require_attributes,
    require_gpu_release,
    require_parameters,
)

KEY = "DRAFT_GRAPH"
LOOP = "_pareto_draft_loop"
BATCH = ("num_reqs", "num_tokens_padded", "attn_metadata", "slot_mappings", "num_tokens_across_dp")
SPECULATOR_ATTRIBUTES = (
    "current_draft_step",
    "num_speculative_steps",
    "model_state",
    "input_buffers",
    "block_tables",
    "attn_groups",
    "kv_cache_config",
)


def install() -> Patch:
    """Install the patch; the drafter and its graphs are checked when they are made.

    Raises:
        PatchRefusedError: no CUDA GPU, an unknown vLLM, or drafting code that looks otherwise.
    """
    require_gpu_release(KEY)
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils import SpeculatorCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator

    stock_decode = require_parameters(
        KEY,
        AutoRegressiveSpeculator,
        "_multi_step_decode",
        ("self", "num_reqs", "skip_attn", "batch_desc", "num_tokens_across_dp"),
    )
    require_parameters(KEY, AutoRegressiveSpeculator, "_generate_draft", ("self", *BATCH, "cudagraph_runtime_mode"))
    stock_capture = require_parameters(KEY, AutoRegressiveSpeculator, "capture", ("self",))
    stock_init = require_parameters(KEY, AutoRegressiveSpeculator, "init_cudagraph_manager", ("self", "cudagraph_mode"))
    require_parameters(
        KEY,
        SpeculatorCudaGraphManager,
        "__init__",
        ("self", "vllm_config", "device", "cudagraph_mode", "decode_query_len", "lora_capture_cases"),
    )
    require_parameters(
        KEY,
        SpeculatorCudaGraphManager,
        "capture",
        (
            *("self", "forward_fn", "model_state", "input_buffers", "block_tables", "attn_groups"),
            *("kv_cache_config", "progress_bar_desc"),
        ),
    )
    require_parameters(KEY, SpeculatorCudaGraphManager, "run_fullgraph", ("self", "desc"))
    from kernels.draft_loop import DraftLoop

    patch = Patch(KEY)

    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> None:
        stock_init(self, cudagraph_mode)
        require_loop(self)

    def capture(self: Any) -> None:
        stock_capture(self)
        loop = DraftLoop(self)
        loop.capture()
        setattr(self, LOOP, loop)

    def multi_step_decode(
        self: Any, num_reqs: int, skip_attn: bool, batch_desc: Any, num_tokens_across_dp: Any
    ) -> None:
        loop = getattr(self, LOOP, None)  # before the capture there are dummy runs without one
        if loop is not None and loop.replay(batch_desc):
            patch.taken += 1
        else:
            patch.left += 1
            stock_decode(self, num_reqs, skip_attn, batch_desc, num_tokens_across_dp)

    def refuse_v1(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise refusal(KEY, "the V1 model runner launches each draft pass in pieces, which no single graph can hold")

    patch.replace(AutoRegressiveSpeculator, "init_cudagraph_manager", init_cudagraph_manager)
    patch.replace(AutoRegressiveSpeculator, "capture", capture)
    patch.replace(AutoRegressiveSpeculator, "_multi_step_decode", multi_step_decode)
    patch.replace(SpecDecodeBaseProposer, "__init__", refuse_v1)
    return activate(patch, "the draft passes of a step are one CUDA graph")


def require_loop(speculator: Any) -> None:
    """Require a drafter whose loop can be captured.

    Raises:
        PatchRefusedError: its positions advance, experts are balanced between passes, or it has no full graphs.
    """
    require_attributes(KEY, speculator, SPECULATOR_ATTRIBUTES)
    if speculator.advance_draft_positions:
        raise refusal(KEY, f"positions of this drafter ({type(speculator).__name__}) advance between its passes")
    if speculator.eplb_state is not None:
        raise refusal(KEY, "experts are balanced between the passes (EPLB)")
    if speculator.num_speculative_steps > 1 and not speculator.decode_cudagraph_manager.needs_capture():
        mode = speculator.vllm_config.compilation_config.cudagraph_mode
        raise refusal(KEY, f"draft passes run without full CUDA graphs here (cudagraph_mode {mode})")
