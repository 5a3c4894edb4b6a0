"""The study file: YAML in, frozen objects out. Every error names the file, the line and the key."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from search.data import GATE, HELD_OUT, TUNE, Prompt, Record, Task, content_hash, read_prompts, read_records, read_tasks
from search.errors import UsageError
from search.gates import GateSpec, read_gate
from search.knobs import KNOWN, Knob
from search.secrets import is_secret_name

T = TypeVar("T")
LEAST_TUNE = 3  # prompts; two say nothing of how they differ
MAX_BYTES = 1 << 20  # of a study file
MAX_NUMBER = 10**9
MAX_WORDS = 400  # characters of an error, which may quote the file
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it becomes part of file names


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
    """One study file."""

    path: Path
    name: str
    engine: EngineSpec
    knobs: tuple[Knob, ...]
    workload: WorkloadSpec
    gate: GateSpec
    limits: LimitSpec

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
            **{f"knobs.{k.name}": {"low": k.low, "high": k.high, "step": k.step, "log": k.log} for k in self.knobs},
            "workload.prompts": content_hash(self.workload.prompts),
            "workload.output_tokens": self.workload.output_tokens,
            "gate.records": content_hash(self.gate.records),
            "gate.ceiling": {"ppl": self.gate.ppl} if self.gate.ppl is not None else {"ratio": self.gate.ratio},
            **self.gate.more_definition(),
        }


def read_study(path: Path) -> StudySpec:
    """Read and check a study file.

    Args:
        path: the file, or a folder that holds a study.yaml.

    Raises:
        UsageError: naming the file, the line, the key and what to write instead.
    """
    path = path / "study.yaml" if path.is_dir() else path
    node = _compose(path)
    if node is None:
        raise UsageError(f"The study file {path} is empty.")
    return _study(_Section(path, "", node), path)


def line_of(path: Path, key: str) -> int | None:
    """The line of the study file on which `key` (knobs.sliding_window.high) stands, or the nearest key above it."""
    node, line = _compose(path), None
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((k, v) for k, v in node.value if k.value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _compose(path: Path) -> yaml.Node | None:
    """The file as YAML nodes, which still know their lines; without anchors, which can make a small file huge."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"The study file {path} cannot be read: {error.strerror or error}.") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"The study file {path} is larger than 1 MiB: this is no study file.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8.") from error
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise UsageError(f"{path}, line {line}: aliases (*name) are not supported.")
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_words = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise UsageError(f"{path}{line_words}: not valid YAML ({problem}).") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not a study file (nested too deeply).") from error


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
        self.children: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(key, f"{self.key or 'the file'} has a key that is no word")
            if key.value in self.children:
                raise self.error(key, f"{self.name(key.value)} stands there twice")
            self.children[key.value] = (key, value)

    def error(self, node: yaml.Node, what: str) -> UsageError:
        return UsageError(f"{self.path}, line {node.start_mark.line + 1}: {what:.{MAX_WORDS}}.")

    def name(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def take(self, key: str, kind: type[T], default: T | None = None, *, least: float | None = None) -> T:
        self.taken.add(key)
        if key not in self.children:
            if default is None:
                raise self.error(self.node, f"{self.name(key)} is missing")
            return default
        node = self.children[key][1]
        value = self.value(node, key)
        if kind is float and type(value) is int and abs(value) <= MAX_NUMBER:
            value = float(value)
        if type(value) is not kind:
            wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}.get(
                kind
            )
            raise self.error(node, f"{self.name(key)} must be {wanted or 'a mapping'}, not {value!r:.80}")
        if type(value) in (int, float) and not abs(cast(float, value)) <= MAX_NUMBER:  # nor is it NaN
            raise self.error(node, f"{self.name(key)} must be a number up to {MAX_NUMBER:,}, not {value!r:.40}")
        if isinstance(value, str) and not value.isprintable():
            raise self.error(node, f"{self.name(key)} holds characters that cannot be printed")
        if least is not None and cast(float, value) < least:
            raise self.error(node, f"{self.name(key)} must be at least {least:g}, not {value!r}")
        found: T = value
        return found

    def value(self, node: yaml.Node, key: str) -> Any:
        """What a node holds; tags that YAML's own types do not know are an error."""
        try:
            return yaml.safe_load(yaml.serialize(node))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            problem = getattr(error, "problem", None) or "not a value"
            raise self.error(node, f"{self.name(key)} cannot be read ({problem})") from error

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
    if not NAME.fullmatch(name):
        raise top.error(top.children["name"][1], f"name must be letters, digits, dots and dashes, not {name!r:.80}")
    engine = _engine(top.section("engine"), path.parent)
    knobs = _knobs(top.section("knobs"), has_drafter=engine.drafter is not None)
    workload = _workload(top.section("workload"), path.parent)
    gate = read_gate(top.section("gate"), path.parent)
    limits = _limits(top)
    top.done()
    return StudySpec(path, name, engine, knobs, workload, gate, limits)


def _engine(section: _Section, folder: Path) -> EngineSpec:
    model = _model(section, "model", folder)
    drafter = _model(section, "drafter", folder) if "drafter" in section.children else None
    section.taken.add("drafter")
    args = section.take("args", dict, {})
    for name, value in args.items():
        node = section.children["args"][1]
        if not isinstance(name, str) or not _plain(value):
            raise section.error(
                node, f"engine.args.{name} must be a number, text, true, false, or lists and maps of them"
            )
        if is_secret_name(name):
            raise section.error(node, f"engine.args.{name} would store a secret with the study: set HF_TOKEN instead")
    section.done()
    return EngineSpec(model, drafter, args)


def _plain(value: Any) -> bool:
    """Whether JSON can hold a value as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or type(value) in (bool, str, int) or (type(value) is float and math.isfinite(value))


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
        if KNOWN[name].needs_drafter and not has_drafter:
            raise section.error(node, f"knobs.{name} needs a drafter, and engine.drafter is not set")
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


def _limits(top: _Section) -> LimitSpec:
    if "limits" not in top.children:
        top.taken.add("limits")
        return LimitSpec()
    section = top.section("limits")
    values = {f.name: section.take(f.name, float, getattr(LimitSpec, f.name), least=1) for f in fields(LimitSpec)}
    section.done()
    return LimitSpec(**values)
