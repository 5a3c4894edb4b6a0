"""Inject faults into whole searches, run the same command until it is done, and look at what is left.

    python -m tests.faults.campaign --faults 200

Prints a table: fault, stage, how often it was injected, and what was lost (nothing, if all is well). Exit code 1 if
anything was.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.trial import TrialState

from search.engine.group import marked
from search.store import Outcome, Store, open_engine, pareto_front
from tests.faults.engine import FAULTS_OF_STAGE, HARMLESS

ROOT = Path(__file__).resolve().parents[2]
TRIALS = 16
FAULTS_A_SEARCH = 5
MOST_RUNS = 12  # of one command, each of which a fault may end
CALLS = {"build": 1, "apply": 60, "gate": 90, "speed": 250}  # of a stage among which a fault is placed


@dataclass
class Search:
    """One search that was disturbed: its faults and those that fired, exit codes of its runs, and what is wrong."""

    faults: list[dict]
    fired: list[dict] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(study, folder, faults, seed=0):
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
    command += ["--trials", str(TRIALS), "--storage", f"sqlite:///{database}", "--seed", str(seed)]
    command += ["--logs", str(folder / "logs")]
    search = Search(faults)
    while len(search.codes) < MOST_RUNS:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        search.codes.append(done.returncode)
        if "Traceback" in done.stderr:
            search.wrong.append(f"a traceback: {done.stderr[-800:]}")
        if done.returncode == 0:
            break
    else:
        search.wrong.append(f"not done after {MOST_RUNS} runs: {done.stderr[-300:]}")
    search.fired = [fault for number, fault in enumerate(faults) if (folder / f"fired-{number}").exists()]
    return search


def look(search, folder, undisturbed):
    """Add what is wrong with what a search has left behind."""
    wrong, storage = search.wrong, f"sqlite:///{folder / 'study.db'}"
    store = Store(open_engine(storage), "synthetic-simulated")
    finished = [o for o in store.outcomes() if o.state != "FAIL"]
    trials = optuna.load_study(study_name="synthetic-simulated", storage=storage).get_trials()
    if len(finished) != TRIALS:
        wrong.append(f"{len(finished)} trials finished, not {TRIALS}")
    told = {t.number: t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)}
    if sorted(told) != [o.trial for o in finished]:
        wrong.append("Optuna was told of other trials than are stored")
    if any(t.state in (TrialState.RUNNING, TrialState.WAITING) for t in trials):
        wrong.append("a trial is still open")
    for o in finished:
        if told[o.trial].constraints.get("ppl") != o.excess:
            wrong.append(f"trial {o.trial} has a wrong constraint")
        wrong += missing_rows(store, o)
    if {p.trial for p in store.front()} != {
        o.trial for o in pareto_front(o for o in finished if o.state == "COMPLETE")
    }:
        wrong.append("the stored front is not the outcomes' front")
    truth = {o.setting_key: (o.state, o.ppl) for o in undisturbed}
    wrong += [
        f"trial {o.trial} has other figures than undisturbed"
        for o in finished
        if o.setting_key in truth and (o.state, o.ppl) != truth[o.setting_key]
    ]
    if all(fault["kind"] in HARMLESS for fault in search.fired) and front_of(finished) != front_of(undisturbed):
        wrong.append("the front is not the undisturbed one")
    with store._session() as session:
        marks = set(session.connection().exec_driver_sql("SELECT mark FROM pareto_process").scalars())
    if marks or marked(marks):
        wrong.append("processes are left")
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


def front_of(outcomes):
    """The front as what was measured: settings with their figures."""
    front = pareto_front(o for o in outcomes if o.state == "COMPLETE")
    return sorted((o.setting_key, round(o.tps, 6), round(o.ppl, 9)) for o in front)


def plans(count, seed):
    """So many faults, every kind at every stage in turn, some a search; harmless ones are not mixed with others."""
    draw = random.Random(seed)
    pairs = [(stage, kind) for stage, kinds in FAULTS_OF_STAGE.items() for kind in kinds]
    draw.shuffle(pairs)
    chosen = [pairs[i % len(pairs)] for i in range(count)]
    for group in ([p for p in chosen if p[1] in HARMLESS], [p for p in chosen if p[1] not in HARMLESS]):
        for start in range(0, len(group), FAULTS_A_SEARCH):
            yield [
                {"stage": stage, "kind": kind, "call": draw.randint(1, CALLS[stage])}
                for stage, kind in group[start : start + FAULTS_A_SEARCH]
            ]


def campaign(study, folder, count, seed=0):
    """Run all plans; yields each search when it has been looked at, the undisturbed one first."""
    calm = run(study, folder / "calm", [])
    store = Store(open_engine(f"sqlite:///{folder / 'calm' / 'study.db'}"), "synthetic-simulated")
    undisturbed = [o for o in store.outcomes() if o.state != "FAIL"]
    look(calm, folder / "calm", undisturbed)
    yield calm
    for number, faults in enumerate(plans(count, seed)):
        search = run(study, folder / str(number), faults)
        look(search, folder / str(number), undisturbed)
        yield search


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
    args = parser.parse_args()
    from tests.faults.study import write_study

    with tempfile.TemporaryDirectory() as scratch:
        searches = []
        for search in campaign(write_study(Path(scratch) / "study"), Path(scratch), args.faults, args.seed):
            searches.append(search)
            for what in search.wrong:
                print(f"WRONG after {search.fired} (exit codes {search.codes}): {what}", flush=True)
    print("\n".join(table(searches)))
    return int(any(search.wrong for search in searches))


if __name__ == "__main__":
    sys.exit(main())
