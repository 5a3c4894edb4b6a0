"""Search a study: sample settings, gate them on perplexity, time those that pass, keep the Pareto front.

    python -m search.run --trials 200
    python -m search.run --study studies/miniature --storage sqlite:///study.db --json
    python -m search.run --gpus 0,1,2        a searcher on each (--cluster ADDRESS: on every GPU of a Ray cluster)

Running the same command again goes on where it stopped. Exit codes: 0 done, 1 the search could not be carried
out, 2 bad arguments or study file, 130 interrupted (everything measured is kept).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from search.cli import (
    DEFAULT_STORAGE,
    add_output_arguments,
    add_study_arguments,
    fail,
    find_study,
    set_up_errors,
    study_arguments,
)

SAMPLERS = ("gated", "tpe", "gp", "nsga2", "random")  # search.samplers has them; naming them here spares its imports
OTHERWISE = "tpe"  # the default where the usual one does not know the objectives, or its packages are not installed
DEFAULTS = {"trials": 200, "confirm": 3, "storage": DEFAULT_STORAGE, "sampler": "gated", "engine": "vllm", "seed": 0}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m search.run",
        description="Search a study: gate settings on perplexity, time those that pass, keep the Pareto front.",
    )
    add_study_arguments(p)
    p.add_argument("--trials", type=int, metavar="N", help="total that should stand finished (default 200)")
    p.add_argument("--confirm", type=int, metavar="N", help="finalists to measure again, served (default 3; 0: none)")
    p.add_argument("--timeout", type=float, metavar="S", help="ask for no further trial after S seconds")
    p.add_argument(
        "--sampler",
        choices=SAMPLERS,
        help="who proposes settings (default gated; tpe for other objectives than TPS and perplexity)",
    )
    p.add_argument("--stop", choices=("auto",), help="auto: end when another trial is not expected to gain 0.2 %%")
    p.add_argument("--prior", metavar="FROM", help="points from elsewhere: CSV, vllm bench sweep's folder, a database")
    p.add_argument("--engine", metavar="NAME", help="vllm (default), simulated, or module:Class of another")
    p.add_argument("--ppl-ceiling", type=float, metavar="X", help="absolute ceiling, instead of the study's")
    p.add_argument("--seed", type=int, metavar="N", help="seed of the sampler and the engine (default 0)")
    p.add_argument("--gpus", metavar="0,1,2", help="search on these GPUs of this host, or cpu:N: N searchers without")
    p.add_argument(
        "--cluster", metavar="ADDRESS", help="search on every GPU of the Ray cluster there (auto: this host's)"
    )
    p.add_argument("--searchers", type=int, metavar="N", help="with --cluster: N, as GPUs come (default: one a GPU)")
    p.add_argument("--logs", type=Path, metavar="DIR", help="folder for the workers' logs (default logs)")
    add_output_arguments(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the search; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        path, why = find_study(args.study)
        chosen = {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}
        resolved = {**DEFAULTS, **chosen}
        default_because: dict[str, str] = {}
        if resolved["trials"] < 1:
            fail("--trials must be at least 1.")
        if resolved["engine"] not in ("vllm", "simulated") and ":" not in resolved["engine"]:
            fail(f"--engine must be vllm, simulated or module:Class, not {resolved['engine']!r}.")
        if resolved["confirm"] < 0:
            fail("--confirm must be at least 0.")
        if args.ppl_ceiling is not None and not args.ppl_ceiling > 1:
            fail(f"--ppl-ceiling must be over 1, the least perplexity there is, not {args.ppl_ceiling}.")
        from search.objectives import DEFAULT
        from search.samplers import check_sampler, missing
        from search.spec import read_study

        spec = read_study(path)
        if "sampler" not in chosen and spec.objectives != DEFAULT:
            resolved["sampler"], default_because["sampler"] = OTHERWISE, ": gated knows no such objectives"
        check_sampler(spec.objectives, resolved["sampler"], bool(args.stop))
        if "sampler" not in chosen and (lacks := missing(resolved["sampler"])):
            if args.stop:
                fail(f"--stop auto needs {' and '.join(lacks)}: pip install {' '.join(lacks)}.")
            resolved["sampler"], default_because["sampler"] = OTHERWISE, f": {lacks[0]} is not installed"
        if args.ppl_ceiling is not None:
            spec = spec.with_ceiling(args.ppl_ceiling)
        fleet = None
        if args.gpus is not None or args.cluster is not None or args.searchers is not None:
            from search.fleet import check_fleet, read_fleet

            fleet = read_fleet(args.gpus, args.cluster, args.searchers)
            check_fleet(fleet, resolved["storage"])
        from search.closing import found, next_steps
        from search.interrupt import EXIT_CODE, interruptible
        from search.progress import make_progress
        from search.store import safe_url
        from search.study import Options, search

        progress = make_progress(spec.objectives, to_stderr=args.json)
        try:
            progress.note(f"Study {spec.name} ({why}): {path}")
            shown = {**resolved, "storage": safe_url(resolved["storage"])}
            progress.note(
                ", ".join(
                    f"{k} {v}" + ("" if k in chosen else f" (default{default_because.get(k, '')})")
                    for k, v in shown.items()
                )
                + (f", timeout {args.timeout:g} s" if args.timeout is not None else "")
            )
            if resolved["engine"] != "vllm":
                progress.note("SIMULATED ENGINE: every figure below is made up; nothing is measured.")
            options = Options(
                trials=resolved["trials"],
                confirm=resolved["confirm"],
                storage=resolved["storage"],
                engine=resolved["engine"],
                sampler=resolved["sampler"],
                seed=resolved["seed"],
                timeout_s=args.timeout,
                logs=args.logs or Path("logs"),
                prior=args.prior,
                stop_early=args.stop == "auto",
            )
            with interruptible():
                if fleet is None:
                    summary = search(spec, options, progress)
                else:
                    from search.cluster import search_together

                    summary = search_together(spec, options, fleet, progress)
        except KeyboardInterrupt:
            progress.close()
            progress.note("Interrupted. Everything measured so far is kept; the same command goes on from here.")
            return EXIT_CODE
        finally:
            progress.close()
        told = summary.confirmed and resolved["confirm"]  # before the finalists were confirmed
        lines = next_steps(summary, study_arguments(args.study, resolved["storage"]))
        for line in lines if told else [*found(summary), *lines]:
            progress.note(line)
        if args.json:
            print(json.dumps(summary.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
