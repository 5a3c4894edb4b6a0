"""Landscapes that are made up to be difficult. They keep the A10G's knobs, noise and costs, and bend its laws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp

from search.engine.protocol import KnobValue
from search.knobs import DRAFTS, TOP_K, WINDOW, Knob
from search.landscapes.a10g import A10G, NOISE, PPL_FLOOR, decoding, perplexity
from search.landscapes.base import Decoding, Landscape

NOISE_FACTOR = 10.0


def _islands(setting: Mapping[str, KnobValue]) -> float:
    """Over the ceiling from window 232 to 368 and below 144: larger is not always better."""
    window = int(setting[WINDOW])
    return perplexity(setting) + 0.1 * exp(-(((window - 300) / 70.0) ** 4))


def _flat(setting: Mapping[str, KnobValue]) -> Decoding:
    """One speed nearly everywhere, 15 % more on a patch: K 3 to 5 with top-k 64 to 112."""
    on_patch = 3 <= int(setting[DRAFTS]) <= 5 and 64 <= int(setting[TOP_K]) <= 112
    drafts = int(setting[DRAFTS])
    return Decoding((0.3 / max(1, drafts),) * drafts, 6.0 / (1.15 if on_patch else 1.0) * (1.3 if drafts else 1.0), 0.0)


def _no_top_k(setting: Mapping[str, KnobValue]) -> Decoding:
    return decoding({**setting, TOP_K: 48})


TWO_ISLANDS = replace(A10G, name="two-islands", perplexity=_islands)
PLATEAU = replace(A10G, name="plateau", decoding=_flat)
NO_EFFECT = replace(A10G, name="no-effect", decoding=_no_top_k)
NOISY = replace(
    A10G,
    name="noisy",
    noise=replace(
        NOISE, path=NOISE_FACTOR * NOISE.path, within=NOISE_FACTOR * NOISE.within, timing=NOISE_FACTOR * NOISE.timing
    ),
)
# The reference passes, at the model's own window of 512, but no window of the range does.
UNREACHABLE: Landscape = replace(
    A10G,
    name="unreachable",
    knobs=(Knob(WINDOW, 64, 448, step=4), *A10G.knobs[1:]),
    ceiling=PPL_FLOOR + 0.00005,
    noise=replace(NOISE, perplexity=0.0),
)
