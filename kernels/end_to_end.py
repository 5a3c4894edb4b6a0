"""Tokens a second of vLLM with and without each patch: python -m kernels.bench --end-to-end [MODE] [--json FILE].

A random checkpoint of E4B's shape (`kernels.random_checkpoint`), one stream, K = 7. MODE `here` (the default) is one
engine in this process. The patches are switched on the running engine, whose CUDA graphs are captured again each time,
so that stock and patched differ in nothing else: same process, weights, pages and compiled code, seconds apart. Rounds
go over all variants in turn. MODE `separate` is vLLM as it is served: an engine process of its own, one for stock and
one whose environment has all the keys, which the worker has to confirm.

A figure is the median over rounds and prompts. Throughput counts generated tokens over wall time, the prompt's
processing included; a second figure leaves the prompt out (from the first token to the last). A variant that gives
other tokens than stock has no figure.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels import plugin
from kernels.patches.base import active
from kernels.random_checkpoint import LOAD_FORMAT, register_loader, write_configs

DRAFTS = 7
OUTPUT_TOKENS = 512
STOCK = "stock"
VARIANTS: dict[str, tuple[str, ...]] = {
    STOCK: (),
    "FA_SLIDING": ("FA_SLIDING",),
    "FUSED_CENTROID_HEAD": ("FUSED_CENTROID_HEAD",),
    "DRAFT_GRAPH": ("DRAFT_GRAPH",),
    "all but DRAFT_GRAPH": ("FA_SLIDING", "FUSED_CENTROID_HEAD"),
    "all": tuple(plugin.PATCHES),
}


@dataclass(frozen=True)
class Case:
    """A prompt of `context` tokens, read by sliding layers with this window.

    `asked` is the ratio to stock that all patches together should reach.
    """

    context: int
    window: int
    asked: float


CASES = (Case(2048, 512, 1.35), Case(2048, 188, 1.35), Case(272, 512, 1.15), Case(272, 188, 1.15))


@dataclass(frozen=True)
class Timed:
    """One prompt: what it took, and what was drafted meanwhile."""

    tokens: tuple[int, ...]
    wall_s: float
    decode_s: float
    """From the first token to the last."""
    drafts: int
    accepted: int


class Engine:
    """A vLLM that decodes one stream. In this process, its patches and window can be switched between prompts.

    Args:
        separate: whether the engine has a process of its own, which gets this one's patches and loaders.
        arguments: of `vllm.LLM`.
    """

    def __init__(self, separate: bool = False, **arguments: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if separate else "0"
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        self.llm = LLM(
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_num_seqs=1,
            attention_backend="TRITON_ATTN",
            worker_extension_cls="search.engine.readback.ReadBack",
            **arguments,
        )
        self.runner: Any = None
        if not separate:
            worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
            self.runner = getattr(worker, "worker", worker).model_runner
        gc.collect()
        gc.freeze()

    def mode(self) -> dict[str, str]:
        """How the engine runs: what a figure has to be quoted with."""
        config = self.llm.llm_engine.vllm_config
        return {
            "engine": "in this process" if self.runner else "a process of its own",
            "model_runner": "V2" if getattr(config, "use_v2_model_runner", True) else "V1",
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": str(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        }

    def patches(self) -> dict[str, dict[str, int]]:
        """What the worker's patches report."""
        (reported,) = self.llm.collective_rpc("active_patches")
        found: dict[str, dict[str, int]] = reported
        return found

    def switch(self, keys: Sequence[str], window: int | None = None) -> dict[str, dict[str, int]]:
        """Run with exactly these patches, and this window where one is given; returns what the patches report."""
        for patch in list(active.values()):
            patch.remove()
        for key in keys:
            plugin.install(key)
        if window is not None:
            for layer in self.runner.compilation_config.static_forward_context.values():
                if getattr(layer, "sliding_window", None) is not None:
                    layer.impl.sliding_window = (window - 1, 0)
        self._capture_again()
        return self.patches()

    def _capture_again(self) -> None:
        """Capture the full CUDA graphs anew; pieces between attention layers hold nothing that a patch changes."""
        import torch
        from vllm.config import set_current_vllm_config

        torch.cuda.synchronize()
        speculator = self.runner.speculator
        for manager in (
            self.runner.cudagraph_manager,
            speculator.prefill_cudagraph_manager,
            speculator.decode_cudagraph_manager,
        ):
            manager.graphs.clear()
        with set_current_vllm_config(self.llm.llm_engine.vllm_config):
            self.runner.capture_model()

    def decode(self, prompt: Sequence[int], tokens: int, **sampling: Any) -> tuple[Timed, Any]:
        """Decode greedily to exactly `tokens` tokens; also the output itself."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        before = self._counters()
        started = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        wall_s = time.perf_counter() - started
        drafts, accepted = (b - a for a, b in zip(before, self._counters(), strict=True))
        metrics = output.metrics
        decode_s = metrics.last_token_ts - metrics.first_token_ts
        return Timed(tuple(output.outputs[0].token_ids), wall_s, decode_s, drafts, accepted), output

    def _counters(self) -> tuple[int, int]:
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        return (
            int(found["vllm:spec_decode_num_drafts"].value),
            int(found["vllm:spec_decode_num_accepted_tokens"].value),
        )


@contextmanager
def random_engine(separate: bool = False) -> Iterator[Engine]:
    """An engine on the random checkpoint."""
    register_loader()
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_configs(Path(folder))
        yield Engine(
            separate=separate,
            model=str(target),
            load_format=LOAD_FORMAT,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=0.6,
            speculative_config={"method": "mtp", "model": str(drafter), "num_speculative_tokens": DRAFTS},
        )


def decode_texts(engine: Engine, case: Case, prompts: int) -> list[Timed]:
    """Time the case's prompts (random tokens, the same each time), after one that warms up."""
    draw = random.Random(case.context)
    texts = [[draw.randrange(3, 262144) for _ in range(case.context)] for _ in range(prompts)]
    engine.decode(texts[0], OUTPUT_TOKENS)
    return [engine.decode(text, OUTPUT_TOKENS)[0] for text in texts]


