"""The draft passes after the first, captured together: one CUDA graph launch for the K - 1 passes of a step.

vLLM's V2 runner captures one pass and launches it K - 1 times. Before each launch it writes the pass's number to the
device, and before the first it builds attention metadata and slots that a replayed graph never looks at. Here the
passes follow each other inside one graph, each with its number as a constant, and the host launches once. There is a
graph for every K up to the one the engine was built with, so K can still change from step to step.

A drafter whose positions advance (EAGLE) has slots to compute between the passes; this is for one whose positions stay
(Gemma 4's MTP drafter, which reads the target's keys and values and writes none).
"""

from __future__ import annotations

from typing import Any


class DraftLoop:
    """The captured loops of one speculator of vLLM's V2 runner (`AutoRegressiveSpeculator`).

    Args:
        speculator: its one-pass graphs are captured already.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        counter = speculator.current_draft_step
        self._steps = [counter.new_tensor(step) for step in range(speculator.num_speculative_steps)]
        self._graphs: dict[int, Any] = {}

    def capture(self) -> None:
        """Capture the loop of every K from 2 up to the speculator's own, for each batch that has a one-pass graph."""
        speculator = self._speculator
        one_pass = speculator.decode_cudagraph_manager
        for drafts in range(speculator.num_speculative_steps, 1, -1):
            manager = type(one_pass)(
                one_pass.vllm_config, one_pass.device, one_pass.cudagraph_mode, one_pass.decode_query_len
            )
            manager.capture(
                lambda *batch, drafts=drafts: self._passes(drafts, *batch),
                speculator.model_state,
                speculator.input_buffers,
                speculator.block_tables,
                speculator.attn_groups,
                speculator.kv_cache_config,
                progress_bar_desc=f"Capturing the loop of {drafts} drafts",
            )
            self._graphs[drafts] = manager

    def replay(self, batch: Any) -> bool:
        """Draft passes 1 … K - 1 for a batch descriptor; False where no graph holds that batch or that K."""
        manager = self._graphs.get(self._speculator.num_speculative_steps)
        if manager is None or batch not in manager.graphs:
            return False
        manager.run_fullgraph(batch)
        return True

    def _passes(self, drafts: int, *batch: Any) -> None:
        """Run the passes; `batch` is what vLLM's capture gives a forward function."""
        speculator = self._speculator
        counter = speculator.current_draft_step
        try:
            for step in range(1, drafts):
                speculator.current_draft_step = self._steps[step]
                speculator._generate_draft(*batch)
        finally:
            speculator.current_draft_step = counter
