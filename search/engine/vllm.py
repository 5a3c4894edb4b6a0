"""A real vLLM in this process: one engine, all live knobs changed in place (see `live`)."""

from __future__ import annotations

import dataclasses
import difflib
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Scheduler, worker and model in this process, so that the places the knobs act on can be reached.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import msgspec
import torch
from vllm import LLM, EngineArgs, SamplingParams, envs
from vllm.version import __version__ as vllm_version

from kernels import plugin
from kernels.patches.base import PatchRefusedError
from search.data import json_hash
from search.engine import gpu, memory, processor
from search.engine.arrivals import Arrivals
from search.engine.live import LiveKnobs
from search.engine.protocol import (
    Applied,
    Apply,
    Decode,
    Decoded,
    DecodeTogether,
    EngineError,
    KnobValue,
    Load,
    Loaded,
    Pace,
    Paced,
    Sample,
    Sampled,
    Score,
    Scored,
    Setting,
    Solve,
    Solved,
)
from search.identity import distinct_4grams
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.modelfiles import file_hash, model_folder, read_config, text_config

# What a measurement rests on; the study file cannot change them.
FIXED_ARGS: dict[str, Any] = {
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


class VllmEngine:
    """One vLLM engine, decoding one stream or a wave of them."""

    def load(self, request: Load) -> Loaded:
        """Build the engine with the largest K that will be asked for; the window starts at the model's own."""
        started = time.perf_counter()
        _check_args(request.args | request.build_args, request.build)
        target = model_folder(request.model)
        config = text_config(read_config(target))
        native: Setting = {DRAFTS: 0}
        if config.get("sliding_window"):
            native[WINDOW] = int(config["sliding_window"])
        args = {**request.args, **request.build_args, **FIXED_ARGS, "model": str(target), "seed": request.seed}
        drafter = None
        if name := request.drafter or request.speculation.get("model"):
            drafter = model_folder(name)
            drafter_config = read_config(drafter)
            if drafter_config.get("use_ordered_embeddings"):
                native[TOP_K] = int(drafter_config["centroid_intermediate_top_k"])
        most_drafts = int(request.limits.get(DRAFTS, 0))
        if most_drafts and (drafter or request.speculation):
            of_drafter = {"model": str(drafter)} if drafter else {}
            args["speculative_config"] = {
                **request.speculation,
                **of_drafter,
                "num_speculative_tokens": most_drafts,
            }
        else:
            drafter = None
            native.pop(TOP_K, None)
        # Built with every patch that may be asked for, so that one which does not fit is known now.
        searched = [key for key in plugin.PATCHES if key in request.limits]
        native |= {key: int(os.environ.get(key) == "1") for key in searched}
        self._llm = _build(args, [key for key in searched if request.limits[key]])
        self._arrivals = Arrivals(self._llm.llm_engine)
        self._live = LiveKnobs(self._llm.llm_engine.engine_core.engine_core)
        software = [vllm_version, str(torch.__version__), _processor(), sorted(plugin.report())]
        shell = _shell(request.environment)
        asked = request.build_args | request.build
        require_built(self._live.built(asked), asked)
        gc.collect()
        gc.freeze()  # collections during a timed prompt have less to walk
        return Loaded(
            native=native,
            vocabulary=int(config["vocab_size"]),
            model_hash=file_hash(target),
            drafter_hash=file_hash(drafter) if drafter else None,
            build_hash=json_hash([*software, request.args, *shell.values()]),
            environment=_environment() | shell | _compiled(self._llm.llm_engine.vllm_config.compilation_config),
            start_s=time.perf_counter() - started,
            step_bytes=_step_bytes(self._live.model),
            bandwidth=gpu.peak_bandwidth() if torch.cuda.is_available() else None,
            variable_drafts=self._live.variable_drafts,
        )

    def apply(self, request: Apply) -> Applied:
        """Change the knobs, read them back; K is counted over a decoded probe."""
        started = time.perf_counter()
        self._live.apply(request.setting)
        off = {name: 0 for name in request.setting if name in plugin.PATCHES}
        effective = off | self._live.read_back()
        if request.probe_tokens:
            probe = Decode(prompt_id="probe", prompt=request.probe, max_tokens=request.probe_tokens)
            counted = _drafts_a_step(self.decode(probe))
            effective[DRAFTS] = self._live.drafts if self._live.variable_drafts else counted
            _require_taken(counted)
        return Applied(effective=effective, apply_s=time.perf_counter() - started)

    def score(self, request: Score) -> Scored:
        """Score one record by `prompt_logprobs`, the path an endpoint offers too."""
        started = time.perf_counter()
        tokens = [*request.context, *request.target]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=request.top, detokenize=not request.top)
        (output,) = self._generate([tokens], params)
        logprobs = output.prompt_logprobs or []
        if len(logprobs) != len(tokens):
            raise EngineError(
                "impossible-figure",
                f"Record {request.record}: {len(logprobs)} log-probabilities for {len(tokens)} tokens.",
            )
        first = len(request.context)
        values = []
        for position in range(first, len(tokens)):
            entry = (logprobs[position] or {}).get(tokens[position])
            if entry is None or not math.isfinite(entry.logprob):
                raise EngineError(
                    "impossible-figure", f"Record {request.record}: no log-probability at token {position}."
                )
            values.append(entry.logprob)
        shown = [_finite(entry) for entry in logprobs[first:]] if request.top else []
        return Scored(
            record=request.record,
            nll=-math.fsum(values),
            tokens=len(values),
            score_s=time.perf_counter() - started,
            top_ids=[list(entry) for entry in shown],
            top_logprobs=[list(entry.values()) for entry in shown],
        )

    def decode(self, request: Decode) -> Decoded:
        """Decode greedily, ignoring the end-of-text token, so that every setting does equal work."""
        params = _greedy(request.max_tokens, logprobs=2 if request.show_tokens else None)
        found, (output,) = self._decode(request.prompt_id, [request.prompt], params)
        if not request.show_tokens:
            return found
        gaps = [_gap(entry) for entry in output.logprobs or []]
        return msgspec.structs.replace(found, token_ids=list(output.token_ids), gaps=gaps)

    def decode_together(self, request: DecodeTogether) -> Decoded:
        """Decode several prompts likewise, all of them submitted before the first step."""
        return self._decode(request.wave, list(request.prompts.values()), _greedy(request.max_tokens))[0]

    def _decode(self, name: str, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[Decoded, list[Any]]:
        """Time prompts that are decoded at once; also what came out for each."""
        before, on_gpu = self._counters(), torch.cuda.is_available()
        self._arrivals.listen()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            memory.forget_peak()
        energy_before = gpu.energy_j() if on_gpu else None
        started = time.perf_counter()
        outputs = self._generate(prompts, params)
        latency_s = time.perf_counter() - started
        energy_after = gpu.energy_j() if on_gpu else None
        peak = int(torch.cuda.max_memory_allocated()) if on_gpu else memory.peak_bytes()
        after = self._counters()
        found = [output.outputs[0] for output in outputs]
        texts = [list(one.token_ids) for one in found]
        for token_ids in texts:
            if len(token_ids) != params.max_tokens:
                raise EngineError(
                    "impossible-figure",
                    f"Prompt {name}: {len(token_ids)} tokens came back, {params.max_tokens} were asked.",
                )
        cached, drafts, draft_tokens, *accepted = (b - a for a, b in zip(before, after, strict=True))
        if cached:
            raise EngineError("impossible-figure", f"Prompt {name}: {cached} of its tokens came from the prefix cache.")
        tokens = sum(map(len, texts))
        first_token_s, waits_s = self._arrivals.since(started, len(prompts), tokens)
        timed = Decoded(
            prompt_id=name,
            tokens=tokens,
            latency_s=latency_s,
            output_hash=json_hash(texts if len(texts) > 1 else texts[0]),
            drafts=drafts,
            draft_tokens=draft_tokens,
            accepted_per_pos=accepted,
            distinct_4grams=statistics.fmean(map(distinct_4grams, texts)),
            first_token_s=first_token_s,
            waits_s=waits_s,
            peak_bytes=peak,
            energy_j=None if energy_before is None or energy_after is None else energy_after - energy_before,
        )
        return timed, found

    def solve(self, request: Solve) -> Solved:
        """Answer one task, greedily."""
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, stop=request.stop or None)
        return Solved(task=request.task, text=self._generate([request.prompt], params)[0].outputs[0].text)

    def sample(self, request: Sample) -> Sampled:
        """Sample one continuation."""
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
        )
        found = self._generate([request.prompt], params)[0].outputs[0]
        tokens = list(found.token_ids)
        return Sampled(token_ids=tokens[:-1] if found.finish_reason == "stop" else tokens)

    def pace(self, request: Pace) -> Paced:
        """Time the processor, which what is built does not change."""
        return Paced(seconds=processor.pace(torch.get_num_threads()))

    def _generate(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[Any]:
        """Outputs of vLLM by prompt, in their order."""
        given = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        return list(self._llm.generate(given, params, use_tqdm=False))

    def _counters(self) -> list[int]:
        """Tokens found in the prefix cache, drafts, draft tokens, and accepted tokens at each position, so far."""
        found = {metric.name: metric for metric in self._llm.get_metrics()}
        cached = int(found["vllm:prefix_cache_hits"].value)
        drafts = found.get("vllm:spec_decode_num_drafts")
        if drafts is None:
            return [cached, 0, 0]
        return [
            cached,
            int(drafts.value),
            int(found["vllm:spec_decode_num_draft_tokens"].value),
            *map(int, found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        ]


def _build(args: dict[str, Any], searched: Iterable[str]) -> Any:
    """The engine, with every patch that the environment asks for and those that are searched.

    Raises:
        EngineError: a patch does not fit, or vLLM did not load the plugin that installs it.
    """
    try:
        for key in searched:
            plugin.install(key)
        llm = LLM(**args)
        missing = plugin.missing(os.environ)
    except PatchRefusedError as error:
        raise EngineError("bad-setting", str(error)) from error
    if missing:
        raise EngineError("bad-setting", plugin.NOT_LOADED.format(keys=" and ".join(missing)))
    return llm


def _greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Exactly `max_tokens` of the likeliest tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)


def _gap(entry: dict[int, Any]) -> float:
    """Log-probability of the likeliest token minus that of the next."""
    first, second, *_ = sorted((candidate.logprob for candidate in entry.values()), reverse=True)
    return float(first - second)


def _finite(entry: dict[int, Any]) -> dict[int, float]:
    """Log-probability by token, of those that are possible."""
    return {token: candidate.logprob for token, candidate in entry.items() if math.isfinite(candidate.logprob)}


def _step_bytes(model: torch.nn.Module) -> int:
    """Bytes of the matrices that every decoding step multiplies by; embeddings are only looked up."""
    weights = {p.data_ptr(): p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
    return sum(p.numel() * p.element_size() for p in weights.values())


def _require_taken(drafts: float) -> None:
    """After a decoded probe of so many drafts a step, require that the patches that keys switched on were at work.

    Raises:
        EngineError: one was never taken.
    """
    for key, calls in plugin.report().items():
        if key in plugin.PATCHES and drafts >= plugin.LEAST_DRAFTS[key] and not calls["taken"]:
            raise EngineError("mismatch", f"{key} is active, but no step was taken by its code.")


def _drafts_a_step(counted: Decoded) -> int | float:
    """K as it acted: tokens drafted a verify step that carried drafts."""
    if counted.drafts == 0:
        return 0
    drafts = counted.draft_tokens / counted.drafts
    return int(drafts) if drafts.is_integer() else drafts


def require_built(found: Mapping[str, KnobValue], asked: Mapping[str, KnobValue]) -> None:
    """Require that an engine has the values of the build knobs that it was asked for.

    Args:
        found: those that were found in the engine, by knob.
        asked: all that were asked for.

    Raises:
        EngineError: it took another value.
    """
    for name, value in found.items():
        if value != asked[name]:
            raise EngineError("mismatch", f"asked for {name} {asked[name]}, but the engine was built with {value}")


def _check_args(args: dict[str, Any], build: Mapping[str, KnobValue]) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in args:
        if name in FIXED_ARGS or name in ("model", "speculative_config", "hf_overrides"):
            raise EngineError("bad-setting", f"engine.args.{name} is set by the search itself: remove it.")
        if name not in known and any(knob.partition(".")[0] == name for knob in build):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise EngineError("bad-setting", f"knobs.{name} is no argument of vLLM {vllm_version}.{hint}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise EngineError("bad-setting", f"engine.args.{name} is no argument of vLLM {vllm_version}.{hint}")


def _processor() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return next(iter(_cpu_models(Path("/proc/cpuinfo"))), platform.processor() or platform.machine())


def _cpu_models(cpuinfo: Path) -> Iterable[str]:
    if not cpuinfo.exists():
        return
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            yield line.partition(":")[2].strip()


def _shell(built: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Under "shell", vLLM's keys that this process was started with, besides those of the study (`built`), if any.

    Not those that vLLM keeps out of the keys of its compile cache: folders, addresses, logging, credentials.
    """
    started = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")  # vLLM adds to os.environ
    keys = dict(line.partition("=")[::2] for line in started if line.startswith("VLLM_"))
    found = {name: keys[name] for name in sorted(envs.compile_factors()) if name in keys and name not in built}
    return {"shell": found} if found else {}


def _compiled(config: Any) -> dict[str, Any]:
    """Which compiled code runs, by the name of its cache, and the seconds that compiling took (few: it was cached)."""
    return {"compile_cache": Path(config.cache_dir).name or None, "compile_s": float(config.compilation_time)}


def _environment() -> dict[str, Any]:
    import transformers

    device = (gpu.first_gpu() if torch.cuda.is_available() else None) or {}
    return {
        "engine": "vllm",
        "simulated": False,
        "vllm": vllm_version,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "patches": sorted(plugin.report()),
        **{f"gpu_{name}": value for name, value in device.items()},
        "preload": [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library],
    }
