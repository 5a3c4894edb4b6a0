"""A study file as YAML nodes, which still know their lines: every error names the file, the line and the key."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from search.errors import UsageError

T = TypeVar("T")
MAX_BYTES = 1 << 20  # of a study file
MAX_NUMBER = 10**9
MAX_WORDS = 400  # characters of an error, which may quote the file


@dataclass
class Section:
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
        """The error to raise: `what` is wrong where `node` stands."""
        return UsageError(f"{self.path}, line {node.start_mark.line + 1}: {what:.{MAX_WORDS}}.")

    def name(self, key: str) -> str:
        """A key as a user knows it: with the sections around it."""
        return f"{self.key}.{key}" if self.key else key

    def take(self, key: str, kind: type[T], default: T | None = None, *, least: float | None = None) -> T:
        """The value of a key, which must be of this kind; needed where there is no default."""
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
        """The value of a key, or None where it is not given."""
        self.taken.add(key)
        return self.take(key, kind, least=least) if key in self.children else None

    def section(self, key: str) -> Section:
        """The mapping under a key."""
        self.taken.add(key)
        if key not in self.children:
            raise self.error(self.node, f"{self.name(key)} is missing")
        return Section(self.path, self.name(key), self.children[key][1])

    def done(self) -> None:
        """Complain of a key that nobody took."""
        for key, (node, _) in self.children.items():
            if key not in self.taken:
                close = difflib.get_close_matches(key, self.taken, n=1)
                hint = f"did you mean {close[0]}" if close else f"known are: {', '.join(sorted(self.taken))}"
                raise self.error(node, f"{self.name(key)} is not a key of a study file; {hint}")


def line_of(path: Path, key: str) -> int | None:
    """The line of the study file on which `key` (knobs.sliding_window.high) stands, or the nearest key above it."""
    node, line = compose(path), None
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((k, v) for k, v in node.value if k.value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def compose(path: Path) -> yaml.Node | None:
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


def local_model(section: Section, node: yaml.Node, key: str, name: str, folder: Path) -> str:
    """A hub id as it stands, or a folder made absolute, which must hold a model."""
    if not name.startswith((".", "/")):
        return name
    path = (folder / name).resolve()
    if not (path / "config.json").is_file():
        raise section.error(node, f"{key}: no model in {path} (no config.json)")
    return str(path)


def plain(value: Any) -> bool:
    """Whether JSON can hold a value as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, str, int) or (type(value) is float and math.isfinite(value))
