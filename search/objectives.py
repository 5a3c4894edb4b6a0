"""What a front may be made of: a trial's figures, and which way each is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from search.section import Section


@dataclass(frozen=True)
class Objective:
    """A figure that settings are compared by. `words` say what it is, `axis` with the unit that `scale` leads to."""

    words: str
    axis: str
    form: str
    scale: float = 1.0
    maximize: bool = False

    def shown(self, value: float | None) -> str:
        """A value in words, with its unit; a dash for one that is not known."""
        return "–" if value is None else self.form.format(value * self.scale)


OBJECTIVES = {
    "tps": Objective("tokens a second", "tokens a second", "{:.1f} tok/s", maximize=True),
    "ppl": Objective("perplexity", "perplexity", "perplexity {:.4f}"),
    "ttft_s": Objective("time to the first token", "ms to the first token", "first token after {:.1f} ms", 1e3),
    "itl_p95_s": Objective(
        "gaps between tokens",
        "ms between tokens, 95th percentile",
        "95 % of the gaps between tokens at most {:.1f} ms",
        1e3,
    ),
    "peak_bytes": Objective("peak memory", "GiB of memory at the peak", "peak memory {:.2f} GiB", 1 / (1 << 30)),
    "energy_j": Objective("energy a token", "J a token", "{:.3f} J a token"),
}
DEFAULT = ("tps", "ppl")
MORE = tuple(name for name in OBJECTIVES if name not in DEFAULT)  # measured beside each speed
KEY = "objectives"  # of a study file, and of its definition
LEAST, MOST = 2, 3  # in a front


def read_objectives(top: Section) -> tuple[str, ...]:
    """The objectives that a study file names, in the order of OBJECTIVES; TPS and perplexity where it names none.

    Raises:
        UsageError: one is not known, or they are not two or three.
    """
    named = top.take(KEY, list, list(DEFAULT))
    node = top.children[KEY][1] if KEY in top.children else top.node
    if unknown := [name for name in named if not isinstance(name, str) or name not in OBJECTIVES]:
        raise top.error(node, f"{KEY}: {unknown[0]!r:.80} is not one of {', '.join(OBJECTIVES)}")
    if not LEAST <= len(set(named)) == len(named) <= MOST:
        raise top.error(node, f"{KEY} must name two or three different ones of {', '.join(OBJECTIVES)}")
    return tuple(name for name in OBJECTIVES if name in named)


def listed(objectives: Iterable[str]) -> str:
    """Objectives in words."""
    return ", ".join(OBJECTIVES[name].words for name in objectives)


class Point(Protocol):
    """Anything that was measured: TPS and perplexity, None where there is none. `figures`, if it has them, are more."""

    @property
    def tps(self) -> float | None:
        """Tokens per second."""

    @property
    def ppl(self) -> float | None:
        """Perplexity."""


def value(point: Point, name: str) -> float | None:
    """One figure of a point, by its objective's name."""
    figures: Mapping[str, float | None] | None = getattr(point, "figures", None)
    found: float | None = getattr(point, name) if name in DEFAULT else (figures or {}).get(name)
    return found


def lacking(figures: Mapping[str, float | None], objectives: Iterable[str]) -> list[str]:
    """The objectives among MORE that there is no figure of."""
    return [name for name in objectives if name in MORE and figures.get(name) is None]


def values(point: Point, objectives: Iterable[str]) -> list[float] | None:
    """A point's figures of these objectives, in their order; None where it lacks one."""
    found = [value(point, name) for name in objectives]
    known = [figure for figure in found if figure is not None]
    return known if len(known) == len(found) else None


def losses(point: Point, objectives: Sequence[str]) -> tuple[float, ...] | None:
    """The same turned so that less is better."""
    found = values(point, objectives)
    if found is None:
        return None
    return tuple(-v if OBJECTIVES[name].maximize else v for name, v in zip(objectives, found, strict=True))
