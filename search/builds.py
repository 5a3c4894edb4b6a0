"""What an engine is built with: knobs that only a new engine can change, and in which order builds are tried.

A knob of this kind is any of vLLM's engine arguments, a key of one that is a map (`compilation_config.mode`), an
environment key (`env.VLLM_…`), a key of the speculation (`speculation.prompt_lookup_max`), the `method` of speculation,
the `model` or `drafter` itself, or a name of ours that stands for some of them (`search.knobs.EXPANDED`). An engine
takes a minute or more to start, so trials are grouped: each build has its share of the trials, in one go, and none is
returned to.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from search.engine.protocol import KnobValue, Load, Setting
from search.knobs import DRAFTS, EXPANDED, METHOD, MTP, NO_DRAFTS, Knob, needs_method

LEAST_TRIALS = 8  # of a build: fewer say little of its live knobs
MOST_BUILDS = 100_000  # that a study file may stand for
MOST_VALUES = 64  # of one build knob

ENVIRONMENT, SPECULATION = "env.", "speculation."
MODELS = ("model", "drafter")


@dataclass(frozen=True)
class BuildKnob:
    """A knob that takes a new engine: its `values`, of which `default` is the reference's.

    It counts only where the knobs of `when` have one of the values given there; elsewhere no setting has it.
    """

    name: str
    values: tuple[KnobValue, ...]
    default: KnobValue
    affects_quality: bool = True
    affects_speed: bool = True
    when: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What must not change while a study goes on."""
        affects = {"quality": self.affects_quality, "speed": self.affects_speed}
        when = {name: list(values) for name, values in self.when.items()}
        return {"values": list(self.values), "default": self.default, "affects": affects, "when": when}

    def counts(self, build: Mapping[str, KnobValue]) -> bool:
        """Whether an engine built with `build` has this knob."""
        return all(build.get(name) in allowed for name, allowed in self.when.items())


@dataclass(frozen=True)
class Resolved:
    """What an engine is built from: `args` are vLLM's, `speculation` its speculative_config but for drafter and K."""

    model: str
    drafter: str | None
    args: dict[str, Any]
    speculation: dict[str, Any]
    environment: dict[str, str]

    @property
    def method(self) -> str:
        """The method of speculation, or NO_DRAFTS."""
        return str(self.speculation.get("method") or (MTP if self.drafter else NO_DRAFTS))


def part(knobs: Sequence[BuildKnob], setting: Mapping[str, KnobValue]) -> Setting:
    """The build knobs of a setting."""
    return {knob.name: setting[knob.name] for knob in knobs if knob.name in setting}


def base(knobs: Sequence[BuildKnob]) -> Setting:
    """The build that the reference setting is measured on: every knob's default."""
    found: Setting = {}
    for knob in knobs:
        if knob.counts(found):
            found[knob.name] = knob.default
    return found


def all_builds(knobs: Sequence[BuildKnob], known: Setting | None = None) -> Iterator[Setting]:
    """Every build that the knobs allow, each once."""
    known = known or {}
    if not knobs:
        yield known
        return
    first, *rest = knobs
    for value in first.values if first.counts(known) else (None,):
        yield from all_builds(rest, known if value is None else {**known, first.name: value})


def live_knobs(knobs: Sequence[Knob], method: str) -> tuple[Knob, ...]:
    """The live knobs that an engine with this method of speculation has."""
    return tuple(knob for knob in knobs if needs_method(knob.name, method))


def resolve(
    model: str,
    drafter: str | None,
    args: Mapping[str, Any],
    speculation: Mapping[str, Mapping[str, Any]],
    build: Mapping[str, KnobValue],
) -> Resolved:
    """What an engine is built from, under one build.

    Args:
        model: the study's.
        drafter: the study's, of the method MTP.
        args: the study's.
        speculation: what each other method is configured with, by method.
        build: values of the build knobs.
    """
    chosen = str(build.get(METHOD) or next(iter(speculation), MTP if drafter else NO_DRAFTS))
    config = {"method": chosen, **speculation.get(chosen, {})} if chosen not in (MTP, NO_DRAFTS) else {}
    uses = str(build.get("drafter", drafter)) if chosen == MTP and drafter else None
    merged: dict[str, Any] = dict(args)
    environment: dict[str, str] = {}
    for name, value in build.items():
        if name in (METHOD, *MODELS):
            continue
        if name.startswith(ENVIRONMENT):
            environment[name.removeprefix(ENVIRONMENT)] = str(value)
        elif name.startswith(SPECULATION):
            if config:
                config[name.removeprefix(SPECULATION)] = value
        elif name in EXPANDED:
            merged |= EXPANDED[name](value)
        else:
            _put(merged, name.split("."), value)
    return Resolved(str(build.get("model", model)), uses, merged, config, environment)


def _put(into: dict[str, Any], path: Sequence[str], value: KnobValue) -> None:
    """Set a value in nested maps, which are copied on the way."""
    first, *rest = path
    if not rest:
        into[first] = value
        return
    inner = into.get(first)
    into[first] = dict(inner) if isinstance(inner, Mapping) else {}
    _put(into[first], rest, value)


def load(resolved: Resolved, args: Mapping[str, Any], build: Setting, knobs: Sequence[Knob], seed: int) -> Load:
    """The request that builds an engine; `args` are those that all builds share."""
    limits: Setting = {knob.name: knob.largest for knob in live_knobs(knobs, resolved.method)}
    return Load(
        model=resolved.model,
        drafter=resolved.drafter,
        args=dict(args),
        limits=limits,
        seed=seed,
        build=build,
        build_args={name: value for name, value in resolved.args.items() if args.get(name) != value},
        speculation=resolved.speculation if limits.get(DRAFTS) else {},
        environment=resolved.environment,
    )


@dataclass(frozen=True)
class Plan:
    """Which builds are tried, in order, and how many trials each of them gets."""

    builds: tuple[Setting, ...]
    shares: tuple[int, ...]

    def following(
        self, counts: Sequence[int], closed: Collection[int], running: int | None, elsewhere: Collection[int]
    ) -> int | None:
        """The number of the build to measure the next trial on; None when each has its share.

        The running engine's is kept until it has its share, then one is taken that no other searcher is at, if
        there is one. What closed builds leave over goes to the others.

        Args:
            counts: trials of each build so far.
            closed: builds that will not be measured on any more.
            running: the build of this searcher's engine.
            elsewhere: the builds that other searchers are at.
        """
        left = sum(max(0, self.shares[n] - counts[n]) for n in closed)
        open_ones = [n for n in range(len(self.builds)) if n not in closed]
        more = -(-left // len(open_ones)) if open_ones else 0
        wanting = [n for n in open_ones if counts[n] < self.shares[n] + more]
        if running in wanting:
            return running
        free = [n for n in wanting if n not in elsewhere]
        return next(iter(free or wanting), None)


def plan(knobs: Sequence[BuildKnob], trials: int, has_live: bool, seed: int) -> Plan:
    """The plan of a study of so many trials: the reference's build first, then others in an order drawn once.

    Where there are more builds than trials can tell apart, some are drawn.
    """
    first = base(knobs)
    others = [build for build in all_builds(knobs) if build != first]
    random.Random(f"builds {seed}").shuffle(others)
    affordable = max(1, trials // (LEAST_TRIALS if has_live else 1))
    builds = [first, *others][:affordable]
    each, more = divmod(trials, len(builds))
    return Plan(tuple(builds), tuple(each + (n < more) for n in range(len(builds))))
