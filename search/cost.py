"""What a study's trials cost: seconds by stage, from what the store knows of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from search.store import REFERENCE, Store


@dataclass(frozen=True)
class StageCost:
    """One kind of work: how often it was done, and how many seconds it took, in the median and in all."""

    what: str
    times: int
    median_s: float
    total_s: float


def stage_costs(store: Store) -> list[StageCost]:
    """One line a kind of work that was done at all; the reference setting's stages are left out.

    Applying counts the probe that is decoded after a change. Speed counts the timed prompts alone, controls what the
    reference setting took between them; a trial's whole time also holds what the search itself takes.
    """
    stages = [m for m in store.stages() if m.trial != REFERENCE]
    gates = [m for m in stages if m.stage == "gate"]
    scored, remembered = ([m for m in gates if (m.status == "remembered") is kept] for kept in (False, True))
    timed = [m.wall_s for m in stages if (m.stage, m.status) == ("speed", "done")]
    trials = [o for o in store.outcomes() if o.reused_from is None]
    works = {
        "engine start": [e.start_s for e in store.environments()],
        "apply": [float(m.figures["apply_s"]) for m in gates if "apply_s" in m.figures],
        "gate, scored": [m.wall_s for m in scored],
        "gate, remembered": [m.wall_s for m in remembered],
        "tasks, answered": [m.wall_s for m in stages if (m.stage, m.status) == ("tasks", "done")],
        "speed": timed,
        "controls": [m.wall_s for m in stages if m.stage == "speed" and m.status in ("control", "drift")],
        "trial under the ceiling": [o.wall_s for o in trials if o.state == "COMPLETE"],
        "trial over the ceiling": [o.wall_s for o in trials if o.state == "PRUNED"],
    }
    return [
        StageCost(what, len(seconds), statistics.median(seconds), math.fsum(seconds))
        for what, seconds in works.items()
        if seconds
    ]


def table(costs: Sequence[StageCost]) -> list[str]:
    """The costs as lines of equal columns; none where there are no costs."""
    if not costs:
        return []
    width = max(len(cost.what) for cost in costs)
    return [
        f"{'':{width}}  times  median s  in all s",
        *(f"{c.what:<{width}}  {c.times:5d}  {c.median_s:8.2f}  {c.total_s:8.1f}" for c in costs),
    ]
