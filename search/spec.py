"""The study file: YAML in, frozen objects out. Every error names the file, the line and the key."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from search import builds
from search.buildknobs import read_build_knob
from search.data import (
    GATE,
    HELD_OUT,
    TUNE,
    Prompt,
    Record,
    Task,
    Wave,
    content_hash,
    json_hash,
    read_prompts,
    read_records,
    read_tasks,
    waves,
)
from search.engine.protocol import KnobValue, Load, Setting
from search.errors import UsageError
from search.gates import GateSpec, read_gate
from search.knobs import KNOWN, METHOD, MTP, NO_DRAFTS, Knob
from search.objectives import DEFAULT, read_objectives
from search.objectives import KEY as OBJECTIVES
from search.secrets import is_secret_name
from search.section import Section, compose, line_of, local_model, plain

LEAST_TUNE = 3  # prompts, or waves of them; two say nothing of how they differ
LEAST_HELD_OUT = 2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it becomes part of file names


@dataclass(frozen=True)
class EngineSpec:
    """What is served: model and drafter (a folder or a hub id) and vLLM's engine arguments.

    `speculation` holds what each method of speculation but the drafter's own is configured with, by method.
    """

    model: str
    drafter: str | None
    args: dict[str, Any]
    speculation: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """The methods of speculation that there are."""
        return [*([MTP] if self.drafter else []), *self.speculation]

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

    With a `concurrency` above 1 so many prompts are decoded at the same time, and such a wave takes the place of a
    prompt in all of this.
    """

    prompts: Path
    output_tokens: int
    precision: float
    prompts_per_trial: int | None
    control_prompts: int | None
    control_trials: int
    warmup: WarmupSpec
    concurrency: int = 1

    @property
    def wave_tokens(self) -> int:
        """Tokens that a wave generates."""
        return self.concurrency * self.output_tokens


@dataclass(frozen=True)
class LimitSpec:
    """Seconds that each stage may take, and that a worker or server may be silent (no answer, nothing in its log)."""

    build_s: float = 1800.0
    apply_s: float = 300.0
    gate_s: float = 3600.0
    speed_s: float = 3600.0
    confirm_s: float = 7200.0
    stall_s: float = 300.0

    def seconds(self, stage: str) -> float:
        """The limit of a stage, by its name."""
        return float(getattr(self, f"{stage}_s"))


