"""Search a study: sample settings, gate them on perplexity, time those that pass, keep the Pareto front.

    python -m search.run --trials 200
    python -m search.run --study studies/miniature --storage sqlite:///study.db --json

Running the same command again goes on where it stopped. Exit codes: 0 done, 1 the search could not be carried
out, 2 bad arguments or study file, 130 interrupted (everything measured is kept).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from search.cli import DEFAULT_STORAGE, add_study_arguments, fail, find_study, set_up_errors

if TYPE_CHECKING:
    from search.study import Summary

DEFAULTS = {"trials": 200, "storage": DEFAULT_STORAGE, "sampler": "tpe", "engine": "vllm", "seed": 0}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m search.run",
        description="Search a study: gate settings on perplexity, time those that pass, keep the Pareto front.",
    )
    add_study_arguments(p)
    p.add_argument("--trials", type=int, metavar="N", help="total that should stand finished (default 200)")
    p.add_argument("--timeout", type=float, metavar="S", help="ask for no further trial after S seconds")
    p.add_argument("--sampler", choices=("tpe", "random"), help="who proposes settings (default tpe)")
    p.add_argument("--engine", choices=("vllm", "simulated"), help="what is measured (default vllm)")
    p.add_argument("--ppl-ceiling", type=float, metavar="X", help="absolute ceiling, instead of the study's")
    p.add_argument("--seed", type=int, metavar="N", help="seed of the sampler and the engine (default 0)")
    p.add_argument("--json", action="store_true", help="progress to stderr, one JSON object to stdout")
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the search; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        path, why = find_study(args.study)
        chosen = {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}
        resolved = {**DEFAULTS, **chosen}
        if resolved["trials"] < 1:
            fail("--trials must be at least 1.")
        if args.ppl_ceiling is not None and not args.ppl_ceiling > 1:
            fail(f"--ppl-ceiling must be over 1, the least perplexity there is, not {args.ppl_ceiling}.")
        from search.spec import read_study

        spec = read_study(path)
        if args.ppl_ceiling is not None:
            spec = spec.with_ceiling(args.ppl_ceiling)
        from search.progress import make_progress
        from search.store import safe_url
        from search.study import Options, search

        progress = make_progress(to_stderr=args.json)
        try:
            progress.note(f"Study {spec.name} ({why}): {path}")
            shown = {**resolved, "storage": safe_url(resolved["storage"])}
            progress.note(
                ", ".join(f"{k} {v}" + ("" if k in chosen else " (default)") for k, v in shown.items())
                + (f", timeout {args.timeout:g} s" if args.timeout is not None else "")
            )
            if resolved["engine"] == "simulated":
                progress.note("SIMULATED ENGINE: every figure below is made up; nothing is measured.")
            signal.signal(signal.SIGTERM, _interrupt)
            options = Options(
                trials=resolved["trials"],
                storage=resolved["storage"],
                engine=resolved["engine"],
                sampler=resolved["sampler"],
                seed=resolved["seed"],
                timeout_s=args.timeout,
                logs=Path("logs"),
            )
            summary = search(spec, options, progress)
        except KeyboardInterrupt:
            progress.close()
            progress.note("Interrupted. Everything measured so far is kept; the same command goes on from here.")
            return 130
        finally:
            progress.close()
        for line in closing_words(summary, args.study, resolved["storage"]):
            progress.note(line)
        if args.json:
            print(json.dumps(summary.as_json()))
    return 0


def closing_words(summary: Summary, study: str | None, storage: str) -> list[str]:
    """What was found and what to type next, in four lines at most."""
    counts = summary.counts
    marked = "SIMULATED " if summary.simulated else ""
    lines = [
        f"{counts['complete'] + counts['pruned']} trials finished in {summary.wall_s:.0f} s: "
        f"{counts['complete']} passed the gate, {counts['pruned']} were pruned over the ceiling of "
        f"{summary.ceiling:.4f}; {summary.reused} were known settings, {counts['failed']} more failed."
    ]
    if summary.best is None:
        return [
            *lines,
            "No setting passed the gate: there is no best trial. Raise the ceiling, or widen the ranges.",
        ]
    from search.knobs import words

    best, reference = summary.best, summary.reference
    assert reference.tps is not None
    lines.append(
        f"{marked}Best: trial {best['trial']} ({words(best['knobs'])}): {best['tps']:.1f} tok/s "
        f"[{best['tps_low']:.1f}, {best['tps_high']:.1f}], {best['tps'] / reference.tps:.2f} × the reference's "
        f"{reference.tps:.1f}; perplexity {best['ppl']:.4f} (reference {reference.ppl:.4f})."
    )
    lines.append(f"Front: {len(summary.front)} points.")
    if not summary.simulated:
        from search.store import safe_url

        where = (f" --study {study}" if study else "") + (
            f" --storage {safe_url(storage)}" if storage != DEFAULT_STORAGE else ""
        )
        lines.append(f"Next: python -m search.export{where} --out manifest")
    return lines


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
