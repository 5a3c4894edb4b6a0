"""Inject faults into whole searches, run the same command until it is done, and look at what is left.

    python -m tests.faults.campaign --faults 200         on the simulated engine, three searches at a time
    python -m tests.faults.campaign --real               kills and hangs on the real miniature (a quarter of an hour)

Prints a table: fault, stage, how often it was injected, and what was lost (nothing, if all is well). Exit code 1 if
anything was.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.trial import TrialState

from search.engine.group import marked
from search.store import Outcome, Store, open_engine, pareto_front
from tests.faults.engine import FAULTS_OF_STAGE, HARMLESS
from tests.faults.study import small_miniature, write_study

ROOT = Path(__file__).resolve().parents[2]
MOST_RUNS = 12  # of one command, each of which a fault may end
AT_ONCE = 3  # searches on the simulated engine


@dataclass(frozen=True)
class Bench:
    """What is searched: `calls` of each stage are those among which a fault is placed."""

    engine: str
    trials: int
    faults_a_search: int
    calls: dict[str, int]
    exact: bool  # the machine has no noise, so that figures can be compared to the last digit


SIMULATED = Bench(
    "tests.faults.engine:FaultyEngine", 16, 5, {"build": 1, "apply": 40, "gate": 60, "speed": 120}, exact=True
)
REAL = Bench(
    "tests.faults.real_engine:FaultyVllm", 8, 4, {"build": 1, "apply": 12, "gate": 30, "speed": 60}, exact=False
)
REAL_FAULTS = [
    *((stage, "kill worker") for stage in ("apply", "gate", "speed")),
    *((stage, "kill both") for stage in ("build", "gate")),
    ("speed", "kill parent"),
    *((stage, "stop") for stage in ("gate", "speed")),
]
GONE_S = 5.0  # after which nothing may be left of a search that was killed


@dataclass
class Search:
    """One search that was disturbed: its faults and those that fired, exit codes of its runs, and what is wrong."""

    faults: list[dict]
    fired: list[dict] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(bench, study, folder, faults, seed=0):
    """Search `study` under `faults` with its database in `folder`, until the command says that it is done."""
    folder.mkdir()
    database = folder / "study.db"
    env = {
        **os.environ,
        "FAULTS": json.dumps(faults),
        "FAULTS_FOLDER": str(folder),
        "FAULTS_DATABASE": str(database),
    }
    command = [sys.executable, "-m", "tests.faults.driver", str(folder), "--study", str(study), "--json"]
    command += ["--trials", str(bench.trials), "--storage", f"sqlite:///{database}", "--seed", str(seed)]
    command += ["--logs", str(folder / "logs"), "--engine", bench.engine]
    command += ["--sampler", "tpe"]  # the default goes by the seconds that trials took, which faults change
    search = Search(faults)
    while len(search.codes) < MOST_RUNS:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
        search.codes.append(done.returncode)
        if done.returncode == -signal.SIGKILL:
            search.wrong += still_there(folder)
        if "Traceback" in done.stderr:
            search.wrong.append(f"a traceback: {done.stderr[-800:]}")
        if done.returncode == 0:
            break
    else:
        search.wrong.append(f"not done after {MOST_RUNS} runs: {done.stderr[-300:]}")
    search.fired = [fault for number, fault in enumerate(faults) if (folder / f"fired-{number}").exists()]
    return search


def still_there(folder):
    """What is left of a search that was killed just now; it is given GONE_S."""
    started = time.monotonic()
    while left := marked(marks(folder)):
        if time.monotonic() - started > GONE_S:
            return [f"processes {left} live on {GONE_S} s after their search was killed"]
        time.sleep(0.05)
    print(f"  gone {time.monotonic() - started:.1f} s after the kill")
    return []


def marks(folder):
    """Marks of the process groups that a search's database says may be running."""
    with sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True) as database:
        return {mark for (mark,) in database.execute("SELECT mark FROM pareto_process")}


def opened(folder):
    """The only study of a search's database, in our store and in Optuna's."""
    storage = f"sqlite:///{folder / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    return Store(open_engine(storage), name), optuna.load_study(study_name=name, storage=storage)


