"""Export a measured trial as a folder that serves it: manifest.json and serve.py.

    python -m search.export --out manifest            the confirmed trial with the best lower bound
    python -m search.export --trial 17 --out m17      another one; --unverified if it was not confirmed
    python -m search.export --as vllm --as compose    and a vllm serve command line, and a compose file, in the folder

Exit codes: 0 done, 1 nothing to export, 2 bad arguments, 3 refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from search.cli import DEFAULT_STORAGE, add_output_arguments, add_study_arguments, fail, find_study, set_up_errors
from search.forms import FORMS

if TYPE_CHECKING:
    from search.store import Confirmation


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.export", description="Export a measured trial, ready to serve.")
    add_study_arguments(p)
    p.add_argument("--trial", default="best", metavar="best|N", help="which trial (default best)")
    p.add_argument("--out", type=Path, default=Path("manifest"), metavar="DIR", help="folder (default manifest)")
    p.add_argument(
        "--as",
        dest="forms",
        action="append",
        default=[],
        choices=tuple(FORMS),
        help="also write serve.sh (vllm), vllm.yaml, compose.yaml or manifest.env into the folder (several)",
    )
    p.add_argument("--unverified", action="store_true", help="export a trial that is not confirmed; it claims nothing")
    add_output_arguments(p, json=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Export; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        if args.trial != "best" and not args.trial.isdecimal():
            fail(f"--trial must be best or a trial's number, not {args.trial!r}.")
        from kernels.plugin import PATCHES
        from search.errors import RefusedError
        from search.folder import finite
        from search.knobs import words
        from search.manifest import build_manifest, write_manifest
        from search.spec import read_study
        from search.store import Store, open_engine, safe_url, study_names
        from search.study import PATCH_KEY, study_name

        path, _ = find_study(args.study)
        spec = read_study(path)
        url = args.storage or DEFAULT_STORAGE
        database = open_engine(url, must_exist=True)
        store = Store(database, spec.name)
        where = f"study {spec.name} in {safe_url(url)}"
        winner = store.winner()
        number = int(args.trial) if args.trial != "best" else winner.trial if winner else None
        outcome = store.best() if number is None else store.outcome(number)
        if outcome is None:
            what = "no trial that passed the gate" if args.trial == "best" else f"no trial {args.trial}"
            if study_name(spec, "simulated") in study_names(database):
                what += " (simulated ones are there, and are not exported)"
            return _nothing(f"There is {what} in {where}.")
        if outcome.state != "COMPLETE":
            return _nothing(f"Trial {outcome.trial} has no speed to claim: {outcome.reason}.")
        store.check_definition(spec.definition(), ignore=("gate.ceiling", *map(PATCH_KEY.format, PATCHES)))
        confirmation = store.confirmation(outcome.source)
        if not args.unverified and (confirmation is None or not confirmation.eligible):
            raise RefusedError(_refusal(outcome.trial, confirmation))
        manifest = build_manifest(spec, store, outcome)
        write_manifest(manifest, spec, args.out, store.reference_distributions(), args.forms)
        store.add_export(outcome.trial, args.out, finite(manifest))
        if confirmation and confirmation.eligible:
            chance = f"borne out by a re-run with a chance of {confirmation.p_pass:.1%}"
            said = f"claims {confirmation.claimed:.1f} tok/s, {chance}"
            check = f"Check it with: python -m search.verify {args.out}"
        else:
            said = f"NOT confirmed: the search saw {outcome.tps:.1f} tok/s, and nothing is claimed"
            check = "Nothing of it can be verified before it is confirmed: python -m search.run with --confirm 3."
        print(
            f"Wrote {args.out}: trial {outcome.trial} ({words(outcome.setting)}), perplexity {outcome.ppl:.4f}, "
            f"{said}.\n"
            f"Serve it with: python {args.out / 'serve.py'}\n"
            f"{check}"
        )
        for form in args.forms:
            print(f"Also: {args.out / FORMS[form].file}")
    return 0


def _refusal(trial: int, confirmation: Confirmation | None) -> str:
    if confirmation is None:
        return (
            f"Trial {trial} has not been confirmed by a second measurement. Run the search again with --confirm 3, or "
            "export it as it is with --unverified."
        )
    return (
        f"Trial {trial} was not borne out when it was confirmed: {confirmation.reason}. --unverified exports it anyway."
    )


def _nothing(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
