"""What can be searched: each knob's range, what it affects, and how a setting of all of them is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.plugin import LEAST_DRAFTS
from search.engine.protocol import KnobValue, Setting

WINDOW, TOP_K, DRAFTS = "sliding_window", "centroid_top_k", "num_speculative_tokens"
METHOD = "method"  # of speculation: a build knob
NO_DRAFTS, MTP = "none", "mtp"  # methods
VARIABLE = ("ngram", "ngram_gpu", "suffix")  # methods that draft up to K tokens a step, as many as they find
SHORT = {WINDOW: "window", TOP_K: "top-k", DRAFTS: "K", **{key: key for key in LEAST_DRAFTS}}


@dataclass(frozen=True)
class KnobKind:
    """What is known of a live knob before any study: whether it can change perplexity, its least and largest value.

    `needs_drafter`: it acts where something is drafted; `needs_mtp`: by a Gemma 4 assistant alone.
    `more_is_better`: a larger value does not raise perplexity. `by_ratio`: it acts by ratios, 8 to 16 as 64 to 128.
    """

    affects_quality: bool
    minimum: int
    meaning: str
    maximum: int | None = None
    needs_drafter: bool = True
    needs_mtp: bool = False
    more_is_better: bool = False
    by_ratio: bool = False


KNOWN: Mapping[str, KnobKind] = {
    WINDOW: KnobKind(
        True,
        1,
        "tokens that the sliding-window layers attend to",
        needs_drafter=False,
        more_is_better=True,
        by_ratio=True,
    ),
    TOP_K: KnobKind(
        False, 1, "centroids of the drafter's head whose tokens are candidates", needs_mtp=True, by_ratio=True
    ),
    DRAFTS: KnobKind(False, 0, "tokens drafted a step; 0 decodes without the drafter"),
    # Patches of `kernels.plugin`, by their environment keys: 0 is vLLM's own code. On a GPU alone.
    "FA_SLIDING": KnobKind(True, 0, "1: steps of few rows attend through the split kernel", 1, needs_drafter=False),
    "FUSED_CENTROID_HEAD": KnobKind(False, 0, "1: the fused head gives the drafter's greedy token", 1, needs_mtp=True),
    "DRAFT_GRAPH": KnobKind(False, 0, "1: the draft passes of a step are one CUDA graph", 1, needs_mtp=True),
}


# Build knobs that stand for other arguments of the engine: what each of their values sets.
EXPANDED: Mapping[str, Callable[[KnobValue], dict[str, Any]]] = {
    "kv_cache_gib": lambda gib: {"kv_cache_memory_bytes": round(float(gib) * (1 << 30))},
}


@dataclass(frozen=True)
class Knob:
    """One searched knob: integers from `low` to `high` in `step`s, or by `log`; `default` is tried first."""

    name: str
    low: int
    high: int
    step: int = 1
    log: bool = False
    default: int | None = None

    @property
    def affects_quality(self) -> bool:
        """Whether it can change perplexity."""
        return KNOWN[self.name].affects_quality

    @property
    def largest(self) -> int:
        """The largest value the range holds, which need not be `high`."""
        return self.low + (self.high - self.low) // self.step * self.step

    def nearest(self, value: int) -> int:
        """The value of the range closest to `value`."""
        steps = round((value - self.low) / self.step)
        return min(max(self.low, self.low + steps * self.step), self.largest)


def canonical(setting: Mapping[str, KnobValue], native: Mapping[str, KnobValue]) -> Setting:
    """The one spelling of all settings that decode alike, knobs in the order of KNOWN.

    Without drafts the centroid head never runs, so its top-k is written as the drafter's own; so is a patch that has
    nothing to do.
    """
    full = {**native, **setting}
    if full.get(DRAFTS) == 0 and TOP_K in native:
        full[TOP_K] = native[TOP_K]
    for key, least in LEAST_DRAFTS.items():
        if key in native and int(full.get(DRAFTS, 0)) < least:
            full[key] = native[key]
    return {name: full[name] for name in (*KNOWN, *sorted(full.keys() - KNOWN.keys())) if name in full}


def quality_part(setting: Mapping[str, KnobValue], of_speed: Collection[str] = ()) -> Setting:
    """The knobs of `setting` that perplexity hangs on: of build knobs all but those `of_speed`."""
    return {
        name: value
        for name, value in setting.items()
        if (KNOWN[name].affects_quality if name in KNOWN else name not in of_speed)
    }


def drafts_as_asked(counted: float, drafts: int, method: str | None) -> bool:
    """Whether so many tokens drafted a step that drafted any are what K = `drafts` stands for."""
    return 0 <= counted <= drafts if method in VARIABLE else counted == drafts


def needs_method(name: str, method: str) -> bool:
    """Whether a live knob acts under a method of speculation."""
    kind = KNOWN[name]
    return method == MTP if kind.needs_mtp else method != NO_DRAFTS or not kind.needs_drafter


def words(setting: Mapping[str, KnobValue]) -> str:
    """A setting in a few words, for people."""
    return ", ".join(f"{SHORT.get(name, name)} {value}" for name, value in setting.items())
