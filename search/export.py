"""Export a measured trial as a folder that serves it: manifest.json and serve.py.

    python -m search.export --out manifest            the study's best trial
    python -m search.export --trial 17 --out m17

Exit codes: 0 done, 1 nothing to export, 2 bad arguments, 3 refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from search.cli import DEFAULT_STORAGE, add_study_arguments, fail, find_study, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.export", description="Export a measured trial, ready to serve.")
    add_study_arguments(p)
    p.add_argument("--trial", default="best", metavar="best|N", help="which trial (default best)")
    p.add_argument("--out", type=Path, default=Path("manifest"), metavar="DIR", help="folder (default manifest)")
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def main(argv: list[str] | None = None) -> int:
    """Export; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        if args.trial != "best" and not args.trial.isdecimal():
            fail(f"--trial must be best or a trial's number, not {args.trial!r}.")
        from search.manifest import build_manifest, write_manifest
        from search.spec import read_study
        from search.store import REFERENCE, Store, open_engine, safe_url

        path, _ = find_study(args.study)
        spec = read_study(path)
        url = args.storage or DEFAULT_STORAGE
        store = Store(open_engine(url, must_exist=True), spec.name)
        outcome = store.best() if args.trial == "best" else store.outcome(int(args.trial))
        where = f"study {spec.name} in {safe_url(url)}"
        if outcome is None:
            what = "no trial that passed the gate" if args.trial == "best" else f"no trial {args.trial}"
            return _nothing(f"There is {what} in {where}.")
        if outcome.state != "COMPLETE":
            return _nothing(f"Trial {outcome.trial} has no speed to claim: {outcome.reason}.")
        store.check_definition(spec.definition(), ignore=("gate.ceiling",))
        source = outcome.trial if outcome.reused_from is None else outcome.reused_from
        (speed,) = store.measurements("speed", "done", source)
        environment = next(e for e in store.environments() if e.id == speed.environment_id)
        reference = store.outcome(REFERENCE)
        assert reference is not None  # measured before any trial
        write_manifest(build_manifest(spec, outcome, reference, speed, environment), args.out)
        print(
            f"Wrote {args.out / 'manifest.json'} and serve.py: trial {outcome.trial}, {outcome.tps:.1f} tok/s, "
            f"perplexity {outcome.ppl:.4f}. Not confirmed by a second measurement.\n"
            f"Serve it with: python {args.out / 'serve.py'}"
        )
    return 0


def _nothing(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
