"""Verify an exported folder as a stranger would: serve it, ask it over HTTP, hold what comes back against its claims.

    python -m search.verify manifest
    python -m search.verify manifest --prompts private_prompts.jsonl --records private_records.jsonl --json

The last line is the verdict. Exit codes: 0 the claims hold, 1 it cannot be verified, 2 bad arguments, 3 they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from search.cli import add_output_arguments, fail, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m search.verify", description="Serve an exported folder and check its claims over HTTP."
    )
    p.add_argument("folder", type=Path, metavar="DIR", help="what search.export wrote")
    p.add_argument(
        "--prompts", type=Path, metavar="FILE", help="other prompts, in any format that search.records import takes"
    )
    p.add_argument("--records", type=Path, metavar="FILE", help="other records (JSON Lines)")
    add_output_arguments(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Verify; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        if not (args.folder / "manifest.json").is_file():
            fail(f"{args.folder} holds no manifest.json: give a folder that search.export wrote.")
        from search.interrupt import EXIT_CODE, interruptible
        from search.verification import verify

        stream = sys.stderr if args.json else sys.stdout
        try:
            with interruptible():
                found = verify(
                    args.folder, args.prompts, args.records, lambda text: print(text, file=stream, flush=True)
                )
        except KeyboardInterrupt:
            print("Interrupted; nothing was decided.", file=sys.stderr)
            return EXIT_CODE
        for line in table(found.checks):
            print(line, file=stream)
        verdict = "HOLDS" if found.holds else "DOES NOT HOLD"
        print(f"Verdict: {verdict}" + "".join(f"\n  - {reason}" for reason in found.reasons), file=stream)
        if args.json:
            print(json.dumps({"holds": found.holds, "reasons": found.reasons, "checks": found.checks}))
    return 0 if found.holds else 3


def table(checks: list[dict[str, Any]]) -> list[str]:
    """Claim, measured and verdict, a line each."""
    rows = [("", "claim", "measured", ""), *((c["what"], c["claim"], c["measured"], c["verdict"]) for c in checks)]
    widths = [max(len(str(row[column])) for row in rows) for column in range(4)]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
