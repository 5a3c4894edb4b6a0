"""Compare the samplers on landscapes, in simulated seconds: no engine is started, nothing is measured.

    python -m search.bench samplers --seeds 2 --landscapes a10g --samplers gated random
    python -m search.bench samplers --jobs 15 --out studies/samplers

Runs that OUT/runs.csv holds are not run again. Exit codes: 0 done, 1 stopped by --limit before all runs were done,
2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from search.cli import add_output_arguments, fail, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.bench", description="Compare samplers on landscapes.")
    p.add_argument("what", choices=("samplers",), help="what is compared")
    p.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="folder of results (default bench)")
    p.add_argument("--seeds", type=int, default=20, metavar="N", help="searches of each kind (default 20)")
    p.add_argument("--landscapes", nargs="+", metavar="NAME", help="some of them (default all)")
    p.add_argument("--samplers", nargs="+", metavar="LABEL", help="some of them (default all)")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    p.add_argument("--limit", type=float, metavar="S", help="start and await no run after S seconds")
    p.add_argument("--figure", type=Path, metavar="FILE", help="draw it, as .html or .svg")
    add_output_arguments(p, json=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the tables; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        if args.seeds < 1 or args.jobs < 1:
            fail("--seeds and --jobs must be at least 1.")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
        from search.bench.compare import compare, read_runs
        from search.bench.table import tables
        from search.bench.variants import BY_LABEL, VARIANTS
        from search.landscapes import LANDSCAPES

        for given, known, what in (
            (args.landscapes, LANDSCAPES, "--landscapes"),
            (args.samplers, BY_LABEL, "--samplers"),
        ):
            if unknown := [name for name in given or [] if name not in known]:
                fail(f"{what} {unknown[0]!r} is not one of {', '.join(known)}.")
        cells = [
            (landscape, variant.label, seed)
            for seed in range(args.seeds)
            for variant in VARIANTS
            for landscape in LANDSCAPES
            if landscape in variant.landscapes
            and (not args.landscapes or landscape in args.landscapes)
            and (not args.samplers or variant.label in args.samplers)
        ]
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / "runs.csv"
        for run in compare(cells, file, args.jobs, args.limit):
            ended = "" if run.regret is None else f", regret {run.regret:.2%}"
            print(f"{run.landscape}, {run.variant}, seed {run.seed}: {run.trials} trials{ended}", file=sys.stderr)
        runs = read_runs(file)
        print(tables(runs))
        if args.figure:
            from search.bench.figure import figure, write

            write(figure(runs), args.figure)
        there = {(r.landscape, r.variant, r.seed) for r in runs}
        left = [cell for cell in cells if cell not in there]
        if left:
            print(f"{len(left)} runs are left: the same command goes on with them.", file=sys.stderr)
        return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