def look(bench, search, folder, undisturbed):
    """Add what is wrong with what a search has left behind."""
    wrong, (store, study) = search.wrong, opened(folder)
    finished = [o for o in store.outcomes() if o.state != "FAIL"]
    trials = study.get_trials()
    if len(finished) != bench.trials:
        wrong.append(f"{len(finished)} trials finished, not {bench.trials}")
    told = {t.number: t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)}
    if sorted(told) != [o.trial for o in finished]:
        wrong.append("Optuna was told of other trials than are stored")
    if any(t.state in (TrialState.RUNNING, TrialState.WAITING) for t in trials):
        wrong.append("a trial is still open")
    for o in finished:
        if told[o.trial].constraints.get("ppl") != o.excess:
            wrong.append(f"trial {o.trial} has a wrong constraint")
        wrong += missing_rows(store, o)
    if {p.trial for p in store.front()} != {o.trial for o in pareto_front(as_measured_last(finished))}:
        wrong.append("the stored front is not the outcomes' front")
    truth = {o.setting_key: (o.state, o.ppl) for o in undisturbed}
    wrong += [
        f"trial {o.trial} has other figures than undisturbed"
        for o in finished
        if o.setting_key in truth and (o.state, o.ppl) != truth[o.setting_key]
    ]
    harmless = bench.exact and all(fault["kind"] in HARMLESS for fault in search.fired)
    if harmless and front_of(finished) != front_of(undisturbed):
        wrong.append("the front is not the undisturbed one")
    if marks(folder):
        wrong.append("a process may be left")
    if left := [p.name for p in folder.iterdir() if "spool" in p.name]:
        wrong.append(f"files are left: {left}")


def missing_rows(store, outcome: Outcome):
    """Which of a trial's rows are not there exactly once."""
    if outcome.reused_from is not None:
        return []
    stages = {
        "gate": sum(len(store.measurements("gate", s, outcome.trial)) for s in ("done", "remembered", "proof")),
        "speed": len(store.measurements("speed", "done", outcome.trial)),
    }
    wanted = {"gate": 1, "speed": int(outcome.state == "COMPLETE")}
    return [f"trial {outcome.trial} has {stages[s]} {s} rows" for s in stages if stages[s] != wanted[s]]


def as_measured_last(outcomes):
    """The timed trials, each setting's by its last measurement."""
    timed = [o for o in outcomes if o.state == "COMPLETE"]
    last = {o.setting_key: o.trial for o in timed if o.reused_from is None}
    return [o for o in timed if o.source == last[o.setting_key]]


def front_of(outcomes):
    """The front as what was measured: settings with their figures."""
    front = pareto_front(as_measured_last(outcomes))
    return sorted((o.setting_key, round(o.tps, 6), round(o.ppl, 9)) for o in front)


def plans(bench, pairs, draw):
    """Faults (stage, kind), some a search; harmless ones are not mixed with others."""
    for group in ([p for p in pairs if p[1] in HARMLESS], [p for p in pairs if p[1] not in HARMLESS]):
        for start in range(0, len(group), bench.faults_a_search):
            yield [
                {"stage": stage, "kind": kind, "call": draw.randint(1, bench.calls[stage])}
                for stage, kind in group[start : start + bench.faults_a_search]
            ]


def campaign(bench, study, folder, pairs, seed=0):
    """Run all plans; yields each search when it has been looked at, the undisturbed one first."""
    calm = run(bench, study, folder / "calm", [])
    undisturbed = [o for o in opened(folder / "calm")[0].outcomes() if o.state != "FAIL"]
    look(bench, calm, folder / "calm", undisturbed)
    yield calm

    def disturbed(number, faults):
        search = run(bench, study, folder / str(number), faults)
        look(bench, search, folder / str(number), undisturbed)
        return search

    with ThreadPoolExecutor(AT_ONCE if bench.exact else 1) as pool:
        yield from pool.map(disturbed, *zip(*enumerate(plans(bench, pairs, random.Random(seed))), strict=True))


def every_fault(count, seed=0):
    """So many faults: every kind at every stage in turn."""
    pairs = [(stage, kind) for stage, kinds in FAULTS_OF_STAGE.items() for kind in kinds]
    random.Random(seed).shuffle(pairs)
    return [pairs[i % len(pairs)] for i in range(count)]


def table(searches):
    """Lines: fault, stage, injected, searches in which something was wrong."""
    injected = Counter((f["kind"], f["stage"]) for s in searches for f in s.fired)
    bad = Counter((f["kind"], f["stage"]) for s in searches if s.wrong for f in s.fired)
    lines = [f"{'fault':22}{'stage':8}{'injected':>9}{'lost':>6}"]
    lines += [f"{kind:22}{stage:8}{n:9}{bad[kind, stage]:6}" for (kind, stage), n in sorted(injected.items())]
    return [*lines, f"{'in all':30}{sum(injected.values()):9}{sum(len(s.wrong) for s in searches):6}"]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description="Inject faults into searches.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    bench = REAL if args.real else SIMULATED
    pairs = REAL_FAULTS if args.real else every_fault(args.faults, args.seed)
    searches = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        study = small_miniature(folder / "study") if args.real else write_study(folder / "study")
        for search in campaign(bench, study, folder, pairs, args.seed):
            searches.append(search)
            print(f"{search.fired}: exit codes {search.codes}", flush=True)
            for what in search.wrong:
                print(f"  WRONG: {what}", flush=True)
    print("\n".join(table(searches)))
    return int(any(search.wrong for search in searches))


if __name__ == "__main__":
    sys.exit(main())