@dataclass(frozen=True)
class StudySpec:
    """One study file. `objectives` are what the front is made of, in the order of `search.objectives`."""

    path: Path
    name: str
    engine: EngineSpec
    knobs: tuple[Knob, ...]
    workload: WorkloadSpec
    gate: GateSpec
    limits: LimitSpec
    build_knobs: tuple[builds.BuildKnob, ...] = ()
    objectives: tuple[str, ...] = DEFAULT

    @property
    def of_speed(self) -> frozenset[str]:
        """The build knobs that are said not to change perplexity."""
        return frozenset(knob.name for knob in self.build_knobs if not knob.affects_quality)

    def build_of(self, setting: Mapping[str, KnobValue]) -> Setting:
        """The part of a setting that its engine is built with."""
        return builds.part(self.build_knobs, setting)

    def build_key(self, setting: Mapping[str, KnobValue]) -> str:
        """The engine of a setting as one comparable text: settings with one key need no other engine."""
        return json_hash(self.build_of(setting))

    def resolved(self, setting: Mapping[str, KnobValue]) -> builds.Resolved:
        """What the engine of a setting is built from."""
        engine = self.engine
        return builds.resolve(engine.model, engine.drafter, engine.args, engine.speculation, self.build_of(setting))

    def knobs_of(self, setting: Mapping[str, KnobValue]) -> tuple[Knob, ...]:
        """The live knobs that the engine of a setting has."""
        return builds.live_knobs(self.knobs, self.resolved(setting).method)

    def load(self, setting: Mapping[str, KnobValue], seed: int) -> Load:
        """The request that builds the engine of a setting."""
        return builds.load(self.resolved(setting), self.engine.args, self.build_of(setting), self.knobs, seed)

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
        if len(prompts) < LEAST_TUNE:
            raise UsageError(f"{self.workload.prompts} holds {len(prompts)} tune prompts: {LEAST_TUNE} are needed.")
        return prompts

    def waves(self) -> list[Wave]:
        """The tune prompts as they are timed, in file order; a last wave that is not full is left out."""
        return self._enough(self.prompts(), LEAST_TUNE)

    def held_out_waves(self) -> list[Wave]:
        """The same of the prompts that the search never sees; there may be none, but not one alone."""
        prompts = self.held_out_prompts()
        return self._enough(prompts, LEAST_HELD_OUT) if prompts else []

    def _enough(self, prompts: list[Prompt], least: int) -> list[Wave]:
        found = waves(prompts, self.workload.concurrency)
        if len(found) < least:
            key, number = "workload.concurrency", self.workload.concurrency
            raise UsageError(
                f"{self.path}, line {line_of(self.path, key)}: {key}: {len(prompts)} {prompts[0].split} prompts make "
                f"{len(found)} waves of {number}, and {least} are needed."
            )
        return found

    def held_out_prompts(self) -> list[Prompt]:
        """The prompts that the search never sees, in file order; there may be none, but not one alone."""
        prompts = [p for p in read_prompts(self.workload.prompts) if p.split == HELD_OUT]
        if len(prompts) == 1:
            raise UsageError(f"{self.workload.prompts} holds one held-out prompt: no claim can rest on one.")
        return prompts

    def held_out_records(self) -> list[Record]:
        """The records that the search never sees, in file order; there may be none."""
        return [r for r in read_records(self.gate.records) if r.split == HELD_OUT]

    def records(self) -> list[Record]:
        """The gate records, in file order."""
        records = [r for r in read_records(self.gate.records) if r.split == GATE]
        if not records:
            raise UsageError(f"{self.gate.records} holds no gate records.")
        return records

    def tasks(self) -> list[Task]:
        """The gate's tasks, in file order; none where it has none."""
        return read_tasks(self.gate.tasks.file) if self.gate.tasks is not None else []

    def definition(self) -> dict[str, Any]:
        """What must not change while a study goes on, by the name a user knows it under."""
        return {
            "engine.model": self.engine.model,
            "engine.drafter": self.engine.drafter,
            **{f"engine.args.{name}": value for name, value in self.engine.args.items()},
            **({"engine.speculation": self.engine.speculation} if self.engine.speculation else {}),
            **{f"knobs.{k.name}": {"low": k.low, "high": k.high, "step": k.step, "log": k.log} for k in self.knobs},
            **{f"knobs.{k.name}": k.as_json() for k in self.build_knobs},
            "workload.prompts": content_hash(self.workload.prompts),
            "workload.output_tokens": self.workload.output_tokens,
            **({"workload.concurrency": self.workload.concurrency} if self.workload.concurrency > 1 else {}),
            "gate.records": content_hash(self.gate.records),
            "gate.ceiling": {"ppl": self.gate.ppl} if self.gate.ppl is not None else {"ratio": self.gate.ratio},
            **self.gate.more_definition(),
            **({OBJECTIVES: list(self.objectives)} if self.objectives != DEFAULT else {}),
        }


def read_study(path: Path) -> StudySpec:
    """Read and check a study file.

    Args:
        path: the file, or a folder that holds a study.yaml.

    Raises:
        UsageError: naming the file, the line, the key and what to write instead.
    """
    path = path / "study.yaml" if path.is_dir() else path
    node = compose(path)
    if node is None:
        raise UsageError(f"The study file {path} is empty.")
    return _study(Section(path, "", node), path)


def _study(top: Section, path: Path) -> StudySpec:
    name = top.take("name", str)
    if not NAME.fullmatch(name):
        raise top.error(top.children["name"][1], f"name must be letters, digits, dots and dashes, not {name!r:.80}")
    engine = _engine(top.section("engine"), path.parent)
    knobs, of_build = _knobs(top.section("knobs"), engine, path.parent)
    workload = _workload(top.section("workload"), path.parent)
    gate = read_gate(top.section("gate"), path.parent)
    limits = _limits(top)
    objectives = read_objectives(top)
    top.done()
    return StudySpec(path, name, engine, knobs, workload, gate, limits, of_build, objectives)


def _engine(section: Section, folder: Path) -> EngineSpec:
    model = _model(section, "model", folder)
    drafter = _model(section, "drafter", folder) if "drafter" in section.children else None
    section.taken.add("drafter")
    args = section.take("args", dict, {})
    for name, value in args.items():
        node = section.children["args"][1]
        if not isinstance(name, str) or not plain(value):
            raise section.error(
                node, f"engine.args.{name} must be a number, text, true, false, or lists and maps of them"
            )
        if is_secret_name(name):
            raise section.error(node, f"engine.args.{name} would store a secret with the study: set HF_TOKEN instead")
    speculation = _speculation(section, folder)
    section.done()
    return EngineSpec(model, drafter, args, speculation)


