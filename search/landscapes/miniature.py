"""The bundled miniature on two x86 cores, fitted to a measured grid: studies/miniature/grid, 289 settings.

What it was measured on and when is in its conditions.json; studies/miniature/measure_grid.py measures it again. The
machine was shared: a prompt timed again differed by 6 % (successive controls), and a setting's six prompts lie within
5 to 10 % of the fit, those of settings off the grid no farther.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from search.engine.protocol import KnobValue, Setting
from search.knobs import DRAFTS, TOP_K, WINDOW, Knob
from search.landscapes.base import Costs, Decoding, Landscape, Noise, interpolate

# Perplexity over the 64 gate records: every window of the study's range, and the model's own.
PERPLEXITY = (
    *((16, 6.373485), (32, 4.907832), (48, 4.530330), (64, 4.382022), (80, 4.288127), (96, 4.223031)),
    *((112, 4.168768), (128, 4.138694), (144, 4.106637), (160, 4.071788), (176, 4.056963), (192, 4.039663)),
    *((208, 4.028059), (224, 4.018067), (240, 4.012945), (256, 4.004240), (512, 3.971434)),
)
CEILING_RATIO = 1.05  # the study's

# Chance that a draft is accepted where those before it were, by top-k at window 128: positions 1 to 4, and all later
# ones together (binomial maximum likelihood over the grid). Another window's is this to the power of WINDOW_POWER.
STAYS = {
    1: (0.486, 0.488, 0.458, 0.392, 0.585),
    4: (0.676, 0.684, 0.658, 0.608, 0.723),
    8: (0.691, 0.759, 0.781, 0.713, 0.788),
    16: (0.724, 0.781, 0.808, 0.779, 0.806),
    32: (0.736, 0.803, 0.811, 0.815, 0.830),
    128: (0.754, 0.805, 0.834, 0.813, 0.814),
}
WINDOW_POWER = ((32, 0.991), (64, 0.936), (112, 0.929), (128, 1.0), (192, 1.107), (256, 1.297))

# A prompt of 768 tokens, then steps; robust least squares of ln latency over the grid, drift of the controls undone.
PREFILL_MS = 69.7
STEP_MS, KEY_MS, KEYS = 2.220, 0.002467, 400  # a step without drafts; a key of the window; no more act than so many
ROW_MS, CENTROID_MS, DRAFTING_MS = 0.583, 0.00402, 1.107  # a draft; a centroid of each draft; drafting at all

NOISE = Noise(
    path=0.012,  # tokens a step lie 4.4 % around the fit over six prompts: a quarter of that over all 48
    between=0.08,  # the same of one prompt, in time
    within=0.03,  # assumed: top-k and K leave the text as it is
    timing=0.02,  # the intervals of a search with controls, ± 4.5 % over 24 prompts
    perplexity=0.0,  # the table holds every window as it was scored
    prompt_spread=0.2,
)
COSTS = Costs(
    apply_s=0.11,
    gate_s=3.9,
    prompts=48,
    prompts_a_trial=24,
    output_tokens=64,
    controls_a_prompt=1 / 3,
)
NATIVE: Setting = {WINDOW: 512, TOP_K: 32, DRAFTS: 0}


def perplexity(setting: Mapping[str, KnobValue]) -> float:
    """Of the window alone, as scored; between two windows in proportion."""
    return interpolate(PERPLEXITY, int(setting[WINDOW]))


def acceptance(window: int, top_k: int, drafts: int) -> tuple[float, ...]:
    """Cumulative acceptance by position."""
    low, high = WINDOW_POWER[0][0], WINDOW_POWER[-1][0]
    power = interpolate(WINDOW_POWER, min(max(window, low), high), log=True)
    rates, stays = [], 1.0
    for position in range(drafts):
        curve = [(t, math.log(row[min(position, len(row) - 1)])) for t, row in STAYS.items()]
        stays *= math.exp(power * interpolate(curve, top_k, log=True))
        rates.append(stays)
    return tuple(rates)


def decoding(setting: Mapping[str, KnobValue]) -> Decoding:
    """Prompt processing, verify steps and draft passes of one setting."""
    window, top_k, drafts = int(setting[WINDOW]), int(setting[TOP_K]), int(setting[DRAFTS])
    draft_ms = drafts * (ROW_MS + CENTROID_MS * top_k) + (DRAFTING_MS if drafts else 0.0)
    verify_ms = STEP_MS + KEY_MS * min(window, KEYS)
    return Decoding(acceptance(window, top_k, drafts), verify_ms, draft_ms, PREFILL_MS)


MINIATURE = Landscape(
    name="miniature",
    knobs=(
        Knob(WINDOW, 16, 256, step=16),
        Knob(TOP_K, 1, 128, log=True),
        Knob(DRAFTS, 0, 10, default=4),
    ),
    native=NATIVE,
    ceiling=CEILING_RATIO * perplexity(NATIVE),
    perplexity=perplexity,
    decoding=decoding,
    noise=NOISE,
    costs=COSTS,
)
