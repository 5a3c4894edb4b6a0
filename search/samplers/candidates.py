"""Which settings a sampler considers: at random, far from what was measured, and near what leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from search.engine.protocol import Setting
from search.knobs import words
from search.samplers.history import History
from search.samplers.problem import Problem, values

RANDOM, SPREAD = 1200, 64  # settings considered
STEPS = (-8, -4, -2, -1, 0, 1, 2, 4, 8)  # of a range, away from a leader


def any_setting(problem: Problem, draw: np.random.Generator, fixed: Mapping[str, object] | None = None) -> Setting:
    """A setting at random, evenly over what acts: by ratios where a knob does; `fixed` knobs as they are."""
    setting = {}
    for knob in problem.knobs:
        if fixed and knob.name in fixed:
            setting[knob.name] = fixed[knob.name]
            continue
        low, high = knob.low, knob.largest
        ratio = knob.log and low > 0
        value = low * (high / low) ** draw.random() if ratio else draw.integers(low, high + 1)
        setting[knob.name] = knob.nearest(round(float(value)))
    return problem.spelled(setting)


def random_setting(problem: Problem, past: History, draw: np.random.Generator) -> Setting:
    """A setting at random whose quality knobs are not known to be refused by a gate."""
    over = {problem.quality_key(m.setting) for m in past.measured if m.over(problem.ceiling)}
    found = any_setting(problem, draw)
    for _ in range(20):
        if problem.quality_key(found) not in over:
            break
        found = any_setting(problem, draw)
    return found


def far_from(problem: Problem, past: History, fixed: Mapping[str, object], draw: np.random.Generator) -> Setting:
    """Of some settings at random the one whose knobs that are not `fixed` lie farthest from all known settings.

    Distances go round the ends of a range, so that its ends are not preferred.
    """
    free = [i for i, knob in enumerate(problem.knobs) if knob.name not in fixed]
    pool = [any_setting(problem, draw, fixed) for _ in range(SPREAD)]
    known = [m.setting for m in past.measured] + list(past.pending)
    if not known or not free:
        return pool[0]
    taken = np.array([problem.point(s) for s in known])[:, free]
    points = np.array([problem.point(s) for s in pool])[:, free]
    apart = np.abs(points[:, None, :] - taken[None, :, :])
    nearest = (np.minimum(apart, 1 - apart) ** 2).sum(-1).min(axis=1)
    return pool[int(nearest.argmax())]


def candidates(problem: Problem, past: History, leaders: Sequence[Setting], draw: np.random.Generator) -> list[Setting]:
    """Settings not measured yet: at random, and near the leaders: one knob changed, or the rest of it at random."""
    pool = [any_setting(problem, draw) for _ in range(RANDOM)]
    quality = {knob.name for knob in problem.quality}
    for leader in leaders:
        kept = {name: value for name, value in leader.items() if name in quality}
        pool += [any_setting(problem, draw, kept) for _ in range(SPREAD)]
        for knob in problem.knobs:
            at = (int(str(leader[knob.name])) - knob.low) // knob.step
            for step in STEPS:
                if 0 <= at + step < len(values(knob)):
                    near = {**leader, knob.name: values(knob)[at + step]}
                    pool.append(problem.spelled(near))
                    for other in problem.knobs:
                        if other.name != knob.name and abs(step) == 1:
                            moved = other.nearest(int(str(near[other.name])) + int(draw.choice((-1, 1))) * other.step)
                            pool.append(problem.spelled({**near, other.name: moved}))
    known = {words(m.setting) for m in past.measured} | {words(s) for s in past.pending}
    different = {words(s): s for s in pool}
    return [s for key, s in different.items() if key not in known] or pool[:1]
