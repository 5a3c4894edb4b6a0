"""The study file: YAML in, frozen objects out. Every error names the file, the line and the key."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from search.data import GATE, HELD_OUT, TUNE, Prompt, Record, content_hash, read_prompts, read_records
from search.errors import UsageError
from search.knobs import KNOWN, Knob

T = TypeVar("T")


@dataclass(frozen=True)
class EngineSpec:
    """What is served: model and drafter (a folder or a hub id) and vLLM's engine arguments."""

    model: str
    drafter: str | None
    args: dict[str, Any]

    @property
    def model_name(self) -> str:
        """A hub id as it stands; of a folder, its last two names (miniature/target)."""
        return "/".join(self.model.rstrip("/").split("/")[-2:])


@dataclass(frozen=True)
class WarmupSpec:
    """The warm-up that the exported server runs before it answers."""

    prompts: int = 64
    max_tokens: int = 1
    seed: int = 42


@dataclass(frozen=True)
class WorkloadSpec:
    """What is decoded for TPS: `output_tokens` after each prompt.

    A trial times prompts until its interval is within ± `precision` (0.01 is 1 %), but no more than
    `prompts_per_trial` (None: all tune prompts). On a machine whose speed drifts, one control prompt at the
    reference setting is timed before, after and between every `control_prompts` of them (None: no such controls).
    Every `control_trials` timed trials, and in every new worker, several are.
    """

    prompts: Path
    output_tokens: int
    precision: float
    prompts_per_trial: int | None
    control_prompts: int | None
    control_trials: int
    warmup: WarmupSpec


@dataclass(frozen=True)
class GateSpec:
    """The perplexity test; exactly one of `ppl` and `ratio` (to the reference setting) is set."""

    records: Path
    ppl: float | None
    ratio: float | None


@dataclass(frozen=True)
class StudySpec:
    """One study file."""

    path: Path
    name: str
    engine: EngineSpec
    knobs: tuple[Knob, ...]
    workload: WorkloadSpec
    gate: GateSpec

    @property
    def folder(self) -> Path:
        """The folder that the file's paths are relative to."""
        return self.path.parent

    def with_ceiling(self, ppl: float) -> StudySpec:
        """The same study with an absolute ceiling."""
        return replace(self, gate=replace(self.gate, ppl=ppl, ratio=None))

    def prompts(self) -> list[Prompt]:
        """The tune prompts, in file order."""
        prompts = [p for p in read_prompts(self.workload.prompts) if p.split == TUNE]
        if len(prompts) < 2:
            raise UsageError(f"{self.workload.prompts} holds fewer than two tune prompts.")
        return prompts

    def held_out_prompts(self) -> list[Prompt]:
        """The prompts that the search never sees, in file order; there may be none."""
        return [p for p in read_prompts(self.workload.prompts) if p.split == HELD_OUT]

    def held_out_records(self) -> list[Record]:
        """The records that the search never sees, in file order; there may be none."""
        return [r for r in read_records(self.gate.records) if r.split == HELD_OUT]

    def records(self) -> list[Record]:
        """The gate records, in file order."""
        records = [r for r in read_records(self.gate.records) if r.split == GATE]
        if not records:
            raise UsageError(f"{self.gate.records} holds no gate records.")
        return records

    def definition(self) -> dict[str, Any]:
        """What must not change while a study goes on, by the name a user knows it under."""
        return {
            "engine.model": self.engine.model,
            "engine.drafter": self.engine.drafter,
            **{f"engine.args.{name}": value for name, value in self.engine.args.items()},
            **{f"knobs.{k.name}": {"low": k.low, "high": k.high, "step": k.step, "log": k.log} for k in self.knobs},
            "workload.prompts": content_hash(self.workload.prompts),
            "workload.output_tokens": self.workload.output_tokens,
            "gate.records": content_hash(self.gate.records),
            "gate.ceiling": {"ppl": self.gate.ppl} if self.gate.ppl is not None else {"ratio": self.gate.ratio},
        }


def read_study(path: Path) -> StudySpec:
    """Read and check a study file.

    Args:
        path: the file, or a folder that holds a study.yaml.

    Raises:
        UsageError: naming the file, the line, the key and what to write instead.
    """
    path = path / "study.yaml" if path.is_dir() else path
    try:
        node = yaml.compose(path.read_text())
    except OSError as error:
        raise UsageError(f"The study file {path} cannot be read: {error.strerror or error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)}).") from error
    if node is None:
        raise UsageError(f"The study file {path} is empty.")
    return _study(_Section(path, "", node), path)


