"""Make the texts of a study: sample gate records from a reference model, take in texts of many formats.

    python -m search.records build --model REFERENCE --for MODEL --prompts prompts.jsonl --out records.jsonl
    python -m search.records import --model MODEL --prompts sharegpt.json --records records.jsonl --out FOLDER

Prompts: JSON Lines of {"prompt_token_ids"}, {"prompt": text} or {"messages"}; ShareGPT JSON; an OpenAI-style log or
batch ({"custom_id", "body"}); plain text (.txt), a prompt a paragraph. Records: JSON Lines of {"context_token_ids",
"target_token_ids"} or, as text, {"context" or "prompt", "target" or "completion"}; plain text (.txt), cut into records
of 512 tokens of context and 256 to score. Text becomes tokens of MODEL, conversations through its chat template.

Half of the texts are what a search sees (tune prompts, gate records); the other half is held out for confirming. Exit
codes: 0 done, 1 the reference model could not be run, 2 bad arguments or files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from search.cli import add_output_arguments, fail, set_up_errors


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.records", description="Make the texts of a study.")
    actions = p.add_subparsers(dest="action", required=True, metavar="build|import")
    build = actions.add_parser("build", help="sample gate records from a reference model")
    build.add_argument("--model", required=True, metavar="REFERENCE", help="folder or hub id of a stronger model")
    build.add_argument("--for", required=True, dest="served", metavar="MODEL", help="the model that will be gated")
    build.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE", help="texts to continue, in any format that import takes"
    )
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="records file to write")
    build.add_argument("--tokens", type=int, default=256, metavar="N", help="longest continuation (default 256)")
    build.add_argument("--seed", type=int, default=42, metavar="N", help="of sampling and of the split (default 42)")
    build.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an engine argument (several)")
    build.add_argument("--engine", default="vllm", metavar="NAME", help="vllm (default), simulated, or module:Class")
    build.add_argument(
        "--logs", type=Path, default=Path("logs"), metavar="DIR", help="folder for its log (default logs)"
    )
    take = actions.add_parser("import", help="take prompts and records in")
    take.add_argument("--model", metavar="MODEL", help="whose tokens text becomes")
    take.add_argument("--prompts", type=Path, metavar="FILE", help="prompts (JSON Lines, ShareGPT, a log, .txt)")
    take.add_argument("--records", type=Path, metavar="FILE", help="records (JSON Lines, .txt)")
    take.add_argument("--out", required=True, type=Path, metavar="DIR", help="the study's folder")
    take.add_argument("--seed", type=int, default=42, metavar="N", help="of the split (default 42)")
    for action in (build, take):
        add_output_arguments(action, json=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Make them; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        from search.interrupt import EXIT_CODE, interruptible
        from search.texts import Recipe, import_texts, sample_records

        if args.action == "import":
            if args.prompts is None and args.records is None:
                fail("import needs --prompts, --records or both.")
            for path, counts in import_texts(args.prompts, args.records, args.model, args.out, args.seed):
                print(f"Wrote {path}: {counts}.")
            return 0
        if args.tokens < 1:
            fail("--tokens must be at least 1.")
        recipe = Recipe(args.model, args.served, args.prompts, args.tokens, args.seed, _engine_args(args.arg))
        try:
            with interruptible():
                counts = sample_records(recipe, args.out, args.engine, args.logs, print)
        except KeyboardInterrupt:
            print("Interrupted; nothing was written.", file=sys.stderr)
            return EXIT_CODE
        print(f"Wrote {args.out}: {counts}. How they were made is in {args.out}.recipe.json.")
    return 0


def _engine_args(given: list[str]) -> dict[str, object]:
    import yaml

    found: dict[str, object] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            fail(f"--arg must be NAME=VALUE, not {item!r}.")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            fail(f"--arg {name}: its value is not readable: {value!r:.80}.")
    return found


if __name__ == "__main__":
    sys.exit(main())
