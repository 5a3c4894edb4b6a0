"""Live knobs on a GPU: vLLM's V2 model runner replays CUDA graphs, which hold a knob's old value until captured anew.

Written against vLLM 0.26 (`vllm.v1.worker.gpu.model_runner`, one stream). A new engine takes a minute or more, a
capture about a second.
"""

from __future__ import annotations

from typing import Any


class GraphRunner:
    """The V2 model runner of an in-process engine, built with the largest K that will be asked for.

    Args:
        runner: vLLM's `GPUModelRunner`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._speculator = runner.speculator
        self._sizes = list(runner.compilation_config.cudagraph_capture_sizes or [])
        self._tokens: Any = getattr(runner.req_states, "draft_tokens", None)
        self._drafted: Any = getattr(self._speculator, "draft_tokens", None)

    def set_drafts(self, drafts: int, scheduler: Any) -> None:
        """Draft and verify `drafts` tokens a step from the next capture on; 0 runs no drafter pass at all.

        The runner's buffers keep their size; what is seen of them is as wide as the drafts.
        """
        runner, speculator = self._runner, self._speculator
        if speculator is None:
            return
        runner.num_speculative_steps = drafts
        runner.decode_query_len = drafts + runner.model_state.num_new_sampled_tokens_per_step
        runner.speculator = speculator if drafts else None
        runner.req_states.draft_tokens = self._tokens[:, :drafts]
        if drafts:
            speculator.num_speculative_steps = drafts
            speculator.draft_tokens = self._drafted[:, :drafts]
        if hasattr(scheduler, "_spec_token_placeholders"):  # of the asynchronous scheduler
            scheduler._spec_token_placeholders = [-1] * drafts

    def capture(self) -> None:
        """Throw the graphs away and capture them again, as the knobs stand now."""
        runner = self._runner
        mode, cases = runner.cudagraph_manager.cudagraph_mode, runner.lora_capture_cases
        if not mode:  # the engine runs without graphs
            return
        # A decode step has decode_query_len rows, a draft pass one: both need a size that rounds up to them.
        runner.compilation_config.cudagraph_capture_sizes = sorted({1, runner.decode_query_len, *self._sizes})
        # A new manager in the place of the old one, whose graphs give their memory back before new ones take it.
        runner.cudagraph_manager = type(runner.cudagraph_manager)(
            runner.vllm_config, runner.device, mode, decode_query_len=runner.decode_query_len, lora_capture_cases=cases
        )
        if runner.speculator is not None:
            runner.speculator.init_cudagraph_manager(mode)
        runner.capture_model()
