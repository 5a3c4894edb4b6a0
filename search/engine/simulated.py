"""A made-up engine behind the worker's own messages, for tests and for trying the search without vLLM.

Nothing here is a measurement, and every row it leads to is marked `simulated`. It answers as a landscape of
`search.landscapes` says: the A10G's, unless a subclass names another.

With TAKES in the environment every change of setting takes so many seconds, as a trial does on a real engine.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time

import msgspec

from kernels.plugin import PATCHES
from search.engine.protocol import (
    Applied,
    Apply,
    Decode,
    Decoded,
    DecodeTogether,
    EngineError,
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
from search.knobs import DRAFTS, MTP, NO_DRAFTS, TOP_K, VARIABLE, WINDOW
from search.landscapes.a10g import A10G
from search.landscapes.miniature import MINIATURE

TAKES = "VLLM_PARETO_SIMULATED_S"
VOCABULARY = 262_144
DRIFT, DRIFT_PERIOD = 0.1, 500  # the machine's speed swings by ± 10 % over so many timed prompts
PACE_S, PACE_SHARE = 0.05, 0.7  # of the processor's work, and of the drift what it shows (ln)
LATENCY_NOISE = 0.003  # relative standard deviation of one prompt timed again
RECORD_SPREAD = 0.05  # standard deviation of ln perplexity between records
MOST_ACCEPTED = 0.98
BROKEN = "broken"  # a value of a build knob with which no engine starts
FP8_LOSS = 0.01  # nats a token, that a KV cache of eight bits costs
BUILD_SPREAD = 0.05  # of ln step time, between engines that are built in different ways
NGRAM_FOUND = 0.4  # share of steps in which looking up finds a draft
COLLAPSE = (0.15, 0.45)  # of the model's own window: below a share between these a task is answered wrongly
BATCH_COST = 0.08  # of a step, for each prompt that is decoded beside the first
PEAK_BYTES = (8 << 30, 1 << 20)  # of memory: the weights, and each token that a prompt may look at
EASE_SHIFT = 0.05  # with it the mean time of all prompts is the law's, although no draft is accepted more than always


class SimulatedEngine:
    """Computes what a worker would measure; takes no time to speak of, unless it is told to."""

    landscape = A10G

    def load(self, request: Load) -> Loaded:
        """Any model will do; it is not opened."""
        self._limits = request.limits
        self._build = request.build
        if BROKEN in self._build.values():
            raise EngineError("bad-setting", "This engine is made up not to start.")
        method = request.speculation.get("method", MTP if request.drafter else NO_DRAFTS)
        self._setting: Setting = dict(self.landscape.native)
        if method != MTP:
            self._setting.pop(TOP_K, None)
        self._found = NGRAM_FOUND if method in VARIABLE else 1.0
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
            variable_drafts=method in VARIABLE,
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
        law = math.log(self.landscape.perplexity(self._setting)) + FP8_LOSS * (
            self._build.get("kv_cache_dtype") == "fp8"
        )
        offset = random.Random(_hash("record", request.record)).gauss(0.0, RECORD_SPREAD)
        tokens = len(request.target)
        shown = [self._distribution(request, i) for i in range(tokens if request.top else 0)]
        return Scored(
            record=request.record,
            nll=tokens * (law + offset),
            tokens=tokens,
            score_s=0.0,
            top_ids=[list(entry) for entry in shown],
            top_logprobs=[list(entry.values()) for entry in shown],
        )

    def _distribution(self, request: Score, position: int) -> dict[int, float]:
        """Log-probabilities of `top` tokens that halve from one to the next.

        As far as perplexity has risen over that of the model's own setting, they are mixed with those in reverse; and
        that is the share of positions whose two likeliest tokens have changed places.
        """
        draw = random.Random(_hash("token", request.record, position))
        ids = [draw.randrange(VOCABULARY) for _ in range(request.top)]
        native = self.landscape.perplexity(self.landscape.native)
        risen = min(1.0, max(0.0, self.landscape.perplexity(self._setting) / native - 1))
        shares = [2.0 ** -(i + 1) for i in range(request.top)]
        if draw.random() < risen:
            shares[:2] = shares[1::-1]
        mixed = [(1 - risen) * p + risen * q for p, q in zip(shares, shares[::-1], strict=True)]
        return {token: math.log(p) for token, p in zip(ids, mixed, strict=True)}

    def decode(self, request: Decode) -> Decoded:
        """Steps of (verify + K draft passes), each yielding one token and the accepted drafts."""
        found = self._timed(request.prompt_id, [request.prompt_id], request.max_tokens)
        if not request.show_tokens:
            return found
        return msgspec.structs.replace(
            found, token_ids=list(range(request.max_tokens)), gaps=[1.0] * request.max_tokens
        )

    def decode_together(self, request: DecodeTogether) -> Decoded:
        """The same for several prompts at once: a step takes BATCH_COST longer for each that is still decoded."""
        return self._timed(request.wave, list(request.prompts), request.max_tokens)

    def _timed(self, name: str, prompts: list[str], max_tokens: int) -> Decoded:
        drafts_a_step, window = int(self._setting[DRAFTS]), int(self._setting[WINDOW])
        law = self.landscape.decoding({**self.landscape.native, **self._setting})
        half = math.sqrt(3) * self.landscape.noise.prompt_spread
        eases = [math.exp(random.Random(_hash("prompt", p)).uniform(-half, half) + EASE_SHIFT) for p in prompts]
        accepted = [[min(MOST_ACCEPTED, rate * ease) * self._found for rate in law.acceptance] for ease in eases]
        steps = [math.ceil(max_tokens / (1 + sum(rates))) for rates in accepted]
        verify_ms, draft_ms = law.verify_ms, law.draft_ms
        if self._setting.get("FA_SLIDING"):
            verify_ms *= 0.97
        for key in ("FUSED_CENTROID_HEAD", "DRAFT_GRAPH"):
            draft_ms *= 0.9 if self._setting.get(key) else 1.0
        self._decoded += 1
        noise = math.exp(self._drift() + self._noise.gauss(0.0, LATENCY_NOISE))
        drafts = [round(count * self._found) if drafts_a_step else 0 for count in steps]
        luck = random.Random(_hash("build", sorted(self._build.items()))).uniform(-BUILD_SPREAD, BUILD_SPREAD)
        if self._build:
            verify_ms *= math.exp(luck)
        draft_ms *= self._found == 1.0  # what is looked up takes no pass of a drafter
        decode_ms = _steps_taken(steps) * (verify_ms + draft_ms)
        step_ms = decode_ms / max(steps)
        hits = [[int(rate * n) for rate in rates] for rates, n in zip(accepted, drafts, strict=True)]
        return Decoded(
            prompt_id=name,
            tokens=len(prompts) * max_tokens,
            latency_s=(len(prompts) * law.prefill_ms + decode_ms) / 1000 * noise,
            output_hash=_hash("output", *prompts, window),
            drafts=sum(drafts),
            draft_tokens=sum(drafts) * drafts_a_step,
            accepted_per_pos=[sum(at) for at in zip(*hits, strict=True)],
            distinct_4grams=1.0,
            first_token_s=[(len(prompts) * law.prefill_ms + step_ms) / 1000 * noise] * len(prompts),
            waits_s=[step_ms / 1000 * noise] * (sum(steps) - len(prompts)),
            peak_bytes=PEAK_BYTES[0] + PEAK_BYTES[1] * len(prompts) * (window + drafts_a_step),
        )

    def solve(self, request: Solve) -> Solved:
        """The last word (or token id) of the prompt, or nothing to the point where the window is too small for it.

        Each task needs another window, between COLLAPSE of the model's own: perplexity shows little of that.
        """
        words = request.prompt.split() if isinstance(request.prompt, str) else request.prompt
        share = random.Random(_hash("task", request.task)).uniform(*COLLAPSE)
        knows = int(self._setting[WINDOW]) >= share * int(self.landscape.native[WINDOW])
        return Solved(task=request.task, text=f" {words[-1]}\n" if knows else "I see .")

    def pace(self, request: Pace) -> Paced:
        """The drift, as the processor shows it."""
        return Paced(seconds=PACE_S * math.exp(PACE_SHARE * self._drift()))

    def _drift(self) -> float:
        """How much slower the machine is (ln), which swings with every prompt; it goes on where an engine ends."""
        return DRIFT * math.sin(2 * math.pi * self._decoded / DRIFT_PERIOD)

    def sample(self, request: Sample) -> Sampled:
        """Any tokens; the same ones for the same seed."""
        draw = random.Random(_hash("sample", request.prompt, request.seed))
        return Sampled(token_ids=[draw.randrange(VOCABULARY) for _ in range(request.max_tokens)])


class SimulatedMiniature(SimulatedEngine):
    """The same over the bundled miniature's landscape: `--engine search.engine.simulated:SimulatedMiniature`."""

    landscape = MINIATURE


def _steps_taken(steps: list[int]) -> float:
    """How long prompts that need so many steps take together, by a step of one of them alone."""
    ended, taken = 0, 0.0
    for running, count in zip(range(len(steps), 0, -1), sorted(steps), strict=True):
        taken += (count - ended) * (1 + BATCH_COST * (running - 1))
        ended = count
    return taken


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
