"""When tokens arrive: read from the statistics that vLLM makes of every step anyway, so that nothing gets slower."""

from __future__ import annotations

import time
from typing import Any


class Arrivals:
    """Listens to an engine's steps.

    Args:
        llm_engine: vLLM's `LLMEngine`, built with statistics on.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._steps: list[tuple[float, Any]] | None = None  # while nobody asks for them
        manager = llm_engine.logger_manager
        record = manager.record

        def noting(*args: Any, **kwargs: Any) -> Any:
            if self._steps is not None:
                self._steps.append((time.perf_counter(), kwargs.get("iteration_stats")))
            return record(*args, **kwargs)

        manager.record = noting

    def listen(self) -> None:
        """Note every step from now on, until `since` is asked."""
        self._steps = []

    def since(self, started: float, prompts: int, tokens: int) -> tuple[list[float], list[float]]:
        """Seconds from `started` to each prompt's first token, and between a prompt's later steps with tokens.

        Both are empty where the engine did not tell of every one of `prompts`, or told of more than `tokens` allow.
        """
        told = [(at, stats) for at, stats in self._steps or () if stats is not None]
        self._steps = None
        first = [at - started for at, stats in told for _ in stats.time_to_first_tokens_iter]
        waits = [float(wait) for _, stats in told for wait in stats.inter_token_latencies_iter]
        return (first, waits) if len(first) == prompts and len(waits) <= tokens - prompts else ([], [])
