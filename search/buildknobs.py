"""Build knobs as the study file has them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search.builds import ENVIRONMENT, MODELS, MOST_VALUES, SPECULATION, BuildKnob
from search.engine.protocol import KnobValue
from search.knobs import METHOD, NO_DRAFTS
from search.secrets import is_secret_name
from search.section import Section, local_model

NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
POINTS = 6  # of a range without a step
OF_DRAFTS = (METHOD, "drafter")  # what is drafted, and how, changes no token that is kept
# Arguments that the search itself sets, or that would have it measure something else.
NOT_SEARCHED = (
    *("tokenizer", "seed", "served_model_name", "hf_overrides", "speculative_config", "enable_prefix_caching"),
    *("distributed_executor_backend", "disable_log_stats", "max_model_len"),
)


def read_build_knob(
    part: Section, name: str, earlier: Sequence[BuildKnob], methods: Sequence[str], folder: Path
) -> BuildKnob:
    """One knob that is no live one: `choices`, or a range from `low` to `high`.

    Args:
        part: its section of the file.
        name: an engine argument, or what else `search.builds` knows.
        earlier: the build knobs above it, which it may hang on.
        methods: of speculation, that the study has.
        folder: that paths of models are relative to.

    Raises:
        UsageError: naming the line, the key and what to write instead.
    """
    if not NAME.fullmatch(name) or name in NOT_SEARCHED:
        raise part.error(part.node, f"{part.key} cannot be searched")
    if is_secret_name(name.removeprefix(ENVIRONMENT)):
        raise part.error(part.node, f"{part.key} would store a secret with the study")
    values = _choices(part, name, folder) if "choices" in part.children else _range(part)
    if name == METHOD and (unknown := [v for v in values if v not in (NO_DRAFTS, *methods)]):
        known = ", ".join((NO_DRAFTS, *methods))
        raise part.error(part.node, f"{part.key}: {unknown[0]!r:.80} is not one of {known} (see engine.speculation)")
    default = values[0]
    if "default" in part.children:
        default = _value(part, "default", name, folder)
        if default not in values:
            raise part.error(part.children["default"][1], f"{part.key}: default ({default!r:.80}) is no value of it")
    affects = part.take("affects", str, "speed" if name in OF_DRAFTS or name.startswith(SPECULATION) else "both")
    if affects not in ("quality", "speed", "both"):
        raise part.error(part.children["affects"][1], f"{part.name('affects')} must be quality, speed or both")
    when = _when(part, earlier)
    part.done()
    return BuildKnob(name, values, default, affects != "speed", affects != "quality", when)


def _choices(part: Section, name: str, folder: Path) -> tuple[KnobValue, ...]:
    found = part.take("choices", list)
    values = [_checked(part, "choices", value, name, folder) for value in found]
    if not values or len({repr(value) for value in values}) < len(values) or len(values) > MOST_VALUES:
        raise part.error(part.children["choices"][1], f"{part.name('choices')} must be 1 to {MOST_VALUES} values")
    return tuple(values)


def _range(part: Section) -> tuple[KnobValue, ...]:
    """The values of a range: in steps, or so many points, evenly or by ratios."""
    ends = [_value(part, key) for key in ("low", "high")]
    if any(type(end) not in (int, float) for end in ends):
        raise part.error(part.node, f"{part.key} takes choices, or a range of numbers from low to high")
    low, high = (float(end) for end in ends)
    log = part.take("log", bool, False)
    whole = all(type(end) is int for end in ends)
    if low > high or (log and low <= 0):
        raise part.error(part.node, f"{part.key}: low must be at most high, and above 0 for log")
    step = part.optional("step", float, least=0)
    points = part.optional("points", int, least=2)
    if (step is not None and (log or points is not None)) or step == 0:
        raise part.error(part.node, f"{part.key} takes a step above 0, or points, or log with points")
    if step is not None:
        count = math.floor((high - low) / step + 1e-9) + 1
        found = [low + number * step for number in range(min(count, MOST_VALUES + 1))]
    else:
        shares = [number / ((points or POINTS) - 1) for number in range(min(points or POINTS, MOST_VALUES + 1))]
        found = [low * (high / low) ** s if log else low + s * (high - low) for s in shares]
    values = list(dict.fromkeys(round(v) if whole and step in (None, int(step or 0)) else _short(v) for v in found))
    if len(values) > MOST_VALUES:
        raise part.error(part.node, f"{part.key} has over {MOST_VALUES} values, each of which takes a new engine")
    return tuple(values)


def _short(value: float) -> float:
    """A value without the last digits that adding steps up leaves."""
    return float(f"{value:.10g}")


def _value(part: Section, key: str, name: str = "", folder: Path | None = None) -> KnobValue:
    part.taken.add(key)
    if key not in part.children:
        raise part.error(part.node, f"{part.name(key)} is missing (or give choices)")
    return _checked(part, key, part.value(part.children[key][1], key), name, folder)


def _checked(part: Section, key: str, value: Any, name: str, folder: Path | None) -> KnobValue:
    """A value that JSON, Optuna and a command line can all hold."""
    good = isinstance(value, str | bool | int | float) and (not isinstance(value, float) or math.isfinite(value))
    if not good or (isinstance(value, str) and not value.isprintable()):
        raise part.error(part.children[key][1], f"{part.name(key)} must hold numbers, texts, true or false")
    if name in MODELS and folder is not None:
        return local_model(part, part.children[key][1], part.key, str(value), folder)
    found: KnobValue = value
    return found


def _when(part: Section, earlier: Sequence[BuildKnob]) -> dict[str, tuple[KnobValue, ...]]:
    """On which values of earlier knobs it hangs."""
    part.taken.add("when")
    if "when" not in part.children:
        return {}
    known = {knob.name: knob for knob in earlier}
    found: dict[str, tuple[KnobValue, ...]] = {}
    for name, wanted in part.take("when", dict).items():
        values = tuple(wanted) if isinstance(wanted, list) else (wanted,)
        if name not in known or any(value not in known[name].values for value in values):
            what = f"{name!r:.80} must be a knob above it that takes a new engine, with values of its own"
            raise part.error(part.children["when"][1], f"{part.name('when')}: {what}")
        found[name] = values
    return found
