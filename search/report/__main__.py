"""Write a study's report: one HTML file that can be mailed and needs no network.

    python -m search.report --out report.html
    python -m search.report --study studies/miniature --storage sqlite:///study.db

Exit codes: 0 done, 1 nothing to report, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search.cli import (
    DEFAULT_STORAGE,
    add_output_arguments,
    add_study_arguments,
    find_study,
    set_up_errors,
    study_arguments,
)

if TYPE_CHECKING:
    from search.store import Store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.report", description="Write a study's report as one HTML file.")
    add_study_arguments(p)
    p.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="file (default report.html)")
    add_output_arguments(p, json=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        from search.files import write_whole
        from search.report.page import render
        from search.store import Store, open_engine, study_names
        from search.store.frames import frames

        url = args.storage or DEFAULT_STORAGE
        engine = open_engine(url, must_exist=True)
        name = _study(args.study, study_names(engine))
        store = Store(engine, name)
        page = render(frames(store), _commands(study_arguments(args.study, url), _options(store)))
        write_whole(args.out, page)
        print(f"Wrote {args.out}: study {name}, {len(page) / 1e6:.1f} MB.")
    return 0


def _study(asked: str | None, stored: list[str]) -> str:
    """The study's name in the database: the one that was asked for, or its simulated twin, or the only one."""
    if asked is None and len(stored) == 1:
        return stored[0]
    from search.spec import read_study
    from search.study import study_name

    spec = read_study(find_study(asked)[0])
    names = [study_name(spec, engine) for engine in ("vllm", "simulated")]
    return next((name for name in names if name in stored), names[0])


def _options(store: Store) -> dict[str, Any]:
    """What the search was run with, to the number of trials that stand finished."""
    ceiling = store.definition().get("gate.ceiling") or {}
    absolute = {"ppl-ceiling": ceiling["ppl"]} if ceiling.get("ppl") is not None else {}
    return {**store.options(), "trials": store.finished(), **absolute}


def _commands(where: str, options: Mapping[str, Any]) -> list[str]:
    how = "".join(
        f" --{name} {options[name]}"
        for name in ("trials", "sampler", "seed", "engine", "ppl-ceiling")
        if name in options
    )
    return [
        f"python -m search.run{where}{how}",
        f"python -m search.export{where} --out manifest",
        "python -m search.verify manifest",
    ]


if __name__ == "__main__":
    sys.exit(main())
