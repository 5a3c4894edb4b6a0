"""Say beforehand whether a study will run, and what it will cost: no engine is started.

    python -m search.doctor
    python -m search.doctor --study studies/miniature --trials 200 --json

Exit codes: 0 it will run, 1 it will not (what is bad is said), 2 bad arguments or study file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from search.cli import DEFAULT_STORAGE, add_output_arguments, add_study_arguments, find_study, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m search.doctor", description="Say whether a study will run, and what it will cost."
    )
    add_study_arguments(p)
    p.add_argument(
        "--trials", type=int, default=200, metavar="N", help="total that should stand finished (default 200)"
    )
    add_output_arguments(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Examine; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        from search.checkup import BAD, examine
        from search.cost import table
        from search.spec import read_study

        path, why = find_study(args.study)
        spec = read_study(path)
        checks, cost, stages = examine(spec, args.storage or DEFAULT_STORAGE, args.trials)
        stream = sys.stderr if args.json else sys.stdout
        print(f"Study {spec.name} ({why}): {path}", file=stream)
        for check in checks:
            print(f"  {check.verdict:<8} {check.what}: {check.says}", file=stream)
        if cost.trial_s is None or cost.search_s is None:
            print(f"A trial's cost is {cost.basis}.", file=stream)
        else:
            print(
                f"A trial takes {cost.trial_s:.1f} s, the search {_duration(cost.search_s)} ({cost.basis}).",
                file=stream,
            )
        for line in table(stages):
            print(f"  {line}", file=stream)
        if args.json:
            found = {"checks": [asdict(c) for c in checks], "cost": asdict(cost), "stages": [asdict(s) for s in stages]}
            print(json.dumps({"study": spec.name, **found}))
        return int(any(check.verdict == BAD for check in checks))


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
