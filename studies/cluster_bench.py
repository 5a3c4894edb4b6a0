"""What many searchers cost one database: throughput, and how long asking and telling take.

    python studies/cluster_bench.py --searchers 64 --trials 10000 --seconds 300        as much as there is time for
    python studies/cluster_bench.py --searchers 1 --trials 60 --takes 2                the rate of one, and
    python studies/cluster_bench.py --searchers 8 --trials 480 --takes 2               of eight: parallel efficiency
    python studies/cluster_bench.py --searchers 1,8,64 --trials 2000 --storage postgresql://…

Every searcher is a process that runs `search.study.search` on the simulated engine, which here lives in that process:
what is measured is Optuna, the store and the database, all on this machine. Nothing is measured of a model. With
`--seconds` the same command goes on where it stopped, as a search does. The PostgreSQL server is one that the package
pgserver starts in `--folder`, unless `--storage` names another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna

import search.engine.session
import search.study
from search.engine.simulated import TAKES, SimulatedEngine
from search.engine.worker import answer
from search.spec import read_study
from search.store import Store, open_engine
from search.study import Options

STUDY = """\
name: bench
engine:
  model: example/model
  drafter: example/drafter
  args: {max_model_len: 1024}
knobs:
  sliding_window: {low: 16, high: 512, step: 4}
  centroid_top_k: {low: 1, high: 128}
  num_speculative_tokens: {low: 0, high: 10, default: 4}
workload: {prompts: prompts.jsonl, output_tokens: 64, control: {trials: 1000000}}
gate: {records: records.jsonl, ceiling: {ratio: 1.05}}
"""
PARTS = ("take_slot", "ask", "claim", "finish", "tell")


class InProcess:
    """A worker without a process: answers at once."""

    def __init__(self, engine: str, log: Path, ledger: object = None, environment: object = None) -> None:
        self._engine = SimulatedEngine()
        self.log = log
        self.left_on_gpu: dict[str, int] = {}

    def ask(self, request: Any, expect: type, stall_s: float, deadline: float | None = None) -> Any:
        """The engine's answer."""
        return answer(self._engine, request)

    def end(self) -> None:
        """Nothing is left."""


class Silent:
    """An observer that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def timed(call: Callable[..., Any], seconds: list[tuple[str, float, float]], part: str) -> Callable[..., Any]:
    """`call`, whose duration is added to `seconds` with when it ended."""

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        started = time.time()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append((part, time.time() - started, time.time()))

    return timed_call


def searcher(number: int, study: Path, options: Options, out: Path) -> None:
    """One searcher; leaves its durations in `out`."""
    seconds: list[tuple[str, float, float]] = []
    search.engine.session.Worker = InProcess  # type: ignore[misc, assignment]
    for owner, name in ((Store, "take_slot"), (Store, "claim"), (Store, "finish"), (optuna.Study, "ask")):
        setattr(owner, name, timed(getattr(owner, name), seconds, name))
    search.study.tell = timed(search.study.tell, seconds, "tell")
    try:
        search.study.search(read_study(study), options, Silent())
    finally:
        (out / f"{number}.json").write_text(json.dumps(seconds))


def write_study(folder: Path) -> Path:
    """The smallest study: eight prompts, eight records."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    tokens = [[draw.randrange(4096) for _ in range(48)] for _ in range(8)]
    write("prompts.jsonl", [{"id": f"p{i}", "split": "tune", "prompt_token_ids": t} for i, t in enumerate(tokens)])
    write(
        "records.jsonl",
        [{"id": f"r{i}", "context_token_ids": t[:32], "target_token_ids": t[32:]} for i, t in enumerate(tokens)],
    )
    (folder / "study.yaml").write_text(STUDY)
    return folder / "study.yaml"


def run(args: argparse.Namespace, searchers: int, storage: str, folder: Path) -> dict[str, Any]:
    """Run so many searchers at once; what they did and how long it took them."""
    study, out = write_study(folder / "study"), folder / f"times-{searchers}-{time.time():.0f}"
    out.mkdir()
    os.environ[TAKES] = str(args.takes)
    options = Options(args.trials, 0, storage, "simulated", args.sampler, 0, args.seconds, folder / "logs")
    store = Store(open_engine(storage), "bench-simulated")
    before = store.finished()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=searcher, args=(n, study, options, out)) for n in range(searchers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    times = [tuple(row) for file in sorted(out.glob("*.json")) for row in json.loads(file.read_text())]
    finished = store.finished() - before
    if len(list(out.glob("*.json"))) < searchers or not finished:
        raise SystemExit(f"Only {len(list(out.glob('*.json')))} of {searchers} searchers came to an end.")
    first = min(end - took for part, took, end in times if part == "ask")
    wall_s = max(end for part, took, end in times if part == "tell") - first
    return {
        "searchers": searchers,
        "sampler": args.sampler,
        "takes_s": args.takes,
        "trials": finished,
        "of": before + finished,
        "wall_s": round(wall_s, 1),
        "trials_a_second": round(finished / wall_s, 2),
        "ask_and_tell_ms": {q: round(1000 * quantile(pairs(times), p), 1) for q, p in (("p50", 0.5), ("p95", 0.95))},
        "mean_ms": {
            name: round(1000 * statistics.fmean(t for part, t, _ in times if part == name), 1) for name in PARTS
        },
        **({"efficiency": round(finished / wall_s * args.takes / searchers, 3)} if args.takes else {}),
    }


def pairs(times: list[tuple[Any, ...]]) -> list[float]:
    """Seconds that a trial's asking and telling took together, in each searcher's order."""
    found, ask = [], 0.0
    for part, took, _ in times:
        if part == "take_slot":
            ask = took
        elif part in PARTS:
            ask += took
        if part == "tell":
            found.append(ask)
    return found


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of all are below."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Run and print a JSON line for each number of searchers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searchers", default="64", help="how many, or several numbers: 1,8,64")
    parser.add_argument("--trials", type=int, default=10_000, help="total that should stand finished")
    parser.add_argument("--seconds", type=float, help="ask for no further trial after so long")
    parser.add_argument("--takes", type=float, default=0.0, help="seconds that a trial takes")
    parser.add_argument("--sampler", default="tpe")
    parser.add_argument("--folder", type=Path, default=Path("cluster-bench"))
    parser.add_argument("--storage", help="a PostgreSQL database (default: one made in the folder)")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for searchers in map(int, args.searchers.split(",")):
            storage = args.storage
            if storage is None:
                import pgserver

                server = pgserver.get_server(args.folder.absolute() / "pg")
                stack.callback(server.cleanup)
                name = f"bench_{args.sampler}_{searchers}_{args.takes:g}".replace(".", "_")
                if name not in server.psql("SELECT datname FROM pg_database"):
                    server.psql(f"CREATE DATABASE {name}")
                storage = server.get_uri(name)
            print(json.dumps(run(args, searchers, storage, args.folder)), flush=True)


if __name__ == "__main__":
    main()
