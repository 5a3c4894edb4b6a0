"""The gates of a study: what its file asks of a setting, and what each finds. A setting has to pass all of them.

They stand in the order of GATES everywhere, and each is a constraint of its own: its excess, in its own unit, is at
most 0 where it holds. The cheapest come first: the records are scored, which is one prefill each, of a few records
alone where a setting is far off, and gives the perplexity that the front and the samplers rest on. Tasks are decoded
token by token, and only by a setting that the records have not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from search.data import content_hash, is_utf8
from search.section import Section

GATES = ("ppl", "top1", "kl", "exact")
WHOLE = 1e-9  # of one token or task: what a share in decimals may be off by


@dataclass(frozen=True)
class AgreementSpec:
    """Agreement with the reference setting over the gate records (see `search.agreement`); one at least is set.

    `top1` is the least share of target tokens whose likeliest token is the reference's, `kl` the most nats a token.
    """

    top1: float | None = None
    kl: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by their gate."""
        return {name: value for name, value in (("top1", self.top1), ("kl", self.kl)) if value is not None}


@dataclass(frozen=True)
class TaskSpec:
    """Tasks of `file`, answered greedily in at most `max_tokens` up to the first text of `stop`: see `search.answers`.

    Exactly one is set: `exact`, the least share of expected answers, or `drop`, by how much it may be under the
    reference setting's.
    """

    file: Path
    max_tokens: int
    stop: tuple[str, ...] = ()
    exact: float | None = None
    drop: float | None = None

    def least(self, reference: float) -> float:
        """The least share of expected answers, where the reference setting has `reference`."""
        return self.exact if self.exact is not None else reference - (self.drop or 0.0)


@dataclass(frozen=True)
class GateSpec:
    """The perplexity test, of which exactly one of `ppl` and `ratio` (to the reference setting) is set; and others."""

    records: Path
    ppl: float | None
    ratio: float | None
    agreement: AgreementSpec | None = None
    tasks: TaskSpec | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The gates that a setting has to pass, in the order of GATES."""
        agreement = self.agreement.limits if self.agreement is not None else {}
        return ("ppl", *agreement, *(("exact",) if self.tasks is not None else ()))

    def more_definition(self) -> dict[str, Any]:
        """What a study's definition says of the other gates; nothing where there are none, as before there were any."""
        found: dict[str, Any] = {}
        if self.agreement is not None:
            found["gate.agreement"] = self.agreement.limits
        if (tasks := self.tasks) is not None:
            found["gate.tasks.file"] = content_hash(tasks.file)
            found["gate.tasks"] = {"max_tokens": tasks.max_tokens, "stop": list(tasks.stop)}
            found["gate.tasks"] |= {"exact": tasks.exact} if tasks.exact is not None else {"drop": tasks.drop}
        return found