def _speculation(section: Section, folder: Path) -> dict[str, dict[str, Any]]:
    """What each method of speculation is configured with; a model among it is a hub id, or a folder made absolute."""
    found: dict[str, dict[str, Any]] = {}
    section.taken.add("speculation")
    if "speculation" not in section.children:
        return found
    methods = section.section("speculation")
    for method, (node, value) in methods.children.items():
        config = methods.take(method, dict, {}) if not _is_null(value) else {}
        if method in (MTP, NO_DRAFTS) or not NAME.fullmatch(method):
            what = "a drafter stands under engine.drafter" if method == MTP else "it is no method of vLLM's"
            raise section.error(node, f"engine.speculation.{method}: {what}")
        if not plain(config) or {"method", "num_speculative_tokens"} & config.keys():
            raise section.error(node, f"engine.speculation.{method} must map vLLM's keys but method and K to values")
        if isinstance(config.get("model"), str):
            config["model"] = local_model(section, node, f"engine.speculation.{method}.model", config["model"], folder)
        found[method] = config
    return found


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _model(section: Section, key: str, folder: Path) -> str:
    """A hub id as it stands, or a folder (written ./like/this) made absolute."""
    name = section.take(key, str)
    return local_model(section, section.children[key][1], section.name(key), name, folder)


def _knobs(section: Section, engine: EngineSpec, folder: Path) -> tuple[tuple[Knob, ...], tuple[builds.BuildKnob, ...]]:
    """The live knobs, and those that an engine is built with."""
    knobs: list[Knob] = []
    of_build: list[builds.BuildKnob] = []
    for name, (node, _) in section.children.items():
        if name not in KNOWN:
            close = difflib.get_close_matches(name, [*KNOWN, METHOD], n=1, cutoff=0.8)
            if close and name != METHOD:
                raise section.error(node, f"knobs.{name} is not a known knob; did you mean {close[0]}")
            of_build.append(read_build_knob(section.section(name), name, of_build, engine.methods, folder))
            continue
        if KNOWN[name].needs_mtp and engine.drafter is None:
            raise section.error(node, f"knobs.{name} needs a drafter, and engine.drafter is not set")
        if KNOWN[name].needs_drafter and not engine.methods:
            what = "a drafter or another method, and neither engine.drafter nor engine.speculation is set"
            raise section.error(node, f"knobs.{name} needs {what}")
        part = section.section(name)
        low = part.take("low", int, least=KNOWN[name].minimum)
        high = part.take("high", int)
        if high < low:
            raise part.error(node, f"knobs.{name}: high ({high}) is below low ({low})")
        most = KNOWN[name].maximum
        if most is not None and high > most:
            raise part.error(node, f"knobs.{name}: high ({high}) is over {most}")
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
    if not knobs and not of_build:
        raise section.error(section.node, "knobs names no knob to search")
    if len(engine.methods) > 1 and METHOD not in (knob.name for knob in of_build):
        several = " and ".join(engine.methods)
        raise section.error(section.node, f"engine has several methods of speculation ({several}): make method a knob")
    count = sum(1 for _ in itertools.islice(builds.all_builds(of_build), builds.MOST_BUILDS + 1))
    if count > builds.MOST_BUILDS:
        raise section.error(section.node, f"knobs stand for more than {builds.MOST_BUILDS:,} different engines")
    return tuple(sorted(knobs, key=lambda knob: list(KNOWN).index(knob.name))), tuple(of_build)


def _workload(section: Section, folder: Path) -> WorkloadSpec:
    prompts = folder / section.take("prompts", str)
    tokens = section.take("output_tokens", int, least=2)
    precision = section.take("precision", float, 0.01, least=0.001)
    if precision >= 1:
        node = section.children["precision"][1]
        raise section.error(node, f"workload.precision must be under 1 (0.02 is ± 2 %), not {precision:g}")
    most = section.optional("prompts_per_trial", int, least=2)
    concurrency = section.take("concurrency", int, 1, least=1)
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
    return WorkloadSpec(prompts, tokens, precision, most, control_prompts, control_trials, warmup, concurrency)


def _limits(top: Section) -> LimitSpec:
    if "limits" not in top.children:
        top.taken.add("limits")
        return LimitSpec()
    section = top.section("limits")
    values = {f.name: section.take(f.name, float, getattr(LimitSpec, f.name), least=1) for f in fields(LimitSpec)}
    section.done()
    return LimitSpec(**values)