class WrongTokensError(RuntimeError):
    """A variant's tokens are not stock's."""


def require_same(case: Case, timed: dict[str, list[Timed]]) -> None:
    """Require stock's tokens of every variant.

    Raises:
        WrongTokensError: naming the first variant with other tokens.
    """
    for name, runs in timed.items():
        for mine, stock in zip(runs, timed[STOCK], strict=True):
            if mine.tokens != stock.tokens:
                raise WrongTokensError(f"{name} gave other tokens than stock at context {case.context}.")


def _row(case: Case, timed: dict[str, list[Timed]], reports: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {**asdict(case), "variants": {}}
    for name, runs in timed.items():
        accepted, drafts = sum(run.accepted for run in runs), sum(run.drafts for run in runs)
        row["variants"][name] = {
            "tps": statistics.median(len(run.tokens) / run.wall_s for run in runs),
            "decode_tps": statistics.median((len(run.tokens) - 1) / run.decode_s for run in runs),
            "step_ms": statistics.median(1e3 * run.decode_s / run.drafts for run in runs),
            "accepted_a_step": accepted / drafts,
            "tps_of_runs": [len(run.tokens) / run.wall_s for run in runs],
            "patches": reports[name],
        }
    stock = row["variants"][STOCK]
    for variant in row["variants"].values():
        variant["ratio"] = variant["tps"] / stock["tps"]
        variant["decode_ratio"] = variant["decode_tps"] / stock["decode_tps"]
    return row


def table(found: dict[str, Any]) -> list[str]:
    """The measured cases as a Markdown table."""
    lines = [
        "| context, window | variant | tokens/s | ÷ stock | asked | decoding alone, tokens/s | ÷ stock | ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        for name, variant in row["variants"].items():
            figures = (
                f"{variant['tps']:.1f}",
                f"{variant['ratio']:.3f}",
                f"{row['asked']:g}" if name == "all" else "",
                f"{variant['decode_tps']:.1f}",
                f"{variant['decode_ratio']:.3f}",
                f"{variant['step_ms']:.2f}",
            )
            lines.append(f"| {row['context']}, {row['window']} | {name} | {' | '.join(figures)} |")
    return lines


def run_here(rounds: int = 3, prompts: int = 2) -> dict[str, Any]:
    """Time every variant in every case on one engine in this process.

    Raises:
        WrongTokensError: a variant gave other tokens than stock.
    """
    with random_engine() as engine:
        rows = []
        for case in CASES:
            timed: dict[str, list[Timed]] = {name: [] for name in VARIANTS}
            reports = {}
            for _ in range(rounds):
                for name, keys in VARIANTS.items():
                    engine.switch(keys, case.window)
                    timed[name] += decode_texts(engine, case, prompts)
                    reports[name] = engine.patches()
            require_same(case, timed)
            rows.append(_row(case, timed, reports))
        return {"mode": engine.mode(), "cases": rows}


def run_separate(prompts: int = 6) -> dict[str, Any]:
    """Time stock and all patches, each in an engine process of its own, at the model's own window.

    Raises:
        WrongTokensError: the patched engine gave other tokens than stock.
        subprocess.CalledProcessError: an engine did not start, or a key did not act in it.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in (STOCK, "all"):
        environment = {**os.environ, **{key: "1" if key in VARIANTS[name] else "0" for key in plugin.PATCHES}}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "timed.json"
            subprocess.run(
                [sys.executable, "-m", "kernels.end_to_end", str(file), str(prompts)], env=environment, check=True
            )
            found[name] = json.loads(file.read_text())
    rows = []
    for number, case in enumerate(_separate_cases()):
        timed = {
            name: [Timed(**{**run, "tokens": tuple(run["tokens"])}) for run in each["timed"][number]]
            for name, each in found.items()
        }
        require_same(case, timed)
        rows.append(_row(case, timed, {name: each["patches"] for name, each in found.items()}))
    return {"mode": found[STOCK]["mode"], "cases": rows}


def _separate_cases() -> list[Case]:
    return [case for case in CASES if case.window == 512]


def _one_separate_engine(file: Path, prompts: int) -> None:
    """Time one engine whose patches this process's environment names; for `run_separate`."""
    plugin.register()
    with random_engine(separate=True) as engine:
        timed = [[asdict(run) for run in decode_texts(engine, case, prompts)] for case in _separate_cases()]
        (effective,) = engine.llm.collective_rpc("effective_knobs")  # refuses where a key does not act
        found = {"mode": {**engine.mode(), "effective": str(effective)}, "timed": timed, "patches": engine.patches()}
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    _one_separate_engine(Path(sys.argv[1]), int(sys.argv[2]))