@dataclass(frozen=True)
class Finding:
    """What one gate says of a setting: `figure` over what was looked at, held against `limit`.

    `excess` is how far it is over its limit; where not all was looked at, as estimated from what was. `reason` says in
    words which gate this is, and by how much.
    """

    gate: str
    outcome: Literal["over", "under", "undecided"]
    figure: float
    limit: float
    excess: float
    reason: str

    def as_json(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {name: getattr(self, name) for name in ("outcome", "figure", "limit", "excess")}


def of_share(gate: str, what: str, good: int, used: int, of: int, least: float) -> Finding:
    """What a gate finds that asks for a share of at least `least` of all `of`.

    Over as soon as the rest cannot bring it back, whatever they are: that is exact, and assumes nothing.

    Args:
        gate: one of GATES.
        what: what is counted, for people ("of the tasks are answered as expected").
        good: how many of those looked at are so.
        used: how many were looked at.
        of: how many there are.
        least: the share that is asked for.
    """
    needed, figure = least * of - WHOLE, good / used
    over = good + (of - used) < needed
    outcome: Literal["over", "under", "undecided"] = "over" if over else "under" if used == of else "undecided"
    excess = least - figure if outcome != "under" else min(0.0, least - figure)
    early = f" after {used} of {of}, and the rest cannot bring it back" if used < of else ""
    reason = f"gate {gate}: {figure:.4f} {what}{early}; {least:.4f} is the least, missed by {excess:.4f}"
    return Finding(gate, outcome, figure, least, excess, reason)


def of_mean(gate: str, what: str, total: float, used: int, of: int, most: float) -> Finding:
    """What a gate finds that asks for a mean of at most `most` over all `of`, none of which is below 0.

    Over as soon as `total`, the sum over those looked at, is more than all together may have: that is exact, too.
    """
    figure = total / used
    over = total > most * of
    outcome: Literal["over", "under", "undecided"] = "over" if over else "under" if used == of else "undecided"
    excess = figure - most if outcome != "under" else min(0.0, figure - most)
    early = f" after {used} of {of}, and the rest cannot bring it back" if used < of else ""
    reason = f"gate {gate}: {figure:.4f} {what}{early}; {most:.4f} is the most, exceeded by {excess:.4f}"
    return Finding(gate, outcome, figure, most, excess, reason)


def words(reference: Mapping[str, Any] | None) -> str:
    """The gates beside perplexity, for people; nothing where there are none. `reference`: its `store.Outcome.gates`."""
    sides = {"top1": "at least", "kl": "at most", "exact": "at least"}
    asked = [
        f"{name} {sides[name]} {found['limit']:.4f} (the reference {found['figure']:.4f})"
        for name, found in (reference or {}).items()
        if name in sides
    ]
    return f"Other gates: {', '.join(asked)}." if asked else ""


def refusers(gates: Mapping[str, Any] | None) -> list[str]:
    """The gates that refused a setting; `gates` are its `store.Outcome.gates`."""
    return [name for name, found in (gates or {}).items() if found and found["outcome"] == "over"]


def constraints(gates: Mapping[str, Any]) -> dict[str, float]:
    """What Optuna is told of a trial's gates (see `store.Outcome`): each one's excess, in the order of GATES.

    A gate that was not asked, because another one had refused the setting, is told as 0: Optuna wants every constraint
    of every trial (it sums violations, and its GP and dashboard go by position), and 0 adds nothing to them.
    """
    return {name: float(gates[name]["excess"]) if gates[name] else 0.0 for name in GATES if name in gates}


def read_gate(section: Section, folder: Path) -> GateSpec:
    """The study file's `gate`; errors name the line and the key."""
    records = folder / section.take("records", str)
    ceiling = section.section("ceiling")
    ppl = ceiling.optional("ppl", float)
    ratio = ceiling.optional("ratio", float)
    ceiling.done()
    if (ppl is None) == (ratio is None):
        raise ceiling.error(ceiling.node, "gate.ceiling takes exactly one of ppl and ratio")
    if ppl is not None and ppl <= 1:
        raise ceiling.error(ceiling.node, f"gate.ceiling.ppl must be over 1, the least perplexity there is, not {ppl}")
    if ratio is not None and ratio < 1:
        raise ceiling.error(ceiling.node, f"gate.ceiling.ratio must be at least 1, not {ratio}")
    section.taken |= {"agreement", "tasks"}
    agreement = _agreement(section.section("agreement")) if "agreement" in section.children else None
    tasks = _tasks(section.section("tasks"), folder) if "tasks" in section.children else None
    section.done()
    return GateSpec(records, ppl, ratio, agreement, tasks)


def _agreement(part: Section) -> AgreementSpec:
    found = AgreementSpec(_share(part, "top1"), part.optional("kl", float, least=0))
    part.done()
    if found == AgreementSpec():
        raise part.error(part.node, "gate.agreement takes top1, kl, or both")
    return found


def _tasks(part: Section, folder: Path) -> TaskSpec:
    file = folder / part.take("file", str)
    max_tokens = part.take("max_tokens", int, least=1)
    stop = part.take("stop", list, [])
    if not all(isinstance(text, str) and text and is_utf8(text) for text in stop):
        raise part.error(part.children["stop"][1], "gate.tasks.stop must be a list of texts")
    exact, drop = _share(part, "exact"), _share(part, "drop")
    part.done()
    if (exact is None) == (drop is None):
        raise part.error(part.node, "gate.tasks takes exactly one of exact and drop")
    return TaskSpec(file, max_tokens, tuple(stop), exact, drop)


def _share(part: Section, key: str) -> float | None:
    found = part.optional(key, float, least=0)
    if found is not None and found > 1:
        raise part.error(part.children[key][1], f"{part.name(key)} is a share: it must be at most 1, not {found}")
    return found