@dataclass
class _Section:
    """A mapping of the file: takes its keys one by one and, at the end, complains of those not taken."""

    path: Path
    key: str
    node: yaml.Node
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(self.node, f"{self.key or 'the file'} must be a mapping of keys to values")
        self.children = {str(k.value): (k, v) for k, v in self.node.value}

    def error(self, node: yaml.Node, what: str) -> UsageError:
        return UsageError(f"{self.path}, line {node.start_mark.line + 1}: {what}.")

    def name(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def take(self, key: str, kind: type[T], default: T | None = None, *, least: float | None = None) -> T:
        self.taken.add(key)
        if key not in self.children:
            if default is None:
                raise self.error(self.node, f"{self.name(key)} is missing")
            return default
        node = self.children[key][1]
        value: Any = yaml.safe_load(yaml.serialize(node))
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(kind)
            raise self.error(node, f"{self.name(key)} must be {wanted or 'a mapping'}, not {value!r}")
        if least is not None and cast(float, value) < least:
            raise self.error(node, f"{self.name(key)} must be at least {least:g}, not {value!r}")
        return value

    def optional(self, key: str, kind: type[T], *, least: float | None = None) -> T | None:
        self.taken.add(key)
        return self.take(key, kind, least=least) if key in self.children else None

    def section(self, key: str) -> _Section:
        self.taken.add(key)
        if key not in self.children:
            raise self.error(self.node, f"{self.name(key)} is missing")
        return _Section(self.path, self.name(key), self.children[key][1])

    def done(self) -> None:
        for key, (node, _) in self.children.items():
            if key not in self.taken:
                close = difflib.get_close_matches(key, self.taken, n=1)
                hint = f"did you mean {close[0]}" if close else f"known are: {', '.join(sorted(self.taken))}"
                raise self.error(node, f"{self.name(key)} is not a key of a study file; {hint}")


def _study(top: _Section, path: Path) -> StudySpec:
    name = top.take("name", str)
    engine = _engine(top.section("engine"), path.parent)
    knobs = _knobs(top.section("knobs"), has_drafter=engine.drafter is not None)
    workload = _workload(top.section("workload"), path.parent)
    gate = _gate(top.section("gate"), path.parent)
    top.done()
    return StudySpec(path, name, engine, knobs, workload, gate)


def _engine(section: _Section, folder: Path) -> EngineSpec:
    model = _model(section, "model", folder)
    drafter = _model(section, "drafter", folder) if "drafter" in section.children else None
    section.taken.add("drafter")
    args = section.take("args", dict, {})
    section.done()
    return EngineSpec(model, drafter, args)


def _model(section: _Section, key: str, folder: Path) -> str:
    """A hub id as it stands, or a folder (written ./like/this) made absolute."""
    name = section.take(key, str)
    if not name.startswith((".", "/")):
        return name
    path = (folder / name).resolve()
    if not (path / "config.json").is_file():
        raise section.error(section.children[key][1], f"{section.name(key)}: no model in {path} (no config.json)")
    return str(path)


def _knobs(section: _Section, *, has_drafter: bool) -> tuple[Knob, ...]:
    knobs = []
    for name, (node, _) in section.children.items():
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {close[0]}" if close else f"known are: {', '.join(KNOWN)}"
            raise section.error(node, f"knobs.{name} is not a known knob; {hint}")
        if name != "sliding_window" and not has_drafter:
            raise section.error(node, f"knobs.{name} needs a drafter, and engine.drafter is not set")
        part = section.section(name)
        low = part.take("low", int, least=KNOWN[name].minimum)
        high = part.take("high", int)
        if high < low:
            raise part.error(node, f"knobs.{name}: high ({high}) is below low ({low})")
        knob = Knob(
            name,
            low,
            high,
            step=part.take("step", int, 1, least=1),
            log=part.take("log", bool, False),
            default=part.optional("default", int),
        )
        part.done()
        if knob.log and (knob.step != 1 or knob.low < 1):
            raise part.error(node, f"knobs.{name}: log needs low ≥ 1 and no step")
        if knob.default is not None and (not low <= knob.default <= high or (knob.default - low) % knob.step):
            raise part.error(node, f"knobs.{name}: default ({knob.default}) is not a value of the range")
        knobs.append(knob)
    if not knobs:
        raise section.error(section.node, "knobs names no knob to search")
    return tuple(sorted(knobs, key=lambda knob: list(KNOWN).index(knob.name)))


def _workload(section: _Section, folder: Path) -> WorkloadSpec:
    prompts = folder / section.take("prompts", str)
    tokens = section.take("output_tokens", int, least=2)
    precision = section.take("precision", float, 0.01, least=0.001)
    most = section.optional("prompts_per_trial", int, least=2)
    control_prompts, control_trials = None, 25
    if "control" in section.children:
        part = section.section("control")
        control_prompts = part.optional("prompts", int, least=1)
        control_trials = part.take("trials", int, control_trials, least=1)
        part.done()
    section.taken.add("control")
    warmup = WarmupSpec()
    if "warmup" in section.children:
        part = section.section("warmup")
        warmup = WarmupSpec(
            part.take("prompts", int, warmup.prompts, least=0),
            part.take("max_tokens", int, warmup.max_tokens, least=1),
            part.take("seed", int, warmup.seed),
        )
        part.done()
    section.taken.add("warmup")
    section.done()
    return WorkloadSpec(prompts, tokens, precision, most, control_prompts, control_trials, warmup)


def _gate(section: _Section, folder: Path) -> GateSpec:
    records = folder / section.take("records", str)
    ceiling = section.section("ceiling")
    ppl = ceiling.optional("ppl", float)
    ratio = ceiling.optional("ratio", float)
    ceiling.done()
    section.done()
    if (ppl is None) == (ratio is None):
        raise ceiling.error(ceiling.node, "gate.ceiling takes exactly one of ppl and ratio")
    if ppl is not None and ppl <= 1:
        raise ceiling.error(ceiling.node, f"gate.ceiling.ppl must be over 1, the least perplexity there is, not {ppl}")
    if ratio is not None and ratio < 1:
        raise ceiling.error(ceiling.node, f"gate.ceiling.ratio must be at least 1, not {ratio}")
    return GateSpec(records, ppl, ratio)
