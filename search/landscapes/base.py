"""What a landscape is: laws of perplexity and of decoding over settings, with the noise and the cost of measuring them.

A landscape is not measured; it is fitted to measurements, or made up to be difficult. `search.engine.simulated` speaks
the worker's protocol over one, `search.bench` replays whole searches on one without a worker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from search.engine.protocol import KnobValue, Setting
from search.knobs import Knob, canonical

Law = Callable[[Mapping[str, KnobValue]], float]


@dataclass(frozen=True)
class Decoding:
    """How one setting decodes.

    `acceptance[i]` is the share of verify steps in which the draft at position i is accepted (cumulative, one entry for
    every drafted token); a step takes `verify_ms` and, for all its drafts together, `draft_ms`; a prompt `prefill_ms`.
    """

    acceptance: tuple[float, ...]
    verify_ms: float
    draft_ms: float
    prefill_ms: float = 0.0

    @property
    def tokens_a_step(self) -> float:
        """The token that is always right and the accepted drafts."""
        return 1.0 + math.fsum(self.acceptance)

    def tps(self, output_tokens: int) -> float:
        """Tokens a second, prompt processing included, of prompts decoded to `output_tokens`."""
        steps_ms = output_tokens / self.tokens_a_step * (self.verify_ms + self.draft_ms)
        return 1000.0 * output_tokens / (self.prefill_ms + steps_ms)


@dataclass(frozen=True)
class Noise:
    """Relative standard deviations of what a trial measures around the law (0.01 is 1 %).

    `path`: speed of one quality setting's texts, the same for all its trials of a study: other windows write other
        tokens, which are easier or harder to draft.
    `between`: of a prompt's time, against what the anchor predicts, where the texts differ; shared by the trials of one
        quality setting that time the same prompts.
    `within`: the same where the texts agree and only speed knobs differ.
    `timing`: of a trial that times as many prompts as it may, timed again.
    `perplexity`: of one quality setting's perplexity around the smooth law, the same whenever it is scored.
    `prompt_spread`: of ln acceptance between prompts, which is spread evenly.
    """

    path: float
    between: float
    within: float
    timing: float
    perplexity: float
    prompt_spread: float


@dataclass(frozen=True)
class Costs:
    """Seconds of a trial's stages, and how many prompts it may time."""

    apply_s: float
    gate_s: float
    prompts: int
    prompts_a_trial: int
    output_tokens: int
    controls_a_prompt: float = 0.0


@dataclass(frozen=True)
class Landscape:
    """Laws over settings of `knobs`; `native` is the reference setting, `ceiling` the perplexity it is gated at."""

    name: str
    knobs: tuple[Knob, ...]
    native: Setting
    ceiling: float
    perplexity: Law
    decoding: Callable[[Mapping[str, KnobValue]], Decoding]
    noise: Noise
    costs: Costs

    def tps(self, setting: Mapping[str, KnobValue]) -> float:
        """True tokens a second of a setting."""
        return self.decoding(setting).tps(self.costs.output_tokens)

    def settings(self) -> Iterator[Setting]:
        """Every setting of the knobs' ranges, in its one spelling."""
        ranges = [range(knob.low, knob.high + 1, knob.step) for knob in self.knobs]
        seen = set()
        for values in itertools.product(*ranges):
            setting = canonical({k.name: v for k, v in zip(self.knobs, values, strict=True)}, self.native)
            key = tuple(setting.values())
            if key not in seen:
                seen.add(key)
                yield setting


def interpolate(points: Sequence[tuple[float, float]], at: float, *, log: bool = False) -> float:
    """Piecewise linear through `points` (x ascending), in ln x with `log`; the end segments go on beyond the ends."""
    x = math.log(at) if log else at
    xs = [math.log(p) if log else p for p, _ in points]
    i = min(max(1, next((n for n, p in enumerate(xs) if p >= x), len(xs) - 1)), len(xs) - 1)
    (x0, y0), (x1, y1) = (xs[i - 1], points[i - 1][1]), (xs[i], points[i][1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
