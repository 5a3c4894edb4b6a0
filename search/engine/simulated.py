"""A made-up engine behind the worker's own messages, for tests and for trying the search without vLLM.

Nothing here is a measurement, and every row it leads to is marked `simulated`. The landscape has the shape of
the public A10G record of google/gemma-4-E4B-it in the Fast Gemma Challenge: perplexity falls with the window
as 2.3769 + 0.768·exp(−w ÷ 49.5), the seven cumulative acceptance rates are those of its winning setting, and
top-k only matters when small. The step times are chosen so that the best K lies inside the range.

With TAKES in the environment every change of setting takes so many seconds, as a trial does on a real engine.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time

from kernels.plugin import PATCHES
from search.engine.protocol import (
    Applied,
    Apply,
    Decode,
    Decoded,
    EngineError,
    Load,
    Loaded,
    Sample,
    Sampled,
    Score,
    Scored,
    Setting,
)
from search.knobs import DRAFTS, TOP_K, WINDOW

TAKES = "VLLM_PARETO_SIMULATED_S"
NATIVE_WINDOW, NATIVE_TOP_K, VOCABULARY = 512, 32, 262_144
ACCEPTANCE = (0.729, 0.554, 0.439, 0.361, 0.302, 0.252, 0.213)
DRIFT, DRIFT_PERIOD = 0.1, 500  # the machine's speed swings by ± 10 % over so many timed prompts
LATENCY_NOISE = 0.003  # relative standard deviation of one prompt timed again
PROMPT_SPREAD = 0.15  # relative standard deviation of acceptance between prompts
STEP_MS, STEP_MS_A_ROW, STEP_MS_A_KEY, DRAFT_MS = 5.2, 0.12, 0.0012, 0.35


class SimulatedEngine:
    """Computes what a worker would measure; takes no time to speak of, unless it is told to."""

    def load(self, request: Load) -> Loaded:
        """Any model will do; it is not opened."""
        self._limits = request.limits
        self._setting: Setting = {WINDOW: NATIVE_WINDOW, TOP_K: NATIVE_TOP_K, DRAFTS: 0}
        self._setting |= {key: 0 for key in PATCHES if key in request.limits}
        self._noise = random.Random(request.seed)
        self._decoded = 0
        return Loaded(
            native=dict(self._setting),
            vocabulary=VOCABULARY,
            model_hash=_hash("model", request.model),
            drafter_hash=_hash("drafter", request.drafter),
            build_hash=_hash("simulated", sorted(request.args.items())),
            environment={"engine": "simulated", "simulated": True},
            start_s=0.0,
        )

    def apply(self, request: Apply) -> Applied:
        """Take the setting as it is asked, within the limits."""
        for name, value in request.setting.items():
            if name == DRAFTS and int(value) > int(self._limits.get(DRAFTS, 0)):
                raise EngineError("bad-setting", f"K {value} is over the limit of {self._limits.get(DRAFTS, 0)}.")
        self._setting |= request.setting
        if request.probe:
            time.sleep(float(os.environ.get(TAKES, 0)))
        return Applied(effective=dict(self._setting), apply_s=0.0)

    def score(self, request: Score) -> Scored:
        """The perplexity law, with a fixed offset for each record."""
        window = int(self._setting[WINDOW])
        law = math.log(2.3769 + 0.768 * math.exp(-window / 49.5))
        offset = random.Random(_hash("record", request.record)).gauss(0.0, 0.05)
        tokens = len(request.target)
        return Scored(record=request.record, nll=tokens * (law + offset), tokens=tokens, score_s=0.0)

    def decode(self, request: Decode) -> Decoded:
        """Steps of (verify + K draft passes), each yielding one token and the accepted drafts."""
        drafts_a_step, window = int(self._setting[DRAFTS]), int(self._setting[WINDOW])
        ease = random.Random(_hash("prompt", request.prompt_id)).gauss(1.0, PROMPT_SPREAD)
        accepted = [min(0.98, rate * ease) for rate in self._acceptance()[:drafts_a_step]]
        steps = math.ceil(request.max_tokens / (1 + sum(accepted)))
        keys = min(window, len(request.prompt))
        key_ms, draft_ms = STEP_MS_A_KEY, DRAFT_MS
        if self._setting.get("FA_SLIDING"):
            key_ms /= 2
        for key in ("FUSED_CENTROID_HEAD", "DRAFT_GRAPH"):
            draft_ms *= 0.9 if self._setting.get(key) else 1.0
        step_ms = STEP_MS + STEP_MS_A_ROW * drafts_a_step + key_ms * keys + draft_ms * drafts_a_step
        self._decoded += 1
        drift = DRIFT * math.sin(2 * math.pi * self._decoded / DRIFT_PERIOD)
        noise = math.exp(drift + self._noise.gauss(0.0, LATENCY_NOISE))
        drafts = steps if drafts_a_step else 0
        return Decoded(
            prompt_id=request.prompt_id,
            tokens=request.max_tokens,
            latency_s=steps * step_ms / 1000 * noise,
            output_hash=_hash("output", request.prompt_id, window),
            drafts=drafts,
            draft_tokens=drafts * drafts_a_step,
            accepted_per_pos=[int(rate * drafts) for rate in accepted],
            distinct_4grams=1.0,
            token_ids=list(range(request.max_tokens)) if request.show_tokens else [],
            gaps=[1.0] * request.max_tokens if request.show_tokens else [],
        )

    def sample(self, request: Sample) -> Sampled:
        """Any tokens; the same ones for the same seed."""
        draw = random.Random(_hash("sample", request.prompt, request.seed))
        return Sampled(token_ids=[draw.randrange(VOCABULARY) for _ in range(request.max_tokens)])

    def _acceptance(self) -> list[float]:
        """Acceptance by position: the record's seven, then on at its last ratio; less with few centroids."""
        rates = list(ACCEPTANCE)
        while len(rates) < 16:
            rates.append(rates[-1] * ACCEPTANCE[-1] / ACCEPTANCE[-2])
        recall = 1 - 0.35 * math.exp(-int(self._setting[TOP_K]) / 6)
        return [rate * recall for rate in rates]


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
